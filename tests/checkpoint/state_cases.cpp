#include "checkpoint/state_cases.h"

#include <torch/torch.h>

#include <cmath>

#include "accelerate/accelerator.h"
#include "accelerate/optim.h"
#include "accelerate/optimizer.h"
#include "training/optimizer_tensors.h"
#include "training/scheduler_cases.h"

namespace accelerate::test {
namespace {

template <class O, class Options>
BuildOptimizer maker(Options options) {
  return [options](Tensors params) -> std::shared_ptr<torch::optim::Optimizer> {
    auto optimizer = std::make_shared<O>(Tensors(params.begin(), params.begin() + 2), options);
    optimizer->add_param_group(
        torch::optim::OptimizerParamGroup(Tensors(params.begin() + 2, params.end())));
    optimizer->param_groups()[1].options().set_lr(0.02);
    return optimizer;
  };
}

Value copies(const Tensors& params) {
  Value::List list;
  for (const auto& tensor : params) list.emplace_back(tensor.detach().clone());
  return list;
}

/// The value without references to tensors that the optimizer goes on to change.
Value frozen(const Value& value) {
  if (value.is_tensor()) return Value(value.as_tensor().clone());
  if (value.is_list()) {
    Value::List list;
    for (const auto& item : value.as_list()) list.push_back(frozen(item));
    return list;
  }
  if (!value.is_dict()) return value;
  Value::Dict dict;
  for (const auto& [key, item] : value.as_dict()) dict.set(key, frozen(item));
  return dict;
}

AcceleratedOptimizer prepared(Accelerator& accelerator, torch::optim::Optimizer& optimizer) {
  return accelerator.prepare(optimizer);
}

/// write_schedulers.py's metric: falls, then swings.
double metric(int step) {
  return std::floor(1000 * (std::exp(-step / 15.0) + 0.1 * ((step * 7) % 5))) / 1000;
}

void advance(LRScheduler& scheduler, int step) {
  if (auto* plateau = dynamic_cast<ReduceLROnPlateau*>(&scheduler)) {
    plateau->step(metric(step));
  } else {
    scheduler.step();
  }
}

std::string optimizer_of(const std::string& name) {
  for (const std::string kind : {"adamw", "adam", "rmsprop"}) {
    if (name.ends_with("_" + kind)) return kind;
  }
  return "sgd";
}

Value lrs_from(LRScheduler& scheduler, torch::optim::Optimizer& optimizer) {
  Value::List lrs;
  for (int step = kSchedulerSteps + 1; step <= kSchedulerSteps + kLrs; ++step) {
    advance(scheduler, step);
    Value::List row;
    for (auto& group : optimizer.param_groups()) row.emplace_back(group.options().get_lr());
    lrs.emplace_back(std::move(row));
  }
  return lrs;
}

}  // namespace

const std::map<std::string, BuildOptimizer>& optimizer_cases() {
  static const std::map<std::string, BuildOptimizer> cases{
      {"SGD", maker<SGD>(SGDOptions{.lr = 0.01, .momentum = 0.9})},
      {"SGD_plain", maker<SGD>(SGDOptions{.lr = 0.01})},
      {"Adam", maker<Adam>(AdamOptions{.lr = 0.01})},
      {"AdamW", maker<AdamW>(AdamWOptions{.lr = 0.01, .amsgrad = true})},
      {"Adagrad", maker<Adagrad>(AdagradOptions{.lr = 0.01})},
      {"RMSprop", maker<RMSprop>(RMSpropOptions{.lr = 0.01, .momentum = 0.9, .centered = true})},
      {"Adafactor", maker<Adafactor>(AdafactorOptions{.lr = 0.01})},
      {"NAdam", maker<NAdam>(NAdamOptions{.lr = 0.01})},
      {"RAdam", maker<RAdam>(RAdamOptions{.lr = 0.01})},
      {"Adamax", maker<Adamax>(AdamaxOptions{.lr = 0.01})},
  };
  return cases;
}

Value optimizer_case(const BuildOptimizer& build) {
  Accelerator accelerator({.cpu = true});
  const auto params = parameters();
  const auto owner = build(params);
  auto optimizer = prepared(accelerator, *owner);
  const auto run = [&](int first, int last) {
    for (int step = first; step <= last; ++step) {
      set_gradients(params, step);
      optimizer.step();
    }
  };
  run(1, kStepsBefore);
  Value::Dict result{{"params", copies(params)}, {"state", frozen(optimizer.state_dict())}};
  run(kStepsBefore + 1, kStepsBefore + kStepsAfter);
  result.set("next", copies(params));
  return result;
}

Value continued_optimizer(const BuildOptimizer& build, const Value& saved) {
  Accelerator accelerator({.cpu = true});
  Tensors params;
  for (const auto& tensor : saved.at("params").as_list()) {
    params.push_back(tensor.as_tensor().detach().clone().requires_grad_());
  }
  const auto owner = build(params);
  auto optimizer = prepared(accelerator, *owner);
  optimizer.load_state_dict(saved.at("state"));
  for (int step = kStepsBefore + 1; step <= kStepsBefore + kStepsAfter; ++step) {
    set_gradients(params, step);
    optimizer.step();
  }
  return copies(params);
}

std::vector<std::string> scheduler_names() {
  std::vector<std::string> names;
  for (const auto& [name, build] : scheduler_cases()) {
    if (!name.ends_with("by_hand")) names.push_back(name);
  }
  return names;
}

Value scheduler_case(const std::string& name) {
  Accelerator accelerator({.cpu = true});
  const auto optimizer = make_optimizer(optimizer_of(name));
  const auto scheduler = scheduler_cases().at(name)(*optimizer);
  for (int step = 1; step <= kSchedulerSteps; ++step) advance(*scheduler, step);
  Value::Dict result{{"optimizer", prepared(accelerator, *optimizer).state_dict()},
                     {"state", scheduler->state_dict()}};
  result.set("lr", lrs_from(*scheduler, *optimizer));
  return result;
}

Value continued_scheduler(const std::string& name, const Value& saved) {
  Accelerator accelerator({.cpu = true});
  const auto optimizer = make_optimizer(optimizer_of(name));
  const auto scheduler = scheduler_cases().at(name)(*optimizer);
  prepared(accelerator, *optimizer).load_state_dict(saved.at("optimizer"));
  scheduler->load_state_dict(saved.at("state"));
  return lrs_from(*scheduler, *optimizer);
}

}  // namespace accelerate::test
