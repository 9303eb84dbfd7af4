// Who writes what, and what the others see when a process fails.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "accelerate/accelerator.h"
#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "checkpoint/models.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using test::filled;
using test::message_of;
using test::names_in;
using test::SharedFolder;

Accelerator on_cpu_with(const ProjectConfiguration& project) {
  return Accelerator({.cpu = true, .project_config = project});
}

TEST(SaveOnProcesses, WritesOnTheMainProcessAndIsCompleteEverywhere) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    Accelerator accelerator({.cpu = true});
    const auto model = accelerator.prepare(filled<test::Small>());
    accelerator.save_model(model, folder.path() / "model", {.max_shard_size = 100});
    // Complete when it returns, on every rank.
    test::Small loaded;
    load_checkpoint_in_model(loaded, folder.path() / "model", {.strict = true});
    test::expect_equal(loaded, *filled<test::Small>());

    accelerator.save(Value(accelerator.process_index()), folder.path() / "rank.bin");
    accelerator.wait_for_everyone();
    EXPECT_EQ(load(folder.path() / "rank.bin").as_int(), 0);
  });
}

TEST(SaveOnProcesses, WritesOnceOnEachHostWhereAsked) {
  const SharedFolder folder;
  auto options = folder.options();
  options.processes_per_host = 2;
  on_processes(4, options, [&] {
    auto accelerator = on_cpu_with({.save_on_each_node = true});
    const auto host = folder.path() / ("host" + std::to_string(accelerator.process_index() / 2));
    // Each process has a folder of its own, to see which of them write.
    const auto mine = host / std::to_string(accelerator.process_index());
    accelerator.save_model(filled<test::Small>(), mine);
    EXPECT_EQ(std::filesystem::exists(mine), accelerator.is_local_main_process());
    accelerator.save(Value(1), host / ("rank" + std::to_string(accelerator.process_index())));
    EXPECT_EQ(
        std::filesystem::exists(host / ("rank" + std::to_string(accelerator.process_index()))),
        accelerator.is_local_main_process());
  });
}

TEST(SaveOnProcesses, ThrowsEverywhereWhenTheWriterFails) {
  const SharedFolder folder;
  on_processes(3, folder.options(), [&] {
    Accelerator accelerator({.cpu = true});
    const auto file = folder.path() / "file";
    if (accelerator.is_main_process()) std::ofstream(file) << "x";
    accelerator.wait_for_everyone();
    const auto save = [&] { accelerator.save_model(filled<test::Small>(), file / "below"); };
    if (accelerator.is_main_process()) {
      EXPECT_NE(message_of<CheckpointError>(save).find("Cannot create the folder"),
                std::string::npos);
    } else {
      const auto message = message_of<CommError>(save);
      EXPECT_NE(message.find("Cannot create the folder"), std::string::npos) << message;
      EXPECT_NE(message.find("rank 0"), std::string::npos) << message;
    }
    // Processes are still in step.
    accelerator.save_model(filled<test::Small>(), folder.path() / "good");
    EXPECT_TRUE(std::filesystem::exists(folder.path() / "good" / "model.safetensors"));
  });
}

TEST(SaveOnProcesses, NamesHaveThePrefixOfTheWrapperUnlessUnwrapped) {
  on_processes(2, [] {
    Accelerator accelerator({.cpu = true});
    const auto model = accelerator.prepare(filled<test::Small>());
    EXPECT_EQ(accelerator.get_state_dict(model).keys().front(), "linear1.weight");
    EXPECT_EQ(accelerator.get_state_dict(model, /*unwrap=*/false).keys().front(),
              "module.linear1.weight");
  });
}

// ---- load from rank 0 ---------------------------------------------------------------------------

TEST(LoadOnProcesses, Rank0ReadsForAll) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    Accelerator accelerator({.cpu = true});
    const auto weights = folder.path() / "model";
    accelerator.save_model(filled<test::Small>(), weights);
    // The other process has no such folder.
    const auto mine = accelerator.is_main_process() ? weights : folder.path() / "nowhere";
    test::Small net;
    if (!accelerator.is_main_process()) {
      set_module_tensor_to_device(net, "linear1.weight", torch::kMeta);
    }
    auto report = load_checkpoint_in_model(net, mine, {.broadcast_from_rank0 = true});
    test::expect_equal(net, *filled<test::Small>());
    EXPECT_TRUE(report.missing_keys.empty());

    test::Leaf other({{"weight", torch::zeros(2)}});
    report = load_checkpoint_in_model(other, mine, {.broadcast_from_rank0 = true});
    EXPECT_EQ(report.missing_keys, std::vector<std::string>{"weight"});
    EXPECT_EQ(report.unexpected_keys.size(), 9U);
  });
}

TEST(LoadOnProcesses, AllHaveTheWholeReportOfRank0AndTheirTies) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    Accelerator accelerator({.cpu = true});
    const auto file = folder.path() / "model.safetensors";
    StateDict state("Tensor");
    state.insert("net.a", torch::ones({3}));
    state.insert("net.b", torch::ones({2}));
    accelerator.save(state, file, {.safe_serialization = true});

    const auto shared = torch::zeros({3});
    test::Leaf leaf({{"a", shared}, {"a2", torch::zeros({3})}, {"b", torch::zeros({5})}});
    tie_parameters(leaf, {"a", "a2"});
    if (!accelerator.is_main_process()) {
      for (const auto* name : {"a", "a2"}) set_module_tensor_to_device(leaf, name, torch::kMeta);
      tie_parameters(leaf, {"a", "a2"});
    }
    const auto report = load_checkpoint_in_model(leaf, file,
                                                 {.broadcast_from_rank0 = true,
                                                  .key_mapping = KeyMapping().strip_prefix("net."),
                                                  .ignore_mismatched_sizes = true});
    EXPECT_EQ(report.mismatched_keys, (std::vector<MismatchedKey>{{"b", {2}, {5}}}));
    ASSERT_EQ(report.key_mapping.rules.size(), 1U);
    EXPECT_EQ(report.key_mapping.rules[0].matched, 2);
    EXPECT_EQ(leaf.named_parameters()["a2"].sum().item<float>(), 3);
    EXPECT_EQ(leaf.named_parameters()["a2"].data_ptr(), leaf.named_parameters()["a"].data_ptr());
  });
}

TEST(LoadOnProcesses, AllThrowIfRank0CannotRead) {
  on_processes(2, [] {
    Accelerator accelerator({.cpu = true});
    test::Small net;
    const auto load = [&] {
      load_checkpoint_in_model(net, "nowhere", {.broadcast_from_rank0 = true});
    };
    if (accelerator.is_main_process()) {
      EXPECT_THROW(load(), ArgumentError);
    } else {
      EXPECT_NE(message_of<CommError>(load).find("nowhere"), std::string::npos);
    }
  });
}

}  // namespace
}  // namespace accelerate
