#include <ATen/ATen.h>

#include <cstring>

#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "accelerate/random.h"
#include "accelerate/state.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;

// Each state travels in a slot of one size, whatever its length: then all processes send equally
// many bytes even where one of them brought a generator of another device, and that is found out
// afterwards instead of tearing the collective. Torch's largest state, of the CPU, has 5056 bytes.
constexpr std::int64_t kSlotBytes = 8192;

struct SlotHeader {
  std::int64_t type = 0;
  std::int64_t state_bytes = 0;
};

constexpr std::int64_t kRoom = kSlotBytes - static_cast<std::int64_t>(sizeof(SlotHeader));

SlotHeader header_of(RNGType type, const at::Tensor& state) {
  return {.type = static_cast<std::int64_t>(type), .state_bytes = state.numel()};
}

void pack(std::uint8_t* slot, RNGType type, const at::Tensor& state) {
  if (state.numel() > kRoom) {
    throw UnsupportedError(str("The random state '", to_string(type), "' has ", state.numel(),
                               " bytes; at most ", kRoom, " can be synchronized."));
  }
  const auto header = header_of(type, state);
  std::memcpy(slot, &header, sizeof header);
  std::memcpy(slot + sizeof header, state.const_data_ptr(),
              static_cast<std::size_t>(state.numel()));
}

/// Overwrites `state` by what process 0 had in this slot.
void unpack(const std::uint8_t* slot, RNGType type, at::Tensor& state) {
  SlotHeader sent;
  std::memcpy(&sent, slot, sizeof sent);
  const auto mine = header_of(type, state);
  if (sent.type != mine.type || sent.state_bytes != mine.state_bytes) {
    throw CommError(
        str("Random states cannot be synchronized: process 0 sent that of '",
            to_string(static_cast<RNGType>(sent.type)), "' with ", sent.state_bytes,
            " bytes where this process has '", to_string(type), "' with ", mine.state_bytes,
            " bytes. Pass the same types, in one order, and generators of one device."),
        0);
  }
  std::memcpy(state.mutable_data_ptr(), slot + sizeof sent,
              static_cast<std::size_t>(state.numel()));
}

std::vector<RNGType> types_of(std::span<const std::string> names) {
  std::vector<RNGType> types;
  for (const auto& name : names) types.push_back(from_string<RNGType>(name));
  return types;
}

}  // namespace

void synchronize_rng_states(std::span<const RNGType> types,
                            const std::optional<at::Generator>& generator,
                            std::source_location where) {
  const PartialState state;
  // Read all before anything is sent: what is missing here must not be found half-way.
  std::vector<at::Tensor> states;
  for (const auto type : types) states.push_back(get_rng_state(type, generator));
  if (!state.use_distributed() || types.empty()) return;

  auto slots = at::zeros({static_cast<std::int64_t>(types.size()), kSlotBytes}, at::kByte);
  auto* bytes = slots.data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < types.size(); ++i) {
    pack(bytes + static_cast<std::int64_t>(i) * kSlotBytes, types[i], states[i]);
  }
  // NCCL sends from the device only.
  const auto received = broadcast(slots.to(state.device()), 0, where).cpu();
  const auto* from_root = received.const_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < types.size(); ++i) {
    unpack(from_root + static_cast<std::int64_t>(i) * kSlotBytes, types[i], states[i]);
  }
  for (std::size_t i = 0; i < types.size(); ++i) set_rng_state(types[i], states[i], generator);
}

void synchronize_rng_states(std::span<const std::string> types,
                            const std::optional<at::Generator>& generator,
                            std::source_location where) {
  synchronize_rng_states(std::span<const RNGType>(types_of(types)), generator, where);
}

void synchronize_rng_states(std::initializer_list<RNGType> types,
                            const std::optional<at::Generator>& generator,
                            std::source_location where) {
  synchronize_rng_states(std::span<const RNGType>(types.begin(), types.size()), generator, where);
}

void synchronize_rng_states(std::initializer_list<const char*> types,
                            const std::optional<at::Generator>& generator,
                            std::source_location where) {
  const std::vector<std::string> names(types.begin(), types.end());
  synchronize_rng_states(std::span<const std::string>(names), generator, where);
}

void synchronize_rng_state(RNGType type, const std::optional<at::Generator>& generator,
                           std::source_location where) {
  synchronize_rng_states({type}, generator, where);
}

}  // namespace accelerate
