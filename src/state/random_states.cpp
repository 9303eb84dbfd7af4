#include "state/random_states.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <sstream>

#include "accelerate/errors.h"
#include "accelerate/random.h"
#include "core/text.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::state {
namespace {

// Python's version of the state of `random`, and its length: the words and the place among them.
constexpr std::int64_t kVersion = 3;
constexpr std::size_t kNumbers = std::mt19937::state_size + 1;

Value host_state() {
  std::stringstream text;
  text << host_rng();
  Value::List numbers;
  for (std::int64_t number = 0; text >> number;) numbers.emplace_back(number);
  return Value::tuple({Value(kVersion), Value::tuple(std::move(numbers)), Value()});
}

void set_host_state(const Value& state) {
  const auto parts = state.items();
  if (parts.size() != 3 || parts[1].items().size() != kNumbers) {
    throw ArgumentError(str("random_state is not a state of Python's random module: it needs ",
                            kNumbers, " numbers."));
  }
  std::stringstream text;
  for (const auto& number : parts[1].items()) text << number.as_int() << ' ';
  text >> host_rng();
}

at::Generator generator_of(const AcceleratorBackend& backend, int index) {
  return at::globalContext().defaultGenerator(
      c10::Device(backend.type(), static_cast<c10::DeviceIndex>(index)));
}

}  // namespace

Value RandomStates::state_dict() {
  Value::Dict state;
  state.set("step", Value(step_));
  state.set("random_state", host_state());
  state.set("torch_manual_seed", Value(get_rng_state(RNGType::kTorch)));
  if (const auto* backend = accelerator_backend()) {
    Value::List devices;
    for (int i = 0; i < backend->device_count(); ++i) {
      devices.emplace_back(get_rng_state(RNGType::kGenerator, generator_of(*backend, i)));
    }
    state.set("torch_cuda_manual_seed", Value(std::move(devices)));
  }
  return Value(std::move(state));
}

void RandomStates::load_state_dict(const Value& state) {
  const auto& entries = state.as_dict();
  if (const auto* step = entries.get("step")) step_ = step->as_int();
  if (const auto* host = entries.get("random_state")) set_host_state(*host);
  if (const auto* torch = entries.get("torch_manual_seed")) {
    set_rng_state(RNGType::kTorch, torch->as_tensor());
  }
  const auto* devices = entries.get("torch_cuda_manual_seed");
  const auto* backend = accelerator_backend();
  if (devices == nullptr || backend == nullptr) return;
  const auto count =
      std::min(devices->items().size(), static_cast<std::size_t>(backend->device_count()));
  for (std::size_t i = 0; i < count; ++i) {
    set_rng_state(RNGType::kGenerator, devices->items()[i].as_tensor(),
                  generator_of(*backend, static_cast<int>(i)));
  }
}

}  // namespace accelerate::detail::state
