// Debug mode: mismatched inputs are reported, with the same text on all processes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "comm/samples.h"
#include "support/line_up.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using torch::Tensor;
using Named = std::map<std::string, Tensor>;
using Mismatch = DistributedOperationException;

const OnProcessesOptions kDebug{.environment = {{"ACCELERATE_DEBUG_MODE", "1"}}};

TEST(DebugMode, LetsMatchingInputsPass) {
  on_processes(2, kDebug, [](PartialState& state) {
    ASSERT_TRUE(state.debug());
    const double rank = state.process_index();
    for (int round = 0; round < 4; ++round) {
      EXPECT_EQ(numbers(gather(torch::tensor({rank}))), (std::vector<double>{0, 1}));
      EXPECT_EQ(numbers(reduce(torch::tensor({rank}))), std::vector<double>{0.5});
      EXPECT_EQ(numbers(broadcast(torch::tensor({rank}))), std::vector<double>{0});
      EXPECT_EQ(pad_across_processes(torch::ones(state.process_index() + 1)).numel(), 2);
    }
    EXPECT_TRUE(gather(std::vector<Tensor>{}).empty());
  });
}

TEST(DebugMode, ShowsTheShapesOfAllProcesses) {
  on_processes(2, kDebug, [](PartialState& state) {
    const auto mine = torch::zeros({4, 2 + state.process_index()});
    const std::string sentence =
        "Cannot apply desired operation due to shape mismatches. All shapes across devices "
        "must "
        "be valid.\n\n";
    EXPECT_EQ(message_of<Mismatch>([&] { (void)gather(mine); }),
              sentence +
                  "Operation: `accelerate.utils.operations.gather`\n"
                  "Input shapes:\n"
                  "  - Process 0: [4, 2]\n"
                  "  - Process 1: [4, 3]");
    EXPECT_EQ(message_of<Mismatch>([&] { (void)reduce(Named{{"tensor", mine}}); }),
              sentence +
                  "Operation: `accelerate.utils.operations.reduce`\n"
                  "Input shapes:\n"
                  "  - Process 0: {'tensor': [4, 2]}\n"
                  "  - Process 1: {'tensor': [4, 3]}");
    EXPECT_EQ(message_of<Mismatch>([&] { broadcast(mine); }),
              sentence +
                  "Operation: `accelerate.utils.operations.broadcast`\n"
                  "Input shapes:\n"
                  "  - Process 0: [4, 2]\n"
                  "  - Process 1: [4, 3]");
    try {
      (void)gather(mine);
    } catch (const Mismatch& error) {
      EXPECT_EQ(error.rank(), 1);
    }
    EXPECT_EQ(gather(torch::ones(1)).numel(), 2);  // nothing was sent, nobody is out of step
  });
}

TEST(DebugMode, ShowsDifferentKeysAndDtypes) {
  on_processes(2, kDebug, [](PartialState& state) {
    const bool first = state.process_index() == 0;
    EXPECT_NE(message_of<Mismatch>([&] {
                (void)gather(Named{{first ? "a" : "b", torch::ones(1)}});
              }).find("  - Process 0: {'a': [1]}\n  - Process 1: {'b': [1]}"),
              std::string::npos);
    EXPECT_EQ(message_of<Mismatch>(
                  [&] { (void)gather(torch::ones(2, first ? torch::kFloat : torch::kInt)); }),
              "Cannot apply desired operation due to dtype mismatches. All dtypes across devices "
              "must be valid.\n\nOperation: `accelerate.utils.operations.gather`\n"
              "Input shapes:\n  - Process 0: [2]\n  - Process 1: [2]\n"
              "Input dtypes:\n  - Process 0: 'torch.float32'\n  - Process 1: 'torch.int32'");
  });
}

TEST(DebugMode, ShowsWhereEachProcessIsWhenTheOperationsDiffer) {
  on_processes(2, kDebug, [](PartialState& state) {
    const auto message = message_of<Mismatch>([&] {
      if (state.process_index() == 0) {
        (void)gather(torch::ones(1));
      } else {
        (void)reduce(torch::ones(1), Reduction::kSum);
      }
    });
    EXPECT_NE(message.find("Operations:\n  - Process 0: `accelerate.utils.operations.gather` at "),
              std::string::npos)
        << message;
    EXPECT_NE(
        message.find("  - Process 1: `accelerate.utils.operations.reduce` with reduction=sum at "),
        std::string::npos)
        << message;
    EXPECT_NE(message.find("debug_mode_multi_test.cpp:"), std::string::npos) << message;
    EXPECT_NE(message_of<Mismatch>([&] {
                broadcast(torch::ones(1), state.process_index());
              }).find("with from_process=1"),
              std::string::npos);
  });
}

TEST(DebugMode, RefusesTensorsOnAnotherDeviceOnAllProcesses) {
  on_processes(2, kDebug, [](PartialState& state) {
    const auto mine = torch::ones(1, state.process_index() == 1 ? torch::kMeta : torch::kCPU);
    EXPECT_EQ(
        message_of<Mismatch>([&] { (void)gather(mine); }),
        "Process 1 passes a tensor on meta to `accelerate.utils.operations.gather`, but its state "
        "is configured for cpu. Move it to cpu before the call.\n\n"
        "Devices:\n  - Process 0: 'cpu'\n  - Process 1: 'meta'");
  });
}

TEST(DebugMode, ComparesTheDeviceOfEveryTensorOnAllProcesses) {
  on_processes(2, kDebug, [](PartialState& state) {
    const bool first = state.process_index() == 0;
    const Named mine{{"a", torch::ones(1)},
                     {"b", torch::ones(1, first ? torch::kCPU : torch::kMeta)}};
    EXPECT_EQ(message_of<Mismatch>([&] { (void)gather(mine); }),
              "Cannot apply desired operation due to device mismatches. Move the tensors of "
              "rank 1 to the devices of rank 0 before the call.\n\n"
              "Operation: `accelerate.utils.operations.gather`\n"
              "Devices:\n  - Process 0: {'a': 'cpu', 'b': 'cpu'}\n"
              "  - Process 1: {'a': 'cpu', 'b': 'meta'}");
    EXPECT_EQ(gather(torch::ones(1)).numel(), 2);  // nobody is out of step
  });
}

TEST(DebugMode, RefusesTensorsThatCannotBeUsedOnAllProcesses) {
  on_processes(2, kDebug, [](PartialState& state) {
    const bool first = state.process_index() == 0;
    const auto dense = torch::ones({2, 2});
    const std::vector<Tensor> sparse{dense, first ? dense : dense.to_sparse()};
    EXPECT_EQ(message_of<Mismatch>([&] { (void)gather(sparse); }),
              "Cannot apply desired operation: some processes pass tensors that cannot be "
              "used. Pass dense tensors that are not expanded.\n\n"
              "Operation: `accelerate.utils.operations.gather`\n"
              "Tensors that cannot be used:\n  - Process 0: none\n"
              "  - Process 1: the tensor at [1] is of layout Sparse");
    EXPECT_THROW((void)reduce(sparse), Mismatch);
    EXPECT_THROW((void)pad_across_processes(sparse), Mismatch);
    const auto expanded = message_of<Mismatch>(
        [&] { broadcast(first ? torch::ones(1).expand({2}) : torch::ones(2), 1); });
    EXPECT_NE(expanded.find("  - Process 0: the tensor is expanded\n  - Process 1: none"),
              std::string::npos)
        << expanded;
    // Alike on all processes: each says it as it does without debug mode.
    EXPECT_THROW((void)gather(dense.to_sparse()), ArgumentError);
    EXPECT_EQ(gather(torch::ones(1)).numel(), 2);  // nobody is out of step
  });
}

TEST(DebugMode, NestsTheErrorOfTheSizeExchangeInThatOfPadding) {
  on_processes(2, kDebug, [](PartialState& state) {
    const auto mine = state.process_index() == 0 ? torch::ones({2, 2}) : torch::ones({2, 2, 2});
    try {
      (void)pad_across_processes(mine);
      FAIL() << "no exception";
    } catch (const Mismatch& outer) {
      EXPECT_NE(
          std::string(outer.what()).find("`accelerate.utils.operations.pad_across_processes`"),
          std::string::npos);
      const auto inner = message_of<Mismatch>([&] { std::rethrow_if_nested(outer); });
      EXPECT_NE(inner.find("Operation: `accelerate.utils.operations.gather`\nInput shapes:\n"
                           "  - Process 0: [1, 2]\n  - Process 1: [1, 3]"),
                std::string::npos)
          << inner;
    }
  });
}

TEST(DebugMode, NamesTheProcessesThatDoNotCome) {
  on_processes(3, kDebug, [] {
    test::line_up(std::string(std::getenv("ACCELERATE_DEBUG_RDV_FILE")) + "_line", 3);
    PartialState state(PartialStateOptions{.cpu = true, .timeout = std::chrono::seconds(2)});
    (void)gather(torch::ones(1));
    if (state.process_index() > 0) return;
    const auto message = message_of<Mismatch>([] { (void)reduce(torch::ones(1)); });
    EXPECT_NE(message.find("processes 1, 2 did not reach `accelerate.utils.operations.reduce` #2 "
                           "within 2 seconds: rank 1, rank 2 took another branch, or has ended.\n\n"
                           "Operations:\n  - Process 0: `accelerate.utils.operations.reduce` with "
                           "reduction=mean at "),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("\n  - Process 1: not here\n  - Process 2: not here"), std::string::npos)
        << message;
  });
}

TEST(DebugMode, CanBeSwitchedInTheProgram) {
  on_processes(2, [](PartialState& state) {
    EXPECT_FALSE(state.debug());
    state.set_debug(true);
    EXPECT_THROW((void)gather(torch::ones(1 + state.process_index())), Mismatch);
  });
}

TEST(DebugMode, ComparesTheArgumentsOfPadding) {
  on_processes(2, kDebug, [](PartialState& state) {
    const bool first = state.process_index() == 0;
    const auto inner = [](const PadOptions& options) {
      return message_of<Mismatch>([&] {
        try {
          (void)pad_across_processes(torch::ones({2, 2}), options);
        } catch (const Mismatch& outer) {
          std::rethrow_if_nested(outer);
        }
      });
    };
    EXPECT_NE(inner({.dim = first ? 0 : 1}).find("with dim=1, pad_index=0, pad_first=false at "),
              std::string::npos);
    EXPECT_NE(inner({.pad_index = first ? 0 : 7}).find("pad_index=7"), std::string::npos);
    EXPECT_NE(inner({.pad_first = !first}).find("pad_first=true"), std::string::npos);
  });
}

TEST(DebugMode, ShowsNestedTensorsAndOtherLeavesOnAllProcesses) {
  on_processes(2, kDebug, [](PartialState& state) {
    const bool first = state.process_index() == 0;
    const auto nested = at::_nested_tensor_from_tensor_list({torch::ones(2), torch::ones(3)});
    EXPECT_NE(message_of<Mismatch>([&] {
                (void)gather(first ? nested : torch::ones(2));
              }).find("  - Process 0: 'nested'\n  - Process 1: [2]"),
              std::string::npos);
    const Value leaf = first ? Value(torch::ones(2)) : Value("text");
    EXPECT_NE(message_of<Mismatch>([&] {
                (void)gather(leaf);
              }).find("  - Process 0: [2]\n  - Process 1: 'text'"),
              std::string::npos);
    EXPECT_EQ(message_of<ArgumentError>([] { (void)gather(Value("text")); }),
              "gather got a leaf of kind string: 'text'. Only leaves of kind tensor can be used "
              "here.");
    EXPECT_EQ(gather(torch::ones(1)).numel(), 2);  // nobody is out of step
  });
}

/// A store that loses its connection when everybody has come.
class LostStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    PrefixStore::wait(keys, timeout);
    TORCH_CHECK_WITH(DistStoreError, false, "connection lost");
  }
};

TEST(DebugMode, ReportsALostStoreAsACommError) {
  on_processes(2, kDebug, [](PartialState& state) {
    const auto store = c10::make_intrusive<LostStore>("lost", state.store());
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, state.process_index(), 2);
    group->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO,
                      state.process_group()->getBackend(c10::kCPU));
    const auto message = message_of<CommError>([&] { (void)gather(torch::ones(1), group); });
    EXPECT_EQ(message.find("gather at "), 0U) << message;
    EXPECT_NE(message.find(": every process came, but the store failed on rank "),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("connection lost"), std::string::npos) << message;
  });
}

}  // namespace
}  // namespace accelerate
