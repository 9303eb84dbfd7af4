// Gradients arrive, are reduced over the processes, and are handed to optimizers.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <ranges>

#include "accelerate/errors.h"
#include "core/text.h"
#include "parallel/gradient_hooks.h"
#include "sharding/sharded_state.h"

namespace accelerate::detail::sharding {
namespace {

using Kind = TapeEvent::Kind;
using torch::autograd::variable_list;

/// Called when the gradient of a leaf has been accumulated.
class ArrivalHook final : public torch::autograd::FunctionPostHook {
 public:
  ArrivalHook(ShardedState& state, Flat& flat, std::size_t slice, std::size_t leaf)
      : state_(state), flat_(flat), slice_(slice), leaf_(leaf) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    auto& slice = flat_.slices[slice_];
    state_.arrived(flat_, slice, slice.leaves[leaf_]);
    return outputs;
  }

 private:
  ShardedState& state_;
  Flat& flat_;
  std::size_t slice_;
  std::size_t leaf_;
};

void check_gradient(const at::Tensor& gradient, const std::string& name) {
  if (gradient.requires_grad()) {
    throw UnsupportedError(str("backward: create_graph is set, but the parameter '", name,
                               "' is sharded: a graph of its gradient would need values that are "
                               "released. Train this model by data parallelism."));
  }
  if (gradient.layout() == at::kStrided) return;
  throw UnsupportedError(str("backward: the gradient of '", name,
                             "' is sparse, which a sharded model does not support. Make its "
                             "Embedding with sparse(false), or ignore its module."));
}

void forget_arrivals(Flat& flat) {
  flat.is_reduced = false;
  flat.arrived = 0;
  for (auto& slice : flat.slices) {
    for (auto& leaf : slice.leaves) leaf.has_arrived = false;
  }
}

bool is_complete(const Flat& flat) { return !flat.is_reduced && flat.arrived == flat.leaf_count(); }

/// Whether earlier gradients are there, which new ones are added to.
bool accumulates(const Flat& flat) {
  return std::ranges::any_of(flat.slices, [](const FlatSlice& slice) {
    return slice.part.size() > 0 && slice.has_gradient();
  });
}

}  // namespace

void ShardedState::install_hooks() {
  for (auto* flat : flats) {
    for (std::size_t i = 0; flat->is_trained && i < flat->slices.size(); ++i) {
      auto& leaves = flat->slices[i].leaves;
      for (std::size_t j = 0; j < leaves.size(); ++j) {
        leaves[j].accumulator = torch::autograd::impl::grad_accumulator(leaves[j].tensor);
        leaves[j].hook =
            leaves[j].accumulator->add_post_hook(std::make_unique<ArrivalHook>(*this, *flat, i, j));
      }
    }
  }
}

void ShardedState::remove_hooks() noexcept {
  for (auto* flat : flats) {
    for (auto& slice : flat->slices) {
      for (auto& leaf : slice.leaves) {
        if (leaf.accumulator) leaf.accumulator->del_post_hook(leaf.hook);
      }
    }
  }
}

// ---- buffers ------------------------------------------------------------------------------------

at::Tensor ShardedState::take_buffer(const Flat& flat) {
  const auto size = flat.layout.padded_size();
  auto best = free_buffers.end();
  auto largest = free_buffers.end();
  for (auto it = free_buffers.begin(); it != free_buffers.end(); ++it) {
    if (it->scalar_type() != flat.reduce_dtype) continue;
    if (it->numel() >= size && (best == free_buffers.end() || it->numel() < best->numel())) {
      best = it;
    }
    if (largest == free_buffers.end() || it->numel() > largest->numel()) largest = it;
  }
  at::Tensor memory;
  if (best != free_buffers.end()) {
    memory = std::move(*best);
    free_buffers.erase(best);
  } else {
    if (largest != free_buffers.end()) free_buffers.erase(largest);  // too small: grows
    memory = at::empty({size}, at::TensorOptions(flat.reduce_dtype).device(placement.device));
  }
  const auto buffer = memory.narrow(0, 0, size);
  for (const auto& gap : flat.layout.gaps()) buffer.narrow(0, gap.begin, gap.size()).zero_();
  return buffer;
}

void ShardedState::give_back_buffer(Flat& flat) {
  if (!flat.buffer.defined()) return;
  const auto elements =
      static_cast<std::int64_t>(flat.buffer.storage().nbytes()) / flat.buffer.element_size();
  free_buffers.push_back(flat.buffer.as_strided({elements}, {1}, 0));
  flat.buffer.reset();
  for (auto& slice : flat.slices) slice.is_in_buffer = false;
}

at::Tensor ShardedState::empty_gradient(const Flat& flat) const {
  return at::empty(flat.shard.sizes(), flat.shard.options().pinned_memory(placement.pin_memory));
}

// ---- arrivals -----------------------------------------------------------------------------------

void ShardedState::arrived(Flat& flat, FlatSlice& slice, Leaf& leaf) {
  const std::scoped_lock lock(mutex);
  const at::NoGradGuard no_grad;
  const auto gradient = std::exchange(leaf.tensor.mutable_grad(), at::Tensor());
  if (!in_backward) {
    throw StateError(str("The gradient of the sharded parameter '", slice.name(),
                         "' comes from loss.backward(). Call accelerator.backward(loss)."));
  }
  if (gradient.defined()) check_gradient(gradient, slice.name());
  if (flat.is_reduced) {
    // A part that is computed again gives gradients of its own: another round, if there is one.
    if (tape->is_learned() && !tape->reduces_later(flat.index)) {
      throw StateError(str("backward: the gradient of '", slice.name(),
                           "' came after those of its unit '", units[flat.unit]->title(),
                           "' were reduced: the model is used in another order than in the first "
                           "step. Put what is used in changing order into one unit."));
    }
    finish(flat);
    forget_arrivals(flat);
  }
  if (!flat.buffer.defined()) flat.buffer = take_buffer(flat);
  if (gradient.defined()) {
    const auto into = flat.buffer.narrow(0, slice.offset, slice.size).view(slice.sizes);
    slice.is_in_buffer ? into.add_(gradient) : into.copy_(gradient);
    slice.is_in_buffer = slice.is_used = true;
  }
  if (!std::exchange(leaf.has_arrived, true)) ++flat.arrived;
  if (!reduces || !is_complete(flat)) return;
  if (!tape->is_learned()) {
    tape->record({.kind = Kind::kReduce, .index = flat.index});
    launch(flat);
    return;
  }
  const auto is_next = [&](Kind kind) {
    return tape->next() != nullptr && tape->next()->kind == kind;
  };
  while (is_next(Kind::kReduce) && is_complete(*flats[tape->next()->index])) {
    run_until(tape->position() + 1);
    while (spec.prefetch_after_gradients && is_next(Kind::kGather)) {
      run_until(tape->position() + 1);
    }
  }
}

/// Gradients that did not come are zeros: other processes may have them.
void ShardedState::launch(Flat& flat) {
  const at::NoGradGuard no_grad;
  if (in_flight != nullptr) finish(*in_flight);
  if (!flat.buffer.defined()) flat.buffer = take_buffer(flat);
  for (const auto& slice : flat.slices) {
    if (!slice.is_in_buffer) flat.buffer.narrow(0, slice.offset, slice.size).zero_();
  }
  const auto like = at::TensorOptions(flat.reduce_dtype).device(placement.device);
  const bool direct = !accumulates(flat) && flat.reduce_dtype == flat.shard.scalar_type() &&
                      placement.device == flat.shard.device();
  if (direct && !flat.gradient.defined()) flat.gradient = empty_gradient(flat);
  flat.reduced = direct ? flat.gradient : at::empty({flat.layout.shard_size()}, like);
  flat.reduction = collectives.start_mean(units[flat.unit]->title(), flat.reduced, flat.buffer);
  flat.is_reduced = true;
  in_flight = &flat;
  if (!spec.overlap_reductions) finish(flat);
}

void ShardedState::finish(Flat& flat) {
  if (!flat.reduction) return;
  const at::NoGradGuard no_grad;
  in_flight = nullptr;
  std::exchange(flat.reduction, nullptr)->wait();
  collectives.finish_mean(units[flat.unit]->title(), flat.reduced);
  give_back_buffer(flat);
  if (!flat.gradient.defined()) flat.gradient = empty_gradient(flat);
  auto reduced = std::exchange(flat.reduced, at::Tensor());
  if (accumulates(flat)) {
    reduced = reduced.to(flat.shard.options());
  } else if (!reduced.is_same(flat.gradient)) {
    // To the host: `end_backward` waits for it.
    reduced = flat.gradient.copy_(reduced, /*non_blocking=*/true);
  }
  for (std::size_t i = 0; i < flat.slices.size(); ++i) {
    auto& slice = flat.slices[i];
    auto& gradient = slice.local.mutable_grad();
    const auto at = flat.layout.place(i, placement.rank);
    const auto size = slice.part.size();
    const auto value = size == 0 ? at::empty_like(slice.local) : reduced.narrow(0, at, size);
    if (gradient.defined()) {
      gradient.add_(value);
      continue;
    }
    // In the buffer of all of them, detached: `Optimizer::zero_grad` refuses views.
    const auto home = size == 0 ? value : flat.gradient.narrow(0, at, size);
    if (size > 0 && !reduced.is_alias_of(flat.gradient)) home.copy_(value);
    gradient = home.detach();
  }
}

/// What is left when a backward that records has ended: parameters that were not used.
void ShardedState::flush() {
  if (tape->is_learned()) return;  // `finish_phase` carries out the rest of the tape
  for (auto* flat : std::views::reverse(flats)) {
    if (!flat->is_trained || flat->is_reduced) continue;
    tape->record({.kind = Kind::kReduce, .index = flat->index});
    launch(*flat);
  }
}

void ShardedState::end_backward() {
  if (reduces) flush();
  finish_phase();
  if (in_flight != nullptr) finish(*in_flight);
  if (placement.masters_on_host && placement.device.is_cuda()) {
    c10::impl::VirtualGuardImpl(placement.device.type())
        .synchronizeDevice(placement.device.index());
  }
  in_backward = false;
  is_accumulating = !reduces;
  for (auto* flat : flats) forget_arrivals(*flat);
  if (reduces) {
    average_whole();
    if (spec.skip_globally_unused) forget_unused();
  }
  hand_out_tokens();
  release_all();
}

/// Of ignored modules.
void ShardedState::average_whole() {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : whole) {
    for (const auto& leaf : parameter.leaves) {
      if (!leaf.requires_grad() || leaf.numel() == 0) continue;
      auto& gradient = leaf.mutable_grad();
      if (!gradient.defined()) gradient = at::zeros_like(leaf);
      gradients.push_back(gradient);
    }
  }
  if (const auto& all = collectives.groups().all) {
    parallel::average_gradients(gradients, nullptr, all);
  }
}

void ShardedState::forget_unused() {
  std::vector<FlatSlice*> slices;
  for (auto* flat : flats) {
    for (auto& slice : flat->slices) {
      if (flat->is_trained) slices.push_back(&slice);
    }
  }
  auto used = at::zeros({static_cast<std::int64_t>(slices.size())}, at::kInt);
  for (std::size_t i = 0; i < slices.size(); ++i) used.data_ptr<int>()[i] = slices[i]->is_used;
  used = used.to(placement.device);
  collectives.all_reduce("used parameters", used, c10d::ReduceOp::MAX);
  used = used.cpu();
  for (std::size_t i = 0; i < slices.size(); ++i) {
    if (used.data_ptr<int>()[i] == 0) slices[i]->local.mutable_grad().reset();
  }
}

// ---- tokens -------------------------------------------------------------------------------------

void ShardedState::hand_out_tokens() {
  for (auto* flat : flats) {
    for (auto& slice : flat->slices) {
      if (!slice.is_in_buffer && !slice.has_gradient()) continue;
      for (auto& leaf : slice.leaves) leaf.tensor.mutable_grad() = slice.token;
    }
  }
}

/// Where a token is gone, `zero_grad` of the module has dropped the gradient.
void ShardedState::take_back_tokens() {
  for (auto* flat : flats) {
    for (auto& slice : flat->slices) {
      if (!flat->is_trained) continue;
      const bool has_none = std::ranges::none_of(
          slice.leaves, [](const Leaf& leaf) { return leaf.tensor.grad().defined(); });
      if (has_none) {
        slice.local.mutable_grad().reset();
        slice.is_in_buffer = false;
      }
      for (auto& leaf : slice.leaves) leaf.tensor.mutable_grad().reset();
      if (!slice.has_gradient() && !slice.is_in_buffer) slice.is_used = false;
    }
  }
}

}  // namespace accelerate::detail::sharding
