#include "state/random_states.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <span>
#include <sstream>
#include <string_view>

#include "accelerate/errors.h"
#include "accelerate/random.h"
#include "core/text.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::state {
namespace {

// Python's version of the state of `random`, and the number of words of a state.
constexpr std::int64_t kVersion = 3;
constexpr std::size_t kWords = std::mt19937::state_size;

/// The words of a state and, last, the place among them.
Value::List numbers_of(const std::mt19937& engine) {
  std::stringstream text;
  text << engine;
  Value::List numbers;
  for (std::int64_t number = 0; text >> number;) numbers.emplace_back(number);
  return numbers;
}

/// Throws `ArgumentError` with the name of the entry for what is no state; `engine` has not changed
/// then.
void set_numbers(std::mt19937& engine, std::span<const Value> numbers, std::string_view entry) {
  std::stringstream text;
  bool valid = numbers.size() == kWords + 1;
  for (std::size_t i = 0; valid && i < numbers.size(); ++i) {
    const auto limit = i < kWords ? std::int64_t{0xFFFFFFFF} : static_cast<std::int64_t>(kWords);
    valid = numbers[i].is_int() && numbers[i].as_int() >= 0 && numbers[i].as_int() <= limit;
    if (valid) text << numbers[i].as_int() << ' ';
  }
  if (!valid) {
    throw ArgumentError(str(entry, " is not the state of a Mersenne twister: it needs ", kWords,
                            " numbers of 32 bits and the place among them."));
  }
  text >> engine;
}

Value::List list_of(const Value& numbers) {
  if (!numbers.is_tensor()) return {numbers.items().begin(), numbers.items().end()};
  // Python keeps the words as an array.
  const auto words = numbers.as_tensor().to(at::kCPU, at::kLong).contiguous();
  const auto* data = words.const_data_ptr<std::int64_t>();
  return {data, data + words.numel()};
}

at::Generator generator_of(const AcceleratorBackend& backend, int index) {
  return at::globalContext().defaultGenerator(
      c10::Device(backend.type(), static_cast<c10::DeviceIndex>(index)));
}

}  // namespace

Value RandomStates::state_dict() {
  Value::Dict state;
  state.set("step", Value(step_));
  state.set("random_state",
            Value::tuple({Value(kVersion), Value::tuple(numbers_of(host_rng())), host_gauss_}));
  // A list of words, where numpy has an array: it takes both, and the name of the array's class
  // depends on the version of numpy.
  auto words = numbers_of(numpy_rng());
  const Value place = words.back();
  words.pop_back();
  state.set("numpy_random_seed",
            Value::tuple({"MT19937", std::move(words), place, numpy_has_gauss_, numpy_gauss_}));
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
  if (const auto* host = entries.get("random_state")) {
    const auto parts = host->items();
    const auto numbers = parts.size() == 3 ? parts[1].items() : std::span<const Value>();
    set_numbers(host_rng(), numbers, "random_state");
    host_gauss_ = parts[2];
  }
  if (const auto* numpy = entries.get("numpy_random_seed")) {
    const auto parts = numpy->items();
    auto numbers = parts.size() == 5 ? list_of(parts[1]) : Value::List();
    if (parts.size() == 5) numbers.push_back(parts[2]);
    set_numbers(numpy_rng(), numbers, "numpy_random_seed");
    numpy_has_gauss_ = parts[3];
    numpy_gauss_ = parts[4];
  }
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
