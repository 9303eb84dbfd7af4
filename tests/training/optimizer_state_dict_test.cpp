// The state of optimizers in the layout of Python's state_dict().
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "accelerate/optimizer.h"
#include "optim/optimizer_core.h"
#include "support/message_of.h"
#include "training/optimizer_tensors.h"

namespace accelerate {
namespace {

using test::message_of;
using test::parameters;
using test::set_gradients;
using test::Tensors;
using torch::optim::Optimizer;
using Make = std::function<std::shared_ptr<Optimizer>(const Tensors&)>;

struct Kind {
  std::string name;
  Make make;
  /// The group, as PyTorch 2.11 prints it, without its parameters.
  std::string group;
  /// The names of what is kept of a parameter.
  std::string state;
};

template <class O, class Options>
Make maker(Options options) {
  return [options](const Tensors& params) { return std::make_shared<O>(params, options); };
}

const std::vector<Kind>& kinds() {
  namespace optim = torch::optim;
  const std::string adam = "'lr': 0.1, 'betas': (0.9, 0.999), 'eps': 1e-08, 'weight_decay': ";
  const std::string adam_tail =
      "'maximize': False, 'foreach': None, 'capturable': False, 'differentiable': False, "
      "'fused': None, 'decoupled_weight_decay': ";
  const std::string adamw = adam + "0.01, 'amsgrad': False, " + adam_tail + "True";
  const std::string sgd =
      "'lr': 0.1, 'momentum': 0.9, 'dampening': 0.0, 'weight_decay': 0.0, 'nesterov': False, "
      "'maximize': False, 'foreach': None, 'differentiable': False, 'fused': None";
  const std::string adagrad =
      "'lr': 0.1, 'lr_decay': 0.0, 'eps': 1e-10, 'weight_decay': 0.0, "
      "'initial_accumulator_value': 2.0, 'foreach': None, 'maximize': False, "
      "'differentiable': False, 'fused': None";
  const std::string rmsprop =
      "'lr': 0.1, 'momentum': 0.9, 'alpha': 0.99, 'eps': 1e-08, 'centered': True, "
      "'weight_decay': 0.0, 'capturable': False, 'foreach': None, 'maximize': False, "
      "'differentiable': False";
  static const std::vector<Kind> all{
      {"torch AdamW", maker<optim::AdamW>(optim::AdamWOptions(0.1)), adamw,
       "step exp_avg exp_avg_sq"},
      {"AdamW", maker<AdamW>(AdamWOptions{.lr = 0.1}), adamw, "step exp_avg exp_avg_sq"},
      {"torch Adam", maker<optim::Adam>(optim::AdamOptions(0.1).amsgrad(true)),
       adam + "0.0, 'amsgrad': True, " + adam_tail + "False",
       "step exp_avg exp_avg_sq max_exp_avg_sq"},
      {"Adam", maker<Adam>(AdamOptions{.lr = 0.1, .amsgrad = true}),
       adam + "0.0, 'amsgrad': True, " + adam_tail + "False",
       "step exp_avg exp_avg_sq max_exp_avg_sq"},
      {"torch SGD", maker<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9)), sgd,
       "momentum_buffer"},
      {"SGD", maker<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9}), sgd, "momentum_buffer"},
      {"torch Adagrad",
       maker<optim::Adagrad>(optim::AdagradOptions(0.1).initial_accumulator_value(2)), adagrad,
       "step sum"},
      {"Adagrad", maker<Adagrad>(AdagradOptions{.lr = 0.1, .initial_accumulator_value = 2}),
       adagrad, "step sum"},
      {"torch RMSprop",
       maker<optim::RMSprop>(optim::RMSpropOptions(0.1).momentum(0.9).centered(true)), rmsprop,
       "step square_avg momentum_buffer grad_avg"},
      {"RMSprop", maker<RMSprop>(RMSpropOptions{.lr = 0.1, .momentum = 0.9, .centered = true}),
       rmsprop, "step square_avg momentum_buffer grad_avg"},
      {"NAdam", maker<NAdam>(NAdamOptions{.lr = 0.1}),
       adam + "0.0, 'momentum_decay': 0.004, 'decoupled_weight_decay': False, 'maximize': False, "
              "'foreach': None, 'capturable': False, 'differentiable': False",
       "step mu_product exp_avg exp_avg_sq"},
      {"RAdam", maker<RAdam>(RAdamOptions{.lr = 0.1}),
       adam + "0.0, 'maximize': False, 'foreach': None, 'capturable': False, "
              "'decoupled_weight_decay': False, 'differentiable': False",
       "step exp_avg exp_avg_sq"},
      {"Adamax", maker<Adamax>(AdamaxOptions{.lr = 0.1}),
       adam + "0.0, 'foreach': None, 'maximize': False, 'differentiable': False, "
              "'capturable': False",
       "step exp_avg exp_inf"},
      {"Adafactor", maker<Adafactor>(AdafactorOptions{.lr = 0.1}),
       "'lr': 0.1, 'beta2_decay': -0.8, 'eps': (None, 0.001), 'd': 1.0, 'weight_decay': 0.0, "
       "'foreach': None, 'maximize': False",
       "step row_var col_var"},
      {"Lion", maker<Lion>(LionOptions{.lr = 0.1}),
       "'lr': 0.1, 'betas': (0.9, 0.99), 'weight_decay': 0.0, 'maximize': False, "
       "'capturable': False",
       "exp_avg"},
  };
  return all;
}

AcceleratedOptimizer prepared(std::shared_ptr<Optimizer> optimizer) {
  return AcceleratedOptimizer(detail::optim::make_optimizer_core(std::move(optimizer)));
}

void step(AcceleratedOptimizer& optimizer, const Tensors& params, int number) {
  set_gradients(params, number);
  optimizer.step();
}

Tensors copies(const Tensors& params) {
  Tensors result;
  for (const auto& p : params) result.push_back(p.detach().clone().requires_grad_());
  return result;
}

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t p = 0; p < a.size(); ++p) EXPECT_TRUE(torch::equal(a[p], b[p])) << p;
}

/// A state whose tensors do not change with the optimizer.
Value kept(const Value& state) {
  Value::Dict states;
  for (const auto& [index, one] : state.at("state").as_dict()) {
    Value::Dict copy;
    for (const auto& [name, tensor] : one.as_dict()) copy.set(name, tensor.as_tensor().clone());
    states.set(index, std::move(copy));
  }
  return Value::Dict{{"state", std::move(states)}, {"param_groups", state.at("param_groups")}};
}

/// Where the tensors of a state lie, but for step counts: LibTorch's are no tensors.
std::vector<const void*> places_of(const Value& state) {
  std::vector<const void*> places;
  for (const auto& [index, one] : state.at("state").as_dict()) {
    for (const auto& [name, tensor] : one.as_dict()) {
      if (name.as_string() != "step") places.push_back(tensor.as_tensor().const_data_ptr());
    }
  }
  return places;
}

class StateDictOfOptimizer : public testing::TestWithParam<std::size_t> {
 protected:
  const Kind& kind = kinds()[GetParam()];
};
INSTANTIATE_TEST_SUITE_P(Kinds, StateDictOfOptimizer, testing::Range<std::size_t>(0, 15));

TEST_P(StateDictOfOptimizer, HasPythonsLayout) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  auto optimizer = prepared(kind.make(params));
  step(optimizer, params, 1);
  step(optimizer, params, 2);
  const auto state = optimizer.state_dict();
  EXPECT_EQ(state.as_dict().keys().size(), 2);
  EXPECT_EQ(state.at("param_groups").repr(), "[{" + kind.group + ", 'params': [0, 1, 2, 3]}]");
  std::string names;
  for (const auto& [name, tensor] : state.at("state").at(0).as_dict()) {
    names += (names.empty() ? "" : " ") + name.as_string();
    EXPECT_TRUE(tensor.is_tensor()) << names;
  }
  EXPECT_EQ(names, kind.state);
  if (kind.name.find("Adagrad") == std::string::npos) {
    EXPECT_FALSE(state.at("state").as_dict().contains(3)) << "it has not stepped yet";
  }
}

TEST_P(StateDictOfOptimizer, LetsAnotherOneGoOnFromIt) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  auto optimizer = prepared(kind.make(params));
  for (int i = 1; i <= 3; ++i) step(optimizer, params, i);
  optimizer.param_groups()[0].options().set_lr(0.025);
  const auto state = kept(optimizer.state_dict());
  const auto other_params = copies(params);
  auto other = prepared(kind.make(other_params));
  step(other, copies(params), 5);
  other.load_state_dict(state);
  EXPECT_EQ(other.state_dict(), state);
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.025);
  for (int i = 4; i <= 8; ++i) {
    step(optimizer, params, i);
    step(other, other_params, i);
  }
  expect_equal(params, other_params);

  // Back to where it was.
  optimizer.load_state_dict(state);
  EXPECT_EQ(optimizer.state_dict(), state);
}

TEST_P(StateDictOfOptimizer, IsLoadedIntoTheMemoryThatIsThere) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  auto optimizer = prepared(kind.make(params));
  for (int i = 1; i <= 4; ++i) step(optimizer, params, i);
  const auto state = kept(optimizer.state_dict());
  step(optimizer, params, 5);
  const auto before = places_of(optimizer.state_dict());
  optimizer.load_state_dict(state);
  EXPECT_EQ(optimizer.state_dict(), state);
  EXPECT_EQ(places_of(optimizer.state_dict()), before);
}

TEST_P(StateDictOfOptimizer, KeepsItsValuesWhenAnotherOneIsLoaded) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  auto optimizer = prepared(kind.make(params));
  for (int i = 1; i <= 4; ++i) step(optimizer, params, i);
  const auto older = kept(optimizer.state_dict());
  step(optimizer, params, 5);
  const auto held = optimizer.state_dict();  // the optimizer's own tensors, as in Python
  const auto values = kept(held);
  optimizer.load_state_dict(older);
  EXPECT_EQ(optimizer.state_dict(), older);
  EXPECT_EQ(held, values);
}

TEST(StateDictsOfOptimizers, MayExchangeTheStatesOfTwoParameters) {
  const Tensors params{torch::ones({4}).requires_grad_(), torch::zeros({4}).requires_grad_()};
  auto optimizer = prepared(std::make_shared<AdamW>(params));
  for (std::size_t p = 0; p < 2; ++p) params[p].mutable_grad() = torch::full({4}, 1.0 + p);
  optimizer.step();
  auto state = optimizer.state_dict().as_dict();
  auto& states = state.at("state").as_dict();
  std::swap(states.at(0), states.at(1));
  const auto expected = kept(state);
  optimizer.load_state_dict(state);
  EXPECT_EQ(optimizer.state_dict(), expected);
}

TEST_P(StateDictOfOptimizer, RefusesWhatDoesNotFitAndChangesNothing) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  auto optimizer = prepared(kind.make(params));
  for (int i = 1; i <= 4; ++i) step(optimizer, params, i);
  const auto before = kept(optimizer.state_dict());
  const auto refused = [&](const std::function<void(Value::Dict&)>& change) {
    auto state = kept(optimizer.state_dict()).as_dict();
    state.at("param_groups").as_list()[0].as_dict().set("lr", 0.5);
    change(state);
    const auto message = message_of<ArgumentError>([&] { optimizer.load_state_dict(state); });
    EXPECT_EQ(optimizer.state_dict(), before) << message;
    return message;
  };
  const auto group = [](Value::Dict& state) -> Value::Dict& {
    return state.at("param_groups").as_list()[0].as_dict();
  };
  const auto expect_says = [](const std::string& message, const std::string& text) {
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect_says(refused([](auto& state) {
                auto& groups = state.at("param_groups").as_list();
                groups.push_back(groups[0]);
              }),
              "has 2 parameter groups and this optimizer has 1");
  expect_says(refused([&](auto& state) { group(state).at("params").as_list().pop_back(); }),
              "has 3 parameters in group 0 and this optimizer has 4");
  expect_says(refused([&](auto& state) { group(state).set("speed", 3); }), "'speed'");
  expect_says(refused([&](auto& state) { group(state).set("weight_decay", "much"); }),
              "the options of group 0");
  // Of the last parameter: those before it are put back.
  const auto name = kind.state.substr(kind.state.rfind(' ') + 1);
  if (kind.name != "Adafactor") {
    expect_says(refused([&](auto& state) {
                  state.at("state").as_dict().at(3).as_dict().set(name, torch::ones({7}));
                }),
                "[7]");
  }
  expect_says(refused([](auto& state) { state.at("state").as_dict().set(9, Value::Dict{}); }),
              "states of 5 parameters");
  expect_says(refused([](auto& state) { state.erase("state"); }), "state");
  expect_says(refused([&](auto& state) { group(state).set("differentiable", true); }),
              "'differentiable'");
}

TEST(StateDictsOfOptimizers, TakeWhatPythonWrites) {
  // What a scheduler and another device leave in a group, and counts that are plain numbers.
  const auto params = parameters(torch::kFloat);
  auto optimizer = prepared(std::make_shared<AdamW>(std::vector<torch::optim::OptimizerParamGroup>{
      Tensors{params[0], params[1]}, Tensors{params[2], params[3]}}));
  const auto group = [](double lr, Value::List indices) -> Value {
    return Value::Dict{{"lr", torch::tensor(lr, torch::kDouble)},
                       {"betas", Value::tuple({0.8, 0.9})},
                       {"eps", 1e-8},
                       {"weight_decay", 0},
                       {"amsgrad", false},
                       {"maximize", false},
                       {"foreach", true},
                       {"capturable", false},
                       {"differentiable", false},
                       {"fused", nullptr},
                       {"decoupled_weight_decay", true},
                       {"initial_lr", 0.5},
                       {"params", std::move(indices)}};
  };
  const Value state = Value::Dict{
      {"state", Value::Dict{{0, Value::Dict{{"step", 3},
                                            {"exp_avg", torch::ones({3, 4}, torch::kDouble)},
                                            {"exp_avg_sq", torch::ones({3, 4}, torch::kDouble)}}}}},
      {"param_groups",
       Value::list({group(0.25, Value::List{0, 1}), group(0.125, Value::List{2, 3})})}};
  optimizer.load_state_dict(state);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.125);
  const auto loaded = optimizer.state_dict();
  const auto& first = loaded.at("state").at(0);
  EXPECT_EQ(first.at("step").as_tensor().item<float>(), 3);
  EXPECT_EQ(first.at("exp_avg").as_tensor().scalar_type(), torch::kFloat) << "as the parameter";
  EXPECT_EQ(loaded.at("param_groups").items()[1].at("params").repr(), "[2, 3]");
  EXPECT_EQ(loaded.at("param_groups").items()[0].at("betas").repr(), "(0.8, 0.9)");
}

TEST(StateDictsOfOptimizers, AreRefusedForUnknownOptimizers) {
  auto lbfgs = prepared(std::make_shared<torch::optim::LBFGS>(parameters()));
  EXPECT_NE(message_of<UnsupportedError>([&] { (void)lbfgs.state_dict(); }).find("LBFGS"),
            std::string::npos);
}

}  // namespace
}  // namespace accelerate
