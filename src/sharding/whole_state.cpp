// State dictionaries of whole parameters, what files need of shards, and gradients that are
// accumulated.
#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/state/partial_state.h"
#include "modeling/tensors.h"
#include "sharding/sharded_engine.h"
#include "sharding/sharded_state.h"

namespace accelerate::detail::sharding {
namespace {

/// Collective. All masters of a buffer, on the device.
at::Tensor gather_masters(ShardedState& state, const Flat& flat) {
  const auto own = flat.shard.to(state.placement.device);
  auto all = at::empty({flat.layout.padded_size()}, own.options());
  state.collectives.gather_now("masters of " + state.units[flat.unit]->title(), all, own);
  return all;
}

/// In Python's words.
[[noreturn]] void refuse_whole_state() {
  throw ConfigError(
      "Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save` in "
      "DeepSpeed config is False. To save the model weights in 16bit, set it to true in the "
      "DeepSpeed configuration, or `zero3_save_16bit_model` of the plugin (`accelerate launch "
      "--zero3_save_16bit_model true`). `save_state` needs neither, and `accelerate merge-weights` "
      "makes one file of what it saves.");
}

}  // namespace

bool ShardedEngine::is_sharded() const {
  return std::ranges::any_of(state_->flats, [](const Flat* flat) { return !flat->is_alias(); });
}

StateDict ShardedEngine::state_dict(const torch::nn::Module& module) {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  const at::NoGradGuard no_grad;
  if (state.spec.whole_state == WholeState::kRefused) refuse_whole_state();
  state.finish_phase();
  state.drop_stale();
  auto own = accelerate::state_dict(module);
  const bool has_compute_types =
      state.spec.whole_state == WholeState::kComputeTypes &&
      std::ranges::all_of(state.flats, [](const Flat* flat) { return flat->is_resident; });
  if (!is_sharded() || has_compute_types) return own;
  const bool keeps = PartialState().is_local_main_process();
  for (const auto* flat : state.flats) {
    auto all = gather_masters(state, *flat);
    if (!keeps) continue;
    if (state.spec.whole_state == WholeState::kComputeTypes) all = all.to(flat->compute_dtype);
    all = all.cpu();
    for (const auto& slice : flat->slices) {
      const auto values = all.narrow(0, slice.offset, slice.size).view(slice.sizes).clone();
      for (const auto& name : slice.names) own[name] = values;
    }
  }
  return keeps ? own : StateDict("Tensor");
}

void ShardedEngine::load_state_dict(torch::nn::Module& module, const StateDict& given,
                                    bool strict) {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  const at::NoGradGuard no_grad;
  state.finish_phase();
  state.release_all();
  const auto own = accelerate::state_dict(module);
  modeling::check_fits(own, given, strict);
  for (const auto& entry : own) {
    const auto* const values = given.find(entry.key());
    if (values == nullptr) continue;
    const auto* const place = state.find_leaf(entry.value());
    if (place == nullptr) {
      entry.value().copy_(*values);
      continue;
    }
    const auto& part = place->slice().part;
    if (part.size() == 0) continue;
    place->slice().local.copy_(values->reshape({-1}).slice(0, part.begin, part.end));
  }
  state.ring.wait_for_caller();
  state.publish_all();
}

// ---- files --------------------------------------------------------------------------------------

std::vector<checkpoint::LocalShard> ShardedEngine::local_shards() {
  const auto& replicate = state_->collectives.groups().replicate;
  std::vector<checkpoint::LocalShard> shards;
  for (const auto& [name, place] : state_->names) {
    if (place == nullptr) continue;
    const auto& slice = place->slice();
    shards.push_back({.name = name,
                      .sizes = slice.sizes,
                      .dtype = slice.local.scalar_type(),
                      .begin = slice.part.begin,
                      .end = slice.part.end,
                      .values = slice.local.detach(),
                      .replica = replicate && replicate->getRank() > 0,
                      .tied_to = name == slice.name() ? "" : slice.name()});
  }
  return shards;
}

StateDict ShardedEngine::whole_tensors() { return state_->whole_tensors; }

void ShardedEngine::loaded() {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  state.release_all();
  state.ring.wait_for_caller();
  state.has_unpublished = true;
}

std::vector<std::string> ShardedEngine::names_in(const torch::optim::Optimizer& optimizer) {
  const auto name_of = [&](const at::Tensor& parameter) -> std::string {
    if (const auto* const place = state_->find_local(parameter)) return place->slice().name();
    for (const auto& [tensor, name] : state_->stand_ins) {
      if (tensor.is_same(parameter)) return name;
    }
    for (const auto& entry : state_->whole_tensors) {
      if (entry.value().is_same(parameter)) return entry.key();
    }
    return "";
  };
  std::vector<std::string> names;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) names.push_back(name_of(parameter));
  }
  return names;
}

bool ShardedEngine::has_deepspeed_names() const { return state_->spec.deepspeed_names; }

StateDictType ShardedEngine::state_dict_type() const { return state_->spec.state_dict_type; }

// ---- accumulated gradients ----------------------------------------------------------------------

at::Tensor ShardedEngine::accumulated_gradient(const at::Tensor& parameter) {
  const auto* const place = state_->find_leaf(parameter);
  if (place == nullptr) return parameter.grad();
  const auto& slice = place->slice();
  if (slice.is_in_buffer) {
    return place->flat->buffer.narrow(0, slice.offset, slice.size).view(slice.sizes);
  }
  if (!slice.has_gradient()) return {};
  // Reduced already: the part of this process, and zeros, so that the mean over processes, times
  // their number, is the whole one.
  const auto count = static_cast<double>(state_->placement.processes);
  auto whole = at::zeros({slice.size}, slice.local.grad().options());
  whole.slice(0, slice.part.begin, slice.part.end).copy_(slice.local.grad() * count);
  return whole.view(slice.sizes);
}

void ShardedEngine::set_accumulated_gradient(const at::Tensor& parameter,
                                             const at::Tensor& gradient) {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  const at::NoGradGuard no_grad;
  const auto* const place = state.find_leaf(parameter);
  if (place == nullptr) {
    parameter.mutable_grad() = gradient;
    return;
  }
  auto& slice = place->slice();
  auto& flat = *place->flat;
  slice.local.mutable_grad().reset();
  slice.is_in_buffer = slice.is_used = gradient.defined();
  for (auto& leaf : slice.leaves) leaf.tensor.mutable_grad().reset();
  if (!gradient.defined()) return;
  state.is_accumulating = true;
  if (!flat.buffer.defined()) flat.buffer = state.take_buffer(flat);
  flat.buffer.narrow(0, slice.offset, slice.size).view(slice.sizes).copy_(gradient);
  for (auto& leaf : slice.leaves) leaf.tensor.mutable_grad() = slice.token;
}

}  // namespace accelerate::detail::sharding
