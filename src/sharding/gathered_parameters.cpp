#include "accelerate/sharding/gathered_parameters.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/state/partial_state.h"
#include "core/text.h"
#include "sharding/sharded_state.h"

namespace accelerate::detail::sharding {
namespace {

/// A parameter that is whole now.
struct Opened {
  SlicePlace place;
  std::int64_t version = 0;  // of its first leaf

  [[nodiscard]] const at::Tensor& tensor() const { return place.slice().leaves.front().tensor; }
};

void check_rank(std::optional<int> rank) {
  const PartialState state;
  if (!rank || (*rank >= 0 && *rank < state.num_processes())) return;
  throw ArgumentError(str("gathered_parameters: modifier_rank is ", *rank,
                          ", but there are processes 0 to ", state.num_processes() - 1, "."));
}

/// Collective. Which of the parameters the modifier has changed.
std::vector<bool> changed_by(ShardedState& state, const std::vector<Opened>& opened, int modifier) {
  auto flags = at::zeros({static_cast<std::int64_t>(opened.size())}, at::kInt);
  for (std::size_t i = 0; i < opened.size(); ++i) {
    auto& slice = opened[i].place.slice();
    const bool written = std::exchange(slice.is_written, false);
    flags.data_ptr<int>()[i] = written || opened[i].tensor()._version() != opened[i].version;
  }
  flags = flags.to(state.placement.device);
  state.collectives.broadcast("changed parameters", flags, modifier);
  flags = flags.cpu();
  std::vector<bool> changed;
  for (std::size_t i = 0; i < opened.size(); ++i) {
    changed.push_back(flags.data_ptr<int>()[i] != 0);
  }
  return changed;
}

/// Collective. The masters of all processes get what the modifier has in a parameter.
void write_back(ShardedState& state, const Opened& opened, int modifier) {
  auto& [unit, flat, index] = opened.place;
  const auto& slice = opened.place.slice();
  const auto whole = flat->is_resident ? flat->whole : memory_of(*unit->slot, *flat);
  const auto values = whole.narrow(0, slice.offset, slice.size);
  state.collectives.broadcast(str("changes of ", slice.name()), values, modifier);
  if (flat->is_alias() || slice.part.size() == 0) return;
  flat->shard.narrow(0, flat->layout.place(index, state.placement.rank), slice.part.size())
      .copy_(values.slice(0, slice.part.begin, slice.part.end));
}

}  // namespace

struct GatheredScope::Gathered {
  std::optional<int> modifier;
  std::vector<std::pair<ShardedState*, std::vector<Opened>>> by_model;
};

GatheredScope::GatheredScope(std::span<const at::Tensor> parameters,
                             const GatheredParametersOptions& options)
    : gathered_(std::make_unique<Gathered>()) {
  if (!options.enabled) return;
  check_rank(options.modifier_rank);
  gathered_->modifier = options.modifier_rank;
  for (auto* state : living_states()) {
    const std::scoped_lock lock(state->mutex);
    std::vector<Opened> opened;
    for (const auto& parameter : parameters) {
      const auto* const place = parameter.defined() ? state->find_leaf(parameter) : nullptr;
      if (place == nullptr) continue;
      const auto same = [&](const Opened& one) { return &one.place.slice() == &place->slice(); };
      if (std::ranges::any_of(opened, same)) continue;
      opened.push_back({.place = *place, .version = parameter._version()});
    }
    if (opened.empty()) continue;
    state->finish_phase();
    state->drop_stale();
    // In the order of units on all processes.
    std::ranges::stable_sort(opened, {}, [](const Opened& one) { return one.place.unit->index; });
    for (const auto& one : opened) {
      if (one.place.unit->comes_and_goes()) state->gather_alone(*one.place.unit);
      one.place.unit->is_open = true;
      one.place.slice().is_written = false;
    }
    gathered_->by_model.emplace_back(state, std::move(opened));
  }
}

void GatheredScope::finish() {
  const at::NoGradGuard no_grad;
  if (!gathered_->modifier) return;
  for (auto& [state, opened] : gathered_->by_model) {
    const std::scoped_lock lock(state->mutex);
    const auto changed = changed_by(*state, opened, *gathered_->modifier);
    for (std::size_t i = 0; i < opened.size(); ++i) {
      if (changed[i]) write_back(*state, opened[i], *gathered_->modifier);
    }
    for (auto* flat : state->flats) flat->sent_version = flat->shard._version();
    state->ring.wait_for_caller();
  }
}

GatheredScope::~GatheredScope() {
  for (auto& [state, opened] : gathered_->by_model) {
    const std::scoped_lock lock(state->mutex);
    for (const auto& one : opened) one.place.unit->is_open = false;
    state->release_all();
  }
}

}  // namespace accelerate::detail::sharding
