// gathered_parameters of models that are not sharded.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "accelerator/nets.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;
class GatheredParameters : public test::Stateless {};

TEST_F(GatheredParameters, RunsTheFunctionAndReturnsItsResult) {
  EXPECT_EQ(
      gathered_parameters(std::vector{torch::ones(1)}, {.modifier_rank = 0}, [] { return 7; }), 7);
  EXPECT_EQ(gathered_parameters(*torch::nn::Linear(1, 1), {}, [] { return 7; }), 7);
}

TEST_F(GatheredParameters, RefusesAProcessThatDoesNotExist) {
  const std::vector<torch::Tensor> none;
  EXPECT_EQ(
      message_of<ArgumentError>([&] { gathered_parameters(none, {.modifier_rank = 1}, [] {}); }),
      "gathered_parameters: modifier_rank is 1, but there are processes 0 to 0.");
  EXPECT_EQ(gathered_parameters(none, {.modifier_rank = 9, .enabled = false}, [] { return 7; }), 7);
}

}  // namespace
}  // namespace accelerate
