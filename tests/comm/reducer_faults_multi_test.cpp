// c10d's Reducer, which averages gradients during the backward, on our groups: ranks that reduce
// different things are told so, and ranks that do not are left alone.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <unordered_map>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "support/on_processes.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;

constexpr int kRanksDisagree = 70;

using Used = std::vector<std::size_t>;
using Buckets = std::vector<Used>;

const Used kAll = {0, 1, 2};

struct ReplicaOptions {
  std::vector<std::int64_t> sizes = {10, 200, 3000};
  /// The last parameter's gradient is ready first.
  Buckets buckets = {{2}, {1}, {0}};
  bool find_unused = false;
};

/// A model of some parameters, whose gradient is the input, and the reducer of its gradients.
class Replica {
 public:
  explicit Replica(const PartialState& state, const ReplicaOptions& options = {})
      : parameters_(make_parameters(options.sizes)),
        reducer_(std::make_shared<c10d::Reducer>(
            parameters_, options.buckets, state.process_group(),
            std::vector<bool>(parameters_.size(), false), kOneParameter, options.find_unused,
            /*gradient_as_bucket_view=*/true, std::unordered_map<std::size_t, std::string>{},
            kOneParameter, false, false,
            std::vector<std::int64_t>(options.buckets.size(), kOneParameter))),
        logger_(std::make_shared<c10d::Logger>(reducer_)) {
    reducer_->set_logger(logger_);  // it uses one when it looks for unused parameters
  }

  [[nodiscard]] torch::Tensor forward(float input, const Used& used = kAll, bool sync = true) {
    reducer_->prepare_for_forward();
    if (sync) reducer_->rebuild_buckets();
    auto output = torch::zeros({});
    for (const auto i : used) output = output + (parameters_[i] * input).sum();
    if (sync) reducer_->prepare_for_backward({output});
    return output;
  }

  /// One step, over the parameters in `used`.
  void step(float input, const Used& used = kAll) {
    zero_gradients();
    forward(input, used).backward();
  }

  void zero_gradients() {
    for (auto& parameter : parameters_) {
      if (parameter.grad().defined()) parameter.mutable_grad().zero_();
    }
  }

  [[nodiscard]] float gradient(std::size_t parameter) const {
    return parameters_[parameter].grad().mean().item<float>();
  }

 private:
  static std::vector<torch::Tensor> make_parameters(const std::vector<std::int64_t>& sizes) {
    std::vector<torch::Tensor> result;
    for (const auto size : sizes) result.push_back(torch::ones({size}, torch::requires_grad()));
    return result;
  }

  static constexpr std::int64_t kOneParameter = 1;  // bytes, which any parameter fills

  std::vector<torch::Tensor> parameters_;
  std::shared_ptr<c10d::Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
};

struct Setting {
  int ranks;
  const char* backend;
};

class ReducerFaults : public testing::TestWithParam<Setting> {
 protected:
  using Program = std::function<void(PartialState&, bool strays)>;

  // As in a program whose main catches nothing; the harness would.
  static void uncaught(const std::function<void()>& f) noexcept { f(); }

  // Rank 1 strays. The time counts from when all are up.
  static std::vector<RankOutcome> run(const Program& program) {
    return run_processes(
        GetParam().ranks,
        {.timeout = 30s, .environment = {{"ACCELERATE_HOST_BACKEND", GetParam().backend}}},
        [=](PartialState& state) {
          uncaught([&] {
            state.wait_for_everyone();
            const auto start = std::chrono::steady_clock::now();
            try {
              program(state, state.process_index() == 1);
            } catch (const CommError&) {
              EXPECT_LT(std::chrono::steady_clock::now() - start, test::patient(1500ms));
              throw;
            }
          });
        });
  }

  static void expect_all_say(const std::vector<RankOutcome>& outcomes,
                             const std::vector<std::string>& texts, int except = -1) {
    for (int rank = 0; rank < static_cast<int>(outcomes.size()); ++rank) {
      const auto& outcome = outcomes[rank];
      if (rank == except) continue;
      for (const auto& text : texts) {
        EXPECT_TRUE(outcome.output_contains(text))
            << "rank " << rank << " does not say '" << text << "' but:\n"
            << outcome.output;
      }
      EXPECT_EQ(outcome.exit_code, kRanksDisagree) << "rank " << rank << "\n" << outcome.output;
      EXPECT_FALSE(outcome.output_contains("Failure")) << outcome.output;
    }
  }
};

TEST_P(ReducerFaults, AnotherModelIsNamedWithBothBuckets) {
  expect_all_say(run([](PartialState& state, bool strays) {
                   Replica replica(state, {.sizes = {10, strays ? 201 : 200, 3000}});
                   replica.step(1);
                 }),
                 {"all_reduce sum float32[200] named 'backward'",
                  "all_reduce sum float32[201] named 'backward'"});
}

TEST_P(ReducerFaults, AnotherOrderOfBucketsIsNamed) {
  expect_all_say(run([](PartialState& state, bool strays) {
                   Replica replica(state, {.buckets = strays ? Buckets{{0}, {1}, {2}}
                                                             : Buckets{{2}, {1}, {0}}});
                   replica.step(1);
                 }),
                 {"all_reduce sum float32[10]", "all_reduce sum float32[3000]"});
}

TEST_P(ReducerFaults, ARankThatAloneLooksForUnusedParametersIsNamed) {
  expect_all_say(run([](PartialState& state, bool strays) {
                   Replica replica(state, {.find_unused = strays});
                   for (int i = 0; i < 3; ++i) {
                     replica.step(1, strays ? Used{0, 2} : Used{0, 1, 2});
                   }
                 }),
                 {"all_reduce sum int32[3] named 'backward'"});
}

TEST_P(ReducerFaults, ARankThatLeavesAParameterOutIsNamedWithTheWordsOfTheReducer) {
  expect_all_say(run([](PartialState& state, bool strays) {
                   Replica replica(state);
                   for (int i = 0; i < 3; ++i) {
                     replica.step(1, strays ? Used{2, 1} : Used{0, 1, 2});
                   }
                 }),
                 {"rank 1 (", "Expected to have finished reduction in the prior iteration"}, 1);
}

TEST_P(ReducerFaults, ARankThatSkipsTheBackwardAndGathersIsNamed) {
  expect_all_say(run([](PartialState& state, bool strays) {
                   Replica replica(state);
                   for (int i = 0; i < 3; ++i) {
                     if (!strays || i != 2) replica.step(1);
                     (void)gather(torch::ones({2}));
                   }
                 }),
                 {"gather float32[2] at reducer_faults_multi_test.cpp:", "named 'backward'"});
}

TEST_P(ReducerFaults, ARankThatSkipsABackwardIsMissedAtTheEnd) {
  expect_all_say(run([](PartialState& state, bool strays) {
                   Replica replica(state);
                   for (int i = 0; i < 5; ++i) {
                     if (!strays || i != 2) replica.step(1);
                   }
                   std::exit(0);
                 }),
                 {"rank 1 (", "has ended after all_reduce sum float32[", "named 'backward'"}, 1);
}

INSTANTIATE_TEST_SUITE_P(Backends, ReducerFaults,
                         testing::Values(Setting{2, "gloo"}, Setting{4, "gloo"}, Setting{2, "shm"},
                                         Setting{4, "shm"}),
                         [](const auto& info) {
                           return std::string(info.param.backend) +
                                  std::to_string(info.param.ranks);
                         });

// Healthy loops, on both backends.
void on_both(int ranks, const std::function<void(PartialState&)>& f) {
  for (const char* backend : {"gloo", "shm"}) {
    on_processes(ranks, {.environment = {{"ACCELERATE_HOST_BACKEND", backend}}},
                 [=](PartialState& state) { f(state); });
  }
}

// Of the inputs rank + round.
float average(const PartialState& state, int round) {
  return static_cast<float>(state.num_processes() - 1) / 2 + static_cast<float>(round);
}

TEST(Reducer, AveragesGradientsOfManySteps) {
  on_both(2, [](PartialState& state) {
    Replica replica(state);
    for (int round = 0; round < 200; ++round) {
      replica.step(static_cast<float>(state.process_index() + round));
      for (int i = 0; i < 3; ++i) ASSERT_FLOAT_EQ(replica.gradient(i), average(state, round));
    }
  });
}

TEST(Reducer, LeavesOutTheStepsThatAccumulate) {
  on_both(3, [](PartialState& state) {
    Replica replica(state);
    for (int round = 0; round < 20; ++round) {
      const auto input = static_cast<float>(state.process_index() + round);
      replica.zero_gradients();
      for (int i = 0; i < 3; ++i) replica.forward(input, kAll, i == 2).backward();
      ASSERT_FLOAT_EQ(replica.gradient(1), 3 * average(state, round));
    }
  });
}

TEST(Reducer, FindsUnusedParametersAlsoWhereTheyDifferBetweenRanks) {
  on_both(2, [](PartialState& state) {
    Replica replica(state, {.find_unused = true});
    for (int round = 0; round < 20; ++round) {
      const auto input = static_cast<float>(state.process_index() + round);
      replica.step(input, {0, 2});
      ASSERT_FLOAT_EQ(replica.gradient(2), average(state, round));
      replica.step(1, state.is_main_process() ? Used{0, 1} : Used{0, 1, 2});
      ASSERT_FLOAT_EQ(replica.gradient(2), 0.5F);
    }
  });
}

// Autograd has threads of its own, which know nothing of names and lines.
TEST(Reducer, MindsNeitherNameNorThreadOfWhoCallsTheBackward) {
  on_both(2, [](PartialState& state) {
    Replica replica(state);
    for (int round = 0; round < 5; ++round) {
      replica.zero_gradients();
      auto output = replica.forward(state.is_main_process() ? 1 : 3);
      if (state.is_main_process()) {
        const auto named = name_collectives("step");
        output.backward();
      } else {
        std::thread([&] { output.backward(); }).join();
      }
      ASSERT_FLOAT_EQ(replica.gradient(0), 2);
    }
  });
}

}  // namespace
}  // namespace accelerate
