#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <tuple>
#include <type_traits>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "core/text.h"
#include "training/update_rules.h"

namespace accelerate {
namespace {

using at::Tensor;
using detail::GradScaling;
using detail::TensorBuckets;
using detail::UpdateRule;
using torch::optim::OptimizerParamGroup;

template <class T>
concept HasBetas = requires(T options) {
  options.betas;
};
template <class T>
concept HasMomentum = requires(T options) {
  options.momentum;
};
template <class T>
concept HasDecoupledDecay = requires(T options) {
  options.decoupled_weight_decay;
};

/// Calls `f(name, field)` for each option, in Python's order.
template <class Options, class F>
void visit(Options& options, const F& f) {
  using O = std::remove_const_t<Options>;
  f("lr", options.lr);
  if constexpr (HasBetas<O>) f("betas", options.betas);
  if constexpr (std::same_as<O, SGDOptions>) {
    f("momentum", options.momentum);
    f("dampening", options.dampening);
  }
  if constexpr (std::same_as<O, AdagradOptions>) f("lr_decay", options.lr_decay);
  if constexpr (std::same_as<O, RMSpropOptions>) f("alpha", options.alpha);
  if constexpr (std::same_as<O, AdafactorOptions>) {
    f("beta2_decay", options.beta2_decay);
    f("eps", options.eps);
    f("d", options.d);
  } else if constexpr (!std::same_as<O, AdagradOptions> && requires { options.eps; }) {
    f("eps", options.eps);
  }
  f("weight_decay", options.weight_decay);
  if constexpr (requires { options.amsgrad; }) f("amsgrad", options.amsgrad);
  if constexpr (std::same_as<O, SGDOptions>) f("nesterov", options.nesterov);
  if constexpr (std::same_as<O, AdagradOptions>) {
    f("initial_accumulator_value", options.initial_accumulator_value);
    f("eps", options.eps);
  }
  if constexpr (std::same_as<O, RMSpropOptions>) {
    f("momentum", options.momentum);
    f("centered", options.centered);
  }
  if constexpr (std::same_as<O, NAdamOptions>) f("momentum_decay", options.momentum_decay);
  if constexpr (HasDecoupledDecay<O> && !std::same_as<O, AdamOptions>) {
    f("decoupled_weight_decay", options.decoupled_weight_decay);
  }
  f("maximize", options.maximize);
  f("capturable", options.capturable);
  if constexpr (std::same_as<O, AdamOptions>) {
    f("decoupled_weight_decay", options.decoupled_weight_decay);
  }
}

Value to_value(double field) { return field; }
Value to_value(bool field) { return field; }
Value to_value(const std::pair<double, double>& field) {
  return Value::tuple({field.first, field.second});
}
Value to_value(const std::pair<std::optional<double>, double>& field) {
  return Value::tuple({field.first, field.second});
}

void from_value(double& field, const Value& value) { field = value.as_double(); }
void from_value(bool& field, const Value& value) { field = value.as_bool(); }
void from_value(std::optional<double>& field, const Value& value) {
  field = value.is_none() ? std::nullopt : std::optional(value.as_double());
}
template <class First>
void from_value(std::pair<First, double>& field, const Value& value) {
  const auto items = value.items();
  if (items.size() != 2)
    throw ArgumentError(detail::str(value.repr(), " is not a pair of numbers."));
  from_value(field.first, items[0]);
  from_value(field.second, items[1]);
}

template <class T>
void require(bool fine, std::string_view optimizer, std::string_view option, T value,
             std::string_view range) {
  if (fine) return;
  throw ArgumentError(detail::str("The option ", option, " of ", optimizer, " is ", value,
                                  "; it must be ", range, "."));
}

/// Throws `ArgumentError` for what PyTorch refuses.
template <class Options>
void check(const Options& options) {
  const auto name = UpdateRule<Options>::kName;
  const auto at_least_0 = [&](std::string_view option, double value) {
    require(value >= 0, name, option, value, "0 or more");
  };
  at_least_0("lr", options.lr);
  at_least_0("weight_decay", options.weight_decay);
  if constexpr (HasBetas<Options>) {
    const auto [beta1, beta2] = options.betas;
    require(beta1 >= 0 && beta1 < 1, name, "betas[0]", beta1, "at least 0 and below 1");
    require(beta2 >= 0 && beta2 < 1, name, "betas[1]", beta2, "at least 0 and below 1");
  }
  if constexpr (HasMomentum<Options>) at_least_0("momentum", options.momentum);
  if constexpr (std::same_as<Options, SGDOptions>) {
    require(!options.nesterov || (options.momentum > 0 && options.dampening == 0), name, "nesterov",
            options.nesterov, "false unless there is momentum and no dampening");
  }
  if constexpr (std::same_as<Options, AdagradOptions>) {
    at_least_0("lr_decay", options.lr_decay);
    at_least_0("initial_accumulator_value", options.initial_accumulator_value);
  }
  if constexpr (std::same_as<Options, RMSpropOptions>) at_least_0("alpha", options.alpha);
  if constexpr (std::same_as<Options, NAdamOptions>) {
    at_least_0("momentum_decay", options.momentum_decay);
  }
  if constexpr (std::same_as<Options, AdafactorOptions>) {
    require(options.beta2_decay <= 0, name, "beta2_decay", options.beta2_decay, "0 or less");
    at_least_0("eps[0]", options.eps.first.value_or(0));
    at_least_0("eps[1]", options.eps.second);
    require(options.d >= 1, name, "d", options.d, "1 or more");
  } else if constexpr (requires { options.eps; }) {
    at_least_0("eps", options.eps);
  }
}

/// One tensor for each name of the rule; undefined where it is not used.
struct TensorState final : torch::optim::OptimizerCloneableParamState<TensorState> {
  std::vector<Tensor> slots;
};

bool is_number(std::string_view name) { return name == "step" || name == "mu_product"; }

std::vector<std::int64_t> shape_of(std::string_view name, const Tensor& parameter) {
  auto shape = parameter.sizes().vec();
  if (name == "row_var" && !shape.empty()) shape[shape.size() - 1] = 1;
  if (name == "col_var" && shape.size() > 1) shape[shape.size() - 2] = 1;
  return shape;
}

/// A tensor of the state, 0 everywhere; numbers on `step_device`, the rest as the parameter.
Tensor new_tensor(std::string_view name, const Tensor& parameter, c10::Device step_device) {
  if (is_number(name)) {
    return at::zeros({}, at::TensorOptions(at::kFloat).device(step_device));
  }
  if (name == "row_var" || name == "col_var") {
    return at::zeros(shape_of(name, parameter), parameter.options().requires_grad(false));
  }
  return at::zeros_like(parameter, at::TensorOptions().requires_grad(false),
                        at::MemoryFormat::Preserve);
}

/// Whether the state of `parameter` has the tensor `slot` under these options.
template <class Options>
bool wants(const Options& options, std::size_t slot, const Tensor& parameter) {
  if constexpr (requires { options.amsgrad; }) return slot != 3 || options.amsgrad;
  if constexpr (std::same_as<Options, SGDOptions>) return options.momentum != 0;
  if constexpr (std::same_as<Options, RMSpropOptions>) {
    if (slot == 2) return options.momentum > 0;
    return slot != 3 || options.centered;
  }
  if constexpr (std::same_as<Options, AdafactorOptions>) {
    if (slot == 0) return true;
    return (parameter.dim() > 1) == (slot != 3);
  }
  return true;
}

template <class Options>
void set_first_value(const Options& options, std::string_view name, const Tensor& tensor) {
  if constexpr (std::same_as<Options, AdagradOptions>) {
    if (name == "sum") tensor.fill_(options.initial_accumulator_value);
  } else if constexpr (std::same_as<Options, NAdamOptions>) {
    if (name == "mu_product") tensor.fill_(1);
  }
}

/// Adds 1 to each step count; 0 where `found_inf` is 1.
void advance(std::vector<Tensor>& steps, const Tensor& found_inf) {
  if (!steps.front().is_cpu()) {
    if (found_inf.defined()) {
      at::_foreach_add_(steps, (1 - found_inf.reshape({})).to(steps.front().device()));
    } else {
      at::_foreach_add_(steps, 1);
    }
    return;
  }
  // No kernel for a number that is at hand.
  for (auto& step : steps) *step.mutable_data_ptr<float>() += 1;
}

template <class Options>
GroupOptions<Options>& options_in(OptimizerParamGroup& group) {
  auto* const options = dynamic_cast<GroupOptions<Options>*>(&group.options());
  if (options == nullptr) {
    const auto name = UpdateRule<Options>::kName;
    throw ArgumentError(
        detail::str("A parameter group of accelerate::", name,
                    " has the options of another optimizer. Make it with param_group(params, ",
                    name, "Options{...})."));
  }
  return *options;
}

std::string group_key(std::size_t i) { return detail::str("group", i); }

}  // namespace

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
detail::LearningRate GroupOptions<Options>::learning_rate(c10::Device device) {
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
  visit(values, [&]<class Field>(const std::string& name, const Field& field) {
    if constexpr (std::same_as<Field, double> || std::same_as<Field, bool>) {
      archive.write(name, c10::IValue(field));
    } else if constexpr (std::same_as<Field, std::pair<double, double>>) {
      archive.write(name, c10::IValue(std::make_tuple(field.first, field.second)));
    } else {  // what is not set is not written
      if (field.first) archive.write(name + "1", c10::IValue(*field.first));
      archive.write(name + "2", c10::IValue(field.second));
    }
  });
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::InputArchive& archive) {
  auto read = values;
  visit(read, [&]<class Field>(const std::string& name, Field& field) {
    c10::IValue value;
    if constexpr (std::same_as<Field, double>) {
      archive.read(name, value);
      field = value.toDouble();
    } else if constexpr (std::same_as<Field, bool>) {
      archive.read(name, value);
      field = value.toBool();
    } else if constexpr (std::same_as<Field, std::pair<double, double>>) {
      archive.read(name, value);
      const auto& both = value.toTupleRef().elements();
      field = {both.at(0).toDouble(), both.at(1).toDouble()};
    } else {
      field.first =
          archive.try_read(name + "1", value) ? std::optional(value.toDouble()) : std::nullopt;
      archive.read(name + "2", value);
      field.second = value.toDouble();
    }
  });
  check(read);
  values = read;
  set_lr(values.lr);
}

template <class Options>
Value::Dict GroupOptions<Options>::to_dict() const {
  Value::Dict result;
  visit(values, [&](const char* name, const auto& field) { result.set(name, to_value(field)); });
  return result;
}

template <class Options>
void GroupOptions<Options>::update(const Value::Dict& changes) {
  auto changed = values;
  auto unknown = changes;
  std::vector<std::string> known;
  visit(changed, [&](const char* name, auto& field) {
    known.emplace_back(name);
    if (const auto* const value = changes.get(name)) from_value(field, *value);
    unknown.erase(name);
  });
  if (!unknown.empty()) {
    throw ArgumentError(detail::str(UpdateRule<Options>::kName, " has no option ",
                                    unknown.keys().front().repr(),
                                    ". It has: ", detail::join(known), "."));
  }
  check(changed);
  values = changed;
  set_lr(values.lr);
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
    throw ArgumentError(detail::str(UpdateRule<Options>::kName,
                                    " has no momentum that could be set to ", momentum, "."));
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
  if (scaling.on_host()) {
    if (scaling.overflowed()) return;
    scaling.found_inf = Tensor();
  }
  for (auto& group : param_groups_) {
    const detail::BucketsScope scope(*buckets_);
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
  const auto holds = [&](const OptimizerParamGroup& group) {
    return std::ranges::any_of(group.params(), [&](const auto& p) { return p.is_same(parameter); });
  };
  const auto group = std::ranges::find_if(param_groups_, holds);
  if (group == param_groups_.end()) {
    throw ArgumentError(detail::str("A state was given for a parameter of shape ",
                                    parameter.sizes(),
                                    " that is in no group of the optimizer. Add it with "
                                    "add_param_group first."));
  }
  const auto names = state_names();
  auto state = std::make_unique<TensorState>();
  state->slots.resize(names.size());
  for (const auto& [name, tensor] : tensors) {
    const auto place = std::ranges::find(names, name);
    if (place == names.end()) {
      throw ArgumentError(detail::str(
          "The state of a parameter has a tensor '", name,
          "', which this optimizer does not know. It knows: ", detail::join(names), "."));
    }
    const auto fits = is_number(name)
                          ? tensor.numel() == 1
                          : tensor.sizes() == at::IntArrayRef(shape_of(name, parameter));
    if (!fits) {
      throw ArgumentError(
          detail::str("The tensor '", name, "' of a state has shape ", tensor.sizes(),
                      ", which does not fit the parameter of shape ", parameter.sizes(), "."));
    }
    auto& slot = state->slots[static_cast<std::size_t>(place - names.begin())];
    slot = new_tensor(name, parameter, step_device(*group, parameter));
    slot.copy_(is_number(name) ? tensor.reshape({}) : tensor);
  }
  state_[parameter.unsafeGetTensorImpl()] = std::move(state);
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  archive.write("groups", c10::IValue(static_cast<std::int64_t>(param_groups_.size())));
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& group = param_groups_[g];
    torch::serialize::OutputArchive group_archive(archive.compilation_unit());
    group.options().serialize(group_archive);
    group_archive.write("params", c10::IValue(static_cast<std::int64_t>(group.params().size())));
    for (std::size_t p = 0; p < group.params().size(); ++p) {
      for (const auto& [name, tensor] : state_of(group.params()[p])) {
        group_archive.write(detail::str("param", p, "_", name), tensor, /*is_buffer=*/true);
      }
    }
    archive.write(group_key(g), group_archive);
  }
}

void FusedOptimizer::load(torch::serialize::InputArchive& archive) {
  const auto expect = [](std::size_t here, const c10::IValue& there, std::string_view what) {
    if (there.toInt() == static_cast<std::int64_t>(here)) return;
    throw ArgumentError(
        detail::str("The saved optimizer has ", there.toInt(), " ", what, " and this one has ",
                    here, ". Build it on the same parameters as the one that was saved."));
  };
  c10::IValue count;
  archive.read("groups", count);
  expect(param_groups_.size(), count, "parameter groups");
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    auto& group = param_groups_[g];
    torch::serialize::InputArchive group_archive;
    archive.read(group_key(g), group_archive);
    group_archive.read("params", count);
    expect(group.params().size(), count, detail::str("parameters in group ", g));
    group.options().serialize(group_archive);
    for (std::size_t p = 0; p < group.params().size(); ++p) {
      NamedTensors tensors;
      for (const auto name : state_names()) {
        Tensor tensor;
        if (group_archive.try_read(detail::str("param", p, "_", name), tensor,
                                   /*is_buffer=*/true)) {
          tensors.emplace_back(name, tensor);
        }
      }
      if (tensors.empty()) {
        state_.erase(group.params()[p].unsafeGetTensorImpl());
      } else {
        set_state_of(group.params()[p], tensors);
      }
    }
  }
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
  return UpdateRule<Options>::kStates;
}

template <class Options>
Options& OptimizerWith<Options>::options(std::size_t group) {
  if (group >= param_groups_.size()) {
    throw ArgumentError(detail::str("There is no parameter group ", group, ": the optimizer has ",
                                    param_groups_.size(), "."));
  }
  return options_in<Options>(param_groups_[group]).values;
}

template <class Options>
c10::Device OptimizerWith<Options>::step_device(const OptimizerParamGroup& group,
                                                const Tensor& parameter) const {
  if constexpr (UpdateRule<Options>::kFused) return parameter.device();
  const auto& options = static_cast<const GroupOptions<Options>&>(group.options()).values;
  return options.capturable ? parameter.device() : c10::Device(c10::kCPU);
}

template <class Options>
bool OptimizerWith<Options>::step_group(OptimizerParamGroup& group, TensorBuckets& buckets,
                                        GradScaling& scaling) {
  using Rule = UpdateRule<Options>;
  constexpr bool kCounts = Rule::kStates[0] == "step";
  constexpr bool kIsSGD = std::same_as<Options, SGDOptions>;
  auto& group_options = options_in<Options>(group);
  const auto& options = group_options.values;
  // Reads what the device knows, once, where a step has to be known to be one.
  const auto shall_step = [&] {
    if (scaling.overflowed()) return false;
    scaling.found_inf = Tensor();
    return true;
  };

  for (const auto& parameter : group.params()) {
    const auto& grad = parameter.grad();
    if (!grad.defined()) continue;
    auto& entry = state_[parameter.unsafeGetTensorImpl()];
    if (entry == nullptr) entry = std::make_unique<TensorState>();
    auto& slots = static_cast<TensorState&>(*entry).slots;
    slots.resize(Rule::kStates.size());
    const auto counts_on = step_device(group, parameter);
    bool first = false;
    bool fused = Rule::kFused && detail::fusable(parameter, grad);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (!wants(options, i, parameter)) continue;
      const auto name = Rule::kStates[i];
      if (!slots[i].defined()) {
        // The first momentum is the gradient itself, and must not come from a step that is none.
        if (kIsSGD && scaling.found_inf.defined() && !shall_step()) return false;
        slots[i] = new_tensor(name, parameter, counts_on);
        set_first_value(options, name, slots[i]);
        first = kIsSGD;
      }
      if (is_number(name)) {
        if (slots[i].device() != counts_on) slots[i] = slots[i].to(counts_on);
      } else {
        fused = fused && detail::same_layout(parameter, slots[i]);
      }
    }
    auto& bucket = buckets.at(parameter.device(), parameter.scalar_type(), fused, first);
    bucket.params.push_back(parameter);
    bucket.grads.push_back(grad);
    for (std::size_t i = 0; i < slots.size(); ++i) bucket.slots[i].push_back(slots[i]);
  }

  for (auto& bucket : buckets) {
    const bool kernel_decides = bucket.fusable && !bucket.device.is_cpu();
    if (scaling.found_inf.defined() && !kernel_decides && !shall_step()) return false;
    if (kCounts) advance(bucket.slots[0], scaling.found_inf);
    Rule::apply(bucket, options, group_options.learning_rate(bucket.device), scaling);
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
