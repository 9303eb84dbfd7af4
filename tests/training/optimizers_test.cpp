#include "accelerate/optim.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "accelerate/checks.h"
#include "accelerate/errors.h"
#include "optim/fused_step.h"
#include "support/message_of.h"
#include "support/reference_path.h"
#include "training/optimizer_tensors.h"

namespace accelerate {
namespace {

using detail::optim::fused_step;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using Json = nlohmann::json;
using test::Layout;
using test::message_of;
using test::parameter;
using test::parameters;
using test::set_gradients;
using test::Tensors;

const Json& python() {
  static const auto values = [] {
    std::ifstream in(test::reference_path("optimizers/optimizers.json"));
    return Json::parse(in);
  }();
  return values;
}

std::vector<double> numbers(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().to(torch::kCPU, torch::kDouble).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                 double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], tolerance * (1 + std::abs(expected[i])))
        << what << ", element " << i;
  }
}

void expect_equal(const Tensors& actual, const Tensors& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t p = 0; p < actual.size(); ++p) {
    expect_near(numbers(actual[p]), numbers(expected[p]), tolerance,
                "parameter " + std::to_string(p));
  }
}

/// Python's numbers are those of a CPU. On a GPU PyTorch's own fused AdamW, which gives our numbers
/// to the last bit, is off from them by up to 1.4e-6 of 1 + |x| in float32.
double tolerance_of(torch::Dtype dtype, const torch::Tensor& parameter) {
  if (dtype == torch::kDouble) return 1e-12;
  return parameter.is_cuda() ? 2e-6 : 1e-6;
}

torch::Dtype dtype_of(const Json& run) {
  return run["dtype"] == "float64" ? torch::kDouble : torch::kFloat;
}

/// 50 steps, and Python's parameters after some of them.
void expect_pythons_steps(const Json& run, const Tensors& params,
                          const std::function<void()>& step) {
  for (int s = 1; s <= 50; ++s) {
    set_gradients(params, s);
    step();
    const auto after = std::to_string(s);
    if (!run["params"].contains(after)) continue;
    for (int p = 0; p < 4; ++p) {
      expect_near(numbers(params[p]), run["params"][after][p],
                  tolerance_of(dtype_of(run), params[p]),
                  "parameter " + std::to_string(p) + " after step " + after);
    }
  }
}

Value to_value(const Json& json) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_null()) return {};
  if (json.is_number()) return json.get<double>();
  Value::List items;
  for (const auto& item : json) items.push_back(to_value(item));
  return items;
}

Value::Dict to_dict(const Json& json) {
  Value::Dict result;
  for (const auto& [name, value] : json.items()) result.set(name, to_value(value));
  return result;
}

/// An optimizer of ours on two groups, the options given as Python's keyword arguments.
template <class Options>
std::unique_ptr<FusedOptimizer> own_with(const Tensors& params, const Json& options,
                                         const Json& second, bool capturable) {
  GroupOptions<Options> first{Options{}};
  first.update(to_dict(options));
  first.values.capturable = capturable;
  auto other = first;
  other.update(to_dict(second));
  return std::make_unique<OptimizerWith<Options>>(
      std::vector{param_group(Tensors(params.begin(), params.begin() + 2), first.values),
                  param_group(Tensors(params.begin() + 2, params.end()), other.values)});
}

std::unique_ptr<FusedOptimizer> own(const Json& run, const Tensors& params,
                                    bool capturable = false) {
  const auto make = [&]<class Options>(std::type_identity<Options>) {
    return own_with<Options>(params, run["options"], run["second"], capturable);
  };
  const std::string name = run["optimizer"];
  if (name == "AdamW") return make(std::type_identity<AdamWOptions>());
  if (name == "Adam") return make(std::type_identity<AdamOptions>());
  if (name == "SGD") return make(std::type_identity<SGDOptions>());
  if (name == "Adagrad") return make(std::type_identity<AdagradOptions>());
  if (name == "RMSprop") return make(std::type_identity<RMSpropOptions>());
  if (name == "NAdam") return make(std::type_identity<NAdamOptions>());
  if (name == "RAdam") return make(std::type_identity<RAdamOptions>());
  if (name == "Adamax") return make(std::type_identity<AdamaxOptions>());
  if (name == "Lion") return make(std::type_identity<LionOptions>());
  return make(std::type_identity<AdafactorOptions>());
}

template <class T>
T option(const Json& options, const char* name, T otherwise) {
  return options.value(name, otherwise);
}

std::tuple<double, double> betas(const Json& options) {
  if (!options.contains("betas")) return {0.9, 0.999};
  return {options["betas"][0], options["betas"][1]};
}

// LibTorch's options with Python's names.
torch::optim::AdamWOptions torch_options(const Json& o, std::type_identity<torch::optim::AdamW>) {
  return torch::optim::AdamWOptions(option(o, "lr", 1e-3))
      .betas(betas(o))
      .eps(option(o, "eps", 1e-8))
      .weight_decay(option(o, "weight_decay", 1e-2))
      .amsgrad(option(o, "amsgrad", false));
}
torch::optim::AdamOptions torch_options(const Json& o, std::type_identity<torch::optim::Adam>) {
  return torch::optim::AdamOptions(option(o, "lr", 1e-3))
      .betas(betas(o))
      .eps(option(o, "eps", 1e-8))
      .weight_decay(option(o, "weight_decay", 0.0))
      .amsgrad(option(o, "amsgrad", false));
}
torch::optim::SGDOptions torch_options(const Json& o, std::type_identity<torch::optim::SGD>) {
  return torch::optim::SGDOptions(option(o, "lr", 1e-3))
      .momentum(option(o, "momentum", 0.0))
      .dampening(option(o, "dampening", 0.0))
      .weight_decay(option(o, "weight_decay", 0.0))
      .nesterov(option(o, "nesterov", false));
}
torch::optim::AdagradOptions torch_options(const Json& o,
                                           std::type_identity<torch::optim::Adagrad>) {
  return torch::optim::AdagradOptions(option(o, "lr", 1e-2))
      .lr_decay(option(o, "lr_decay", 0.0))
      .weight_decay(option(o, "weight_decay", 0.0))
      .initial_accumulator_value(option(o, "initial_accumulator_value", 0.0))
      .eps(option(o, "eps", 1e-10));
}
torch::optim::RMSpropOptions torch_options(const Json& o,
                                           std::type_identity<torch::optim::RMSprop>) {
  return torch::optim::RMSpropOptions(option(o, "lr", 1e-2))
      .alpha(option(o, "alpha", 0.99))
      .eps(option(o, "eps", 1e-8))
      .weight_decay(option(o, "weight_decay", 0.0))
      .momentum(option(o, "momentum", 0.0))
      .centered(option(o, "centered", false));
}

template <class T>
std::unique_ptr<Optimizer> of_libtorch(const Json& run, const Tensors& params) {
  auto merged = run["options"];
  merged.update(run["second"]);
  const auto first = torch_options(run["options"], std::type_identity<T>());
  const auto second = torch_options(merged, std::type_identity<T>());
  using Options = std::remove_const_t<decltype(first)>;
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors(params.begin(), params.begin() + 2),
                      std::make_unique<Options>(first));
  groups.emplace_back(Tensors(params.begin() + 2, params.end()), std::make_unique<Options>(second));
  return std::make_unique<T>(groups, first);
}

/// The same of LibTorch; null for what it does not have.
std::unique_ptr<Optimizer> libtorch(const Json& run, const Tensors& params) {
  if (run["options"].contains("maximize")) return nullptr;
  const std::string name = run["optimizer"];
  if (name == "AdamW") return of_libtorch<torch::optim::AdamW>(run, params);
  if (name == "Adam") return of_libtorch<torch::optim::Adam>(run, params);
  if (name == "SGD") return of_libtorch<torch::optim::SGD>(run, params);
  if (name == "Adagrad") return of_libtorch<torch::optim::Adagrad>(run, params);
  if (name == "RMSprop") return of_libtorch<torch::optim::RMSprop>(run, params);
  return nullptr;
}

std::string named(const Json& run) {
  return run["optimizer"].get<std::string>() + " " + run["options"].dump() + " then " +
         run["second"].dump() + " " + run["dtype"].get<std::string>();
}

/// One of the runs in float64, by its place among those of the optimizer.
const Json& run_of(const std::string& optimizer, std::size_t which = 0) {
  for (const auto& run : python()) {
    if (run["optimizer"] == optimizer && run["dtype"] == "float64" && which-- == 0) return run;
  }
  throw std::logic_error("no such run");
}

/// The fused kernels wake all threads for every tensor, however small.
[[maybe_unused]] const auto* const kOneThread =
    testing::AddGlobalTestEnvironment([]() -> testing::Environment* {
      struct OneThread : testing::Environment {
        void SetUp() override { torch::set_num_threads(1); }
      };
      return new OneThread;  // GoogleTest deletes it
    }());

torch::Tensor number(double value) { return torch::full({}, value, torch::kFloat); }

class StepsOn : public testing::TestWithParam<std::tuple<torch::DeviceType, Layout>> {
 protected:
  void SetUp() override {
    if (device() == torch::kCUDA && !is_cuda_available()) GTEST_SKIP() << "no GPU";
  }
  static torch::DeviceType device() { return std::get<0>(GetParam()); }
  static Layout layout() { return std::get<1>(GetParam()); }
};

TEST_P(StepsOn, OurOptimizersAreThoseOfPython) {
  for (const auto& run : python()) {
    SCOPED_TRACE(named(run));
    for (const bool capturable : {false, true}) {
      if (capturable && device() == torch::kCPU) continue;
      const auto params = parameters(torch::device(device()).dtype(dtype_of(run)), layout());
      const auto optimizer = own(run, params, capturable);
      // A learning rate on the device is float32.
      auto expected = run;
      if (capturable) expected["dtype"] = "float32";
      expect_pythons_steps(expected, params, [&] { optimizer->step(); });
    }
  }
}

TEST_P(StepsOn, TheUsersOptimizersAreThoseOfPython) {
  for (const auto& run : python()) {
    SCOPED_TRACE(named(run));
    const auto params = parameters(torch::device(device()).dtype(dtype_of(run)), layout());
    const auto optimizer = libtorch(run, params);
    if (optimizer == nullptr) continue;
    expect_pythons_steps(run, params, [&] { ASSERT_TRUE(fused_step(*optimizer)); });
  }
}

TEST_P(StepsOn, AFusedStepIsTheStepOfTheOptimizerItself) {
  for (const auto& run : python()) {
    SCOPED_TRACE(named(run));
    const auto options = torch::device(device()).dtype(dtype_of(run));
    const auto plain_params = parameters(options, layout());
    const auto fused_params = parameters(options, layout());
    const auto mixed_params = parameters(options, layout());
    const auto plain = libtorch(run, plain_params);
    const auto fused = libtorch(run, fused_params);
    const auto mixed = libtorch(run, mixed_params);
    if (plain == nullptr) continue;
    for (int s = 1; s <= 50; ++s) {
      for (const auto* const params : {&plain_params, &fused_params, &mixed_params}) {
        set_gradients(*params, s);
      }
      plain->step();
      ASSERT_TRUE(fused_step(*fused));
      if (s % 2 == 0) {
        ASSERT_TRUE(fused_step(*mixed));
      } else {
        mixed->step();
      }
    }
    expect_equal(fused_params, plain_params, tolerance_of(dtype_of(run), fused_params[0]));
    expect_equal(mixed_params, plain_params, tolerance_of(dtype_of(run), mixed_params[0]));
    EXPECT_EQ(fused->state().size(), plain->state().size());
  }
}

std::string name_of(const testing::TestParamInfo<StepsOn::ParamType>& info) {
  const std::string device = std::get<0>(info.param) == torch::kCUDA ? "Cuda" : "Cpu";
  return device + (std::get<1>(info.param) == Layout::kGaps ? "WithGaps" : "Dense");
}
INSTANTIATE_TEST_SUITE_P(Devices, StepsOn,
                         testing::Combine(testing::Values(torch::kCPU, torch::kCUDA),
                                          testing::Values(Layout::kDense, Layout::kGaps)),
                         name_of);

TEST(OwnOptimizers, KeepTheStateThatPythonKeeps) {
  for (const auto& run : python()) {
    SCOPED_TRACE(named(run));
    const auto params = parameters(dtype_of(run));
    const auto optimizer = own(run, params);
    EXPECT_TRUE(optimizer->state_of(params[0]).empty());
    for (int s = 1; s <= 50; ++s) {
      set_gradients(params, s);
      optimizer->step();
    }
    for (int p = 0; p < 4; ++p) {
      const auto state = optimizer->state_of(params[p]);
      const auto& expected = run["state"][p];
      EXPECT_EQ(state.size(), expected.size());
      for (const auto& [name, tensor] : state) {
        ASSERT_TRUE(expected.contains(name)) << name;
        expect_near(numbers(tensor), expected[name], tolerance_of(dtype_of(run), params[p]), name);
      }
    }
  }
}

TEST(OwnOptimizers, GoOnFromAStateThatIsGivenAndFromOneThatWasSaved) {
  for (const auto& run : python()) {
    if (run["dtype"] == "float32") continue;
    SCOPED_TRACE(named(run));
    const auto params = parameters();
    const auto optimizer = own(run, params);
    for (int s = 1; s <= 5; ++s) {
      set_gradients(params, s);
      optimizer->step();
    }
    std::stringstream file;
    torch::save(*optimizer, file);
    Tensors given_params;
    Tensors loaded_params;
    for (const auto& p : params) {
      given_params.push_back(p.detach().clone().requires_grad_());
      loaded_params.push_back(p.detach().clone().requires_grad_());
    }
    const auto given = own(run, given_params);
    for (int p = 0; p < 4; ++p) {
      given->set_state_of(given_params[p], optimizer->state_of(params[p]));
    }
    auto with_defaults = run;
    with_defaults["options"].clear();
    with_defaults["second"].clear();
    const auto loaded = own(with_defaults, loaded_params);
    torch::load(*loaded, file);

    for (int s = 6; s <= 10; ++s) {
      for (const auto& list : {params, given_params, loaded_params}) set_gradients(list, s);
      optimizer->step();
      given->step();
      loaded->step();
    }
    expect_equal(given_params, params, 0);
    expect_equal(loaded_params, params, 0);
  }
}

TEST(OwnOptimizers, StepOnlyWhereGradientsAreFinite) {
  for (const auto& run : python()) {
    if (run["dtype"] == "float64") continue;
    SCOPED_TRACE(named(run));
    const auto plain_params = parameters(torch::kFloat);
    const auto scaled_params = parameters(torch::kFloat);
    const auto plain = own(run, plain_params);
    const auto scaled = own(run, scaled_params);
    for (int s = 1; s <= 6; ++s) {
      const bool overflow = s == 1 || s == 4;
      set_gradients(scaled_params, s, 1024);
      EXPECT_TRUE(fused_step(*scaled, number(1024), number(overflow ? 1 : 0)));
      if (overflow) continue;
      set_gradients(plain_params, s);
      plain->step();
      // What is read after the step is the unscaled gradient.
      expect_equal({scaled_params[0].grad()}, {plain_params[0].grad()}, 1e-6);
    }
    expect_equal(scaled_params, plain_params, 1e-6);
  }
}

TEST(FusedStep, StepsOnlyWhereGradientsAreFinite) {
  for (const auto& run : python()) {
    if (run["dtype"] == "float64") continue;
    SCOPED_TRACE(named(run));
    const auto plain_params = parameters(torch::kFloat);
    const auto scaled_params = parameters(torch::kFloat);
    const auto plain = libtorch(run, plain_params);
    const auto scaled = libtorch(run, scaled_params);
    if (plain == nullptr) continue;
    for (int s = 1; s <= 6; ++s) {
      const bool overflow = s == 1 || s == 4;
      set_gradients(scaled_params, s, 1024);
      EXPECT_TRUE(fused_step(*scaled, number(1024), number(overflow ? 1 : 0)));
      if (overflow) continue;
      set_gradients(plain_params, s);
      plain->step();
    }
    expect_equal(scaled_params, plain_params, 1e-6);
  }
}

TEST(FusedStep, WritesTheStateThatLibTorchSaves) {
  const auto fused_params = parameters();
  const auto params = parameters();
  const auto fused = libtorch(run_of("AdamW", 1), fused_params);
  for (int s = 1; s <= 4; ++s) {
    set_gradients(fused_params, s);
    EXPECT_TRUE(fused_step(*fused));
  }
  const auto& state = static_cast<torch::optim::AdamWParamState&>(
      *fused->state().at(fused_params[1].unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 3);  // it had no gradient once
  EXPECT_TRUE(state.max_exp_avg_sq().defined());

  std::stringstream file;
  torch::save(static_cast<torch::optim::AdamW&>(*fused), file);
  auto loaded = torch::optim::AdamW(Tensors(params.begin(), params.begin() + 2));
  loaded.add_param_group(OptimizerParamGroup(Tensors(params.begin() + 2, params.end())));
  torch::load(loaded, file);
  for (std::size_t p = 0; p < params.size(); ++p) {
    torch::NoGradGuard no_grad;
    params[p].copy_(fused_params[p]);
  }
  set_gradients(params, 5);
  set_gradients(fused_params, 5);
  loaded.step();
  EXPECT_TRUE(fused_step(*fused));
  expect_equal(fused_params, params, 1e-12);
}

TEST(FusedStep, ReadsAGradientThatLiesInAnotherOrder) {
  for (const auto* const name : {"AdamW", "Adam", "SGD", "Adagrad", "RMSprop"}) {
    SCOPED_TRACE(name);
    const auto plain_params = parameters();
    const auto fused_params = parameters();
    const auto own_params = parameters();
    const auto plain = libtorch(run_of(name), plain_params);
    const auto fused = libtorch(run_of(name), fused_params);
    const auto ours = own(run_of(name), own_params);
    for (int s = 1; s <= 3; ++s) {
      for (const auto* const params : {&plain_params, &fused_params, &own_params}) {
        set_gradients(*params, s);
        auto& grad = (*params)[0].mutable_grad();
        grad = grad.t().contiguous().t();
      }
      plain->step();
      EXPECT_TRUE(fused_step(*fused));
      ours->step();
    }
    expect_equal(fused_params, plain_params, 1e-12);
    expect_equal(own_params, plain_params, 1e-12);
  }
}

TEST(FusedStep, TakesParametersOfSeveralTypesAtOnce) {
  const Tensors params{
      parameter(0, torch::kBFloat16, Layout::kDense), parameter(1, torch::kFloat, Layout::kDense),
      parameter(2, torch::kDouble, Layout::kDense), parameter(3, torch::kHalf, Layout::kDense)};
  const auto exact_params = parameters();
  for (const auto* const name : {"AdamW", "Adam", "SGD", "Adagrad", "RMSprop"}) {
    const auto optimizer = libtorch(run_of(name), params);
    const auto exact = libtorch(run_of(name), exact_params);
    set_gradients(params, 5);
    set_gradients(exact_params, 5);
    EXPECT_TRUE(fused_step(*optimizer));
    exact->step();
    expect_equal(params, exact_params, 3e-2);
  }
}

struct OwnWay : torch::optim::SGD {
  using SGD::SGD;
};

TEST(FusedStep, LeavesToTheOptimizerWhatItCannotDo) {
  const auto values = torch::ones({4, 2}).requires_grad_();
  const auto before = values.detach().clone();
  values.mutable_grad() = torch::ones({4, 2}).to_sparse();
  torch::optim::SGD sgd({values}, torch::optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_FALSE(fused_step(sgd));
  EXPECT_TRUE(sgd.state().empty());

  values.mutable_grad() = torch::ones({4, 2});
  OwnWay derived({values}, torch::optim::SGDOptions(0.1));
  EXPECT_FALSE(fused_step(derived));
  torch::optim::LBFGS lbfgs({values});
  EXPECT_FALSE(fused_step(lbfgs));
  EXPECT_TRUE(torch::equal(values, before));
}

TEST(FusedStep, SharesALargeParameterOutOverThreads) {
  torch::set_num_threads(2);
  const auto values = torch::cos(torch::arange(100'000, torch::kDouble));
  const Tensors plain_params{values.clone().requires_grad_()};
  const Tensors fused_params{values.clone().requires_grad_()};
  torch::optim::AdamW plain(plain_params);
  torch::optim::AdamW fused(fused_params);
  for (int s = 0; s < 3; ++s) {
    plain_params[0].mutable_grad() = torch::sin(values + s);
    fused_params[0].mutable_grad() = torch::sin(values + s);
    plain.step();
    EXPECT_TRUE(fused_step(fused));
  }
  EXPECT_TRUE(torch::allclose(fused_params[0], plain_params[0], 1e-12, 1e-12));
  torch::set_num_threads(1);
}

TEST(FusedStep, DoesNothingWithoutGradients) {
  const auto params = parameters();
  const auto optimizer = libtorch(run_of("AdamW"), params);
  EXPECT_TRUE(fused_step(*optimizer));
  EXPECT_TRUE(optimizer->state().empty());
  expect_equal(params, parameters(), 0);
}

TEST(OwnOptimizers, ReturnTheLossOfTheClosure) {
  const auto weight = torch::tensor({3.0}).requires_grad_();
  SGD sgd({weight}, {.lr = 0.1});
  torch::NoGradGuard no_grad;
  const auto loss = sgd.step([&] {
    sgd.zero_grad();
    auto value = (weight * weight).sum();
    value.backward();
    return value;
  });
  EXPECT_DOUBLE_EQ(loss.item<double>(), 9);
  EXPECT_FLOAT_EQ(weight.item<float>(), 3 - 0.1 * 6);
  EXPECT_FALSE(sgd.step().defined());
}

TEST(OwnOptimizers, TakeANewLearningRateThroughTheFaceOfLibTorch) {
  const auto weight = torch::tensor({1.0}, torch::kDouble).requires_grad_();
  weight.mutable_grad() = torch::ones({1}, torch::kDouble);
  SGD sgd({weight});
  Optimizer& optimizer = sgd;
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-3);
  optimizer.param_groups()[0].options().set_lr(0.5);
  optimizer.step();
  EXPECT_DOUBLE_EQ(weight.item<double>(), 0.5);
  EXPECT_EQ(sgd.options().lr, 0.5);
}

TEST(OwnOptimizers, CanBeMoved) {
  const auto params = parameters();
  const auto expected = parameters();
  AdamW first(params, {.lr = 0.1});
  AdamW other(expected, {.lr = 0.1});
  set_gradients(params, 1);
  set_gradients(expected, 1);
  first.step();
  other.step();
  AdamW moved(std::move(first));
  moved.step();
  other.step();
  expect_equal(params, expected, 0);
}

TEST(OwnOptimizers, ShowTheirOptionsAsPythonDoes) {
  const auto shown = [](const auto& options) {
    return Value(GroupOptions(options).to_dict()).repr();
  };
  EXPECT_EQ(shown(AdamWOptions{}),
            "{'lr': 0.001, 'betas': (0.9, 0.999), 'eps': 1e-08, 'weight_decay': 0.01, 'amsgrad': "
            "False, 'maximize': False, 'capturable': False}");
  EXPECT_EQ(shown(AdafactorOptions{}),
            "{'lr': 0.01, 'beta2_decay': -0.8, 'eps': (None, 0.001), 'd': 1.0, 'weight_decay': "
            "0.0, 'maximize': False, 'capturable': False}");
  GroupOptions<AdagradOptions> adagrad{AdagradOptions{}};
  adagrad.update({{"eps", 1e-3}, {"maximize", true}});
  EXPECT_EQ(adagrad.values.eps, 1e-3);
  EXPECT_TRUE(adagrad.values.maximize);
}

TEST(OwnOptimizers, HaveAMomentumForCyclicSchedules) {
  GroupOptions<AdamOptions> adam{AdamOptions{}};
  adam.set_momentum(0.8);
  EXPECT_EQ(adam.momentum(), 0.8);
  EXPECT_EQ(adam.values.betas.first, 0.8);
  GroupOptions<SGDOptions> sgd{SGDOptions{.momentum = 0.5}};
  EXPECT_EQ(sgd.momentum(), 0.5);
  GroupOptions<AdagradOptions> adagrad{AdagradOptions{}};
  EXPECT_EQ(adagrad.momentum(), std::nullopt);
  EXPECT_THROW(adagrad.set_momentum(0.5), ArgumentError);
}

TEST(OwnOptimizers, SayWhichOptionCannotBe) {
  const auto params = parameters();
  EXPECT_EQ(message_of<ArgumentError>([&] { AdamW(params, {.lr = -1}); }),
            "The option lr of AdamW is -1; it must be 0 or more.");
  EXPECT_EQ(message_of<ArgumentError>([&] { Adam(params, {.betas = {0.9, 1.5}}); }),
            "The option betas[1] of Adam is 1.5; it must be at least 0 and below 1.");
  EXPECT_EQ(message_of<ArgumentError>([&] { SGD(params, {.nesterov = true}); }),
            "The option nesterov of SGD is true; it must be false unless there is momentum and no "
            "dampening.");
  EXPECT_EQ(message_of<ArgumentError>([&] { Adafactor(params, {.d = 0.5}); }),
            "The option d of Adafactor is 0.5; it must be 1 or more.");
  EXPECT_EQ(message_of<ArgumentError>([&] { GroupOptions(SGDOptions{}).update({{"eps", 1e-3}}); }),
            "SGD has no option 'eps'. It has: lr, momentum, dampening, weight_decay, nesterov, "
            "maximize, capturable.");
  EXPECT_EQ(message_of<ArgumentError>([&] { AdamW({param_group(params, SGDOptions{})}); }),
            "A parameter group of accelerate::AdamW has the options of another optimizer. Make it "
            "with param_group(params, AdamWOptions{...}).");
}

TEST(OwnOptimizers, SayWhichStateDoesNotFit) {
  const auto params = parameters();
  AdamW adamw(params);
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { adamw.set_state_of(params[0], {{"exp_avg", torch::zeros({4, 3})}}); }),
            "The tensor 'exp_avg' of a state has shape [4, 3], which does not fit the parameter of "
            "shape [3, 4].");
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { adamw.set_state_of(params[0], {{"sum", torch::zeros({3, 4})}}); }),
            "The state of a parameter has a tensor 'sum', which this optimizer does not know. It "
            "knows: step, exp_avg, exp_avg_sq, max_exp_avg_sq.");
  EXPECT_THROW(adamw.set_state_of(torch::zeros({2}), {}), ArgumentError);

  std::stringstream file;
  torch::save(adamw, file);
  AdamW smaller({params[0]});
  EXPECT_EQ(
      message_of<ArgumentError>([&] { torch::load(smaller, file); }),
      "load_state_dict: the saved state has 4 parameters in group 0 and this optimizer has 1. "
      "Build it on the same parameters, in the same groups.");
}

TEST(OwnOptimizers, RefuseSparseGradientsBeforeAnythingChanges) {
  const auto params = parameters();
  set_gradients(params, 1);
  params[2].mutable_grad() = params[2].grad().to_sparse();
  AdamW adamw(params);
  EXPECT_EQ(message_of<ArgumentError>([&] { adamw.step(); }),
            "The gradient of parameter 2 in group 0, shape [2, 3, 2], is Double and Sparse. The "
            "optimizers of accelerate/optim.h take dense gradients of their parameter's "
            "floating-point type; use one of torch::optim for others.");
  expect_equal(params, parameters(), 0);
  EXPECT_FALSE(fused_step(adamw));
}

}  // namespace
}  // namespace accelerate
