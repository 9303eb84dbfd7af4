// Objects between real processes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "comm/samples.h"
#include "support/on_processes.h"

namespace lab {

/// An object that can refuse to be written.
struct Report {
  bool broken = false;
};
accelerate::Value to_value(const Report& report) {
  if (report.broken) throw std::domain_error("no report today");
  return accelerate::Value(1);
}
Report from_value(std::type_identity<Report>, const accelerate::Value&) { return {}; }

}  // namespace lab

namespace accelerate {
namespace {

TEST(GatherObject, ConcatenatesListsOfDifferentLengths) {
  on_processes(3, [](PartialState& state) {
    std::vector<std::string> mine;
    for (int i = 0; i < state.process_index(); ++i) {
      mine.push_back("rank " + std::to_string(state.process_index()) + " item " +
                     std::to_string(i));
    }
    EXPECT_EQ(gather_object(mine), reference().at("gather_object").get<std::vector<std::string>>());
    EXPECT_TRUE(gather_object(std::vector<int>{}).empty());
  });
}

TEST(GatherObject, MovesObjectsOfAnySize) {
  on_processes(2, [](PartialState& state) {
    // Around the slot of the first message, and far beyond it on one process only.
    for (const std::size_t size : {1, 3900, 4060, 4080, 4096, 5000, 1000000}) {
      const auto text = [&](int rank) {
        return std::string(rank == 0 ? 3 : size, static_cast<char>('a' + rank));
      };
      EXPECT_EQ(all_gather_object(text(state.process_index())), (std::vector{text(0), text(1)}))
          << size;
    }
    struct Record {
      std::int32_t rank;
      double score;
    };
    const auto records = gather_object(std::vector{Record{state.process_index(), 0.5}});
    ASSERT_EQ(records.size(), 2);
    EXPECT_EQ(records[1].rank, 1);
  });
}

TEST(GatherObject, SaysWhenTheTypesDiffer) {
  on_processes(2, [](PartialState& state) {
    const auto named = name_collectives("different types");
    const auto message = message_of<CommError>([&] {
      if (state.process_index() == 0) {
        (void)all_gather_object(1);
      } else {
        (void)all_gather_object(std::string("one"));
      }
    });
    EXPECT_NE(
        message.find(state.process_index() == 0 ? "found a string where an integer was expected"
                                                : "found an integer where a string was expected"),
        std::string::npos)
        << message;
  });
}

TEST(GatherObject, ThrowsEverywhereWhenOneProcessCannotWriteItsObject) {
  on_processes(2, [](PartialState& state) {
    const bool broken = state.process_index() == 1;
    const auto check = [&](const std::string& operation, auto&& call) {
      if (broken) {
        EXPECT_EQ(message_of<std::domain_error>(call), "no report today");
        return;
      }
      const auto message = message_of<CommError>(call);
      EXPECT_TRUE(message.starts_with(operation + " at ")) << message;
      EXPECT_TRUE(message.ends_with(": rank 1 failed: no report today")) << message;
    };
    std::vector<lab::Report> list{{broken}};
    check("gather_object", [&] { (void)gather_object(list); });
    check("all_gather_object", [&] { (void)all_gather_object(list.front()); });
    check("broadcast_object_list", [&] { broadcast_object_list(list, 1); });
    EXPECT_EQ(broadcast_object_list(list, 0).front().broken, false);

    const auto sparse = broken ? torch::eye(2).to_sparse() : torch::eye(2);
    EXPECT_NE(message_of<Error>([&] {
                (void)all_gather_object(sparse);
              }).find("only dense tensors with data can be sent"),
              std::string::npos);
    EXPECT_EQ(all_gather_object(state.process_index()), (std::vector{0, 1}));
  });
}

TEST(BroadcastObjectList, ReplacesListsAndTuplesInPlace) {
  on_processes(3, [](PartialState& state) {
    const bool root = state.process_index() == 1;
    std::vector<std::string> names(2, root ? "root" : "other");
    EXPECT_EQ(&broadcast_object_list(names, 1), &names);
    EXPECT_EQ(names, (std::vector<std::string>{"root", "root"}));

    std::tuple<int, std::string, std::vector<double>> mixed;
    if (root) mixed = {3, std::string(10000, 'x'), {0.5}};
    broadcast_object_list(mixed, 1);
    EXPECT_EQ(mixed, (std::tuple{3, std::string(10000, 'x'), std::vector{0.5}}));

    std::vector<Value> values(1);
    if (root) values[0] = Value::Dict{{"t", Value(torch::arange(3))}};
    broadcast_object_list(values, 1);
    EXPECT_EQ(values[0].repr(), "{'t': tensor([0, 1, 2])}");
  });
}

TEST(BroadcastObjectList, ThrowsEverywhereWhenLengthsDiffer) {
  on_processes(2, [](PartialState& state) {
    std::vector<int> list(state.process_index() + 1);
    const auto message = message_of<ArgumentError>([&] { broadcast_object_list(list); });
    EXPECT_NE(message.find("the lists must be equally long on all processes. Their lengths are:\n"
                           "  - Process 0: 1\n  - Process 1: 2"),
              std::string::npos)
        << message;
    EXPECT_EQ(all_gather_object(state.process_index()), (std::vector{0, 1}));
  });
}

}  // namespace
}  // namespace accelerate
