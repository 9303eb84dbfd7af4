// Collectives on trees that do not fit together, and on tensors that are not there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "comm/samples.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using torch::Tensor;
using Named = std::map<std::string, Tensor>;

/// All processes throw `CommError` with each of these texts.
void expect_strays(const std::function<void(int rank)>& call,
                   const std::vector<std::string>& texts) {
  on_processes(2, [&](PartialState& state) {
    const auto message = message_of<CommError>([&] { call(state.process_index()); });
    for (const auto& text : texts) {
      EXPECT_NE(message.find(text), std::string::npos) << text << " is not in: " << message;
    }
  });
}

/// Two tensors, so that the key of the second one differs between the processes.
Named keyed_by_rank(int rank) {
  return {{"a", torch::ones(2)}, {rank == 0 ? "b" : "c", torch::ones(2)}};
}

TEST(Structure, OfMapsCountsInEveryCollective) {
  const std::vector<std::string> keys{"['b']", "['c']", "rank 1"};
  expect_strays([](int rank) { (void)gather(keyed_by_rank(rank)); }, keys);
  expect_strays([](int rank) { broadcast(keyed_by_rank(rank)); }, keys);
  expect_strays([](int rank) { (void)reduce(keyed_by_rank(rank)); }, keys);
  expect_strays([](int rank) { (void)pad_across_processes(keyed_by_rank(rank)); },
                {"- Process 0: ['a'], ['b']\n", "- Process 1: ['a'], ['c']"});
  expect_strays(
      [](int rank) {
        (void)gather(Named{{rank == 0 ? "b" : "c", torch::ones(2)}});  // one tensor
      },
      keys);
}

TEST(Structure, OfListsOptionalsAndVariantsCountsToo) {
  using List = std::vector<Tensor>;
  const auto one = torch::ones(2);
  expect_strays(
      [&](int rank) {
        const List one_tensor{one}, two{one, one};
        (void)gather(rank == 0 ? std::pair{one_tensor, two} : std::pair{two, one_tensor});
      },
      {"[0][0], [1][0], [1][1]", "[0][0], [0][1], [1][0]"});
  expect_strays(
      [&](int rank) {
        using Maybe = std::optional<Tensor>;
        (void)gather(rank == 0 ? std::pair<Maybe, Maybe>{one, {}}
                               : std::pair<Maybe, Maybe>{{}, one});
      },
      {": [0]", ": [1]"});
  expect_strays(
      [&](int rank) {
        using Either = std::variant<std::array<Tensor, 1>, std::tuple<Tensor>>;
        (void)gather(rank == 0 ? Either(std::array{one}) : Either(std::tuple{one}));
      },
      {" is alternative 0", " is alternative 1"});
}

TEST(Undefined, TensorsAreRefusedByEveryCollectiveAlsoByOneProcess) {
  for (const int ranks : {1, 2}) {
    on_processes(ranks, [] {
      const std::pair both{torch::ones(2), Tensor()};
      const std::string text = ": the tensor at [1] is not defined";
      EXPECT_TRUE(
          message_of<ArgumentError>([&] { (void)gather(both); }).starts_with("gather" + text));
      EXPECT_TRUE(
          message_of<ArgumentError>([&] { broadcast(both); }).starts_with("broadcast" + text));
      EXPECT_TRUE(
          message_of<ArgumentError>([&] { (void)reduce(both); }).starts_with("reduce" + text));
      EXPECT_TRUE(message_of<ArgumentError>([&] {
                    (void)pad_across_processes(both);
                  }).starts_with("pad_across_processes" + text));
      EXPECT_TRUE(message_of<ArgumentError>([] {
                    (void)gather(Tensor());
                  }).starts_with("gather: the tensor is not defined"));
      EXPECT_NE(message_of<ArgumentError>([] {
                  (void)copy_tensor_to_devices(
                      PartialState().is_main_process() ? std::optional(Tensor()) : std::nullopt);
                }).find("the tensor of process 0 is not defined"),
                std::string::npos);
      EXPECT_FALSE(gather(std::optional<Tensor>()).has_value()) << "absent on all processes";
    });
  }
}

}  // namespace
}  // namespace accelerate
