// Layers of which each process has a part compute what whole layers compute.
#include <accelerate/parallel.h>
#include <accelerate/state.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::message_of;
using torch::Tensor;
namespace F = torch::nn::functional;

const auto kDouble = torch::TensorOptions(torch::kDouble);

/// Everything that a seed decides, in double.
struct Precise {
  Precise() { torch::set_default_dtype(caffe2::TypeMeta::Make<double>()); }
};

double difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

/// What rank `rank` of `size` has of a whole tensor.
Tensor part(const Tensor& whole, std::int64_t dim, int rank, int size) {
  const auto share = whole.size(dim) / size;
  return whole.narrow(dim, rank * share, share);
}

/// A multilayer perceptron, whole.
struct Serial {
  Serial() {
    torch::manual_seed(4);
    up = torch::nn::Linear(6, 8);
    down = torch::nn::Linear(8, 6);
  }
  Tensor forward(const Tensor& x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};

Tensor input() {
  torch::manual_seed(9);
  return torch::randn({2, 4, 6}, kDouble).set_requires_grad(true);
}

void compare_with_serial(PartialState& state, bool sequence_parallel) {
  const Precise precise;
  const auto group = state.process_group();
  const int rank = state.process_index();
  const int size = state.num_processes();
  Serial serial;
  const auto whole_input = input();
  const auto wanted = serial.forward(whole_input);
  const auto weights = torch::arange(wanted.numel(), kDouble).view(wanted.sizes());
  (wanted * weights).sum().backward();

  torch::manual_seed(4);
  nn::ColumnParallelLinear up(6, 8, group,
                              nn::ColumnParallelLinearOptions{
                                  .gather_output = false, .sequence_parallel = sequence_parallel});
  nn::RowParallelLinear down(8, 6, group,
                             nn::RowParallelLinearOptions{.input_is_parallel = true,
                                                          .sequence_parallel = sequence_parallel});
  EXPECT_TRUE(up->weight.equal(part(serial.up->weight, 0, rank, size)));
  EXPECT_TRUE(down->weight.equal(part(serial.down->weight, 1, rank, size)));

  const auto x = input();
  auto entering = sequence_parallel ? nn::scatter_to_region(x, 1, group) : x;
  auto y = down(torch::gelu(up(entering)));
  if (sequence_parallel) {
    EXPECT_EQ(y.size(1), 4 / size);
    y = nn::gather_from_region(y, 1, group);
  }
  EXPECT_LT(difference(y, wanted), 1e-14);
  (y * weights).sum().backward();
  EXPECT_LT(difference(x.grad(), whole_input.grad()), 1e-12);
  EXPECT_LT(difference(up->weight.grad(), part(serial.up->weight.grad(), 0, rank, size)), 1e-12);
  EXPECT_LT(difference(up->bias.grad(), part(serial.up->bias.grad(), 0, rank, size)), 1e-12);
  EXPECT_LT(difference(down->weight.grad(), part(serial.down->weight.grad(), 1, rank, size)),
            1e-12);
  EXPECT_LT(difference(down->bias.grad(), serial.down->bias.grad()), 1e-12);
}

TEST(ParallelLayers, AreTheSerialPerceptron) {
  for (const int size : {1, 2, 4}) {
    on_processes(size, [](PartialState& state) {
      compare_with_serial(state, /*sequence_parallel=*/false);
      compare_with_serial(state, /*sequence_parallel=*/true);
    });
  }
}

TEST(ParallelLayers, LeaveTheirBiasToTheCallerIfAsked) {
  for (const int size : {1, 2}) {
    on_processes(size, [](PartialState& state) {
      const Precise precise;
      const auto group = state.process_group();
      const int rank = state.process_index();
      Serial serial;
      const auto x = input();
      const auto weights = torch::arange(48, kDouble).view({2, 4, 6});
      (serial.forward(x) * weights).sum().backward();
      torch::manual_seed(4);
      nn::ColumnParallelLinear up(
          6, 8, group,
          nn::ColumnParallelLinearOptions{
              .gather_output = false, .sequence_parallel = true, .skip_bias_add = true});
      nn::RowParallelLinear down(
          8, 6, group,
          nn::RowParallelLinearOptions{
              .input_is_parallel = true, .sequence_parallel = true, .skip_bias_add = true});
      const auto hidden = up(nn::scatter_to_region(input(), 1, group));
      const auto y = down(torch::gelu(hidden + up->bias)) + down->bias;
      const auto whole = nn::gather_from_region(y, 1, group);
      EXPECT_LT(difference(whole, serial.forward(x)), 1e-14);
      (whole * weights).sum().backward();
      const auto processes = state.num_processes();
      EXPECT_LT(difference(up->bias.grad(), part(serial.up->bias.grad(), 0, rank, processes)),
                1e-12);
      EXPECT_LT(difference(down->bias.grad(), serial.down->bias.grad()), 1e-12);
      EXPECT_NE(message_of<ArgumentError>([&] {
                  nn::ColumnParallelLinear(6, 8, group,
                                           nn::ColumnParallelLinearOptions{.skip_bias_add = true});
                }).find("Set gather_output = false"),
                std::string::npos);
    });
  }
}

TEST(ParallelLayers, TakeAndGiveWholeTensorsByThemselves) {
  on_processes(2, [](PartialState& state) {
    const Precise precise;
    const auto group = state.process_group();
    Serial serial;
    const auto x = input();
    torch::manual_seed(4);
    nn::ColumnParallelLinear up(6, 8, group);
    nn::RowParallelLinear down(8, 6, group);
    EXPECT_LT(difference(up(x), serial.up(x)), 1e-14);
    EXPECT_LT(difference(down(serial.up(x)), serial.down(serial.up(x))), 1e-14);
  });
}

TEST(ParallelLayers, LookUpAVocabularyOfWhichEachHasAPart) {
  on_processes(2, [](PartialState& state) {
    const Precise precise;
    const auto group = state.process_group();
    const int rank = state.process_index();
    torch::manual_seed(4);
    torch::nn::Embedding whole(10, 3);
    torch::manual_seed(4);
    nn::VocabParallelEmbedding cut(10, 3, group);
    const auto ids = torch::tensor({{0, 9, 4}, {5, 5, 1}});
    const auto wanted = whole(ids);
    const auto given = cut(ids);
    EXPECT_TRUE(given.equal(wanted));
    const auto weights = torch::arange(18, kDouble).view({2, 3, 3});
    (wanted * weights).sum().backward();
    (given * weights).sum().backward();
    EXPECT_TRUE(cut->weight.grad().equal(part(whole->weight.grad(), 0, rank, 2)));
    EXPECT_NE(message_of<ArgumentError>([&] {
                (void)cut(torch::tensor({10}));
              }).find("between 10 and 10, but it has 10 rows"),
              std::string::npos);
  });
}

TEST(VocabParallelCrossEntropy, IsThatOfTheWholeVocabulary) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const int rank = state.process_index();
    torch::manual_seed(1);
    const auto whole = torch::randn({3, 4, 10}, kDouble).set_requires_grad(true);
    const auto cut = part(whole.detach(), -1, rank, 2).clone().set_requires_grad(true);
    auto target = torch::randint(10, {3, 4}, torch::kLong);
    target[0][1] = -100;
    const auto weights = torch::arange(12, kDouble).view({3, 4});
    for (const double smoothing : {0.0, 0.3}) {
      const auto wanted = F::cross_entropy(
          whole.flatten(0, 1), target.flatten(),
          F::CrossEntropyFuncOptions().reduction(torch::kNone).label_smoothing(smoothing));
      const auto given =
          nn::vocab_parallel_cross_entropy(cut, target, group, {.label_smoothing = smoothing});
      EXPECT_LT(difference(given.flatten(), wanted), 1e-13);
      whole.mutable_grad() = cut.mutable_grad() = Tensor();
      (wanted.view({3, 4}) * weights).sum().backward();
      (given * weights).sum().backward();
      EXPECT_LT(difference(cut.grad(), part(whole.grad(), -1, rank, 2)), 1e-13);
    }
    // The example of the documentation: ln 6 - ln 3.
    const auto two = rank == 0 ? torch::tensor({{0.0, std::log(3.0)}}) : torch::zeros({1, 2});
    EXPECT_NEAR(nn::vocab_parallel_cross_entropy(two, torch::tensor({1}), group).item<double>(),
                0.693147, 1e-6);
  });
}

TEST(VocabParallelCrossEntropy, GivesPaddingNoProbability) {
  EXPECT_EQ(nn::padded_vocab_size(50257, 2), 50432);
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const int rank = state.process_index();
    torch::manual_seed(1);
    const auto padded = torch::randn({5, 8}, kDouble);
    const auto target = torch::tensor({0, 4, 2, 1, 3});
    for (const std::int64_t size : {5, 3}) {  // on rank 1 one score of four, and none
      const auto cut = part(padded, -1, rank, 2).clone().set_requires_grad(true);
      const auto own = target.clamp_max(size - 1);
      const auto given = nn::vocab_parallel_cross_entropy(
          cut, own, group, {.label_smoothing = 0.1, .vocab_size = size});
      const auto whole = padded.narrow(1, 0, size).clone().set_requires_grad(true);
      const auto wanted = F::cross_entropy(
          whole, own, F::CrossEntropyFuncOptions().reduction(torch::kNone).label_smoothing(0.1));
      EXPECT_LT(difference(given, wanted), 1e-13);
      given.sum().backward();
      wanted.sum().backward();
      const auto all = torch::constant_pad_nd(whole.grad(), {0, 8 - size});
      EXPECT_LT(difference(cut.grad(), part(all, -1, rank, 2)), 1e-13);
    }
    EXPECT_NE(message_of<ArgumentError>([&] {
                (void)nn::vocab_parallel_cross_entropy(part(padded, -1, rank, 2), target, group,
                                                       {.vocab_size = 4});
              }).find("a target is 4"),
              std::string::npos);
  });
}

TEST(ParallelDropout, DrawsTheMaskOfTheWholeActivation) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const auto whole = torch::ones({3, 8});
    torch::manual_seed(2);
    const auto wanted = torch::dropout(whole, 0.5, true);
    const auto after = torch::rand({1});
    torch::manual_seed(2);
    const auto own = part(whole, 1, state.process_index(), 2);
    EXPECT_TRUE(nn::parallel_dropout(own, 0.5, true, -1, group)
                    .equal(part(wanted, 1, state.process_index(), 2)));
    EXPECT_TRUE(torch::rand({1}).equal(after));
    EXPECT_TRUE(nn::parallel_dropout(own, 0.5, false, -1, group).equal(own));
  });
}

TEST(ParallelLayers, RefuseSizesThatCannotBeDivided) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const auto text = message_of<ArgumentError>([&] { nn::ColumnParallelLinear(4, 5, group); });
    EXPECT_NE(text.find("has size 5, which cannot be divided among 2"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace accelerate
