#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "accelerate/value/from_value.h"
#include "core/json.h"
#include "core/text.h"
#include "optim/optimizer_state.h"
#include "optim/update_rules.h"

namespace accelerate {
namespace {

using at::Tensor;
using detail::str;
using detail::optim::GradScaling;
using detail::optim::is_number;
using detail::optim::kTraits;
using detail::optim::TensorBuckets;
using torch::optim::OptimizerParamGroup;

template <class T>
concept HasBetas = requires(T options) { options.betas; };
template <class T>
concept HasMomentum = requires(T options) { options.momentum; };

/// Throws `ArgumentError` for options that PyTorch rejects.
template <class Options>
void check(const Options& options) {
  const auto require = [](bool valid, std::string_view option, auto value, std::string_view range) {
    if (valid) return;
    throw ArgumentError(str("The option ", option, " of ", kTraits<Options>.name, " is ", value,
                            "; it must be ", range, "."));
  };
  const auto check_number = [&](std::string_view name, double value) {
    if (name == "dampening") return;  // any number
    if (name == "beta2_decay") return require(value <= 0, name, value, "0 or less");
    if (name == "d") return require(value >= 1, name, value, "1 or more");
    require(value >= 0, name, value, "0 or more");
  };
  const auto fields = value_fields(std::type_identity<Options>());
  for_each_field(options, fields, [&]<class T>(const auto& field, const T& value) {
    if constexpr (std::same_as<T, double>) check_number(field.name, value);
  });
  if constexpr (HasBetas<Options>) {
    const auto [beta1, beta2] = options.betas;
    require(beta1 >= 0 && beta1 < 1, "betas[0]", beta1, "at least 0 and below 1");
    require(beta2 >= 0 && beta2 < 1, "betas[1]", beta2, "at least 0 and below 1");
  }
  if constexpr (std::same_as<Options, SGDOptions>) {
    require(!options.nesterov || (options.momentum > 0 && options.dampening == 0), "nesterov",
            options.nesterov, "false unless there is momentum and no dampening");
  }
  if constexpr (std::same_as<Options, AdafactorOptions>) {
    check_number("eps[0]", options.eps.first.value_or(0));
    check_number("eps[1]", options.eps.second);
  }
}

/// One tensor for each of `OptimizerTraits::states`; undefined if it is not used.
struct TensorState final : torch::optim::OptimizerCloneableParamState<TensorState> {
  std::vector<Tensor> slots;
};

/// Adds 1 to each step count, or 0 if `found_inf` is 1.
void advance(std::vector<Tensor>& steps, const Tensor& found_inf) {
  if (!steps.front().is_cpu()) {
    if (found_inf.defined()) {
      at::_foreach_add_(steps, (1 - found_inf.reshape({})).to(steps.front().device()));
    } else {
      at::_foreach_add_(steps, 1);
    }
    return;
  }
  // Numbers on the host need no kernel.
  for (auto& step : steps) *step.mutable_data_ptr<float>() += 1;
}

template <class Options>
GroupOptions<Options>& options_in(OptimizerParamGroup& group) {
  auto* const options = dynamic_cast<GroupOptions<Options>*>(&group.options());
  if (options == nullptr) {
    const auto name = kTraits<Options>.name;
    throw ArgumentError(
        str("A parameter group of accelerate::", name,
            " has the options of another optimizer. Make it with param_group(params, ", name,
            "Options{...})."));
  }
  return *options;
}

/// The name of a state tensor of parameter `index` in an archive.
std::string state_key(std::size_t index, std::string_view name) {
  return str("param", index, "_", name);
}

}  // namespace

void detail::optim::for_each_state_tensor(torch::optim::Optimizer& optimizer,
                                          c10::function_ref<void(const Tensor&)> f) {
  const auto& states = optimizer.state();
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto found = states.find(parameter.unsafeGetTensorImpl());
      if (found == states.end()) continue;
      for (const auto& slot : static_cast<const TensorState&>(*found->second).slots) f(slot);
    }
  }
}

ParamGroupOptions::ParamGroupOptions() = default;
ParamGroupOptions::ParamGroupOptions(const ParamGroupOptions& other) : OptimizerOptions(other) {}
ParamGroupOptions::~ParamGroupOptions() = default;

template <class Options>
GroupOptions<Options>::GroupOptions(Options options) : values(std::move(options)) {
  check(values);
}

template <class Options>
GroupOptions<Options>::GroupOptions(const GroupOptions& other)
    : ParamGroupOptions(other), values(other.values) {}

template <class Options>
GroupOptions<Options>::~GroupOptions() = default;

template <class Options>
std::unique_ptr<torch::optim::OptimizerOptions> GroupOptions<Options>::clone() const {
  return std::make_unique<GroupOptions>(*this);
}

template <class Options>
void GroupOptions<Options>::set_lr(double lr) {
  values.lr = lr;
  if (!lr_tensor_.defined()) return;
  const at::NoGradGuard no_grad;
  lr_tensor_.fill_(lr);
  lr_written_ = lr;
}

template <class Options>
detail::optim::LearningRate GroupOptions<Options>::learning_rate(c10::Device device) {
  if (!values.capturable || device.is_cpu()) return {.value = values.lr, .tensor = {}};
  if (!lr_tensor_.defined()) {
    lr_tensor_ = at::full({}, values.lr, at::TensorOptions(at::kFloat).device(device));
    lr_written_ = values.lr;
  } else if (lr_written_ != values.lr) {
    set_lr(values.lr);
  }
  return {.value = values.lr, .tensor = lr_tensor_.to(device)};
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("options", c10::IValue(detail::json_dumps(to_dict())));
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue text;
  archive.read("options", text);
  update(detail::json_loads(text.toStringRef(), "The options of a saved group").as_dict());
}

template <class Options>
Value::Dict GroupOptions<Options>::to_dict() const {
  return to_value(values).as_dict();
}

template <class Options>
void GroupOptions<Options>::update(const Value::Dict& changes) {
  auto changed = values;
  auto unknown = changes;
  std::vector<std::string_view> known;
  const auto fields = value_fields(std::type_identity<Options>());
  for_each_field(changed, fields, [&]<class T>(const auto& field, T& option) {
    known.push_back(field.name);
    if (const auto* const value = changes.get(field.name)) option = from_value<T>(*value);
    unknown.erase(field.name);
  });
  if (!unknown.empty()) {
    throw ArgumentError(str(kTraits<Options>.name, " has no option ", unknown.keys().front().repr(),
                            ". It has: ", detail::join(known), "."));
  }
  check(changed);
  values = changed;
  set_lr(values.lr);
}

template <class Options>
std::string GroupOptions<Options>::changed_option(const ParamGroupOptions& other) const {
  const auto* const same_kind = dynamic_cast<const GroupOptions*>(&other);
  if (same_kind == nullptr) return str("the kind of options of ", kTraits<Options>.name);
  std::string_view changed;
  const auto fields = value_fields(std::type_identity<Options>());
  for_each_field(values, fields, [&](const auto& field, const auto& value) {
    if (field.name == "lr" || value == same_kind->values.*field.member) return;
    if (changed.empty()) changed = field.name;
  });
  return changed.empty() ? "" : str(changed, " of ", kTraits<Options>.name);
}

template <class Options>
std::optional<double> GroupOptions<Options>::momentum() const {
  if constexpr (HasBetas<Options>) return values.betas.first;
  if constexpr (HasMomentum<Options>) return values.momentum;
  return std::nullopt;
}

template <class Options>
void GroupOptions<Options>::set_momentum(double momentum) {
  if constexpr (HasBetas<Options>) {
    values.betas.first = momentum;
  } else if constexpr (HasMomentum<Options>) {
    values.momentum = momentum;
  } else {
    throw ArgumentError(
        str(kTraits<Options>.name, " has no momentum that could be set to ", momentum, "."));
  }
}

FusedOptimizer::FusedOptimizer(const std::vector<OptimizerParamGroup>& groups,
                               std::unique_ptr<ParamGroupOptions> defaults)
    : Optimizer(groups, std::move(defaults)), buckets_(std::make_unique<TensorBuckets>()) {}

FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;
FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&&) noexcept = default;
FusedOptimizer::~FusedOptimizer() = default;

Tensor FusedOptimizer::step(LossClosure closure) {
  Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  step_scaled({}, {});
  return loss;
}

void FusedOptimizer::step_scaled(const Tensor& grad_scale, const Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& params = param_groups_[g].params();
    for (std::size_t p = 0; p < params.size(); ++p) {
      const auto& grad = params[p].grad();
      if (!grad.defined()) continue;
      if (grad.layout() == at::kStrided && at::isFloatingType(grad.scalar_type()) &&
          grad.scalar_type() == params[p].scalar_type()) {
        continue;
      }
      throw ArgumentError(
          detail::str("The gradient of parameter ", p, " in group ", g, ", shape ",
                      params[p].sizes(), ", is ", grad.scalar_type(), " and ", grad.layout(),
                      ". The optimizers of accelerate/optim.h take dense ",
                      "gradients of their parameter's floating-point type; use one of "
                      "torch::optim for others."));
    }
  }

  GradScaling scaling{.grad_scale = grad_scale, .found_inf = found_inf};
  if (scaling.on_host() && !scaling.resolve()) return;
  for (auto& group : param_groups_) {
    const detail::optim::BucketsScope scope(*buckets_);
    if (!step_group(group, *buckets_, scaling)) return;
  }
}

NamedTensors FusedOptimizer::state_of(const Tensor& parameter) const {
  NamedTensors result;
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found == state_.end()) return result;
  const auto& slots = static_cast<const TensorState&>(*found->second).slots;
  const auto names = state_names();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].defined()) result.emplace_back(names[i], slots[i]);
  }
  return result;
}

void FusedOptimizer::set_state_of(const Tensor& parameter, const NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  const auto& group = detail::optim::group_of(*this, parameter);
  const auto names = state_names();
  detail::optim::require_known_names(tensors, names);
  auto state = std::make_unique<TensorState>();
  state->slots.resize(names.size());
  std::vector<detail::optim::TensorCopy> copies;
  for (const auto& [name, tensor] : tensors) {
    detail::optim::require_shape(name, tensor, parameter);
    const auto place = std::ranges::find(names, name) - names.begin();
    auto& slot = state->slots[static_cast<std::size_t>(place)];
    slot = detail::optim::empty_state_tensor(name, parameter, step_device(group, parameter));
    copies.push_back({.to = slot, .from = is_number(name) ? tensor.reshape({}) : tensor});
  }
  detail::optim::copy_all(copies);
  state_[parameter.unsafeGetTensorImpl()] = std::move(state);
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  Value::List groups;
  std::size_t index = 0;
  for (const auto& group : param_groups_) {
    auto options = static_cast<const ParamGroupOptions&>(group.options()).to_dict();
    options.set("params", group.params().size());
    groups.emplace_back(std::move(options));
    for (const auto& parameter : group.params()) {
      for (const auto& [name, tensor] : state_of(parameter)) {
        archive.write(state_key(index, name), tensor, /*is_buffer=*/true);
      }
      ++index;
    }
  }
  archive.write("groups", c10::IValue(detail::json_dumps(groups)));
}

void FusedOptimizer::load(torch::serialize::InputArchive& archive) {
  c10::IValue text;
  archive.read("groups", text);
  auto groups = detail::json_loads(text.toStringRef(), "The saved optimizer").as_list();
  Value::Dict states;
  std::size_t index = 0;
  for (auto& group : groups) {
    Value::List params;
    for (auto left = group.at("params").as_int(); left > 0; --left, ++index) {
      Value::Dict state;
      for (const auto name : state_names()) {
        Tensor tensor;
        const bool found = archive.try_read(state_key(index, name), tensor, /*is_buffer=*/true);
        if (found) state.set(name, tensor);
      }
      if (!state.empty()) states.set(index, std::move(state));
      params.emplace_back(index);
    }
    group.as_dict().set("params", std::move(params));
  }
  detail::optim::load_optimizer_state_dict(
      *this, Value::Dict{{"state", std::move(states)}, {"param_groups", std::move(groups)}});
}

template <class Options>
OptimizerWith<Options>::OptimizerWith(const std::vector<OptimizerParamGroup>& groups,
                                      Options defaults)
    : FusedOptimizer(groups, std::make_unique<GroupOptions<Options>>(std::move(defaults))) {
  for (auto& group : param_groups_) std::ignore = options_in<Options>(group);
}

template <class Options>
OptimizerWith<Options>::OptimizerWith(std::vector<Tensor> params, Options defaults)
    : OptimizerWith(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(params))},
                    std::move(defaults)) {}

template <class Options>
std::span<const std::string_view> OptimizerWith<Options>::state_names() const {
  return kTraits<Options>.states();
}

template <class Options>
Options& OptimizerWith<Options>::options(std::size_t group) {
  if (group >= param_groups_.size()) {
    throw ArgumentError(str("There is no parameter group ", group, ": the optimizer has ",
                            param_groups_.size(), "."));
  }
  return options_in<Options>(param_groups_[group]).values;
}

template <class Options>
c10::Device OptimizerWith<Options>::step_device(const OptimizerParamGroup& group,
                                                const Tensor& parameter) const {
  if constexpr (kTraits<Options>.fused) return parameter.device();
  const auto& options = static_cast<const GroupOptions<Options>&>(group.options()).values;
  return options.capturable ? parameter.device() : c10::Device(c10::kCPU);
}

template <class Options>
bool OptimizerWith<Options>::step_group(OptimizerParamGroup& group, TensorBuckets& buckets,
                                        GradScaling& scaling) {
  constexpr bool kIsSGD = std::same_as<Options, SGDOptions>;
  auto& group_options = options_in<Options>(group);
  const auto& options = group_options.values;
  for (const auto& parameter : group.params()) {
    if (!parameter.grad().defined()) continue;
    auto& entry = state_[parameter.unsafeGetTensorImpl()];
    if (entry == nullptr) entry = std::make_unique<TensorState>();
    auto& slots = static_cast<TensorState&>(*entry).slots;
    slots.resize(kTraits<Options>.slot_count);
    // The first momentum is the gradient itself: a skipped step must not make it.
    if (kIsSGD && scaling.found_inf.defined() && !slots[0].defined() &&
        detail::optim::uses_slot(options, 0, parameter) && !scaling.resolve()) {
      return false;
    }
    std::array<Tensor*, detail::optim::kMaxSlots> pointers{};
    for (std::size_t i = 0; i < slots.size(); ++i) pointers[i] = &slots[i];
    detail::optim::add_to_bucket(buckets, options, parameter, pointers,
                                 step_device(group, parameter));
  }

  for (auto& bucket : buckets) {
    const bool kernel_decides = bucket.fusable && !bucket.device.is_cpu();
    if (scaling.found_inf.defined() && !kernel_decides && !scaling.resolve()) return false;
    if (kTraits<Options>.counts_steps()) advance(bucket.slots[0], scaling.found_inf);
    detail::optim::update(bucket, options, group_options.learning_rate(bucket.device), scaling);
  }
  return true;
}

#define ACCELERATE_DEFINE_OPTIMIZER(Options) \
  template class GroupOptions<Options>;      \
  template class OptimizerWith<Options>;
ACCELERATE_DEFINE_OPTIMIZER(AdamOptions)
ACCELERATE_DEFINE_OPTIMIZER(AdamWOptions)
ACCELERATE_DEFINE_OPTIMIZER(SGDOptions)
ACCELERATE_DEFINE_OPTIMIZER(AdagradOptions)
ACCELERATE_DEFINE_OPTIMIZER(RMSpropOptions)
ACCELERATE_DEFINE_OPTIMIZER(NAdamOptions)
ACCELERATE_DEFINE_OPTIMIZER(RAdamOptions)
ACCELERATE_DEFINE_OPTIMIZER(AdamaxOptions)
ACCELERATE_DEFINE_OPTIMIZER(LionOptions)
ACCELERATE_DEFINE_OPTIMIZER(AdafactorOptions)
#undef ACCELERATE_DEFINE_OPTIMIZER

}  // namespace accelerate
