// A second engine beside data parallelism: what backward, clipping, optimizers and state
// dictionaries ask of any engine.
#include "parallel/engine.h"

#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "optim/optimizer_core.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using detail::parallel::BackwardPass;
using detail::parallel::GradientShards;
using detail::parallel::ReachedLeaves;
using test::anew;
using test::Line;
using test::message_of;

using Calls = std::vector<std::string>;

/// Writes down what it is asked, multiplies gradients by 3, and claims to hold one of four equal
/// shards of each gradient. The optimizer steps on a copy of the weight, as on a shard.
class RecordingEngine final : public detail::parallel::Engine {
 public:
  explicit RecordingEngine(torch::Tensor weight) : weight_(std::move(weight)) {}

  std::shared_ptr<void> enter_forward() override {
    calls.emplace_back("forward");
    return {nullptr, [this](void*) { calls.emplace_back("end of forward"); }};
  }
  bool reached_by(const ReachedLeaves& leaves) const override { return leaves.contains(weight_); }
  bool wants_local_backward() const override { return true; }
  void before_backward(const BackwardPass& pass) override {
    EXPECT_TRUE(pass.loss.requires_grad());
    calls.emplace_back(pass.synchronizes ? "before backward" : "before local backward");
  }
  void after_backward() override {
    calls.emplace_back("after backward");
    weight_.mutable_grad().mul_(3);
  }
  void attach(torch::optim::Optimizer& optimizer) override {
    calls.emplace_back("attach");
    shard = weight_.detach().clone();
    for (auto& group : optimizer.param_groups()) {
      for (auto& parameter : group.params()) {
        if (parameter.is_same(weight_)) parameter = shard;
      }
    }
  }
  void after_step(torch::optim::Optimizer&) override {
    calls.emplace_back("after step");
    const torch::NoGradGuard no_grad;
    weight_.copy_(shard);
  }
  std::optional<GradientShards> shards_of(std::span<const torch::Tensor> parameters) override {
    GradientShards result;
    for (const auto& parameter : parameters) {
      result.sharded.push_back(parameter.is_same(weight_));
      if (result.sharded.back()) result.gradients.push_back(weight_.grad());
    }
    return result;
  }
  torch::Tensor found_inf_over_processes(const torch::Tensor& found_inf) override {
    calls.emplace_back("found inf");
    return found_inf + (other_process_found_inf ? 1 : 0);
  }
  torch::Tensor norm_over_processes(const GradientShards& shards, double norm_type) override {
    calls.emplace_back("norm");
    EXPECT_EQ(norm_type, 2.0);
    // The root of four equal parts.
    return shards.gradients.empty() ? torch::zeros({}) : shards.gradients[0].norm() * 2;
  }
  StateDict state_dict(const torch::nn::Module&) override {
    calls.emplace_back("state dict");
    StateDict whole("Tensor");
    whole.insert("weight", torch::full({1}, 7.0F));
    return whole;
  }
  void load_state_dict(torch::nn::Module&, const StateDict& state, bool strict) override {
    calls.emplace_back(strict ? "load strictly" : "load");
    const torch::NoGradGuard no_grad;
    weight_.copy_(state["weight"]);
  }

  Calls calls = {};
  torch::Tensor shard = {};
  bool other_process_found_inf = false;

 private:
  torch::Tensor weight_;
};

class EngineTest : public test::Stateless {
 protected:
  void SetUp() override {
    Stateless::SetUp();
    accelerator = std::make_unique<Accelerator>(anew());
    model = accelerator->prepare(net);
    engine = std::make_shared<RecordingEngine>(net->weight);
    model._core()->use(engine);
  }
  Calls take_calls() { return std::exchange(engine->calls, {}); }

  Line net;
  std::unique_ptr<Accelerator> accelerator;
  PreparedModel<Line> model;
  std::shared_ptr<RecordingEngine> engine;
};

TEST_F(EngineTest, IsEnteredForEveryForward) {
  (void)model(torch::ones({1}));
  EXPECT_EQ(take_calls(), (Calls{"forward", "end of forward"}));
  (void)model->forward(torch::ones({1}));
  EXPECT_EQ(take_calls(), (Calls{"forward", "end of forward"}));
}

TEST_F(EngineTest, CompletesTheGradientsOfABackwardThatReachesItsModel) {
  const auto loss = (model(torch::full({1}, 2.0F)) * 5).sum();
  take_calls();
  accelerator->backward(loss);
  EXPECT_EQ(take_calls(), (Calls{"before backward", "after backward"}));
  EXPECT_EQ(net->weight.grad().item<float>(), 30);

  Line other;
  accelerator->backward((accelerator->prepare(other)(torch::ones({1}))).sum());
  EXPECT_EQ(take_calls(), Calls());
}

TEST_F(EngineTest, IsToldOfABackwardThatDoesNotSynchronize) {
  const auto alone = accelerator->no_sync(model);
  accelerator->backward(net->weight.sum());
  EXPECT_EQ(take_calls(), (Calls{"before local backward", "after backward"}));
}

TEST_F(EngineTest, IsNotUsedAgainAfterABackwardThatThrew) {
  auto loss = net->weight.sum();
  loss.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("no"); });
  EXPECT_THROW(accelerator->backward(loss), std::runtime_error);
  EXPECT_EQ(take_calls(), Calls{"before backward"});
  EXPECT_NE(message_of<StateError>([&] {
              accelerator->backward(net->weight.sum());
            }).find("an error ended the last one"),
            std::string::npos);
}

TEST_F(EngineTest, GivesTheNormOfGradientsOverAllProcesses) {
  Line other;  // each process has all of its gradient
  net->weight.mutable_grad() = torch::full({1}, 2.0F);
  other->weight.mutable_grad() = torch::full({1}, 3.0F);
  const std::vector<torch::Tensor> parameters{net->weight, other->weight};
  const auto norm = accelerator->clip_grad_norm_(parameters, 1.0);
  EXPECT_FLOAT_EQ(norm.item<float>(), 5);  // 3 and 4
  EXPECT_NEAR(net->weight.grad().item<float>(), 2.0 / 5, 1e-6);
  EXPECT_NEAR(other->weight.grad().item<float>(), 3.0 / 5, 1e-6);
  EXPECT_EQ(take_calls(), Calls{"norm"});
  accelerator->clip_grad_value_(parameters, 0.125);
  EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 0.125);
}

TEST_F(EngineTest, ReplacesWhatTheOptimizerStepsOn) {
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.5));
  auto optimizer = accelerator->prepare(sgd);
  EXPECT_EQ(take_calls(), Calls{"attach"});
  EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(engine->shard));
  engine->shard.mutable_grad() = torch::full({1}, 4.0F);
  optimizer.step();
  EXPECT_EQ(take_calls(), Calls{"after step"});
  EXPECT_EQ(net->weight.item<float>(), -2);
  (void)accelerator->prepare(optimizer);
  EXPECT_EQ(take_calls(), Calls()) << "attached once";
}

TEST_F(EngineTest, AgreesWithOtherProcessesOnInfiniteGradients) {
  auto optimizer =
      accelerator->prepare(torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.5)));
  auto& core = *optimizer._core();
  core.scaling = std::make_shared<detail::optim::LossScaling>(GradScalerKwargs{.init_scale = 8});
  core.scaling->add(optimizer._core());
  take_calls();
  const auto step = [&] {
    (void)core.scaling->scale(torch::ones({}));
    engine->shard.mutable_grad() = torch::full({1}, 4.0F);
    core.scaling->unscale(core);  // as clipping does; agreed once per step
    optimizer.step();
  };
  engine->other_process_found_inf = true;
  step();
  EXPECT_TRUE(optimizer.step_was_skipped()) << "the gradients of this process are finite";
  EXPECT_EQ(net->weight.item<float>(), 0);
  EXPECT_EQ(core.scaling->scaler().get_scale(), 4) << "the factor shrinks on all processes";
  EXPECT_EQ(take_calls(), Calls{"found inf"});

  engine->other_process_found_inf = false;
  step();
  EXPECT_FALSE(optimizer.step_was_skipped());
  EXPECT_EQ(net->weight.item<float>(), -0.5);
  EXPECT_EQ(take_calls(), (Calls{"found inf", "after step"}));
}

TEST_F(EngineTest, MakesAndTakesWholeStateDictionaries) {
  EXPECT_EQ(accelerator->get_state_dict(model)["weight"].item<float>(), 7);
  EXPECT_EQ(model.state_dict()["weight"].item<float>(), 7);
  EXPECT_EQ(take_calls(), (Calls{"state dict", "state dict"}));
  model.load_state_dict(model.state_dict());
  EXPECT_EQ(take_calls(), (Calls{"state dict", "load strictly"}));
  EXPECT_EQ(net->weight.item<float>(), 7);
}

TEST_F(EngineTest, RefusesToReplaceParametersUnlessItCan) {
  EXPECT_NE(message_of<UnsupportedError>([&] {
              model.replace_parameter("weight", torch::ones({2}));
            }).find("replace_parameter"),
            std::string::npos);
  EXPECT_EQ(net->weight.numel(), 1) << "nothing has changed";
}

/// Loading state dictionaries without an engine.
class StateDictTest : public test::Stateless {};

TEST_F(StateDictTest, NamesWhatDoesNotFitAndChangesNothing) {
  torch::nn::Sequential from(torch::nn::Linear(2, 3), torch::nn::Linear(3, 1));
  torch::nn::Sequential to(torch::nn::Linear(2, 3), torch::nn::Linear(3, 2));
  const auto before = to->parameters()[0].clone();
  auto state = state_dict(*from);
  EXPECT_EQ(message_of<StateDictMismatch>([&] { load_state_dict(*to, state); }),
            "The state does not fit the module:\n\tsize mismatch for 1.weight: the state has shape "
            "[1, 3], the module [2, 3].\n\tsize mismatch for 1.bias: the state has shape [1], the "
            "module [2].");
  EXPECT_TRUE(to->parameters()[0].equal(before));

  StateDict part("Tensor");
  part.insert("0.weight", state["0.weight"]);
  part.insert("extra", torch::ones({1}));
  EXPECT_EQ(message_of<StateDictMismatch>([&] { load_state_dict(*to, part); }),
            "The state does not fit the module:\n\tUnexpected key(s) in state_dict: \"extra\"."
            "\n\tMissing key(s) in state_dict: \"0.bias\", \"1.weight\", \"1.bias\".");
  load_state_dict(*to, part, /*strict=*/false);
  EXPECT_TRUE(to->parameters()[0].equal(from->parameters()[0]));
}

}  // namespace
}  // namespace accelerate
