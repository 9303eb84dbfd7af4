// Collectives that autograd records: what they give, and what their backward gives.
#include <accelerate/parallel.h>
#include <accelerate/state.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>

#include "accelerate/errors.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using torch::Tensor;

/// [4, 6], other numbers on each rank.
Tensor input_of(int rank) {
  return (torch::arange(24, torch::kDouble).view({4, 6}) + 100 * rank).set_requires_grad(true);
}

/// The gradients that arrive at the result, other numbers on each rank.
Tensor weights_like(const Tensor& result, int rank) {
  return torch::arange(result.numel(), torch::kDouble).view(result.sizes()) * (rank + 1);
}

struct Passed {
  Tensor result;
  Tensor gradient;
};
Passed pass(const std::function<Tensor(const Tensor&)>& region, int rank) {
  const auto x = input_of(rank);
  auto result = region(x);
  (result * weights_like(result, rank)).sum().backward();
  return {result.detach(), x.grad()};
}

/// The same on all ranks of `size`, added up.
Tensor sum_of(int size, const std::function<Tensor(int)>& of) {
  auto sum = of(0);
  for (int rank = 1; rank < size; ++rank) sum = sum + of(rank);
  return sum;
}
Tensor cat_of(int size, std::int64_t dim, const std::function<Tensor(int)>& of) {
  std::vector<Tensor> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(of(rank));
  return torch::cat(all, dim);
}

TEST(Regions, CopyAndReduceAreEachOthersBackward) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const int rank = state.process_index();
    const auto copied = pass([&](const Tensor& x) { return nn::copy_to_region(x, group); }, rank);
    EXPECT_TRUE(copied.result.equal(input_of(rank)));
    EXPECT_TRUE(copied.gradient.equal(
        sum_of(2, [&](int one) { return weights_like(copied.result, one); })));

    const auto reduced =
        pass([&](const Tensor& x) { return nn::reduce_from_region(x, group); }, rank);
    EXPECT_TRUE(reduced.result.equal(sum_of(2, [](int one) { return input_of(one).detach(); })));
    EXPECT_TRUE(reduced.gradient.equal(weights_like(reduced.result, rank)));
  });
}

TEST(Regions, GatherAndScatterAlongAnyDimension) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const int rank = state.process_index();
    for (const std::int64_t dim : {0, 1, -1}) {
      const auto share = input_of(0).size(dim) / 2;
      const auto all = cat_of(2, dim, [](int one) { return input_of(one).detach(); });
      const auto own = [&](const Tensor& whole) {
        return whole.narrow(dim, rank * (whole.size(dim) / 2), whole.size(dim) / 2);
      };
      const auto gathered =
          pass([&](const Tensor& x) { return nn::gather_from_region(x, dim, group); }, rank);
      EXPECT_TRUE(gathered.result.equal(all));
      EXPECT_TRUE(gathered.gradient.equal(own(weights_like(all, rank))));

      const auto scattered =
          pass([&](const Tensor& x) { return nn::scatter_to_region(x, dim, group); }, rank);
      EXPECT_TRUE(scattered.result.equal(input_of(rank).detach().narrow(dim, rank * share, share)));
      EXPECT_TRUE(scattered.gradient.equal(
          cat_of(2, dim, [&](int one) { return weights_like(scattered.result, one); })));

      const auto sequence =
          pass([&](const Tensor& x) { return nn::gather_from_sequence(x, dim, group); }, rank);
      EXPECT_TRUE(sequence.result.equal(all));
      EXPECT_TRUE(
          sequence.gradient.equal(own(sum_of(2, [&](int one) { return weights_like(all, one); }))));

      const auto summed = pass(
          [&](const Tensor& x) { return nn::reduce_scatter_to_sequence(x, dim, group); }, rank);
      EXPECT_TRUE(
          summed.result.equal(own(sum_of(2, [](int one) { return input_of(one).detach(); }))));
      EXPECT_TRUE(summed.gradient.equal(
          cat_of(2, dim, [&](int one) { return weights_like(summed.result, one); })));
    }
  });
}

TEST(Regions, ResultsMayBeChangedInPlace) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const auto x = input_of(state.process_index());
    auto total = torch::zeros({}, torch::kDouble);
    for (const std::int64_t dim : {0, 1}) {
      total = total + nn::gather_from_region(x, dim, group).add_(1).sum();
      total = total + nn::scatter_to_region(x, dim, group).add_(1).sum();
      total = total + nn::reduce_scatter_to_sequence(x, dim, group).add_(1).sum();
    }
    total = total + nn::reduce_from_region(x, group).add_(1).sum();
    total.backward();
    EXPECT_TRUE(x.grad().defined());
  });
}

TEST(Regions, RefuseASizeThatCannotBeDivided) {
  on_processes(2, [](PartialState& state) {
    try {
      (void)nn::scatter_to_region(torch::zeros({3, 2}), 0, state.process_group());
      FAIL() << "nothing was thrown";
    } catch (const ArgumentError& error) {
      EXPECT_NE(std::string(error.what()).find("3 is no multiple of 2"), std::string::npos)
          << error.what();
    }
  });
}

TEST(Regions, ReturnTheirInputWithoutAGroup) {
  const auto x = input_of(0);
  EXPECT_TRUE(nn::copy_to_region(x, nullptr).is_same(x));
  EXPECT_TRUE(nn::gather_from_sequence(x, 0, nullptr).is_same(x));
}

}  // namespace
}  // namespace accelerate
