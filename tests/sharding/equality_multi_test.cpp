// A sharded model trains as data parallelism does, to the last bit.
#include <gtest/gtest.h>

#include "accelerator/nets.h"
#include "core/text.h"
#include "sharding/sharded_run.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using detail::str;
using test::expect_equal;
using test::OffloadTarget;
using test::run;
using test::RunOptions;
using test::sharded;
using test::ShardLevel;
using test::ShardSpec;
using test::Step;
using test::TinyGpt;

constexpr ShardLevel kLevels[] = {ShardLevel::kOptimizer, ShardLevel::kGradients,
                                  ShardLevel::kParameters};

std::string text_of(ShardLevel level) { return str("level ", static_cast<int>(level)); }

TEST(ShardedEquality, HasTheBitsOfDataParallelismAtEveryLevel) {
  for (const int ranks : {2, 3, 4}) {
    on_processes(ranks, [] {
      for (const auto step : {Step::kSgd, Step::kMomentum, Step::kAdamW, Step::kTorchAdamW}) {
        const auto wanted = run({.step = step});
        EXPECT_NE(wanted.losses.back(), wanted.losses.front());
        for (const auto level : kLevels) {
          expect_equal(run({.spec = sharded(level), .step = step}), wanted,
                       str(text_of(level), ", step ", static_cast<int>(step)));
        }
      }
    });
  }
}

/// The parameters after steps of 16 rows each, in so many batches.
std::vector<torch::Tensor> trained_in(int batches, ShardLevel level) {
  test::ShardedRun training({.spec = sharded(level), .step = Step::kMomentum});
  for (int step = 0; step < 3; ++step) {
    auto generator =
        at::make_generator<at::CPUGeneratorImpl>(10 * step + training.accelerator.process_index());
    const auto rows =
        torch::randint(test::kWords, {16, 9}, generator, torch::TensorOptions(torch::kLong));
    const auto pass = [&](const torch::Tensor& words) {
      const auto scores = training.model(words.slice(1, 0, 8)).reshape({-1, test::kWords});
      const auto targets = words.slice(1, 1).reshape(-1);
      training.accelerator.backward(torch::nn::functional::cross_entropy(scores, targets) /
                                    batches);
    };
    const auto parts = rows.chunk(batches);
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto alone = training.accelerator.no_sync(training.model);
      pass(parts[i]);
    }
    pass(parts.back());
    training.take_step();
  }
  return training.whole_parameters();
}

TEST(ShardedEquality, FourBatchesOfAStepAreOneOfFourTimesTheSize) {
  on_processes(2, [] {
    for (const auto level : kLevels) {
      const auto one = trained_in(1, level);
      const auto four = trained_in(4, level);
      for (std::size_t i = 0; i < one.size(); ++i) {
        EXPECT_TRUE(four[i].allclose(one[i], 1e-5, 1e-6)) << text_of(level) << ", parameter " << i;
      }
    }
  });
}

TEST(ShardedEquality, DoesNotDependOnWhenParametersComeAndGo) {
  on_processes(2, [] {
    const auto wanted = run({.steps = 6});
    for (const bool reshard : {true, false}) {
      for (const int prefetch : {0, 1, 2, 5}) {
        auto spec = sharded(ShardLevel::kParameters, prefetch);
        spec.reshard_after_forward = reshard;
        spec.limit_gathers = prefetch < 5;
        expect_equal(run({.spec = spec, .steps = 6}), wanted,
                     str("reshard ", reshard, ", prefetch ", prefetch));
      }
    }
    for (const auto level : kLevels) {
      auto spec = sharded(level);
      spec.offload = {.parameters = OffloadTarget::kCpu, .optimizer = OffloadTarget::kCpu};
      expect_equal(run({.spec = spec, .steps = 6}), wanted, text_of(level) + " offloaded");
    }
    auto late = sharded(ShardLevel::kParameters);
    late.prefetch_after_gradients = true;
    expect_equal(run({.spec = late, .steps = 6}), wanted, "gathered when gradients are complete");
    auto kept = sharded(ShardLevel::kParameters);
    kept.keep_gathered_below = 1000;
    expect_equal(run({.spec = kept, .steps = 6}), wanted, "small parameters stay");
    ShardSpec one_unit{.level = ShardLevel::kParameters};
    expect_equal(run({.spec = one_unit, .steps = 6}), wanted, "the root alone");
    ShardSpec nested = sharded(ShardLevel::kParameters);
    nested.units = {"blocks", "blocks.1", "blocks.1.up", "blocks.1.down"};
    expect_equal(run({.spec = nested, .steps = 6}), wanted, "units in units");
  });
}

TEST(ShardedEquality, HoldsForAccumulatedBatchesInBothWays) {
  on_processes(2, [] {
    const auto step = Step::kMomentum;  // AdamW makes steps of rounding errors
    const auto wanted = run({.step = step, .batches = 3});
    for (const auto level : kLevels) {
      auto spec = sharded(level);
      expect_equal(run({.spec = spec, .step = step, .batches = 3}), wanted,
                   text_of(level) + ", kept whole");
      spec.accumulate_unsharded = false;
      const auto reduced = run({.spec = spec, .step = step, .batches = 3});
      for (std::size_t i = 0; i < wanted.parameters.size(); ++i) {
        // Another order of the same sums.
        EXPECT_TRUE(torch::allclose(reduced.parameters[i], wanted.parameters[i], 1e-5, 1e-6))
            << text_of(level) << ", parameter " << i << ": "
            << test::distance(reduced.parameters[i], wanted.parameters[i]);
      }
    }
  });
}

TEST(ShardedEquality, HoldsForTiedFrozenAndIgnoredParameters) {
  on_processes(3, [] {
    const auto tie = [](TinyGpt& net) { tie_parameters(*net, {"tokens.weight", "head.weight"}); };
    const auto freeze = [](TinyGpt& net) {
      net->blocks->ptr(1)->as<test::Block>()->up->weight.requires_grad_(false);
      net->tokens->weight.requires_grad_(false);
    };
    for (const auto& change : {std::function<void(TinyGpt&)>(tie), std::function(freeze)}) {
      const auto wanted = run({.change_net = change});
      for (const auto level : kLevels) {
        expect_equal(run({.spec = sharded(level), .change_net = change}), wanted, text_of(level));
      }
    }
    const auto wanted = run({.step = Step::kMomentum});
    for (const auto level : kLevels) {
      auto spec = sharded(level);
      spec.ignored = {"head", "blocks.2"};
      spec.units = {"blocks.0", "blocks.1"};
      const auto result = run({.spec = spec, .step = Step::kMomentum});
      for (std::size_t i = 0; i < wanted.parameters.size(); ++i) {
        EXPECT_TRUE(torch::allclose(result.parameters[i], wanted.parameters[i], 1e-5, 1e-6))
            << text_of(level) << ", parameter " << i;
      }
    }
  });
}

TEST(ShardedEquality, HoldsWithinRoundingForOddSizesAndClippedGradients) {
  for (const int ranks : {2, 3}) {
    on_processes(ranks, [] {
      const auto wanted = run({.step = Step::kMomentum, .width = 35, .max_norm = 0.5});
      for (const auto level : kLevels) {
        const auto result =
            run({.spec = sharded(level), .step = Step::kMomentum, .width = 35, .max_norm = 0.5});
        for (std::size_t i = 0; i < wanted.parameters.size(); ++i) {
          EXPECT_TRUE(torch::allclose(result.parameters[i], wanted.parameters[i], 1e-5, 1e-6))
              << text_of(level) << ", parameter " << i << ": "
              << test::distance(result.parameters[i], wanted.parameters[i]);
        }
      }
    });
  }
}

TEST(ShardedEquality, HoldsOverGloo) {
  on_processes(2, {.environment = {{"ACCELERATE_HOST_BACKEND", "gloo"}}}, [] {
    const auto wanted = run({});
    for (const auto level : kLevels) {
      expect_equal(run({.spec = sharded(level)}), wanted, text_of(level));
    }
  });
}

TEST(ShardedEquality, SkippedUnitsCountAsZerosOnceTheOrderIsLearned) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    const auto skip_blocks = [rank](int first) {
      return [=](TinyGpt& net, int step) {
        if (rank == 1 && step >= first) net->skipped = {step % 3};
      };
    };
    const auto skip_half = [rank](int first) {
      return [=](TinyGpt& net, int step) {
        const bool skips = rank == 1 && step >= first;
        net->blocks->ptr(1)->as<test::Block>()->skips_mlp = skips;
      };
    };
    for (const auto level : kLevels) {
      // Levels without gathers know the order from the first step on.
      const int first = level == ShardLevel::kParameters ? 1 : 0;
      for (const int prefetch : {0, 1, 2}) {
        for (const auto& skip : {std::function<void(TinyGpt&, int)>(skip_blocks(first)),
                                 std::function<void(TinyGpt&, int)>(skip_half(first))}) {
          const RunOptions plain{.steps = 5, .find_unused = true, .before_step = skip};
          auto options = plain;
          options.spec = sharded(level, prefetch);
          expect_equal(run(options), run(plain), str(text_of(level), ", prefetch ", prefetch));
        }
      }
    }
  });
}

}  // namespace
}  // namespace accelerate
