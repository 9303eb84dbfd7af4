// Meshes on real sub-groups, through shared memory and through Gloo.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::message_of;
using Ranks = std::vector<std::int64_t>;

/// The ranks of the run that answer in the group of a dimension.
Ranks heard_in(const DeviceMesh& mesh, const std::string& name) {
  const auto rank = torch::full({1}, PartialState().process_index(), torch::kLong);
  const auto all = gather(rank, mesh.get_group(name));
  return {all.data_ptr<std::int64_t>(), all.data_ptr<std::int64_t>() + all.numel()};
}

void expect_groups(const DeviceMesh& mesh) {
  auto names = mesh.mesh_dim_names();
  const auto flattened = mesh.layout().flattened_names();
  names.insert(names.end(), flattened.begin(), flattened.end());
  for (const auto& name : names) {
    EXPECT_EQ(heard_in(mesh, name), mesh.members(name)) << name;
    EXPECT_EQ(mesh.get_group(name)->getRank(), mesh.get_local_rank(name)) << name;
    EXPECT_EQ(mesh.get_group(name)->getSize(), mesh.size(name)) << name;
  }
}

OnProcessesOptions through(const char* backend) {
  return {.timeout = std::chrono::seconds(120),
          .environment = {{"ACCELERATE_HOST_BACKEND", backend},
                          {"ACCELERATE_ALLOW_CP_STANDALONE", "true"}}};
}

class MeshOver : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, MeshOver, testing::Values("shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(MeshOver, FourProcessesHaveAGroupForEachDimension) {
  on_processes(4, through(GetParam()), [](PartialState& state) {
    const std::vector<ParallelismConfig> configs = {
        {.dp_shard_size = 2, .tp_size = 2},     {.dp_replicate_size = 2, .dp_shard_size = 2},
        {.dp_shard_size = 2, .cp_size = 2},     {.dp_replicate_size = 2, .sp_size = 2},
        {.dp_replicate_size = 2, .pp_size = 2},
    };
    for (const auto& config : configs) {
      SCOPED_TRACE(config.mesh()->names().back());
      const auto mesh = config.build_device_mesh("cpu");
      expect_groups(*mesh);
      EXPECT_EQ(mesh->get_coordinate(), mesh->layout().coordinates(state.process_index()));
    }
    const auto whole = ParallelismConfig{.dp_replicate_size = 4}.build_device_mesh("cpu");
    EXPECT_EQ(whole->get_group("dp_replicate"), state.process_group()) << "nothing to split";
    EXPECT_EQ(ParallelismConfig{}.build_device_mesh("cpu"), nullptr);
    EXPECT_THROW((void)ParallelismConfig{.tp_size = 3}.build_device_mesh("cpu"), ArgumentError);
  });
}

TEST_P(MeshOver, EightProcessesShareGroupsOfTheSameMembers) {
  on_processes(8, through(GetParam()), [](PartialState& state) {
    const ParallelismConfig config{.dp_replicate_size = 2, .dp_shard_size = 2, .tp_size = 2};
    const auto mesh = config.build_device_mesh("cpu");
    expect_groups(*mesh);
    EXPECT_EQ(mesh->get_group("dp_shard_cp"), mesh->get_group("dp_shard"));
    EXPECT_EQ(mesh->get_group("dp_cp"), mesh->get_group("dp"));
    if (state.process_index() == 5) {  // the example of the mesh's documentation
      EXPECT_EQ(mesh->get_coordinate(), (Ranks{1, 0, 1}));
      EXPECT_EQ(mesh->members("tp"), (Ranks{4, 5}));
      EXPECT_EQ(mesh->members("dp_shard"), (Ranks{5, 7}));
      EXPECT_EQ(mesh->members("dp_replicate"), (Ranks{1, 5}));
      EXPECT_EQ(mesh->members("dp"), (Ranks{1, 3, 5, 7}));
      EXPECT_EQ(mesh->get_local_rank("dp"), 2);
    }
    EXPECT_THROW((void)mesh->get_group("cp"), ArgumentError);
  });
}

TEST_P(MeshOver, EightProcessesOfAPipelineHaveItOutermost) {
  on_processes(8, through(GetParam()), [](PartialState& state) {
    const auto mesh =
        ParallelismConfig{.dp_shard_size = 2, .cp_size = 2, .pp_size = 2}.build_device_mesh("cpu");
    expect_groups(*mesh);
    const auto rank = state.process_index();
    EXPECT_EQ(mesh->members("pp"), (Ranks{rank % 4, rank % 4 + 4}));
    EXPECT_EQ(mesh->size("dp_shard_cp"), 4);
  });
}

TEST_P(MeshOver, AStrayingProcessOfASubGroupIsNamed) {
  auto options = through(GetParam());
  const auto outcomes = run_processes(4, options, [](PartialState& state) {
    const auto mesh = ParallelismConfig{.dp_shard_size = 2, .tp_size = 2}.build_device_mesh("cpu");
    const auto group = mesh->get_group("tp");
    std::string message;
    int rank = -1;
    try {
      // Process 3 is in another collective than process 2; 0 and 1 agree.
      if (state.process_index() == 3) (void)gather(torch::ones({2}), group);
      if (state.process_index() != 3) (void)reduce(torch::ones({3}), group);
    } catch (const CommError& error) {
      message = error.what();
      rank = error.rank();
    }
    if (state.process_index() < 2) {
      EXPECT_EQ(message, "");
      return;
    }
    EXPECT_NE(message.find("rank 2 of the run"), std::string::npos) << message;
    EXPECT_NE(message.find("rank 3 of the run"), std::string::npos) << message;
    EXPECT_NE(message.find("device_mesh_multi_test.cpp:"), std::string::npos) << message;
    EXPECT_EQ(rank, -1) << "of two, none is in the minority";
    std::fflush(nullptr);
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
}

TEST_P(MeshOver, AProcessThatDiesIsNamedByItsRankInTheRun) {
  const auto outcomes = run_processes(4, through(GetParam()), [](PartialState& state) {
    const auto mesh = ParallelismConfig{.dp_shard_size = 2, .tp_size = 2}.build_device_mesh("cpu");
    const auto group = mesh->get_group("dp_shard");  // {0, 2} and {1, 3}
    state.wait_for_everyone();                       // all have connected
    if (state.process_index() == 3) ::_exit(0);
    if (state.process_index() != 1) return (void)reduce(torch::ones({3}), group);
    try {
      (void)reduce(torch::ones({3}), group);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 3 of the run"), std::string::npos)
          << error.what();
      EXPECT_EQ(error.rank(), 3);
    }
    std::fflush(nullptr);
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  });
  for (int rank : {0, 1, 2}) EXPECT_TRUE(outcomes[rank].ok()) << outcomes[rank].output;
}

TEST(Mesh, AnAcceleratorMakesItOnceAndKnowsItsRanks) {
  on_processes(8, through("shm"), [](PartialState& state) {
    const AcceleratorOptions options{
        .cpu = true,
        .parallelism_config = {{.dp_shard_size = 2, .tp_size = 2, .cp_size = 1, .pp_size = 2}}};
    Accelerator accelerator(options);
    const auto mesh = accelerator.torch_device_mesh();
    ASSERT_NE(mesh, nullptr);
    EXPECT_EQ(mesh->device_type(), "cpu");
    const auto rank = state.process_index();
    EXPECT_EQ(accelerator.pipeline_parallel_rank(), rank / 4);
    EXPECT_EQ(accelerator.data_parallel_shard_rank(), rank / 2 % 2);
    EXPECT_EQ(accelerator.tensor_parallel_rank(), rank % 2);
    EXPECT_EQ(accelerator.context_parallel_rank(), 0);
    EXPECT_EQ(accelerator.data_parallel_rank(), 0);
    EXPECT_EQ(Accelerator(options).torch_device_mesh(), mesh);
    EXPECT_EQ(accelerator.parallelism_config()->get_device_mesh(), mesh);
    EXPECT_NE(message_of<ArgumentError>([&] {
                (void)accelerator.parallelism_config()->get_device_mesh("cuda");
              }).find("already created with device type cpu"),
              std::string::npos);
    // Ranks of one tensor-parallel group and of all stages get the same batch.
    auto loader = accelerator.prepare(make_data_loader(torch::arange(4), {.batch_size = 1}));
    std::vector<std::int64_t> seen;
    for (auto& batch : loader) seen.push_back(batch.item<std::int64_t>());
    const std::int64_t first = rank / 2 % 2;
    EXPECT_EQ(seen, (std::vector<std::int64_t>{first, first + 2}));
    // No engine trains a model over these dimensions: that is said, not ignored.
    torch::nn::Linear net(2, 2);
    EXPECT_NE(message_of<UnsupportedError>([&] {
                (void)accelerator.prepare(net);
              }).find("pp_size of parallelism_config is 2"),
              std::string::npos);
    EXPECT_TRUE(accelerator.prepare_model(net, {.evaluation_mode = true}));
  });
}

TEST(Mesh, DataParallelismAveragesOverTheReplicas) {
  on_processes(4, through("shm"), [](PartialState& state) {
    Accelerator accelerator({.cpu = true, .parallelism_config = {{.dp_replicate_size = 4}}});
    torch::nn::Linear net(1, 1);
    auto model = accelerator.prepare(net);
    accelerator.backward(
        model(torch::full({1, 1}, static_cast<float>(state.process_index()))).sum());
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 1.5);
    EXPECT_EQ(accelerator.data_parallel_rank(), state.process_index());
  });
}

TEST_P(MeshOver, GroupsEndWithTheGroupOfTheRun) {
  on_processes(4, through(GetParam()), [](PartialState& state) {
    const auto mesh = ParallelismConfig{.dp_shard_size = 2, .tp_size = 2}.build_device_mesh("cpu");
    const auto group = mesh->get_group("tp");
    expect_groups(*mesh);
    state.wait_for_everyone();
    state.destroy_process_group();
    EXPECT_EQ(message_of<StateError>([&] { (void)mesh->get_group("tp"); }),
              "The mesh has no process group: the run has one process, or its group has been "
              "destroyed.");
    const auto text = message_of<StateError>([&] {
      std::vector<torch::Tensor> one{torch::ones({1})};
      group->allreduce(one)->wait();
    });
    EXPECT_EQ(text, "all_reduce: the process group was destroyed. Make a new one.");
  });
}

}  // namespace
}  // namespace accelerate
