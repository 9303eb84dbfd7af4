// Objects that prepare cannot take over, handles that are empty, options that this run cannot
// follow, and what optimizers pass on.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::anew;
using test::Line;
using test::LineImpl;
using test::message_of;

class RefusalsTest : public test::Stateless {};

TEST_F(RefusalsTest, RefusesWhatWouldComeBackUnprepared) {
  using detail::accelerator::BareModel;
  using detail::accelerator::TorchLoader;
  static_assert(BareModel<LineImpl>);
  static_assert(BareModel<LineImpl*>);
  static_assert(BareModel<torch::nn::Module>);
  static_assert(BareModel<std::unique_ptr<LineImpl>>);
  static_assert(BareModel<torch::nn::AnyModule>);
  static_assert(BareModel<torch::jit::Module>);
  static_assert(detail::accelerator::AnyModel<Line> && !BareModel<Line>);
  static_assert(detail::accelerator::AnyModel<std::shared_ptr<LineImpl>>, "it is taken before");
  static_assert(!BareModel<int> && !BareModel<std::string> && !BareModel<std::nullptr_t>);
  static_assert(!BareModel<int*> && !BareModel<std::unique_ptr<int>>);

  const auto of_torch = [] {
    return torch::data::make_data_loader(
        torch::data::datasets::TensorDataset(torch::arange(8))
            .map(torch::data::transforms::Stack<torch::data::TensorExample>()),
        2);
  };
  static_assert(TorchLoader<decltype(of_torch())>);
  static_assert(TorchLoader<decltype(of_torch())::element_type>);
  static_assert(!TorchLoader<decltype(make_data_loader(torch::arange(2)))> && !TorchLoader<int>);
  static_assert(!TorchLoader<std::unique_ptr<int>> && !TorchLoader<std::string>);
}

TEST_F(RefusalsTest, RefusesHandlesThatAreEmpty) {
  Accelerator accelerator(anew({.gradient_accumulation_steps = 2}));
  Line net;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
  auto [model, optimizer, scheduler] = accelerator.prepare(net, sgd, StepLR(sgd, {.step_size = 1}));
  for (int round = 0; round < 2; ++round) {  // never assigned, and given back
    PreparedModel<Line> no_model;
    AcceleratedOptimizer no_optimizer;
    AcceleratedScheduler no_scheduler;
    if (round == 1) {
      no_model = model;
      no_optimizer = optimizer;
      no_scheduler = scheduler;
      accelerator.free_memory(no_model, no_optimizer, no_scheduler);
    }
    const std::vector<std::function<void()>> calls{
        [&] { (void)accelerator.prepare(no_model); },
        [&] { (void)accelerator.prepare(no_optimizer); },
        [&] { (void)accelerator.prepare_optimizer(no_optimizer); },
        [&] { (void)accelerator.prepare(no_scheduler); },
        [&] { (void)accelerator.prepare_scheduler(no_scheduler); },
        [&] { (void)accelerator.accumulate(no_model); },
        [&] { (void)accelerator.no_sync(no_model); },
        [&] { (void)Accelerator::trigger_sync_in_backward(no_model); },
        [&] { accelerator.unscale_gradients(no_optimizer); },
        [&] { (void)no_optimizer.state_dict(); },
    };
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const auto message = message_of<StateError>(calls[i]);
      EXPECT_NE(message.find("is empty"), std::string::npos) << i << ": " << message;
    }
  }
  EXPECT_FALSE(accelerator.optimizer_step_was_skipped()) << "nothing of it was registered";
  const auto first = accelerator.accumulate(net);
  EXPECT_FALSE(accelerator.sync_gradients()) << "a call that was refused counts no batch";
}

TEST_F(RefusalsTest, RefusesHoldersAndPointersThatAreEmpty) {
  Accelerator accelerator(anew());
  const Line holder{nullptr};
  std::shared_ptr<LineImpl> module;
  std::shared_ptr<AdamW> optimizer;
  std::shared_ptr<StepLR> scheduler;
  const auto entries = accelerator._state_entries().size();
  const std::vector<std::function<void()>> calls{
      [&] { (void)accelerator.prepare(holder); },
      [&] { (void)accelerator.prepare(module); },
      [&] { (void)accelerator.prepare_model(holder); },
      [&] { (void)accelerator.prepare(optimizer); },
      [&] { (void)accelerator.prepare(scheduler); },
      [&] { (void)accelerator.get_state_dict(holder); },
      [&] { accelerator.register_for_checkpointing(holder); },
      [&] { accelerator.register_for_checkpointing(module); },
      [&] { accelerator.register_for_checkpointing(scheduler); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto message = message_of<ArgumentError>(calls[i]);
    EXPECT_NE(message.find("is empty"), std::string::npos) << i << ": " << message;
  }
  EXPECT_EQ(message_of<ArgumentError>(calls[0]),
            "The model is empty: its holder was made with nullptr, or the pointer was never "
            "assigned. Assign a module first, for example net = torch::nn::Linear(4, 2).");
  EXPECT_EQ(accelerator._state_entries().size(), entries) << "something of it was registered";
}

/// What an accelerator with handlers for mixed precision warns of.
std::vector<std::string> warnings_of(AcceleratorOptions options, bool enabled = true) {
  options.kwargs_handlers = {AutocastKwargs{.enabled = enabled},
                             GradScalerKwargs{.enabled = enabled}};
  const test::CapturedLog log;
  const Accelerator accelerator(anew(std::move(options)));
  return log.messages();
}

TEST_F(RefusalsTest, WarnsOfHandlersForAnotherPrecision) {
  EXPECT_TRUE(warnings_of({}, /*enabled=*/false).empty());
  const std::string autocast = "[RANK 0] AutocastKwargs in kwargs_handlers has no effect: ";
  const std::string scaler = "[RANK 0] GradScalerKwargs in kwargs_handlers has no effect: ";
  const std::string why = "mixed_precision is no. Set mixed_precision, or leave the handler out.";
  EXPECT_EQ(warnings_of({}), (std::vector{autocast + why, scaler + why}));
  for (const auto precision : {PrecisionType::kBf16, PrecisionType::kFp8}) {
    const auto warnings = warnings_of({.mixed_precision = precision});
    ASSERT_FALSE(warnings.empty());
    EXPECT_EQ(warnings[0], scaler + "mixed_precision is " + to_string(precision) +
                               ", whose gradients have the range of float32. Leave it out, or use "
                               "fp16.");
  }
  const auto on_a_cpu = warnings_of({.mixed_precision = PrecisionType::kFp16});
  ASSERT_GE(on_a_cpu.size(), 2U);
  const std::string in_float32 =
      "a CPU computes in float32 where mixed_precision is fp16. Leave it out.";
  EXPECT_EQ(on_a_cpu.rbegin()[1], autocast + in_float32);
  EXPECT_EQ(on_a_cpu.back(), scaler + in_float32);
  EXPECT_EQ(warnings_of({.deepspeed_plugin = DeepSpeedPlugin{.zero_stage = 2}}),
            (std::vector{autocast +
                             "a run with DeepSpeed casts the model, not its operators. Set fp16 or "
                             "bf16 of its configuration, or leave the handler out.",
                         scaler + "a run with DeepSpeed scales the loss by its configuration. Set "
                                  "fp16.loss_scale or fp16.initial_scale_power there, or leave the "
                                  "handler out."}));
}

TEST_F(RefusalsTest, RefusesAMeshInThePluginOfTensorParallelism) {
  EXPECT_EQ(message_of<ConfigError>([] {
              const auto mesh =
                  std::make_shared<DeviceMesh>("cpu", MeshLayout({"tp"}, {std::int64_t{1}}));
              Accelerator accelerator(
                  anew({.torch_tp_plugin = TorchTensorParallelPlugin{.torch_device_mesh = mesh}}));
            }),
            "torch_device_mesh of TorchTensorParallelPlugin is given, but the accelerator makes "
            "the mesh itself. Leave it out, and take accelerator.torch_device_mesh().");
}

/// An optimizer that is told when training goes on.
struct ScheduleFree : torch::optim::SGD {
  using SGD::SGD;
  void train() { mode += 't'; }
  void eval() { mode += 'e'; }
  std::string mode;
};

TEST_F(RefusalsTest, PassesOnWhatOptimizersHave) {
  Accelerator accelerator(anew());
  Line net;
  ScheduleFree own(net->parameters(), torch::optim::SGDOptions(0.25));
  auto optimizer = accelerator.prepare(own);
  optimizer.train();
  optimizer.eval();
  EXPECT_EQ(own.mode, "te");
  EXPECT_EQ(&optimizer.defaults(), &own.defaults());
  EXPECT_EQ(&optimizer.state(), &own.state());
  auto plain = accelerator.prepare(AdamW(net->parameters()));
  plain.train();
  plain.eval();
}

}  // namespace
}  // namespace accelerate
