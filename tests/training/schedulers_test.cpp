#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "accelerate/scheduler.h"
#include "support/message_of.h"
#include "support/reference_path.h"
#include "training/scheduler_cases.h"

namespace accelerate {
namespace {

using test::make_optimizer;
using test::message_of;
using test::momentum_of;
using Json = nlohmann::ordered_json;
using Lrs = std::vector<double>;
using torch::optim::Optimizer;

constexpr std::size_t kSteps = 200;
constexpr std::size_t kStateAfter = 7;
/// The same formulas in the same order: only another cos or pow of the C library may differ.
constexpr double kTolerance = 1e-15;

const Json& python() {
  static const auto values = [] {
    std::ifstream in(test::reference_path("schedulers/schedulers.json"));
    return Json::parse(in);
  }();
  return values;
}

/// A column of the reference, where numbers that repeat are written once.
Lrs column(const Json& runs) {
  Lrs numbers;
  for (const auto& run : runs) {
    const auto once = run.is_number();
    numbers.insert(numbers.end(), once ? 1 : run[1].get<std::size_t>(),
                   once ? run.get<double>() : run[0].get<double>());
  }
  return numbers;
}

Value value_of(const Json& json) {
  if (json.is_null()) return nullptr;
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    Value::List items;
    for (const auto& item : json) items.push_back(value_of(item));
    return items;
  }
  if (json.contains("infinity")) {
    return json["infinity"].get<double>() * std::numeric_limits<double>::infinity();
  }
  Value::Dict dict;
  if (json.contains("pairs")) {
    for (const auto& pair : json["pairs"]) dict.set(pair[0].get<std::int64_t>(), value_of(pair[1]));
  } else {
    for (const auto& [key, item] : json.items()) dict.set(key, value_of(item));
  }
  return dict;
}

void expect_close(double ours, double pythons, const std::string& where) {
  const auto scale = std::max(std::abs(ours), std::abs(pythons));
  if (ours == pythons) return;
  EXPECT_LE(std::abs(ours - pythons), kTolerance * scale) << where;
}

void expect_same(const Value& ours, const Value& pythons, const std::string& where) {
  if (pythons.is_dict() && ours.is_dict()) {
    const auto& dict = ours.as_dict();
    ASSERT_EQ(dict.size(), pythons.as_dict().size()) << where << ours.repr();
    for (const auto& [key, item] : pythons.as_dict()) {
      ASSERT_TRUE(dict.contains(key)) << where << key.repr();
      expect_same(dict.at(key), item, where + "." + key.to_string());
    }
  } else if (pythons.is_list() && ours.is_list()) {
    ASSERT_EQ(ours.items().size(), pythons.items().size()) << where;
    for (std::size_t i = 0; i < ours.items().size(); ++i) {
      expect_same(ours.items()[i], pythons.items()[i], where + "[" + std::to_string(i) + "]");
    }
  } else if (pythons.is_double() || (pythons.is_int() && ours.is_double())) {
    expect_close(ours.as_double(), pythons.as_double(), where);
  } else {
    EXPECT_EQ(ours.kind(), pythons.kind()) << where;
    EXPECT_EQ(ours, pythons) << where;
  }
}

Lrs lrs_of(const Optimizer& optimizer) {
  Lrs lrs;
  for (const auto& group : optimizer.param_groups()) lrs.push_back(group.options().get_lr());
  return lrs;
}

void set_lr(Optimizer& optimizer, std::size_t group, double lr) {
  optimizer.param_groups()[group].options().set_lr(lr);
}

/// One step, with what a user does before it in the cases of that name.
void advance(const std::string& name, LRScheduler& scheduler, std::size_t step) {
  auto& optimizer = scheduler.optimizer();
  if (name.ends_with("by_hand") && step == 20) set_lr(optimizer, 0, 0.5);
  if (name.ends_with("by_hand") && step == 60) set_lr(optimizer, 1, lrs_of(optimizer)[1] * 2);
  if (auto* plateau = dynamic_cast<ReduceLROnPlateau*>(&scheduler)) {
    plateau->step(python()["metrics"][step].get<double>());
  } else {
    scheduler.step();
  }
}

std::string optimizer_name(const std::string& name) {
  for (const auto* optimizer : {"adamw", "adam", "rmsprop"}) {
    if (name.ends_with(std::string("_") + optimizer)) return optimizer;
  }
  return "sgd";
}

class Schedulers : public testing::TestWithParam<std::string> {
 protected:
  const std::string& name = GetParam();
  const Json& expected = python()["cases"][name];
  std::unique_ptr<Optimizer> optimizer = make_optimizer(optimizer_name(name));
  std::unique_ptr<LRScheduler> scheduler = test::scheduler_cases().at(name)(*optimizer);

  void expect_step(std::size_t step) {
    const auto lrs = lrs_of(*optimizer);
    EXPECT_EQ(scheduler->get_last_lr(), lrs);
    const auto where = name + ", step " + std::to_string(step);
    for (std::size_t i = 0; i < lrs.size(); ++i) {
      expect_close(lrs[i], lr_[i].at(step), where);
      if (momentum_.empty()) continue;
      expect_close(momentum_of(optimizer->param_groups()[i]), momentum_[i].at(step), where);
    }
  }

 private:
  static std::vector<Lrs> columns(const Json& all) {
    std::vector<Lrs> out;
    for (const auto& runs : all) out.push_back(column(runs));
    return out;
  }
  std::vector<Lrs> lr_ = columns(expected["lr"]);
  std::vector<Lrs> momentum_ = columns(expected.value("momentum", Json::array()));
};

TEST_P(Schedulers, SetPythonsNumbersFor200Steps) {
  expect_step(0);
  for (std::size_t step = 1; step <= kSteps; ++step) {
    advance(name, *scheduler, step);
    expect_step(step);
  }
}

TEST_P(Schedulers, HavePythonsState) {
  for (std::size_t step = 1; step <= kStateAfter; ++step) advance(name, *scheduler, step);
  const auto state = scheduler->state_dict();
  expect_same(state, value_of(expected["state"]), name);

  std::vector<std::string> keys;
  std::vector<std::string> pythons;
  for (const auto& [key, value] : state.as_dict()) keys.push_back(key.to_string());
  for (const auto& [key, value] : expected["state"].items()) pythons.push_back(key);
  EXPECT_EQ(keys, pythons);
}

TEST_P(Schedulers, GoOnFromPythonsState) {
  // What the optimizer's own state holds.
  for (std::size_t i = 0; i < 2; ++i) {
    set_lr(*optimizer, i, column(expected["lr"][i]).at(kStateAfter));
  }
  scheduler->load_state_dict(value_of(expected["state"]));
  for (auto step = kStateAfter + 1; step <= kSteps; ++step) {
    advance(name, *scheduler, step);
    expect_step(step);
  }
}

TEST_P(Schedulers, AreMovedWithTheirOptimizer) {
  advance(name, *scheduler, 1);
  auto old = std::move(optimizer);
  if (auto* sgd = dynamic_cast<torch::optim::SGD*>(old.get())) {
    optimizer = std::make_unique<torch::optim::SGD>(std::move(*sgd));
  } else {
    optimizer = std::move(old);
  }
  old.reset();
  scheduler->rebind(*optimizer);
  EXPECT_EQ(&scheduler->optimizer(), optimizer.get());
  for (std::size_t step = 2; step <= kSteps; ++step) advance(name, *scheduler, step);
  expect_step(kSteps);
}

std::vector<std::string> names() {
  std::vector<std::string> names;
  for (const auto& [name, build] : test::scheduler_cases()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, Schedulers, testing::ValuesIn(names()),
                         [](const auto& info) { return info.param; });

TEST(SchedulerReference, HasNoCaseThatIsNotTested) {
  std::vector<std::string> written;
  for (const auto& [name, value] : python()["cases"].items()) written.push_back(name);
  std::sort(written.begin(), written.end());
  EXPECT_EQ(written, names());
}

struct SchedulerTest : testing::Test {
  std::unique_ptr<Optimizer> sgd = make_optimizer("sgd");
};

TEST_F(SchedulerTest, StartsWithTheFirstStep) {
  ConstantLR scheduler(*sgd, {.factor = 0.5});
  EXPECT_EQ(scheduler.last_epoch(), 0);
  EXPECT_EQ(scheduler.step_count(), 1);
  EXPECT_EQ(scheduler.total_steps(), std::nullopt);
  EXPECT_EQ(scheduler.base_lrs(), (Lrs{0.1, 0.003}));
  EXPECT_EQ(scheduler.get_last_lr(), (Lrs{0.05, 0.0015}));
  scheduler.step();
  EXPECT_EQ(scheduler.last_epoch(), 1);
  EXPECT_EQ(scheduler.step_count(), 2);
}

TEST_F(SchedulerTest, StartsFromTheInitialRatesOfAnEarlierOne) {
  ConstantLR first(*sgd, {.factor = 0.5});
  StepLR second(*sgd, {.step_size = 3});
  EXPECT_EQ(second.base_lrs(), (Lrs{0.1, 0.003}));
  // As in Python, a rate that is set by hand does not change the initial one.
  set_lr(*sgd, 0, 0.7);
  EXPECT_EQ(StepLR(*sgd, {.step_size = 3}).base_lrs(), (Lrs{0.1, 0.003}));
}

TEST_F(SchedulerTest, KeepsInitialRatesOfLibTorchsOptimizersAsLongAsThereIsAScheduler) {
  {
    ConstantLR gone(*sgd, {.factor = 0.5});
  }
  EXPECT_EQ(StepLR(*sgd, {.step_size = 3}).base_lrs(), (Lrs{0.05, 0.0015}));
}

TEST_F(SchedulerTest, KeepsInitialRatesOfOurOptimizersInTheirGroups) {
  AdamW adamw({torch::zeros(1, torch::requires_grad())}, {.lr = 0.1});
  {
    ConstantLR gone(adamw, {.factor = 0.5});
  }
  auto moved = std::move(adamw);
  EXPECT_EQ(StepLR(moved, {.step_size = 3}).base_lrs(), (Lrs{0.1}));
  // A copy of the options is another group.
  AdamW other({torch::optim::OptimizerParamGroup(moved.param_groups()[0])});
  EXPECT_EQ(StepLR(other, {.step_size = 3}).base_lrs(), (Lrs{0.05}));
}

TEST_F(SchedulerTest, ResumesOnlyWhereInitialRatesWereNoted) {
  const auto resume = [&] { return StepLR(*sgd, {.step_size = 3, .last_epoch = 5}); };
  EXPECT_EQ(message_of<ArgumentError>(resume),
            "param 'initial_lr' is not specified in param_groups[0] when resuming scheduler with "
            "last_epoch = 5: no scheduler of this optimizer has set it. Build the scheduler with "
            "last_epoch = -1 and call load_state_dict.");
  ConstantLR first(*sgd, {.factor = 0.5});
  const auto resumed = resume();
  EXPECT_EQ(resumed.last_epoch(), 6);
  EXPECT_EQ(resumed.base_lrs(), (Lrs{0.1, 0.003}));
  EXPECT_THROW(StepLR(*sgd, {.step_size = 3, .last_epoch = -2}), ArgumentError);
}

TEST_F(SchedulerTest, TellsAMovedOptimizerFromOneWithFewerGroups) {
  torch::optim::AdamW adamw({torch::zeros(1)}, torch::optim::AdamWOptions(2e-5));
  auto schedule = CosineAnnealingLR(adamw, {.t_max = 100});
  auto owned = std::move(adamw);
  auto moved = std::make_shared<CosineAnnealingLR>(std::move(schedule));
  moved->rebind(owned);
  moved->step();
  EXPECT_LT(lrs_of(owned)[0], 2e-5);

  StepLR of_two(*sgd, {.step_size = 3});
  EXPECT_EQ(
      message_of<ArgumentError>([&] { of_two.rebind(owned); }),
      "A scheduler of 2 parameter groups cannot go on with an optimizer of 1; build a new one.");
  EXPECT_EQ(&of_two.optimizer(), sgd.get());
}

TEST_F(SchedulerTest, NotesWhatItNeedsForAnotherOptimizer) {
  OneCycleLR scheduler(*sgd, {.max_lr = 0.2, .total_steps = 10});
  auto adam = make_optimizer("adam");
  scheduler.rebind(*adam);
  sgd.reset();
  scheduler.step();
  EXPECT_EQ(lrs_of(*adam), scheduler.get_last_lr());
  EXPECT_LT(momentum_of(adam->param_groups()[0]), 0.95);
}

TEST_F(SchedulerTest, SaysWhatIsWrongWithOptions) {
  const auto text = [](auto f) { return message_of<ArgumentError>(f); };
  auto& o = *sgd;
  EXPECT_EQ(text([&] { CosineAnnealingLR(o, {}); }),
            "t_max of CosineAnnealingLR is 0; it must be at least 1.");
  EXPECT_EQ(text([&] { StepLR(o, {}); }), "step_size of StepLR is 0; it must be at least 1.");
  EXPECT_EQ(text([&] { ExponentialLR(o, {}); }),
            "gamma of ExponentialLR is not set; give the factor.");
  EXPECT_EQ(text([&] { ConstantLR(o, {.factor = 1.5}); }),
            "factor of ConstantLR is 1.5; it must be between 0 and 1.");
  EXPECT_EQ(text([&] { LinearLR(o, {.start_factor = 0}); }),
            "start_factor of LinearLR is 0; it must be greater than 0 and at most 1.");
  EXPECT_EQ(text([&] { LinearLR(o, {.end_factor = -1}); }),
            "end_factor of LinearLR is -1; it must be between 0 and 1.");
  EXPECT_EQ(text([&] { LambdaLR(o, {.lr_lambda = {[](std::int64_t) { return 1.0; }}}); }),
            "Expected 2 lr_lambdas, but got 1.");
  EXPECT_EQ(text([&] { LambdaLR(o, LambdaLROptions{}); }),
            "lr_lambda is not set; give a function, or one for each parameter group.");
  EXPECT_EQ(text([&] { MultiplicativeLR(o, LrLambda()); }),
            "lr_lambda should be a function, but is an empty one.");
  EXPECT_EQ(text([&] { CosineAnnealingWarmRestarts(o, {.t_0 = -1}); }),
            "Expected positive integer t_0, but got -1.");
  EXPECT_EQ(text([&] { CosineAnnealingWarmRestarts(o, {.t_0 = 1, .t_mult = 0}); }),
            "Expected positive integer t_mult, but got 0.");
  EXPECT_EQ(text([&] { ReduceLROnPlateau(o, {.factor = 1.0}); }),
            "factor of ReduceLROnPlateau should be < 1.0, but is 1.");
  EXPECT_EQ(text([&] { ReduceLROnPlateau(o, {.min_lr = {0.1, 0.2, 0.3}}); }),
            "min_lr must have the same length as optimizer.param_groups. min_lr has 3 values, "
            "param_groups has 2.");
  EXPECT_EQ(lrs_of(o), (Lrs{0.1, 0.003}));
}

TEST_F(SchedulerTest, SaysWhatIsWrongWithCycles) {
  const auto text = [](auto f) { return message_of<ArgumentError>(f); };
  auto& o = *sgd;
  EXPECT_EQ(text([&] { OneCycleLR(o, {.max_lr = 0.1}); }),
            "You must define either total_steps OR (epochs AND steps_per_epoch) for OneCycleLR.");
  EXPECT_EQ(text([&] { OneCycleLR(o, {.max_lr = 0.1, .total_steps = 0}); }),
            "Expected positive integer total_steps, but got 0.");
  EXPECT_EQ(text([&] { OneCycleLR(o, {.max_lr = 0.1, .total_steps = 10, .pct_start = 1.5}); }),
            "Expected pct_start between 0 and 1, but got 1.5.");
  EXPECT_EQ(text([&] { OneCycleLR(o, {.total_steps = 10}); }),
            "max_lr is not set; give a number, or one for each group.");
  EXPECT_EQ(
      text([&] { OneCycleLR(o, {.max_lr = 0.1, .total_steps = 10, .pct_start = 0.1}); }),
      "A phase of OneCycleLR has no length with total_steps = 10. Choose another pct_start, or "
      "more steps.");
  EXPECT_EQ(text([&] { CyclicLR(o, {.base_lr = 0.1, .max_lr = 0.2, .step_size_up = 0}); }),
            "Expected positive integer step_size_up, but got 0.");

  torch::optim::Adagrad adagrad({torch::zeros(1)}, torch::optim::AdagradOptions(0.1));
  const auto* no_momentum =
      "optimizer must support momentum or beta1 with `cycle_momentum` option ";
  EXPECT_TRUE(text([&] {
                OneCycleLR(adagrad, {.max_lr = 0.1, .total_steps = 10});
              }).starts_with(no_momentum));
  EXPECT_TRUE(
      text([&] { CyclicLR(adagrad, {.base_lr = 0.1, .max_lr = 0.2}); }).starts_with(no_momentum));
  EXPECT_EQ(lrs_of(adagrad), (Lrs{0.1}));
  CyclicLR without(adagrad, {.base_lr = 0.1, .max_lr = 0.2, .cycle_momentum = false});
  without.step();
  EXPECT_GT(lrs_of(adagrad)[0], 0.1);
}

TEST_F(SchedulerTest, DoesNotGoBeyondOneCycle) {
  OneCycleLR scheduler(*sgd, {.max_lr = 0.1, .total_steps = 5});
  EXPECT_EQ(scheduler.total_steps(), 5);
  for (int step = 0; step < 5; ++step) scheduler.step();
  const auto before = scheduler.state_dict();
  EXPECT_EQ(message_of<StateError>([&] { scheduler.step(); }),
            "Tried to step 6 times. The specified number of total steps is 5.");
  EXPECT_EQ(scheduler.state_dict(), before);
}

TEST_F(SchedulerTest, CyclesTheMomentumOfOurOptimizers) {
  AdamW adamw({torch::zeros(1, torch::requires_grad())}, {.lr = 0.1});
  OneCycleLR scheduler(adamw, {.max_lr = 0.1, .total_steps = 10});
  EXPECT_EQ(adamw.options().betas.first, 0.95);
  EXPECT_DOUBLE_EQ(adamw.options().lr, 0.1 / 25);
  for (int step = 0; step < 2; ++step) scheduler.step();
  EXPECT_EQ(adamw.options().betas.first, 0.85);
  EXPECT_EQ(adamw.options().lr, 0.1);
  EXPECT_TRUE(scheduler.state_dict().at("use_beta1").as_bool());

  SGD plain({torch::zeros(1, torch::requires_grad())}, {.lr = 0.1});
  CyclicLR triangles(plain, {.base_lr = 0.1, .max_lr = 0.2, .step_size_up = 1});
  EXPECT_EQ(plain.options().momentum, 0.9);
  EXPECT_FALSE(triangles.state_dict().at("use_beta1").as_bool());
}

TEST_F(SchedulerTest, RestartsAtEpochsBetweenTwo) {
  const auto& expected = python()["restarts_at_epochs"];
  for (const auto& [mult, lrs] : expected["lr"].items()) {
    const auto optimizer = make_optimizer("sgd");
    CosineAnnealingWarmRestarts scheduler(
        *optimizer, {.t_0 = 5, .t_mult = std::stoll(mult), .eta_min = 0.0001});
    std::size_t at = 0;
    const auto expect_next = [&, &lrs = lrs] {
      for (std::size_t i = 0; i < 2; ++i) {
        expect_close(scheduler.get_last_lr()[i], lrs[at][i].get<double>(), lrs[at].dump());
      }
      ++at;
    };
    for (const auto& epoch : expected["epochs"]) {
      scheduler.step(epoch.get<double>());
      expect_next();
      scheduler.step();
      expect_next();
    }
    EXPECT_THROW(scheduler.step(-1.0), ArgumentError);
  }
}

TEST_F(SchedulerTest, RefusesSchedulersThatDoNotFitTogether) {
  const auto text = [](auto f) { return message_of<ArgumentError>(f); };
  auto& o = *sgd;
  const auto other = make_optimizer("sgd");
  EXPECT_EQ(text([&] { SequentialLR(o, {}); }),
            "SequentialLR expects at least one scheduler, but got no scheduler.");
  EXPECT_EQ(text([&] { ChainedScheduler(SchedulerList{}); }),
            "ChainedScheduler expects at least one scheduler to be chained, but got no scheduler.");
  EXPECT_EQ(
      text([&] { SequentialLR(o, {.schedulers = {ConstantLR(o)}, .milestones = {3}}); }),
      "Sequential Schedulers expects number of schedulers provided to be one more than the "
      "number of milestone points, but got number of schedulers 1 and the number of milestones "
      "to be equal to 1.");
  EXPECT_EQ(text([&] {
              SequentialLR(o, {.schedulers = {ConstantLR(o), ConstantLR(o), ConstantLR(o)},
                               .milestones = {5, 3}});
            }),
            "The milestones of SequentialLR must rise, but are 5, 3.");
  EXPECT_EQ(
      text([&] {
        SequentialLR(o, {.schedulers = {ConstantLR(o), ConstantLR(*other)}, .milestones = {5}});
      }),
      "SequentialLR expects all schedulers to belong to the same optimizer, but the scheduler at "
      "index 1 has another one.");
  EXPECT_EQ(
      text([&] { ChainedScheduler({ConstantLR(o), ReduceLROnPlateau(o)}); }),
      "ChainedScheduler does not support `ReduceLROnPlateau` scheduler as it requires a metric "
      "at each step, but got one at index 1 in the given schedulers sequence.");
}

TEST_F(SchedulerTest, CannotBeginWithAChainAtAMilestone) {
  auto& o = *sgd;
  SequentialLR scheduler(
      o, {.schedulers = {ConstantLR(o), ChainedScheduler({StepLR(o, {.step_size = 3})})},
          .milestones = {2}});
  scheduler.step();
  EXPECT_THROW(scheduler.step(), UnsupportedError);
  EXPECT_EQ(scheduler.last_epoch(), 1);
}

TEST_F(SchedulerTest, KeepsItsStateWhereAnotherDoesNotFit) {
  StepLR scheduler(*sgd, {.step_size = 3});
  scheduler.step();
  const auto before = scheduler.state_dict();
  auto wrong = before.as_dict();
  wrong.set("step_size", 9);
  wrong.set("_last_lr", Value::List{0.1});
  EXPECT_EQ(message_of<ArgumentError>([&] { scheduler.load_state_dict(wrong); }),
            "The state has learning rates for 1 parameter groups, but the optimizer has 2.");
  EXPECT_EQ(scheduler.state_dict(), before);
  wrong.set("_last_lr", "none");
  EXPECT_TRUE(message_of<ArgumentError>([&] {
                scheduler.load_state_dict(wrong);
              }).starts_with("'_last_lr' of the scheduler's state: "));
  EXPECT_EQ(scheduler.state_dict(), before);
  EXPECT_THROW(scheduler.load_state_dict(Value::Dict{{"gamma", 0.5}}), ArgumentError);
  EXPECT_THROW(scheduler.load_state_dict(3), ArgumentError);

  auto more = before.as_dict();
  more.set("verbose", false);  // older versions of PyTorch
  more.set("last_epoch", 40);
  scheduler.load_state_dict(more);
  EXPECT_EQ(scheduler.last_epoch(), 40);
}

TEST_F(SchedulerTest, RestoresAllSchedulersOfAChainWhereOneDoesNotFit) {
  auto& o = *sgd;
  ChainedScheduler chain({ConstantLR(o), StepLR(o, {.step_size = 3})});
  chain.step();
  EXPECT_EQ(chain.last_epoch(), 1);
  EXPECT_EQ(chain.step_count(), 2);
  const auto before = chain.state_dict();
  auto wrong = before;
  auto& states = wrong.as_dict().at("_schedulers").as_list();
  states[0].as_dict().set("last_epoch", 17);
  states[1].as_dict().set("gamma", "high");
  EXPECT_THROW(chain.load_state_dict(wrong), ArgumentError);
  EXPECT_EQ(chain.state_dict(), before);
  states.pop_back();
  EXPECT_EQ(message_of<ArgumentError>([&] { chain.load_state_dict(wrong); }),
            "The state has 1 schedulers, but there are 2.");
}

TEST_F(SchedulerTest, ReducesOnAMetricOnly) {
  ReduceLROnPlateau scheduler(*sgd, {.patience = 0});
  EXPECT_EQ(message_of<StateError>([&] { scheduler.step(); }),
            "ReduceLROnPlateau has no step without a metric; call step(metric).");
  EXPECT_THROW(scheduler.step(torch::zeros(2)), ArgumentError);
  scheduler.step(torch::tensor(1.0));
  EXPECT_EQ(scheduler.best(), 1.0);
  scheduler.step(2.0);
  EXPECT_EQ(lrs_of(*sgd)[0], 0.1 * 0.1);
}

TEST_F(SchedulerTest, AsksForANewOneAfterAGroupWasAdded) {
  LambdaLR scheduler(*sgd, [](std::int64_t) { return 0.5; });
  StepLR steps(*sgd, {.step_size = 1, .gamma = 0.5});
  sgd->add_param_group({{torch::zeros(1, torch::requires_grad())}});
  EXPECT_EQ(
      message_of<StateError>([&] { scheduler.step(); }),
      "The scheduler has learning rates for 2 parameter groups, but its optimizer has 3. Build a "
      "new scheduler after adding a group.");
  EXPECT_EQ(scheduler.last_epoch(), 0);
  steps.step();  // needs nothing but the current rates
  EXPECT_EQ(steps.get_last_lr().size(), 3);
}

/// The example of accelerate/scheduler/lr_scheduler.h.
class Halving : public LRScheduler {
 public:
  explicit Halving(Optimizer& optimizer) : LRScheduler(optimizer) { initialize(); }

 protected:
  std::vector<double> get_lr() override {
    auto lrs = group_lrs();
    if (!is_initial()) {
      for (auto& lr : lrs) lr /= 2;
    }
    return lrs;
  }
};

TEST_F(SchedulerTest, CanBeWrittenByTheUser) {
  auto& o = *sgd;
  SequentialLR scheduler(
      o, {.schedulers = {Halving(o), std::make_shared<Halving>(o)}, .milestones = {2}});
  scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), (Lrs{0.05, 0.0015}));
  EXPECT_EQ(scheduler.state_dict().at("_schedulers").as_list().size(), 2);
}

TEST_F(SchedulerTest, SpellsItsModesAsPython) {
  EXPECT_EQ(to_string(CyclicMode::kExpRange), "exp_range");
  EXPECT_EQ(from_string<AnnealStrategy>("linear"), AnnealStrategy::kLinear);
  EXPECT_EQ(from_string<PlateauMode>("max"), PlateauMode::kMax);
  EXPECT_EQ(to_string(PlateauThresholdMode::kAbs), "abs");
  EXPECT_EQ(to_string(CyclicScaleMode::kIterations), "iterations");
}

}  // namespace
}  // namespace accelerate
