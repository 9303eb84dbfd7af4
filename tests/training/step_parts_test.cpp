#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/deferred_metrics.h"
#include "accelerate/errors.h"
#include "accelerate/nn.h"
#include "accelerate/precision/autocast.h"
#include "optim/clip_grad.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using detail::optim::clip_grad_norm_;
using detail::optim::clip_grad_value_;
using detail::optim::get_total_norm;
using test::message_of;
using torch::Tensor;
using Json = nlohmann::json;

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNaN = std::nan("");

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The type in which a product is computed here and now.
torch::ScalarType product_type() {
  return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

struct AutocastState {
  bool enabled = at::autocast::is_autocast_enabled(at::kCPU);
  at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  bool cache = at::autocast::is_autocast_cache_enabled();
  bool operator==(const AutocastState&) const = default;
};

TEST(AutocastScope, ComputesProductsInTheSmallerTypeUntilItEnds) {
  const AutocastState before;
  {
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product_type(), at::kBFloat16);
    EXPECT_EQ(torch::ones(3).sum().scalar_type(), at::kFloat);
    std::thread([] { EXPECT_EQ(product_type(), at::kFloat) << "in another thread"; }).join();
  }
  {
    const AutocastScope scope(at::kCPU, at::kHalf);
    EXPECT_EQ(product_type(), at::kHalf);
  }
  EXPECT_EQ(product_type(), at::kFloat);
  EXPECT_EQ(AutocastState(), before);
}

TEST(AutocastScope, NestsWithIslandsOfFullPrecision) {
  const AutocastState before;
  {
    const AutocastScope outer(at::kCPU, at::kBFloat16);
    {
      const AutocastScope island(at::kCPU, at::kBFloat16, {.enabled = false});
      EXPECT_EQ(product_type(), at::kFloat);
      {
        const AutocastScope inner(at::kCPU, at::kHalf);
        EXPECT_EQ(product_type(), at::kHalf);
      }
      EXPECT_EQ(product_type(), at::kFloat);
    }
    EXPECT_EQ(product_type(), at::kBFloat16);
    const AutocastScope nothing;
    EXPECT_EQ(product_type(), at::kBFloat16);
  }
  EXPECT_EQ(AutocastState(), before);
}

TEST(AutocastScope, SeesWeightsThatWereChangedAfterTheOutermostScope) {
  const auto weight = torch::ones({2, 2}, torch::requires_grad());
  const auto product = [&] { return torch::mm(torch::ones({2, 2}), weight)[0][0].item<double>(); };
  {
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product(), 2);
    {
      const AutocastScope inner(at::kCPU, at::kBFloat16);
      const torch::NoGradGuard no_grad;
      weight.fill_(5);
    }
    EXPECT_EQ(product(), 2) << "the converted weight is kept while the outermost scope lives";
  }
  {
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product(), 10);
  }
}

TEST(AutocastScope, ConvertsWeightsAnewWithoutTheCache) {
  const auto weight = torch::ones({2, 2}, torch::requires_grad());
  const auto product = [&] { return torch::mm(torch::ones({2, 2}), weight)[0][0].item<double>(); };
  const AutocastState before;
  {
    const AutocastScope scope(at::kCPU, at::kBFloat16, {.cache_enabled = false});
    EXPECT_EQ(product(), 2);
    {
      const AutocastScope inner(at::kCPU, at::kBFloat16);
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled()) << "unset: as it was found";
    }
    const torch::NoGradGuard no_grad;
    weight.fill_(5);
    EXPECT_EQ(product(), 10);
  }
  EXPECT_EQ(AutocastState(), before);
}

TEST(AutocastScope, EndsWhereAnExceptionLeavesIt) {
  const AutocastState before;
  try {
    const AutocastScope outer(at::kCPU, at::kBFloat16, {.cache_enabled = false});
    const AutocastScope inner(at::kCPU, at::kHalf);
    throw std::runtime_error("a forward pass failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(AutocastState(), before);
  EXPECT_EQ(product_type(), at::kFloat);
}

TEST(AutocastScope, RefusesTypesAndDevicesWithoutAutocast) {
  const AutocastState before;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kInt}) {
    const auto message =
        message_of<ArgumentError>([&] { const AutocastScope scope(at::kCPU, dtype); });
    EXPECT_TRUE(contains(message, std::string("not in ") + c10::toString(dtype))) << message;
  }
  const auto message = message_of<ArgumentError>(
      [] { const AutocastScope scope(at::kMeta, at::kBFloat16, {.enabled = false}); });
  EXPECT_TRUE(contains(message, "meta")) << message;
  EXPECT_EQ(AutocastState(), before);
}

const std::vector<std::vector<std::int64_t>> kShapes{{3, 4}, {5}, {2, 3, 2}, {}};

double number(const Json& json) {
  return json.is_string() ? std::stod(json.get<std::string>()) : json.get<double>();
}

torch::ScalarType type_named(const std::string& name) {
  if (name == "float64") return at::kDouble;
  return name == "float32" ? at::kFloat : at::kBFloat16;
}

std::vector<Tensor> parameters_of(const Json& run) {
  std::vector<Tensor> parameters;
  for (std::size_t p = 0; p < kShapes.size(); ++p) {
    const auto dtype = type_named(run.at("dtypes")[p].get<std::string>());
    parameters.push_back(torch::zeros(kShapes[p], torch::dtype(dtype)).requires_grad_());
    if (run.at("before")[p].is_null()) continue;
    std::vector<double> values;
    for (const auto& value : run.at("before")[p]) values.push_back(number(value));
    parameters[p].mutable_grad() =
        torch::tensor(values, torch::kDouble).reshape(kShapes[p]).to(dtype);
  }
  return parameters;
}

void expect_number(double actual, double expected, torch::ScalarType dtype) {
  if (!std::isfinite(expected)) {
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(actual) : actual == expected) << actual;
    return;
  }
  const double tolerance = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-6 : 1e-2;
  EXPECT_NEAR(actual, expected, tolerance * (1 + std::abs(expected)));
}

void expect_gradients(const std::vector<Tensor>& parameters, const Json& expected) {
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    SCOPED_TRACE("parameter " + std::to_string(p));
    ASSERT_EQ(parameters[p].grad().defined(), !expected[p].is_null());
    if (expected[p].is_null()) continue;
    const auto flat = parameters[p].grad().to(torch::kDouble).flatten();
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      expect_number(flat[i].item<double>(), number(expected[p][static_cast<std::size_t>(i)]),
                    parameters[p].scalar_type());
    }
  }
}

TEST(ClipGrad, GivesPythonsNumbers) {
  std::ifstream file(test::reference_path("clip_grad/clip_grad.json"));
  int by_norm = 0;
  int by_value = 0;
  for (const auto& run : Json::parse(file)) {
    SCOPED_TRACE(run.dump().substr(0, 60));
    const auto parameters = parameters_of(run);
    if (run.contains("max_norm")) {
      SCOPED_TRACE("norm_type " + run.at("norm_type").dump() + ", max_norm " +
                   run.at("max_norm").dump());
      const auto norm =
          clip_grad_norm_(parameters, number(run.at("max_norm")), number(run.at("norm_type")));
      EXPECT_EQ(norm.dim(), 0);
      EXPECT_FALSE(norm.requires_grad());
      const auto dtype = type_named(run.at("norm_dtype").get<std::string>());
      EXPECT_EQ(norm.scalar_type(), dtype);
      expect_number(norm.item<double>(), number(run.at("norm")), dtype);
      ++by_norm;
    } else {
      clip_grad_value_(parameters, number(run.at("clip_value")));
      ++by_value;
    }
    expect_gradients(parameters, run.at("after"));
  }
  EXPECT_EQ(by_norm, 52);
  EXPECT_EQ(by_value, 16);
}

Tensor with_gradient(const Tensor& gradient) {
  auto parameter = torch::zeros(gradient.sizes(), gradient.options()).requires_grad_();
  parameter.mutable_grad() = gradient;
  return parameter;
}

TEST(ClipGrad, GivesZeroWithoutGradients) {
  const auto norm = clip_grad_norm_({}, 1.0);
  EXPECT_TRUE(torch::equal(norm, torch::zeros({})));
  const std::vector parameters{torch::ones(3, torch::requires_grad()), Tensor()};
  EXPECT_TRUE(torch::equal(clip_grad_norm_(parameters, 1.0), torch::zeros({})));
  EXPECT_TRUE(torch::equal(get_total_norm({}), torch::zeros({})));
  clip_grad_value_(parameters, 1.0);
}

TEST(ClipGrad, TakesComplexGradientsByNormAlone) {
  const auto values = torch::complex(torch::full({1}, 3.0), torch::full({1}, 4.0));
  const std::vector parameters{with_gradient(values)};
  EXPECT_DOUBLE_EQ(get_total_norm(std::vector{values}).item<double>(), 5);
  EXPECT_DOUBLE_EQ(clip_grad_norm_(parameters, 1.0).item<double>(), 5);
  EXPECT_NEAR(torch::abs(parameters[0].grad()).item<double>(), 1, 1e-6);
  EXPECT_TRUE(contains(message_of<ArgumentError>([&] { clip_grad_value_(parameters, 1.0); }),
                       "Gradient 0 of shape [1] is of Complex"));
}

TEST(ClipGrad, RefusesSparseGradientsAndChangesNothing) {
  auto sparse = torch::zeros({2, 3}, torch::requires_grad());
  sparse.mutable_grad() = torch::ones({2, 3}).to_sparse();
  const std::vector parameters{with_gradient(torch::full({2}, 9.0)), sparse};
  for (const auto& message :
       {message_of<ArgumentError>([&] { clip_grad_norm_(parameters, 1.0); }),
        message_of<ArgumentError>([&] { clip_grad_value_(parameters, 1.0); })}) {
    EXPECT_TRUE(contains(message, "Gradient 1 of shape [2, 3] has layout Sparse")) << message;
  }
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::full({2}, 9.0)));
}

TEST(ClipGrad, RefusesLimitsThatAreNone) {
  const std::vector parameters{with_gradient(torch::full({2}, 9.0))};
  for (const double limit : {-1.0, -kInf, kNaN}) {
    EXPECT_TRUE(contains(message_of<ArgumentError>([&] { clip_grad_norm_(parameters, limit); }),
                         "max_norm is "));
    EXPECT_TRUE(contains(message_of<ArgumentError>([&] { clip_grad_value_(parameters, limit); }),
                         "clip_value is "));
  }
  EXPECT_TRUE(contains(message_of<ArgumentError>([&] { clip_grad_norm_(parameters, 1.0, kNaN); }),
                       "norm_type is NaN"));
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::full({2}, 9.0)));
  clip_grad_norm_(parameters, kInf);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::full({2}, 9.0)));
}

TEST(ClipGrad, ThrowsForNormsThatAreNotFiniteWhereAsked) {
  for (const double value : {kInf, kNaN}) {
    const std::vector parameters{with_gradient(torch::full({2}, value))};
    const auto message =
        message_of<StateError>([&] { clip_grad_norm_(parameters, 1.0, 2.0, true); });
    EXPECT_TRUE(contains(message, "The norm of order 2 of the gradients is ")) << message;
    EXPECT_EQ(std::isnan(parameters[0].grad()[0].item<double>()), std::isnan(value)) << "as before";
  }
  const std::vector fine{with_gradient(torch::full({2}, 3.0))};
  EXPECT_NO_THROW(clip_grad_norm_(fine, 1.0, 2.0, /*error_if_nonfinite=*/true));
}

/// The names of the operators that `f` runs.
template <class F>
std::vector<std::string> operators_of(F&& f) {
  static thread_local std::vector<std::string>* names;
  std::vector<std::string> result;
  names = &result;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        names->emplace_back(function.name());
        return nullptr;
      }));
  f();
  at::removeCallback(handle);
  return result;
}

/// For a layer that takes 6 features; the last two do not lie row behind row.
std::vector<Tensor> inputs() {
  return {torch::randn({6}),
          torch::randn({2, 6}),
          torch::randn({2, 3, 6}),
          torch::randn({2, 3, 2, 6}),
          torch::randn({2, 0, 6}),
          torch::randn({3, 2, 6}).transpose(0, 1),
          torch::randn({6, 2, 3}).permute({1, 2, 0})};
}

/// Two layers with the same numbers.
std::pair<nn::Linear, torch::nn::Linear> both_linears(const torch::nn::LinearOptions& options) {
  torch::manual_seed(3);
  nn::Linear ours(options);
  torch::manual_seed(3);
  torch::nn::Linear theirs(options);
  return {ours, theirs};
}

TEST(Linear, BeginsWithTheNumbersOfTorchs) {
  for (const bool bias : {true, false}) {
    const auto [ours, theirs] = both_linears(torch::nn::LinearOptions(6, 4).bias(bias));
    EXPECT_TRUE(torch::equal(ours->weight, theirs->weight));
    ASSERT_EQ(ours->bias.defined(), bias);
    if (bias) {
      EXPECT_TRUE(torch::equal(ours->bias, theirs->bias));
    }
    EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());
    EXPECT_EQ(ours->options.in_features(), 6);
    std::ostringstream our_text;
    std::ostringstream their_text;
    our_text << ours;
    their_text << theirs;
    EXPECT_EQ(our_text.str(), their_text.str());
  }
}

TEST(Linear, GivesTheOutputsAndGradientsOfTorchs) {
  for (const bool bias : {true, false}) {
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      auto [ours, theirs] = both_linears(torch::nn::LinearOptions(6, 4).bias(bias));
      ours->to(dtype);
      theirs->to(dtype);
      const double tolerance = dtype == torch::kDouble ? 1e-14 : 1e-6;
      for (const auto& input : inputs()) {
        const auto x = input.to(dtype).requires_grad_();
        SCOPED_TRACE(torch::str(x.sizes(), ", strides ", x.strides()));
        const auto same_x = x.detach().clone().requires_grad_();
        const auto out = ours(x);
        const auto expected = theirs(same_x);
        EXPECT_TRUE(torch::allclose(out, expected, tolerance, tolerance));
        ours->zero_grad();
        theirs->zero_grad();
        torch::tanh(out).sum().backward();
        torch::tanh(expected).sum().backward();
        EXPECT_TRUE(torch::allclose(x.grad(), same_x.grad(), tolerance, tolerance));
        for (std::size_t p = 0; p < ours->parameters().size(); ++p) {
          EXPECT_TRUE(torch::allclose(ours->parameters()[p].grad(), theirs->parameters()[p].grad(),
                                      tolerance * 10, tolerance * 10));
        }
      }
    }
  }
}

TEST(Linear, LetsTheProductAddTheBias) {
  nn::Linear layer(6, 4);
  const torch::NoGradGuard no_grad;
  for (const auto& x : inputs()) {
    const auto names = operators_of([&] { std::ignore = layer(x); });
    EXPECT_EQ(std::ranges::count(names, "aten::addmm"), 1) << x.sizes();
    EXPECT_EQ(std::ranges::count(names, "aten::add_"), 0) << x.sizes();
    EXPECT_EQ(std::ranges::count(names, "aten::add"), 0) << x.sizes();
  }
}

TEST(Linear, ComputesInTheSmallerTypeUnderAutocast) {
  for (const bool bias : {true, false}) {
    const auto options = torch::nn::LinearOptions(6, 4).bias(bias);
    auto [ours, theirs] = both_linears(options);
    for (const auto& x : inputs()) {
      const AutocastScope scope(at::kCPU, at::kBFloat16);
      const auto out = ours(x);
      EXPECT_EQ(out.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(torch::allclose(out.to(at::kFloat), theirs(x).to(at::kFloat), 2e-2, 2e-2));
      out.sum().backward();
      EXPECT_EQ(ours->weight.grad().scalar_type(), at::kFloat);
    }
  }
}

TEST(Linear, StandsInForTorchsInContainersClonesAndFiles) {
  torch::manual_seed(5);
  torch::nn::Sequential ours(nn::Linear(6, 5), torch::nn::ReLU(), nn::Linear(5, 2));
  torch::manual_seed(5);
  torch::nn::Sequential theirs(torch::nn::Linear(6, 5), torch::nn::ReLU(), torch::nn::Linear(5, 2));
  const auto x = torch::randn({2, 3, 6});
  EXPECT_TRUE(torch::allclose(ours->forward(x), theirs->forward(x)));
  EXPECT_NE(ours[0]->as<torch::nn::Linear>(), nullptr);
  EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());

  std::stringstream file;
  torch::save(theirs, file);
  torch::nn::Sequential read(nn::Linear(6, 5), torch::nn::ReLU(), nn::Linear(5, 2));
  torch::load(read, file);
  EXPECT_TRUE(torch::allclose(read->forward(x), theirs->forward(x)));

  nn::Linear layer(torch::nn::LinearOptions(6, 4));
  layer->eval();
  layer->to(torch::kDouble);
  const auto clone = std::dynamic_pointer_cast<nn::LinearImpl>(layer->clone());
  ASSERT_NE(clone, nullptr) << "of the same class";
  EXPECT_FALSE(clone->is_training());
  EXPECT_TRUE(torch::equal(clone->weight, layer->weight));
  EXPECT_TRUE(torch::equal(clone->bias, layer->bias));
  EXPECT_TRUE(clone->named_parameters()["weight"].is_same(clone->weight));
  {
    const torch::NoGradGuard no_grad;
    clone->weight.zero_();
  }
  EXPECT_FALSE(torch::equal(clone->weight, layer->weight)) << "with memory of its own";

  nn::Linear sharing(*theirs[0]->as<torch::nn::Linear>());
  EXPECT_TRUE(sharing->weight.is_same(theirs[0]->as<torch::nn::Linear>()->weight));
}

TEST(Linear, IsClonedWithItsParent) {
  struct Net : torch::nn::Cloneable<Net> {
    Net() { reset(); }
    void reset() override { layer = register_module("layer", nn::Linear(3, 2)); }
    nn::Linear layer{nullptr};
  };
  const Net net;
  const auto clone = std::dynamic_pointer_cast<Net>(net.clone());
  EXPECT_TRUE(torch::equal(clone->layer->weight, net.layer->weight));
  EXPECT_FALSE(clone->layer->weight.is_same(net.layer->weight));
  EXPECT_TRUE(clone->named_parameters()["layer.weight"].is_same(clone->layer->weight));
}

TEST(DeferredMetrics, GivesWeightedMeansAndBeginsAnew) {
  DeferredMetrics metrics;
  EXPECT_TRUE(metrics.read().empty());
  const auto w = torch::full({1}, 2.0F, torch::requires_grad());
  metrics.add("loss", (w * 3).sum());
  metrics.add("accuracy", torch::tensor(0.5F), 10);
  metrics.add("loss", (w * 5).sum());
  metrics.add("accuracy", torch::tensor(1.0F), 30);
  EXPECT_EQ(metrics.peek().at("loss"), Value(8.0));
  const auto means = metrics.read();
  EXPECT_EQ(means, (Value::Dict{{"loss", 8.0}, {"accuracy", 0.875}}));
  EXPECT_EQ(means.keys().front().as_string(), "loss") << "in the order in which names came";
  EXPECT_TRUE(metrics.read().empty());

  metrics.add("accuracy", torch::tensor(0.25F));
  EXPECT_EQ(metrics.read(), (Value::Dict{{"accuracy", 0.25}}));
}

TEST(DeferredMetrics, TakesOneElementOfAnyRealType) {
  DeferredMetrics metrics;
  metrics.add("bfloat16", torch::full({1, 1}, 1.5, torch::kBFloat16));
  metrics.add("double", torch::tensor(0.1, torch::kDouble), 0.5);
  metrics.add("int", torch::tensor(7), 2.5);
  metrics.add("bool", torch::tensor(true));
  metrics.add("bool", torch::tensor(false));
  const auto means = metrics.read();
  EXPECT_EQ(means.at("bfloat16"), Value(1.5));
  EXPECT_EQ(means.at("double"), Value(0.1));
  EXPECT_EQ(means.at("int"), Value(7.0));
  EXPECT_EQ(means.at("bool"), Value(0.5));
}

TEST(DeferredMetrics, SumsInDoublePrecision) {
  DeferredMetrics metrics;
  const auto tenth = torch::tensor(0.1F);
  metrics.add("loss", torch::tensor(16777216.0F));  // in float32 nothing can be added to it
  for (int i = 0; i < 9; ++i) metrics.add("loss", tenth);
  EXPECT_NEAR(metrics.read().at("loss").as_double(), (16777216 + 0.9) / 10, 1e-6);
}

TEST(DeferredMetrics, HasRoomForManyNames) {
  DeferredMetrics metrics;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 100; ++i) {
      metrics.add("metric " + std::to_string(round == 0 ? i : 99 - i), torch::tensor(i));
    }
  }
  const auto means = metrics.read();
  ASSERT_EQ(means.size(), 100);
  for (const auto& [name, mean] : means) EXPECT_EQ(mean, Value(49.5)) << name.repr();
}

TEST(DeferredMetrics, WorksInAndOutOfInferenceMode) {
  DeferredMetrics metrics;
  {
    const c10::InferenceMode inference;
    metrics.add("loss", torch::tensor(1.0F));
  }
  metrics.add("loss", torch::tensor(2.0F));
  {
    const c10::InferenceMode inference;
    metrics.add("loss", torch::tensor(3.0F));
    EXPECT_EQ(metrics.read().at("loss"), Value(2.0));
  }
  metrics.add("loss", torch::tensor(4.0F));
  EXPECT_EQ(metrics.read().at("loss"), Value(4.0));
}

TEST(DeferredMetrics, ShowsWhatIsNotFinite) {
  DeferredMetrics metrics;
  metrics.add("infinite", torch::tensor(kInf));
  metrics.add("weightless", torch::tensor(3.0), 0);
  const auto means = metrics.read();
  EXPECT_EQ(means.at("infinite"), Value(kInf));
  EXPECT_TRUE(std::isnan(means.at("weightless").as_double()));
}

TEST(DeferredMetrics, RefusesWhatIsNotOneNumber) {
  DeferredMetrics metrics;
  const auto message = [&](const Tensor& value, double weight = 1) {
    return message_of<ArgumentError>([&] { metrics.add("loss", value, weight); });
  };
  EXPECT_TRUE(contains(message(torch::ones({2, 3})), "'loss'"));
  EXPECT_TRUE(contains(message(torch::ones({2, 3})), "shape [2, 3]"));
  EXPECT_TRUE(contains(message(torch::ones({0})), "shape [0]"));
  EXPECT_TRUE(contains(message(Tensor()), "undefined"));
  EXPECT_TRUE(contains(message(torch::ones({}, torch::kComplexFloat)), "Complex"));
  for (const double weight : {-1.0, kInf, kNaN}) {
    EXPECT_TRUE(contains(message(torch::ones({}), weight), "weight"));
  }
  EXPECT_TRUE(metrics.read().empty());
}

TEST(DeferredMetrics, AddsWithOneOperatorAndMovesWithItsSums) {
  DeferredMetrics metrics;
  const auto loss = torch::ones({}, torch::kDouble);
  metrics.add("loss", loss);
  const auto names = operators_of([&] { metrics.add("loss", loss, 3); });
  EXPECT_EQ(names, std::vector<std::string>{"aten::add_"});
  auto moved = std::move(metrics);
  EXPECT_EQ(moved.reduce().at("loss"), Value(1.0)) << "one process: as read()";
  EXPECT_TRUE(moved.reduce().empty());
}

}  // namespace
}  // namespace accelerate
