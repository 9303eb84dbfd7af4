#include "sharding/sharded_engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "optim/clip_grad.h"
#include "parallel/own_backward.h"
#include "sharding/sharded_state.h"

namespace accelerate::detail::sharding {
namespace {

// A norm of some of the batches would be that of no step.
[[noreturn]] void refuse_incomplete() {
  throw StateError(
      "The gradients of a sharded model can be clipped only where they are complete: those of "
      "batches that are accumulated are still this process's own. Guard the call: if "
      "(accelerator.sync_gradients()) ...");
}

// Tapes of forwards between two backward passes; later ones share the last.
constexpr int kMostForwards = 8;

}  // namespace

ShardedEngine::ShardedEngine(torch::nn::Module& module, const ShardSpec& spec,
                             const ShardProcesses& groups, c10::Device device,
                             std::int64_t drift_check)
    : state_(std::make_unique<ShardedState>(module, spec, groups, device, drift_check)) {}

ShardedEngine::~ShardedEngine() = default;

// ---- forward ------------------------------------------------------------------------------------

std::shared_ptr<void> ShardedEngine::enter_forward() {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  // An error may have ended the last backward.
  state.in_backward = state.in_backward && parallel::own_backward_runs();
  // A forward that backward computes again is a part of its phase.
  if (state.forward_depth == 0 && !state.in_backward) {
    state.finish_phase();
    state.drop_stale();
    const bool trains = at::GradMode::is_enabled();
    const int number = trains ? std::min(state.forward_number++, kMostForwards - 1) : 0;
    state.begin(trains ? Phase::kForward : Phase::kEvaluation, number);
  }
  ++state.forward_depth;
  return {nullptr, [&state](void*) {
            const std::scoped_lock left(state.mutex);
            // A member function that evaluates leaves nothing behind but messages.
            if (--state.forward_depth == 0 && state.phase == Phase::kEvaluation)
              state.release_all();
          }};
}

void ShardedEngine::after_forward() {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  if (state.forward_depth == 1 && !state.in_backward) state.finish_forward();
}

// ---- backward -----------------------------------------------------------------------------------

bool ShardedEngine::reached_by(const parallel::ReachedLeaves& leaves) const {
  const auto is_reached = [&](const at::Tensor& leaf) { return leaves.contains(leaf); };
  for (const auto* flat : state_->flats) {
    for (const auto& slice : flat->slices) {
      for (const auto& leaf : slice.leaves) {
        if (is_reached(leaf.tensor)) return true;
      }
    }
  }
  return std::ranges::any_of(state_->whole, [&](const PlannedParameter& one) {
    return std::ranges::any_of(one.leaves, is_reached);
  });
}

void ShardedEngine::before_backward(const parallel::BackwardPass& pass) {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  state.check_leaves();
  state.take_back_tokens();
  const bool keeps_whole =
      state.spec.accumulate_unsharded || state.spec.level == ShardLevel::kOptimizer;
  state.reduces = pass.synchronizes || !keeps_whole;
  state.begin(pass.synchronizes ? Phase::kBackward : Phase::kLocalBackward);
  state.in_backward = true;
  state.forward_number = 0;
  if (state.drift && pass.synchronizes) state.drift->note_loss(pass.loss);
}

void ShardedEngine::after_backward() {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  const bool synchronizes = state.phase == Phase::kBackward;
  state.end_backward();
  if (state.drift && synchronizes) state.drift->exchange();
}

// ---- optimizers ---------------------------------------------------------------------------------

bool ShardedEngine::holds(const at::Tensor& parameter) const {
  const auto same = [&](const at::Tensor& one) { return one.is_same(parameter); };
  const auto stands_in = [&](const auto& one) { return one.first.is_same(parameter); };
  return state_->find_local(parameter) != nullptr ||
         std::ranges::any_of(state_->stand_ins, stands_in) ||
         std::ranges::any_of(state_->whole, [&](const PlannedParameter& one) {
           return std::ranges::any_of(one.leaves, same);
         });
}

void ShardedEngine::after_zero_grad(const torch::optim::Optimizer& optimizer) {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto* const place = state.find_local(parameter);
      if (place == nullptr) continue;
      state.is_accumulating = false;
      auto& slice = place->slice();
      slice.is_in_buffer = false;
      if (slice.has_gradient()) continue;  // zeros
      for (auto& leaf : slice.leaves) leaf.tensor.mutable_grad().reset();
    }
  }
}

void ShardedEngine::before_step() {
  if (state_->placement.masters_on_host) state_->ring.synchronize();  // copies read the masters
  if (state_->drift) state_->drift->sum_up();
}

void ShardedEngine::after_step(torch::optim::Optimizer& optimizer) {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  state.release_all();
  state.ring.wait_for_caller();
  const auto found = state.stepped.find(&optimizer);
  if (found != state.stepped.end()) state.publish(found->second);
  if (!state.swap) return;
  state.place_states(optimizer);  // what a load has brought into memory
  state.swap->release();
  if (state.own_states_swap) state.own_states_swap->release();
}

at::Tensor ShardedEngine::found_inf_over_processes(const at::Tensor& found_inf) {
  auto flag = found_inf.to(state_->placement.device, /*non_blocking=*/false, /*copy=*/true);
  state_->collectives.all_reduce("infinite gradients", flag, c10d::ReduceOp::MAX);
  return flag.to(found_inf.device());
}

// ---- clipping -----------------------------------------------------------------------------------

std::optional<parallel::GradientShards> ShardedEngine::shards_of(
    std::span<const at::Tensor> parameters) {
  parallel::GradientShards result;
  std::vector<const FlatSlice*> seen;
  for (const auto& parameter : parameters) {
    const SlicePlace* place = nullptr;
    if (parameter.defined()) {
      place = state_->find_leaf(parameter);
      if (place == nullptr) place = state_->find_local(parameter);
    }
    result.sharded.push_back(place != nullptr);
    if (place == nullptr) continue;
    if (state_->is_accumulating) refuse_incomplete();
    const auto& slice = place->slice();
    if (std::ranges::find(seen, &slice) != seen.end()) continue;
    seen.push_back(&slice);
    if (slice.has_gradient() && slice.part.size() > 0) {
      result.gradients.push_back(slice.local.grad());
    }
  }
  return result;
}

at::Tensor ShardedEngine::norm_over_processes(const parallel::GradientShards& shards,
                                              double norm_type) {
  if (norm_type < 0) {
    throw UnsupportedError(str("clip_grad_norm_: norm_type is ", norm_type,
                               ", which is not supported for sharded gradients. Use 2, 1, 0 or "
                               "infinity."));
  }
  const auto norm = optim::get_total_norm(shards.gradients, norm_type);
  // As the model says, not the norm: a process may have no gradients.
  const bool is_double = std::ranges::any_of(
      state_->flats, [](const Flat* flat) { return flat->shard.scalar_type() == at::kDouble; });
  const auto dtype = is_double ? at::kDouble : at::kFloat;
  auto own = norm.to(state_->placement.device, dtype, /*non_blocking=*/false, /*copy=*/true);
  const char* const what = "norm of gradients";
  if (std::isinf(norm_type)) {
    state_->collectives.all_reduce_shards(what, own, c10d::ReduceOp::MAX);
  } else {
    // Of order 0 the norm is a number of elements.
    if (norm_type != 0) own = own.pow(norm_type);
    state_->collectives.all_reduce_shards(what, own, c10d::ReduceOp::SUM);
    if (norm_type != 0) own = own.pow(1 / norm_type);
  }
  return own.to(norm.device(), is_double ? at::kDouble : norm.scalar_type());
}

const ShardStats& ShardedEngine::stats() const { return state_->collectives.stats; }

}  // namespace accelerate::detail::sharding
