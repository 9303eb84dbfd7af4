// Marks for activation checkpointing that no forward asks for.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerator/nets.h"
#include "core/captured_log.h"

namespace accelerate {
namespace {

using test::anew;
using test::CapturedLog;
using test::Mlp;

bool is_linear(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr;
}

class CheckpointMarksTest : public test::Stateless {};

TEST_F(CheckpointMarksTest, OfAModelThatDoesNotAskAreReportedByItsFirstBackward) {
  Accelerator accelerator(anew());
  Mlp marked, other;
  for (int i = 0; i < 2; ++i) (void)apply_activation_checkpointing(*marked, is_linear);
  const CapturedLog log;
  accelerator.backward(other(test::input_of(0)).sum());
  EXPECT_TRUE(log.messages().empty());
  for (int i = 0; i < 2; ++i) accelerator.backward(marked(test::input_of(0)).sum());
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_EQ(log.messages()[0],
            "[RANK 0] backward: 2 modules are marked for activation checkpointing (the first one "
            "is 'first' "
            "of class Linear), but the forward of the model has kept all activations: it did not "
            "ask for the mark. Call the modules by accelerate::maybe_activation_checkpoint(block, "
            "x) instead of block(x) there, or turn activation_checkpointing off.");
}

TEST_F(CheckpointMarksTest, OfAModelThatAsksAreNotReported) {
  Accelerator accelerator(anew());
  Mlp net;
  (void)apply_activation_checkpointing(*net, is_linear);
  const CapturedLog log;
  const auto hidden = torch::tanh(maybe_activation_checkpoint(net->first, test::input_of(0)));
  accelerator.backward(net->second(hidden).sum());
  EXPECT_TRUE(log.messages().empty());
  EXPECT_TRUE(net->first->weight.grad().defined());
}

}  // namespace
}  // namespace accelerate
