#include "optim/optimizer_state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "support/message_of.h"
#include "training/optimizer_tensors.h"

namespace accelerate::optimizer_state_test {
namespace {

using detail::optim::drop_optimizer_state_of;
using detail::optim::move_optimizer_state;
using detail::optim::optimizer_state_of;
using detail::optim::set_optimizer_state_of;
using test::message_of;
using test::parameters;
using test::set_gradients;
using test::Tensors;
using torch::optim::Optimizer;

using Names = std::vector<std::string>;

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(Tensors)> make;
  Names state;
  /// A state is there before the first step.
  bool eager = false;
};

template <class O, class Options>
std::function<std::unique_ptr<Optimizer>(Tensors)> maker(Options options) {
  return [options](Tensors params) { return std::make_unique<O>(std::move(params), options); };
}

const std::vector<Kind>& kinds() {
  namespace optim = torch::optim;
  static const std::vector<Kind> all{
      {"torch AdamW", maker<optim::AdamW>(optim::AdamWOptions(0.1)),
       Names{"step", "exp_avg", "exp_avg_sq"}},
      {"torch AdamW, amsgrad", maker<optim::AdamW>(optim::AdamWOptions(0.1).amsgrad(true)),
       Names{"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
      {"torch Adam", maker<optim::Adam>(optim::AdamOptions(0.1)),
       Names{"step", "exp_avg", "exp_avg_sq"}},
      {"torch Adam, amsgrad", maker<optim::Adam>(optim::AdamOptions(0.1).amsgrad(true)),
       Names{"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
      {"torch SGD", maker<optim::SGD>(optim::SGDOptions(0.1)), Names{}},
      {"torch SGD, momentum", maker<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9)),
       Names{"momentum_buffer"}},
      {"torch Adagrad",
       maker<optim::Adagrad>(optim::AdagradOptions(0.1).initial_accumulator_value(2)),
       Names{"step", "sum"}, /*eager=*/true},
      {"torch RMSprop", maker<optim::RMSprop>(optim::RMSpropOptions(0.1)),
       Names{"step", "square_avg"}},
      {"torch RMSprop, all",
       maker<optim::RMSprop>(optim::RMSpropOptions(0.1).momentum(0.9).centered(true)),
       Names{"step", "square_avg", "momentum_buffer", "grad_avg"}},
      {"accelerate AdamW", maker<AdamW>(AdamWOptions{.lr = 0.1, .amsgrad = true}),
       Names{"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
      {"accelerate SGD", maker<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9}),
       Names{"momentum_buffer"}},
      {"accelerate NAdam", maker<NAdam>(NAdamOptions{.lr = 0.1}),
       Names{"step", "mu_product", "exp_avg", "exp_avg_sq"}},
  };
  return all;
}

void step(Optimizer& optimizer, const Tensors& params, int number) {
  set_gradients(params, number);
  optimizer.step();
}

Names names_of(const NamedTensors& state) {
  Names names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  return names;
}

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t p = 0; p < a.size(); ++p) EXPECT_TRUE(torch::equal(a[p], b[p])) << p;
}

Tensors copies(const Tensors& params) {
  Tensors result;
  for (const auto& p : params) result.push_back(p.detach().clone().requires_grad_());
  return result;
}

/// Gives `to` the states of `from`.
void hand_over(Optimizer& from, const Tensors& from_params, Optimizer& to,
               const Tensors& to_params) {
  for (std::size_t p = 0; p < from_params.size(); ++p) {
    set_optimizer_state_of(to, to_params[p], optimizer_state_of(from, from_params[p]));
  }
}

class OptimizerState : public testing::TestWithParam<std::size_t> {
 protected:
  const Kind& kind = kinds()[GetParam()];
};
INSTANTIATE_TEST_SUITE_P(Kinds, OptimizerState, testing::Range<std::size_t>(0, 12));

TEST_P(OptimizerState, HasPythonsNames) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  const auto optimizer = kind.make(params);
  EXPECT_EQ(names_of(optimizer_state_of(*optimizer, params[0])), kind.eager ? kind.state : Names{});
  for (int i = 1; i <= 2; ++i) step(*optimizer, params, i);
  const auto state = optimizer_state_of(*optimizer, params[0]);
  EXPECT_EQ(names_of(state), kind.state);
  for (const auto& [name, tensor] : state) {
    if (name == "step") {
      EXPECT_TRUE(torch::equal(tensor, torch::full({}, 2.0F))) << tensor;
    } else if (name != "mu_product") {
      EXPECT_EQ(tensor.sizes(), params[0].sizes());
      EXPECT_EQ(tensor.scalar_type(), torch::kDouble);
    }
    EXPECT_FALSE(tensor.requires_grad());
  }
}

TEST_P(OptimizerState, LetsAnotherOptimizerGoOnFromIt) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  const auto optimizer = kind.make(params);
  for (int i = 1; i <= 3; ++i) step(*optimizer, params, i);
  const auto other_params = copies(params);
  const auto other = kind.make(other_params);
  hand_over(*optimizer, params, *other, other_params);
  for (const auto& [name, tensor] : optimizer_state_of(*other, other_params[0])) {
    for (const auto& [mine, original] : optimizer_state_of(*optimizer, params[0])) {
      if (mine == name) {
        EXPECT_TRUE(torch::equal(tensor, original)) << name;
        EXPECT_FALSE(tensor.is_same(original)) << "a copy";
      }
    }
  }
  for (int i = 4; i <= 6; ++i) {
    step(*optimizer, params, i);
    step(*other, other_params, i);
  }
  expect_equal(params, other_params);
}

TEST_P(OptimizerState, IsForgottenOnDemand) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  const auto optimizer = kind.make(params);
  step(*optimizer, params, 1);
  const auto fresh_params = copies(params);
  const auto fresh = kind.make(fresh_params);
  drop_optimizer_state_of(*optimizer, params[0]);
  set_optimizer_state_of(*optimizer, params[1], {});
  for (const std::size_t p : {2, 3}) drop_optimizer_state_of(*optimizer, params[p]);
  EXPECT_EQ(names_of(optimizer_state_of(*optimizer, params[0])), kind.eager ? kind.state : Names{});
  for (int i = 2; i <= 4; ++i) {
    step(*optimizer, params, i);
    step(*fresh, fresh_params, i);
  }
  expect_equal(params, fresh_params);
}

TEST_P(OptimizerState, RefusesWhatDoesNotFit) {
  SCOPED_TRACE(kind.name);
  if (kind.state.empty()) return;
  const auto params = parameters();
  const auto optimizer = kind.make(params);
  step(*optimizer, params, 1);
  const auto state = optimizer_state_of(*optimizer, params[0]);
  const auto& last = kind.state.back();

  const auto message_for = [&](const torch::Tensor& parameter, const NamedTensors& tensors) {
    return message_of<ArgumentError>(
        [&] { set_optimizer_state_of(*optimizer, parameter, tensors); });
  };
  auto unknown = state;
  unknown.emplace_back("velocity", torch::zeros({3, 4}));
  EXPECT_NE(message_for(params[0], unknown).find("'velocity'"), std::string::npos);
  auto misshapen = state;
  misshapen.back().second = torch::zeros({4, 3});
  const auto message = message_for(params[0], misshapen);
  EXPECT_NE(message.find("'" + last + "'"), std::string::npos) << message;
  EXPECT_NE(message.find("[4, 3]"), std::string::npos) << message;
  EXPECT_NE(message_for(torch::zeros({3, 4}), state).find("in no group"), std::string::npos);

  EXPECT_EQ(names_of(optimizer_state_of(*optimizer, params[0])), kind.state);
  EXPECT_TRUE(optimizer_state_of(*optimizer, torch::zeros({3, 4})).empty());
}

TEST_P(OptimizerState, IsWhereItWasMovedTo) {
  SCOPED_TRACE(kind.name);
  const auto params = parameters();
  const auto optimizer = kind.make(params);
  move_optimizer_state(*optimizer, torch::kCPU);
  for (int i = 1; i <= 2; ++i) step(*optimizer, params, i);
  move_optimizer_state(*optimizer, torch::kCPU);
  const auto other_params = copies(params);
  const auto other = kind.make(other_params);
  hand_over(*optimizer, params, *other, other_params);
  step(*optimizer, params, 4);
  step(*other, other_params, 4);
  expect_equal(params, other_params);
  if (kind.name.starts_with("accelerate")) return;
  move_optimizer_state(*optimizer, torch::kMeta);
  for (const auto& [name, tensor] : optimizer_state_of(*optimizer, params[0])) {
    EXPECT_EQ(tensor.is_meta(), name != "step") << name;
  }
}

TEST(OptimizerStates, TakeTheTypeOfTheirParameter) {
  for (const auto& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const auto params = parameters();
    const auto optimizer = kind.make(params);
    for (int i = 1; i <= 2; ++i) step(*optimizer, params, i);
    const auto small_params = parameters(torch::kFloat);
    const auto small = kind.make(small_params);
    hand_over(*optimizer, params, *small, small_params);
    for (const auto& [name, tensor] : optimizer_state_of(*small, small_params[0])) {
      EXPECT_EQ(tensor.scalar_type(), torch::kFloat) << name;
    }
    step(*small, small_params, 3);
  }
}

TEST(OptimizerStates, LackNothingThatTheOptionsNeed) {
  const auto params = parameters();
  torch::optim::Adam plain(params, torch::optim::AdamOptions(0.1));
  torch::optim::Adam amsgrad(params, torch::optim::AdamOptions(0.1).amsgrad(true));
  step(plain, params, 1);
  const auto state = optimizer_state_of(plain, params[0]);
  const auto message =
      message_of<ArgumentError>([&] { set_optimizer_state_of(amsgrad, params[0], state); });
  EXPECT_NE(message.find("lacks 'max_exp_avg_sq', which torch::optim::Adam needs"),
            std::string::npos)
      << message;
  EXPECT_TRUE(optimizer_state_of(amsgrad, params[0]).empty());

  // What the options do not need is kept all the same.
  step(amsgrad, params, 2);
  set_optimizer_state_of(plain, params[0], optimizer_state_of(amsgrad, params[0]));
  EXPECT_EQ(optimizer_state_of(plain, params[0]).size(), 4);

  auto negative = state;
  negative[0].second = torch::tensor(-1.0F);
  EXPECT_NE(message_of<ArgumentError>([&] {
              set_optimizer_state_of(plain, params[0], negative);
            }).find("'step'"),
            std::string::npos);
}

struct MyAdam : torch::optim::Adam {
  using Adam::Adam;
};

TEST(OptimizerStates, OfOtherOptimizersAreRefusedByName) {
  const auto params = parameters();
  torch::optim::LBFGS lbfgs(params);
  MyAdam derived(params);
  const std::vector<std::pair<Optimizer*, std::string>> others{{&lbfgs, "torch::optim::LBFGS"},
                                                               {&derived, "MyAdam"}};
  for (const auto& [optimizer, name] : others) {
    const auto expect_refused = [&, &name = name](const std::function<void()>& f) {
      const auto message = message_of<UnsupportedError>(f);
      EXPECT_NE(message.find(name), std::string::npos) << message;
    };
    auto& other = *optimizer;
    expect_refused([&] { std::ignore = optimizer_state_of(other, params[0]); });
    expect_refused([&] { set_optimizer_state_of(other, params[0], {{"step", torch::ones({})}}); });
    expect_refused([&] { drop_optimizer_state_of(other, params[0]); });
    move_optimizer_state(other, torch::kCPU);  // nothing there yet
  }
  step(derived, params, 1);
  EXPECT_THROW(move_optimizer_state(derived, torch::kCPU), UnsupportedError);
}

TEST(OptimizerStates, OfAdagradAreMadeForGroupsThatCameLater) {
  const auto params = parameters();
  torch::optim::Adagrad adagrad(Tensors{params[0]});
  adagrad.add_param_group(torch::optim::OptimizerParamGroup(Tensors{params[2]}));
  EXPECT_TRUE(optimizer_state_of(adagrad, params[2]).empty());
  drop_optimizer_state_of(adagrad, params[2]);
  EXPECT_EQ(names_of(optimizer_state_of(adagrad, params[2])), (Names{"step", "sum"}));
  set_gradients(params, 1);
  adagrad.step();
  drop_optimizer_state_of(adagrad, params[1]);  // of no group: nothing to make
  EXPECT_TRUE(optimizer_state_of(adagrad, params[1]).empty());
}

}  // namespace
}  // namespace accelerate::optimizer_state_test
