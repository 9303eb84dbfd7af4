// Optimizers step on the shards of this process: their parameters and state are cut, and put
// together again to be saved.
#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "accelerate/state/partial_state.h"
#include "core/text.h"
#include "optim/elementwise.h"
#include "optim/optimizer_state.h"
#include "optim/optimizer_traits.h"
#include "optim/update_rules.h"
#include "sharding/sharded_engine.h"
#include "sharding/sharded_state.h"

namespace accelerate::detail::sharding {
namespace {

using torch::optim::Optimizer;

/// Whether a tensor of a state has one element for each of the parameter.
bool is_elementwise(const std::string& name, const at::Tensor& tensor, c10::IntArrayRef sizes) {
  return tensor.defined() && !optim::is_number(name) && tensor.sizes() == sizes;
}

void cut(NamedTensors& tensors, const FlatSlice& slice) {
  for (auto& [name, tensor] : tensors) {
    if (!is_elementwise(name, tensor, slice.sizes)) continue;
    tensor = tensor.reshape({-1}).slice(0, slice.part.begin, slice.part.end);
  }
}

/// The state that the first step would make, which would be that of all parameters at once; empty
/// for an optimizer that makes it elsewhere.
NamedTensors new_state(const torch::optim::OptimizerOptions& options, const at::Tensor& parameter) {
  NamedTensors tensors;
  const auto make = [&]<class Options>(std::type_identity<Options>) {
    const auto* const own = dynamic_cast<const GroupOptions<Options>*>(&options);
    if (own == nullptr || !parameter.requires_grad()) return;
    const auto names = optim::kTraits<Options>.states();
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!optim::uses_slot(own->values, i, parameter)) continue;
      tensors.emplace_back(
          std::string(names[i]),
          optim::is_number(names[i])
              ? at::zeros({})
              : at::full_like(parameter.detach(), optim::first_value(own->values, names[i])));
    }
  };
  make(std::type_identity<AdamWOptions>());
  make(std::type_identity<AdamOptions>());
  make(std::type_identity<AdagradOptions>());
  make(std::type_identity<LionOptions>());
  return tensors;
}

/// The states of the parameters of one flat buffer.
using FlatStates = std::vector<std::pair<parallel::ParameterState*, const SlicePlace*>>;

std::vector<std::string> elementwise_names(const FlatStates& states) {
  std::vector<std::string> names;
  for (const auto& [of, place] : states) {
    for (const auto& [name, tensor] : of->tensors) {
      if (!is_elementwise(name, tensor, of->parameter.sizes())) continue;
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

/// Collective. Replaces the tensors of one name by whole ones in host memory, or drops them.
void gather_tensors(ShardedState& state, const Flat& flat, const FlatStates& states,
                    const std::string& name, bool keeps) {
  const auto options = flat.shard.options().device(state.placement.device);
  auto own = at::zeros({flat.layout.shard_size()}, options);
  auto all = at::empty({flat.layout.padded_size()}, options);
  const auto for_each = [&](const auto& f) {
    for (const auto& [of, place] : states) {
      for (auto& [key, tensor] : of->tensors) {
        if (key == name && tensor.defined()) f(tensor, *place);
      }
    }
  };
  for_each([&](const at::Tensor& tensor, const SlicePlace& place) {
    const auto at = flat.layout.place(place.index, state.placement.rank);
    if (tensor.numel() > 0) own.narrow(0, at, tensor.numel()).copy_(tensor);
  });
  state.collectives.gather_now(str(name, " of ", state.units[flat.unit]->title()), all, own);
  if (keeps) all = all.cpu();
  for_each([&](at::Tensor& tensor, const SlicePlace& place) {
    const auto& slice = place.slice();
    tensor =
        keeps ? all.narrow(0, slice.offset, slice.size).view(slice.sizes).clone() : at::Tensor();
  });
}

}  // namespace

void ShardedState::place_state(Optimizer& optimizer, const at::Tensor& parameter) const {
  if (spec.offload.optimizer != OffloadTarget::kNvme || find_local(parameter) == nullptr) return;
  for (auto& [name, tensor] : optim::optimizer_state_of(optimizer, parameter)) {
    if (!optim::is_number(name) && !states_swap().holds(tensor)) {
      tensor.set_data(states_swap().place(tensor));
    }
  }
}

void ShardedState::place_states(Optimizer& optimizer) const {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) place_state(optimizer, parameter);
  }
}

void ShardedEngine::attach(Optimizer& optimizer) {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  const at::NoGradGuard no_grad;
  // The tensor of the module through which a slice was found first.
  std::unordered_map<const FlatSlice*, const c10::TensorImpl*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto* const attached = state.find_local(parameter);  // by an earlier call
      if (attached != nullptr) seen.emplace(&attached->slice(), parameter.unsafeGetTensorImpl());
    }
  }
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      const auto* const place = state.find_leaf(parameter);
      if (place == nullptr) continue;
      if (seen.empty()) optim::check_elementwise(optimizer);
      auto& slice = place->slice();
      NamedTensors tensors;
      if (optimizer.state().count(parameter.unsafeGetTensorImpl()) > 0) {
        tensors = optim::optimizer_state_of(optimizer, parameter);
        optimizer.state().erase(parameter.unsafeGetTensorImpl());
      }
      const auto [first, is_new] = seen.emplace(&slice, parameter.unsafeGetTensorImpl());
      if (!is_new) {
        // A parameter that is listed twice is stepped twice, here as elsewhere. Another tensor with
        // the same elements has its gradient in theirs.
        const bool is_listed_twice = first->second == parameter.unsafeGetTensorImpl();
        const auto empty = at::empty({0}, slice.local.options());
        if (!is_listed_twice) state.stand_ins.emplace_back(empty, slice.names.back());
        parameter = is_listed_twice ? slice.local : empty;
        continue;
      }
      cut(tensors, slice);
      parameter = slice.local;
      if (tensors.empty() && state.swap) tensors = new_state(group.options(), parameter);
      if (!tensors.empty()) optim::set_optimizer_state_of(optimizer, parameter, tensors);
      state.place_state(optimizer, parameter);
      auto& of = state.stepped[&optimizer];
      if (place->flat->is_resident && std::ranges::find(of, place->flat) == of.end()) {
        of.push_back(place->flat);
      }
    }
  }
  // All processes publish in this order.
  if (const auto found = state.stepped.find(&optimizer); found != state.stepped.end()) {
    std::ranges::sort(found->second, {}, &Flat::index);
  }
}

void ShardedEngine::cut_state(parallel::ParameterState& of) {
  if (const auto* const place = state_->find_local(of.parameter)) cut(of.tensors, place->slice());
}

void ShardedEngine::gather_states(std::span<parallel::ParameterState> states) {
  auto& state = *state_;
  const std::scoped_lock lock(state.mutex);
  const at::NoGradGuard no_grad;
  const bool keeps = keeps_states_.value_or(PartialState().is_local_main_process());
  // One gather for each buffer and name, in the order of buffers.
  std::map<std::size_t, FlatStates> by_flat;
  for (auto& one : states) {
    const auto* const place = state.find_local(one.parameter);
    if (place != nullptr) by_flat[place->flat->index].emplace_back(&one, place);
  }
  for (const auto& [index, of_flat] : by_flat) {
    for (const auto& name : elementwise_names(of_flat)) {
      gather_tensors(state, *state.flats[index], of_flat, name, keeps);
    }
  }
  if (keeps) return;
  // Those of other models their engines gather.
  for (auto& one : states) {
    if (holds(one.parameter)) one.tensors.clear();
  }
}

}  // namespace accelerate::detail::sharding
