#include "sharding/deepspeed_objects.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <array>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "accelerate/scheduler/deepspeed_schedulers.h"
#include "accelerate/value/from_value.h"
#include "core/text.h"

namespace accelerate::detail::sharding {
namespace {

using torch::optim::Optimizer;
/// Takes what it needs out of the parameters.
using OptimizerMaker = std::shared_ptr<Optimizer> (*)(const DummyOptim&, Value::Dict&);

[[noreturn]] void refuse_parameter(std::string_view type, const std::string& why) {
  throw ConfigError(str("'optimizer.params' of ", type, " in the DeepSpeed configuration: ", why));
}

/// Each group of the dummy with the options of the configuration. Where the groups differ, what
/// they say goes before the configuration, as in Python.
template <class Options>
std::shared_ptr<Optimizer> optimizer_of(const DummyOptim& dummy, const Value::Dict& params,
                                        Options defaults) {
  GroupOptions<Options> chosen(std::move(defaults));
  chosen.update(params);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto& first = dummy.options();
  for (const auto& group : dummy.param_groups()) {
    const auto& own = dynamic_cast<const GroupOptions<SGDOptions>&>(group.options()).values;
    Options options = chosen.values;
    if (own.lr != first.lr) options.lr = own.lr;
    if (own.weight_decay != first.weight_decay) options.weight_decay = own.weight_decay;
    groups.push_back(param_group(group.params(), options));
  }
  return std::make_shared<OptimizerWith<Options>>(groups, chosen.values);
}

/// Removes an entry and returns it, or `fallback`.
bool take_flag(Value::Dict& params, const char* name, bool fallback) {
  const Value* entry = params.get(name);
  if (entry == nullptr) return fallback;
  const bool flag = from_value<bool>(*entry);
  params.erase(name);
  return flag;
}

void check_bias_correction(std::string_view type, Value::Dict& params) {
  if (take_flag(params, "bias_correction", true)) return;
  refuse_parameter(type, "bias_correction is false, which is not available. Leave it out.");
}

// The defaults are DeepSpeed's: no weight decay, and decoupled from the gradient unless told
// otherwise.

std::shared_ptr<Optimizer> make_adamw(const DummyOptim& dummy, Value::Dict& params) {
  check_bias_correction("AdamW", params);
  static_cast<void>(take_flag(params, "torch_adam", false));
  // Of the type AdamW: DeepSpeed has it true, whatever the file says.
  static_cast<void>(take_flag(params, "adam_w_mode", true));
  return optimizer_of(dummy, params, AdamWOptions{.weight_decay = 0});
}

std::shared_ptr<Optimizer> make_adam(const DummyOptim& dummy, Value::Dict& params) {
  if (take_flag(params, "adam_w_mode", true)) return make_adamw(dummy, params);
  check_bias_correction("Adam", params);
  static_cast<void>(take_flag(params, "torch_adam", false));
  return optimizer_of(dummy, params, AdamOptions{});
}

std::shared_ptr<Optimizer> make_adagrad(const DummyOptim& dummy, Value::Dict& params) {
  return optimizer_of(dummy, params, AdagradOptions{});
}

std::shared_ptr<Optimizer> make_lion(const DummyOptim& dummy, Value::Dict& params) {
  return optimizer_of(dummy, params, LionOptions{.lr = 1e-3});
}

std::shared_ptr<Optimizer> make_sgd(const DummyOptim& dummy, Value::Dict& params) {
  return optimizer_of(dummy, params, SGDOptions{});
}

constexpr std::array<std::pair<std::string_view, OptimizerMaker>, 5> kOptimizers{{
    {"adam", make_adam},
    {"adamw", make_adamw},
    {"adagrad", make_adagrad},
    {"lion", make_lion},
    {"sgd", make_sgd},
}};

/// Removes the last step that was done and returns how many there were; DeepSpeed has -1 for none.
std::int64_t take_steps_done(Value::Dict& params) {
  constexpr const char* kKey = "last_batch_iteration";
  const Value* entry = params.get(kKey);
  if (entry == nullptr) return 0;
  const auto last = from_value<std::int64_t>(*entry);
  if (last < -1) {
    throw ConfigError(str("'scheduler.params.", kKey, "' in the DeepSpeed configuration is ", last,
                          ", but must be -1 (a new schedule) or more."));
  }
  params.erase(kKey);
  return last + 1;
}

/// A scheduler whose options are the parameters of the configuration.
template <class Options>
std::shared_ptr<LRScheduler> scheduler_of(Optimizer& optimizer, Value::Dict params) {
  const std::int64_t done = take_steps_done(params);
  Options options;
  const auto fields = value_fields(std::type_identity<Options>{});
  std::vector<std::string> names;
  std::apply([&](const auto&... all) { (names.emplace_back(all.name), ...); }, fields);
  for (const auto& key : params.keys()) {
    if (std::ranges::find(names, key.to_string()) != names.end()) continue;
    throw ConfigError(str("'scheduler.params' in the DeepSpeed configuration has '",
                          key.to_string(), "', which is not known here.",
                          did_you_mean(key.to_string(), names), " It may have: ", join(names),
                          "."));
  }
  set_fields(options, fields, params);
  auto scheduler = std::make_shared<FormulaLR<Options>>(optimizer, options);
  for (std::int64_t i = 0; i < done; ++i) scheduler->step();
  return scheduler;
}

using SchedulerMaker = std::shared_ptr<LRScheduler> (*)(Optimizer&, Value::Dict);
constexpr std::array<std::pair<std::string_view, SchedulerMaker>, 5> kSchedulers{{
    {"WarmupLR", scheduler_of<WarmupLROptions>},
    {"WarmupDecayLR", scheduler_of<WarmupDecayLROptions>},
    {"WarmupCosineLR", scheduler_of<WarmupCosineLROptions>},
    {"OneCycle", scheduler_of<OneCycleOptions>},
    {"LRRangeTest", scheduler_of<LRRangeTestOptions>},
}};

template <class Table>
auto find_maker(const Table& table, std::string_view key, const std::string& type) {
  std::vector<std::string> names;
  for (const auto& [name, maker] : table) {
    if (to_lower(name) == to_lower(type)) return maker;
    names.emplace_back(name);
  }
  throw ConfigError(str("'", key, "' in the DeepSpeed configuration is '", type,
                        "', which is not available. Choose one of: ", join(names), "."));
}

/// Wrong values are the configuration's, not an argument's.
template <class F>
auto of_configuration(std::string_view what, const F& make) {
  try {
    return make();
  } catch (const ArgumentError& error) {
    throw ConfigError(str("'", what, "' in the DeepSpeed configuration: ", error.what()));
  }
}

double first_lr(const Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  return groups.empty() ? 0 : groups.front().options().get_lr();
}

}  // namespace

void describe(DeepSpeedObjects& objects, const torch::nn::Module* model, const Optimizer* optimizer,
              const LRScheduler* scheduler) {
  if (model != nullptr) {
    objects.has_model = true;
    if (const auto* told = dynamic_cast<const HiddenSizes*>(model)) {
      objects.hidden_sizes = told->hidden_sizes();
    }
  }
  if (optimizer != nullptr) {
    const auto* dummy = dynamic_cast<const DummyOptim*>(optimizer);
    objects.optimizer = dummy != nullptr ? GivenObject::kDummy : GivenObject::kReal;
    if (dummy != nullptr) {
      objects.lr = dummy->options().lr;
      objects.weight_decay = dummy->options().weight_decay;
    }
  }
  if (scheduler == nullptr) return;
  const auto* dummy = dynamic_cast<const DummyScheduler*>(scheduler);
  objects.scheduler = dummy != nullptr ? GivenObject::kDummy : GivenObject::kReal;
  if (dummy == nullptr) return;
  objects.has_scheduler_callable = static_cast<bool>(dummy->options().lr_scheduler_callable);
  objects.warmup_num_steps = dummy->options().warmup_num_steps;
  objects.total_num_steps = dummy->options().total_num_steps;
  if (optimizer != nullptr) objects.scheduler_lr = first_lr(*optimizer);
}

std::shared_ptr<Optimizer> make_optimizer(const DeepSpeedSettings& settings,
                                          const DummyOptim& dummy) {
  const auto maker =
      find_maker(kOptimizers, "optimizer.type", settings.optimizer_type.value_or(""));
  if (settings.optimizer_params.contains("max_grad_norm")) {
    refuse_parameter(*settings.optimizer_type,
                     "max_grad_norm is not its business. Set 'gradient_clipping' instead.");
  }
  Value::Dict params = settings.optimizer_params;
  return of_configuration("optimizer.params", [&] { return maker(dummy, params); });
}

std::shared_ptr<LRScheduler> make_scheduler(const DeepSpeedSettings& settings,
                                            const DummyScheduler& dummy, Optimizer& optimizer) {
  if (const auto& make = dummy.options().lr_scheduler_callable) return make(optimizer);
  const auto maker =
      find_maker(kSchedulers, "scheduler.type", settings.scheduler_type.value_or(""));
  return of_configuration("scheduler.params",
                          [&] { return maker(optimizer, settings.scheduler_params); });
}

void check_offloaded(const DeepSpeedSettings& settings, const Optimizer& optimizer) {
  if (settings.optimizer_device == "none" || !settings.force_cpu_optimizer) return;
  const auto is_any = [&]<class... Types>(std::type_identity<Types>...) {
    return ((dynamic_cast<const Types*>(&optimizer) != nullptr) || ...);
  };
  using std::type_identity;
  if (is_any(type_identity<AdamW>(), type_identity<Adam>(), type_identity<Adagrad>(),
             type_identity<Lion>(), type_identity<torch::optim::AdamW>(),
             type_identity<torch::optim::Adam>(), type_identity<torch::optim::Adagrad>())) {
    return;
  }
  throw ConfigError(str("The DeepSpeed configuration has offload_optimizer, but ",
                        c10::demangle(typeid(optimizer).name()),
                        " has no form for the CPU there. Use AdamW, ",
                        "Adam, Adagrad or Lion, or set zero_force_ds_cpu_optimizer to false."));
}

}  // namespace accelerate::detail::sharding
