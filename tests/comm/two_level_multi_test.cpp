// Collectives of ranks on several hosts: within a host through shared memory, between the hosts
// through one rank of each.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "comm/rank_groups.h"
#include "comm/several_hosts.h"
#include "comm/shm_numbers.h"
#include "support/command.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using Hosted = std::vector<int>;  // the host of each rank
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kRanksDisagree = 70;

std::string backend_of(const Group& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendName();
}

Tensor all_reduced(const Group& group, Tensor tensor, ReduceOp::RedOpType reduction = ReduceOp::SUM,
                   bool asynchronous = false) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduction;
  options.asyncOp = asynchronous;
  Tensors tensors{tensor};
  group->allreduce(tensors, options)->wait();
  return tensor;
}

// Whole numbers small enough for every dtype: what is exact does not depend on the order.
Tensor exact(int rank, torch::ScalarType dtype, std::int64_t size) {
  return torch::arange(size).add(3 * rank).remainder(dtype == torch::kBool ? 2 : 3).to(dtype);
}

Tensors exact_of_all(int world, torch::ScalarType dtype, std::int64_t size) {
  Tensors all;
  for (int rank = 0; rank < world; ++rank) all.push_back(exact(rank, dtype, size));
  return all;
}

// ---- values -------------------------------------------------------------------------------------

void all_reduces_every_dtype_by_every_reduction(PartialState& state, const Group& group) {
  for (const auto dtype : kReduced) {
    for (const auto reduction : reductions_of(dtype)) {
      for (const std::int64_t size : {1, 37}) {
        const auto all = exact_of_all(state.num_processes(), dtype, size);
        const auto own = all[static_cast<std::size_t>(state.process_index())].clone();
        EXPECT_EQ(bits(all_reduced(group, own, reduction)), bits(reduced(all, reduction)))
            << dtype << " by " << static_cast<int>(reduction) << ", size " << size;
      }
    }
  }
}

void all_reduces_every_size(PartialState& state, const Group& group) {
  // 32 KiB is where the leaders begin to share the work, 1 MiB what shared memory takes at once.
  for (const std::int64_t size : {0, 1, 3, 8191, 8192, 8193, 262144, 300001, 1 << 20}) {
    const auto all = exact_of_all(state.num_processes(), torch::kFloat, size);
    const auto own = all[static_cast<std::size_t>(state.process_index())].clone();
    EXPECT_TRUE(all_reduced(group, own).equal(reduced(all, ReduceOp::SUM))) << size;
  }
}

void all_ranks_hold_the_same_bits_in_every_run(PartialState& state, const Group& group) {
  torch::manual_seed(state.process_index());
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    for (const std::int64_t size : {100, 100'003}) {
      const auto own = torch::randn({size}, torch::kDouble).to(dtype);
      const auto first = all_reduced(group, own.clone());
      const auto again = all_reduced(group, own.clone(), ReduceOp::SUM, true);
      EXPECT_TRUE(first.equal(again));
      const auto of_all = gather(first.view({1, -1}));
      for (int rank = 0; rank < state.num_processes(); ++rank) {
        EXPECT_TRUE(of_all[rank].equal(first)) << rank;
      }
    }
  }
}

void rounds_halves_once_per_level(PartialState& state, const Group& group) {
  const auto size = state.num_processes();
  // A sum in bfloat16 would stay at 256: 1 is half of its last digit there.
  auto sum = torch::full({5}, state.process_index() == 0 ? 256.0 : 1.0, torch::kBFloat16);
  sum = all_reduced(group, sum).to(torch::kDouble);
  EXPECT_LE((sum - (255.0 + size)).abs().max().item<double>(), 2.0);
  // The sum would not fit, the average does.
  const auto large = torch::full({5}, 60000.0, torch::kHalf);
  EXPECT_TRUE(all_reduced(group, large.clone(), ReduceOp::AVG).equal(large));
}

void reduces_several_and_parts_and_what_is_not_contiguous(PartialState& state, const Group& group) {
  const int world = state.num_processes();
  const int own = state.process_index();
  Tensors several{exact(own, torch::kFloat, 5), exact(own, torch::kFloat, 20'000)};
  group->allreduce_coalesced(several, c10d::AllreduceCoalescedOptions{})->wait();
  EXPECT_TRUE(several[0].equal(reduced(exact_of_all(world, torch::kFloat, 5), ReduceOp::SUM)));
  EXPECT_TRUE(several[1].equal(reduced(exact_of_all(world, torch::kFloat, 20'000), ReduceOp::SUM)));

  auto whole = exact(own, torch::kFloat, 7L * world);
  const auto before = whole.clone();
  auto part = torch::zeros({7});
  group->_reduce_scatter_base(part, whole, c10d::ReduceScatterOptions{})->wait();
  const auto sum = reduced(exact_of_all(world, torch::kFloat, 7L * world), ReduceOp::SUM);
  EXPECT_TRUE(part.equal(sum.view({world, 7})[own]));
  EXPECT_TRUE(whole.equal(before));

  auto square = exact(own, torch::kFloat, 36).view({6, 6});
  static_cast<void>(all_reduced(group, square.t()));
  const auto expected = reduced(exact_of_all(world, torch::kFloat, 36), ReduceOp::SUM);
  EXPECT_TRUE(square.equal(expected.view({6, 6})));
}

void gathers_in_rank_order(PartialState& state, const Group& group) {
  const int world = state.num_processes();
  const int own = state.process_index();
  for (const auto dtype : {torch::kFloat, torch::kBool, torch::kBFloat16, torch::kComplexFloat}) {
    for (const std::int64_t size : {0, 1, 7, 100'001}) {
      const auto all = torch::stack(of_all_ranks(world, dtype, size));
      auto in = sample(own, dtype, size);
      auto out = torch::zeros({world, size}, dtype);
      group->_allgather_base(out, in, c10d::AllgatherOptions{})->wait();
      EXPECT_TRUE(out.equal(all)) << dtype << " " << size;

      std::vector<Tensors> lists{torch::zeros({world, size}, dtype).unbind()};
      Tensors inputs{in};
      group->allgather(lists, inputs, c10d::AllgatherOptions{})->wait();
      EXPECT_TRUE(torch::stack(lists[0]).equal(all)) << dtype << " " << size;
    }
  }
  // Into a matrix that lies in memory column by column.
  auto in = torch::full({2, 3}, own, torch::kFloat);
  Tensor out = torch::zeros({3, 2L * world}).t();
  group->_allgather_base(out, in, c10d::AllgatherOptions{})->wait();
  EXPECT_TRUE(out.equal(torch::arange(world).repeat_interleave(6).view({2L * world, 3}).to(out)));
}

void broadcasts_from_each_rank(PartialState& state, const Group& group) {
  for (int root = 0; root < state.num_processes(); ++root) {
    for (const std::int64_t size : {0, 1, 9, 400'001}) {
      Tensors tensors{torch::full({size}, state.process_index())};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      group->broadcast(tensors, options)->wait();
      EXPECT_TRUE(tensors[0].equal(torch::full({size}, root))) << root << " " << size;
    }
  }
}

void nobody_leaves_a_barrier_before_the_last_has_come(PartialState& state, const Group&) {
  using Clock = std::chrono::steady_clock;  // one for all processes of a machine
  const auto now = [] { return Clock::now().time_since_epoch().count(); };
  for (int late = 0; late < state.num_processes(); ++late) {
    if (state.process_index() == late) std::this_thread::sleep_for(30ms);
    const auto came = now();
    state.wait_for_everyone();
    const auto times = gather(torch::tensor({{came, now()}}, torch::kLong));
    EXPECT_LE(times.select(1, 0).max().item<std::int64_t>(),
              times.select(1, 1).min().item<std::int64_t>());
  }
}

void keeps_overlapping_calls_in_order(PartialState& state, const Group& group) {
  const int world = state.num_processes();
  const int own = state.process_index();
  for (int round = 0; round < 5; ++round) {
    Tensors data;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 12; ++i) {
      data.push_back(torch::full({i % 3 == 0 ? 50'000 : 10 + i}, own + i, torch::kFloat));
      Tensors tensors{data.back()};
      works.push_back(group->allreduce(tensors, c10d::AllreduceOptions{}));
      if (i == 5) {  // at once, behind the six; and one that Gloo carries out
        EXPECT_EQ(gather(torch::tensor({own})).numel(), world);
        std::vector<Tensors> at_root;
        if (own == 1) at_root.push_back(torch::zeros({world, 1}).unbind());
        Tensors inputs{torch::full({1}, own, torch::kFloat)};
        c10d::GatherOptions options;
        options.rootRank = 1;
        group->gather(at_root, inputs, options)->wait();
      }
    }
    // The last one first, by its future.
    works.back()->getFuture()->wait();
    EXPECT_TRUE(works.back()->isCompleted());
    EXPECT_TRUE(works.back()->isSuccess());
    std::ranges::reverse(works);
    for (const auto& work : works) EXPECT_TRUE(work->wait());
    for (int i = 0; i < 12; ++i) {
      const auto expected = static_cast<float>(world * (world - 1) / 2 + world * i);
      EXPECT_TRUE(data[static_cast<std::size_t>(i)].eq(expected).all().item<bool>()) << i;
    }
  }
}

void a_callback_may_call_the_next_collective(PartialState& state, const Group& group) {
  Tensors first{torch::ones({70'000})};
  std::promise<Tensor> second;
  const auto work = group->allreduce(first, c10d::AllreduceOptions{});
  work->getFuture()->addCallback([&](c10::ivalue::Future& future) {
    future.waitAndThrow();
    second.set_value(all_reduced(group, first[0][0].clone()));
  });
  const auto world = static_cast<float>(state.num_processes());
  EXPECT_EQ(second.get_future().get().item<float>(), world * world);
  EXPECT_TRUE(work->wait());
}

// Hosts and processes take longer to start than the checks to run: few tests with many of them.
class TwoLevel : public testing::TestWithParam<Hosted> {
 protected:
  void SetUp() override { ACCELERATE_SKIP_WITHOUT_HOSTS(); }

  template <class F>
  void on_all(F f) {
    on_processes(static_cast<int>(GetParam().size()), on_hosts(GetParam()),
                 [f](PartialState& state) {
                   const auto group = state.process_group();
                   ASSERT_EQ(backend_of(group), "two_level");
                   f(state, group);
                 });
  }
};

TEST_P(TwoLevel, AllReduces) {
  on_all([](PartialState& state, const Group& group) {
    all_reduces_every_dtype_by_every_reduction(state, group);
    all_reduces_every_size(state, group);
    all_ranks_hold_the_same_bits_in_every_run(state, group);
    rounds_halves_once_per_level(state, group);
    reduces_several_and_parts_and_what_is_not_contiguous(state, group);
  });
}

TEST_P(TwoLevel, GathersBroadcastsAndMeets) {
  on_all([](PartialState& state, const Group& group) {
    gathers_in_rank_order(state, group);
    broadcasts_from_each_rank(state, group);
    nobody_leaves_a_barrier_before_the_last_has_come(state, group);
  });
}

TEST_P(TwoLevel, OverlapsCalls) {
  on_all([](PartialState& state, const Group& group) {
    keeps_overlapping_calls_in_order(state, group);
    a_callback_may_call_the_next_collective(state, group);
  });
}

// As DistributedDataParallel does it: buckets of gradients, sent while the backward goes on.
TEST_P(TwoLevel, TrainsAsOneProcessWithTheWholeBatch) {
  on_all([](PartialState& state, const Group& group) {
    const int world = state.num_processes();
    torch::manual_seed(7);
    torch::nn::Sequential net(torch::nn::Linear(20, 300), torch::nn::ReLU(),
                              torch::nn::Linear(300, 300), torch::nn::ReLU(),
                              torch::nn::Linear(300, 3));
    auto alone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    const auto parameters = net->parameters();
    const auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, {40'000});
    c10d::Reducer reducer(parameters, {buckets.rbegin(), buckets.rend()}, group,
                          std::vector<bool>(parameters.size(), false), 40'000, false, false, {},
                          40'000, false, false, {});
    torch::optim::SGD optimizer(parameters, 0.05);
    torch::optim::SGD optimizer_alone(alone->parameters(), 0.05);
    for (int step = 0; step < 5; ++step) {
      const auto input = torch::randn({4L * world, 20});
      const auto target = torch::randn({4L * world, 3});
      optimizer.zero_grad();
      reducer.prepare_for_forward();
      const auto loss =
          torch::mse_loss(net->forward(input.narrow(0, 4L * state.process_index(), 4)),
                          target.narrow(0, 4L * state.process_index(), 4));
      static_cast<void>(reducer.rebuild_buckets());
      reducer.prepare_for_backward({loss});
      loss.backward();
      optimizer.step();

      optimizer_alone.zero_grad();
      torch::mse_loss(alone->forward(input), target).backward();
      optimizer_alone.step();
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(torch::allclose(parameters[i], alone->parameters()[i], 1e-4, 1e-6)) << i;
      const auto of_all = gather(parameters[i].detach().view({1, -1}));
      EXPECT_TRUE(of_all.eq(of_all[0]).all().item<bool>()) << i;
    }
  });
}

std::string name_of(const testing::TestParamInfo<Hosted>& info) {
  std::string name = "Hosts";
  for (const int host : info.param) name += std::to_string(host);
  return name;
}
INSTANTIATE_TEST_SUITE_P(Layouts, TwoLevel,
                         testing::Values(Hosted{0, 0, 1, 1}, Hosted{0, 1, 1, 2, 2, 2},
                                         Hosted{0, 1, 0, 1, 1}),
                         name_of);

// ---- what takes its place -----------------------------------------------------------------------

class HostBackend : public testing::Test {
 protected:
  void SetUp() override { ACCELERATE_SKIP_WITHOUT_HOSTS(); }
};

void expect_sum_through(const char* backend, PartialState& state) {
  const auto group = state.process_group();
  EXPECT_EQ(backend_of(group), backend);
  for (const std::int64_t size : {1, 100'000}) {
    const auto sum = all_reduced(group, torch::full({size}, state.process_index(), torch::kFloat));
    const int world = state.num_processes();
    EXPECT_TRUE(sum.eq(static_cast<float>(world * (world - 1) / 2)).all().item<bool>());
  }
}

TEST_F(HostBackend, IsGlooWhereEachRankHasAHostOfItsOwn) {
  on_processes(2, on_hosts({0, 1}), [](PartialState& state) { expect_sum_through("gloo", state); });
}

TEST_F(HostBackend, IsGlooOnSeveralHostsWhenAskedFor) {
  on_processes(3, on_hosts({0, 0, 1}, {.environment = {{"ACCELERATE_HOST_BACKEND", "gloo"}}}),
               [](PartialState& state) { expect_sum_through("gloo", state); });
}

TEST_F(HostBackend, CannotBeSharedMemoryAloneOnSeveralHosts) {
  const auto outcomes =
      run_processes(3, on_hosts({0, 0, 1}, {.environment = {{"ACCELERATE_HOST_BACKEND", "shm"}}}),
                    [](PartialState& state) { state.wait_for_everyone(); });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(outcome.output_contains("the ranks are on several hosts")) << outcome.output;
  }
}

TEST_F(HostBackend, IsGlooOnAllRanksWhenOneHostGrantsNoMemory) {
  // The kernel refuses files, also in memory, of more than 50 KB to the leader of the second host.
  const auto without_memory = [](int rank, const Words& argv) {
    if (rank != 2) return argv;
    Words words = {"sh", "-c", "trap '' XFSZ; ulimit -f 100; exec \"$@\"", "sh"};
    words.insert(words.end(), argv.begin(), argv.end());
    return words;
  };
  on_processes(4, on_hosts({0, 0, 1, 1}, {.started_by = without_memory}),
               [](PartialState& state) { expect_sum_through("gloo", state); });
}

// ---- containers on one host ---------------------------------------------------------------------

struct Container {
  const char* name;
  Words command;
  const char* backend;
};

class Containers : public testing::TestWithParam<Container> {};

TEST_P(Containers, TrainTogether) {
  if (const auto trial = test::run({.argv = {"unshare", "--pid", "--fork", "--mount", "true"}});
      trial.shell_code() != 0) {
    GTEST_SKIP() << "no namespaces here: " << trial.error;
  }
  const auto started_by = [](int, const Words& argv) {
    auto words = GetParam().command;
    words.insert(words.end(), argv.begin(), argv.end());
    return words;
  };
  on_processes(2, {.timeout = 30s, .started_by = started_by}, [](PartialState& state) {
    expect_sum_through(GetParam().backend, state);
    EXPECT_EQ(gather(torch::tensor({state.process_index()})).numel(), 2);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Containers,
    testing::Values(
        // They cannot see each other's processes, through which shared memory is found and watched.
        Container{"PidNamespaces", {"unshare", "--pid", "--fork", "--kill-child"}, "gloo"},
        Container{"PidNamespacesWithTheirOwnProc",
                  {"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"},
                  "gloo"},
        // The memory has no name in /dev/shm.
        Container{
            "PrivateDevShm",
            {"unshare", "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm && exec \"$@\"", "sh"},
            "shm"}),
    [](const auto& info) { return info.param.name; });

// ---- faults -------------------------------------------------------------------------------------

// As in a program whose main catches nothing; the harness would.
void uncaught(const std::function<void()>& f) noexcept { f(); }

using MaybeText = std::optional<std::string>;

class HostFaults : public testing::Test {
 protected:
  void SetUp() override { ACCELERATE_SKIP_WITHOUT_HOSTS(); }

  static std::vector<RankOutcome> programs(const Hosted& hosted,
                                           const std::function<void(PartialState&)>& main,
                                           const MaybeText& backend = std::nullopt,
                                           const std::shared_ptr<LazyHosts>& hosts = nullptr) {
    const auto options = on_hosts(
        hosted, {.timeout = 40s, .environment = {{"ACCELERATE_HOST_BACKEND", backend}}}, hosts);
    return run_processes(static_cast<int>(hosted.size()), options,
                         [main](PartialState& state) { uncaught([&] { main(state); }); });
  }

  static void expect_all_say(const std::vector<RankOutcome>& outcomes, const std::string& text,
                             const std::vector<int>& but_for = {}) {
    for (int rank = 0; rank < static_cast<int>(outcomes.size()); ++rank) {
      if (std::ranges::find(but_for, rank) != but_for.end()) continue;
      const auto& outcome = outcomes[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(outcome.output_contains(text)) << "rank " << rank << " wrote:\n"
                                                 << outcome.output;
      EXPECT_EQ(outcome.exit_code, kRanksDisagree) << "rank " << rank << "\n" << outcome.output;
    }
  }
};

void reduce_a_little(int rounds) {
  for (int i = 0; i < rounds; ++i) static_cast<void>(reduce(torch::ones({4})));
}

TEST_F(HostFaults, AnotherShapeIsNamed) {
  for (const int stray : {1, 2}) {  // beside a leader, and a leader
    const auto outcomes = programs({0, 0, 1, 1}, [stray](PartialState& state) {
      reduce_a_little(3);
      static_cast<void>(reduce(torch::ones({state.process_index() == stray ? 3 : 4})));
    });
    expect_all_say(outcomes,
                   "rank " + std::to_string(stray) + " is in another collective than the others");
    expect_all_say(outcomes, "float32[3] at two_level_multi_test.cpp:");
  }
}

TEST_F(HostFaults, AHostInAnotherCallIsShown) {
  const auto outcomes = programs({0, 0, 1, 1}, [](PartialState& state) {
    reduce_a_little(3);
    static_cast<void>(state.process_index() < 2 ? reduce(torch::ones({4}))
                                                : gather(torch::ones({4})));
  });
  expect_all_say(outcomes, "the ranks are in different collectives");
}

TEST_F(HostFaults, AnotherDtypeIsNamed) {
  const auto outcomes = programs({0, 0, 1, 1}, [](PartialState& state) {
    reduce_a_little(3);
    const auto dtype = state.process_index() == 2 ? torch::kInt : torch::kFloat;
    static_cast<void>(gather(torch::ones({4}, dtype)));
  });
  expect_all_say(outcomes, "rank 2 is in another collective than the others");
  expect_all_say(outcomes, "gather int32[4] at two_level_multi_test.cpp:");
}

TEST_F(HostFaults, TwoCollectivesInAnotherOrderAreNamed) {
  const auto outcomes = programs({0, 0, 1, 1}, [](PartialState& state) {
    reduce_a_little(3);
    if (state.process_index() == 3) state.wait_for_everyone();
    static_cast<void>(gather(torch::ones({4})));
    if (state.process_index() != 3) state.wait_for_everyone();
  });
  expect_all_say(outcomes, "rank 3 is in another collective than the others");
  expect_all_say(outcomes, "rank 3 (n2): barrier at two_level_multi_test.cpp:");
}

TEST_F(HostFaults, TheExceptionOfOneRankIsShownOnAll) {
  const auto outcomes = programs({0, 0, 1, 1}, [](PartialState& state) {
    reduce_a_little(3);
    if (state.process_index() == 3) throw std::runtime_error("the disk is full");
    reduce_a_little(1);
  });
  expect_all_say(outcomes, "rank 3 (n2) failed after reduce float32[4] at", {3});
  expect_all_say(outcomes, "the disk is full", {3});
}

TEST_F(HostFaults, ARankThatLeavesTheLoopEarlyIsNamed) {
  for (const int leaves :
       {0, 2}) {  // where the desync detector runs, and the leader of another host
    const auto outcomes = programs({0, 0, 1, 1}, [leaves](PartialState& state) {
      reduce_a_little(3);
      if (state.process_index() == leaves) std::exit(0);
      reduce_a_little(1);
    });
    expect_all_say(outcomes,
                   "rank " + std::to_string(leaves) + (leaves == 0 ? " (n1)" : " (n2)") +
                       " has ended after reduce float32[4] at",
                   {leaves});
  }
}

TEST_F(HostFaults, TheLaterTensorsOfACoalescedCallCount) {
  const auto outcomes = programs({0, 0, 1, 1}, [](PartialState& state) {
    const auto size = state.process_index() == 3 ? 3 : 2;
    Tensors tensors{torch::ones({4}), torch::ones({size})};
    Tensors wholes{torch::ones({16}), torch::ones({4 * size})};
    state.process_group()->allgather_into_tensor_coalesced(wholes, tensors)->wait();
  });
  expect_all_say(outcomes, "rank 3 is in another collective than the others");
  expect_all_say(outcomes, "rank 3 (n2): all_gather of several float32[4], float32[3]");
}

TEST_F(HostFaults, AKilledRankIsNamed) {
  for (const int killed :
       {0, 2, 3}) {  // where the desync detector runs, a leader, and one beside it
    const auto outcomes = programs({0, 0, 1, 1}, [killed](PartialState& state) {
      reduce_a_little(3);
      if (state.process_index() == killed) static_cast<void>(std::raise(SIGKILL));
      reduce_a_little(1);
    });
    expect_all_say(outcomes,
                   "rank " + std::to_string(killed) + (killed == 0 ? " (n1) died " : " (n2) died "),
                   {killed});
    expect_all_say(outcomes, "after reduce float32[4] at two_level_multi_test.cpp:", {killed});
  }
}

TEST_F(HostFaults, AfterTheReportTheProcessEndsInOrder) {
  const auto outcomes = programs({0, 0, 1, 1}, [](PartialState& state) {
    const auto group = state.process_group();
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    Tensors several;
    reduce_a_little(2);
    if (state.process_index() == 3) std::exit(0);
    for (int i = 0; i < 4; ++i) {
      several.push_back(torch::ones({50'000}));
      Tensors tensors{several.back()};
      works.push_back(group->allreduce(tensors, c10d::AllreduceOptions{}));
    }
    for (const auto& work : works) EXPECT_THROW(work->wait(), CommError);
    EXPECT_THROW(static_cast<void>(gather(torch::ones({1}))), CommError);
    works.clear();
    state.destroy_process_group();
  });
  for (int rank = 0; rank < 3; ++rank) {
    const auto& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(outcome.ok()) << rank << "\n" << outcome.output;
    EXPECT_LT(outcome.seconds, test::patient(8s).count()) << rank;
  }
}

class LostHosts : public HostFaults, public testing::WithParamInterface<const char*> {};

// The cable of one of three hosts is pulled: that of the last one, and beside it, on hosts of their
// own, that of the first one, where the desync detector runs.
TEST_P(LostHosts, AreNamed) {
  const test::Folder folder;
  const std::string ready = folder / "ready";
  const std::vector<int> lost = {2, 0};
  const RankGroups groups({5, 5});
  const std::vector<std::shared_ptr<LazyHosts>> hosts = {std::make_shared<LazyHosts>(3),
                                                         std::make_shared<LazyHosts>(3)};
  const Hosted hosted = {0, 0, 1, 2, 2};
  const MaybeText backend = std::string(GetParam()) == "gloo" ? MaybeText("gloo") : std::nullopt;
  std::vector<std::thread> saws;
  std::array<std::chrono::steady_clock::time_point, 2> cut_at;
  for (std::size_t group = 0; group < 2 && !in_child_process(); ++group) {
    saws.emplace_back([&, group] {
      const auto file = ready + std::to_string(group);
      if (!test::eventually([&] { return std::filesystem::exists(file); }, test::Seconds(20)))
        return;
      hosts[group]->get().cut(lost[group]);
      cut_at[group] = std::chrono::steady_clock::now();
    });
  }
  // The folder of the parent is told by a variable.
  ::setenv("TWO_LEVEL_TEST_READY", ready.c_str(), in_child_process() ? 0 : 1);
  auto options = on_hosts(
      hosted, {.timeout = 40s, .environment = {{"ACCELERATE_HOST_BACKEND", backend}}}, hosts[0]);
  options.started_by = [=](int process, const Words& argv) {
    const auto [group, rank] = groups.place_of(process);
    const auto on = on_hosts(hosted, {}, hosts[static_cast<std::size_t>(group)]);
    return on.started_by(rank, groups.as_rank(process, argv));
  };
  const auto outcomes = run_processes(groups.processes(), options, [](PartialState& state) {
    uncaught([&] {
      reduce_a_little(3);
      if (state.is_main_process()) {
        std::ofstream(std::getenv("TWO_LEVEL_TEST_READY") + std::to_string(RankGroups::own()))
            << "ready";
      }
      try {
        for (;;) reduce_a_little(1);
      } catch (const CommError&) {
        state.destroy_process_group();  // which waits for nobody
        throw;
      }
    });
  });
  const auto ended = std::chrono::steady_clock::now();
  for (auto& saw : saws) saw.join();
  expect_all_say(groups.of(0, outcomes), " (n3) has given no sign of life for 10 s", {3, 4});
  expect_all_say(groups.of(1, outcomes), "rank 0 (n1) has given no sign of life for 10 s", {0, 1});
  expect_all_say(groups.of(1, outcomes), "reduce float32[4] at two_level_multi_test.cpp:", {0, 1});
  for (const auto at : cut_at) EXPECT_LT(ended - at, test::patient(14s));
  // Those that are cut off miss the others.
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, kRanksDisagree);
}

INSTANTIATE_TEST_SUITE_P(Backends, LostHosts, testing::Values("two_level", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace accelerate
