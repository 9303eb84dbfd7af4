#include "accelerator/recorded_state.h"

#include <torch/nn/module.h>

#include <cstddef>
#include <utility>

#include "accelerate/optim.h"
#include "core/text.h"
#include "optim/optimizer_state.h"

namespace accelerate::detail::accelerator {
namespace {

const void* address_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto* const start = static_cast<const char*>(tensor.storage().data());
  return start == nullptr ? start : start + tensor.storage_offset() * tensor.itemsize();
}

ParamGroupOptions& options_of(torch::optim::OptimizerParamGroup& group) {
  return dynamic_cast<ParamGroupOptions&>(group.options());
}

/// Of the learning rate that kernels read. Writes it first if it has changed.
const void* learning_rate_of(torch::optim::OptimizerParamGroup& group) {
  if (group.params().empty()) return nullptr;
  return address_of(options_of(group).learning_rate(group.params().front().device()).tensor);
}

/// Calls `f` with the parameters of an optimizer, and then with the tensors of their states.
template <class F>
void for_each_slot(const optim::OptimizerCore& core, const F& f) {
  for (const auto& group : core.optimizer->param_groups()) {
    for (const auto& parameter : group.params()) f(parameter);
  }
  optim::for_each_state_tensor(*core.optimizer, f);
}

}  // namespace

RecordedState::RecordedState(const ObjectRegistry& registry, bool steps)
    : steps_(steps), optimizers_(registry.optimizers) {
  for (const auto& model : registry.models) {
    for (const auto& parameter : model->module->parameters()) add(parameter);
    for (const auto& buffer : model->module->buffers()) add(buffer);
  }
  for (const auto& optimizer : optimizers_) {
    for (const auto& group : optimizer->optimizer->param_groups()) {
      for (const auto& parameter : group.params()) add(parameter);
    }
  }
  if (!steps) return;
  for (const auto& optimizer : optimizers_) {
    auto& groups = optimizer->optimizer->param_groups();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      groups_.push_back(
          {optimizer.get(), i, groups[i].options().clone(), learning_rate_of(groups[i])});
    }
    for_each_slot(*optimizer,
                  [this](const at::Tensor& tensor) { slots_.push_back(address_of(tensor)); });
  }
}

void RecordedState::add(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  Place place{.tensor = tensor, .address = address_of(tensor)};
  if (tensor.is_leaf() && tensor.grad().defined()) {
    place.gradient_before = tensor.grad();
    place.gradient = address_of(place.gradient_before);
    place.version_before = place.gradient_before._version();
  }
  places_.push_back(std::move(place));
}

void RecordedState::close() {
  for (auto& place : places_) {
    const auto before = std::exchange(place.gradient_before, {});
    if (!before.defined()) continue;
    // The step has dropped it, and made its own.
    place.needs_gradient =
        place.tensor.grad().is_same(before) || before._version() != place.version_before;
  }
}

std::string RecordedState::changed_option(const Group& group) {
  auto& now = group.optimizer->optimizer->param_groups()[group.index];
  return options_of(now).changed_option(static_cast<const ParamGroupOptions&>(*group.options));
}

std::optional<RecordedState::Change> RecordedState::change() const {
  const auto memory = [](std::string what) {
    return Change{.option = {}, .memory = std::move(what)};
  };
  for (const auto& place : places_) {
    if (address_of(place.tensor) != place.address) return memory("a parameter or buffer");
    if (!place.needs_gradient || !place.tensor.is_leaf()) continue;
    if (address_of(place.tensor.grad()) != place.gradient) return memory("a gradient");
  }
  if (!steps_) return std::nullopt;
  for (const auto& group : groups_) {
    auto& groups = group.optimizer->optimizer->param_groups();
    if (group.index >= groups.size()) return memory("the list of parameter groups");
    if (auto option = changed_option(group); !option.empty()) {
      return Change{.option = std::move(option), .memory = {}};
    }
    if (learning_rate_of(groups[group.index]) != group.learning_rate) {
      return memory("the learning rate of an optimizer");
    }
  }
  std::size_t i = 0;
  bool same = true;
  for (const auto& optimizer : optimizers_) {
    for_each_slot(*optimizer, [&](const at::Tensor& tensor) {
      same = same && i < slots_.size() && slots_[i] == address_of(tensor);
      ++i;
    });
  }
  if (!same || i != slots_.size()) return memory("the state of an optimizer");
  return std::nullopt;
}

}  // namespace accelerate::detail::accelerator
