#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "parallel/data_parallel.h"
#include "parallel/power_sgd.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/reference_path.h"
#include "training/two_heads.h"

namespace accelerate {
namespace {

using detail::parallel::DataParallel;
using Hook = DDPCommunicationHookType;
using Json = nlohmann::json;

/// As tests/reference/comm_hooks/write_comm_hooks.py computes them.
template <class F>
torch::Tensor formula(torch::IntArrayRef shape, F f) {
  const auto size = c10::multiply_integers(shape);
  return f(torch::arange(size, torch::kDouble)).to(torch::kFloat).reshape(shape);
}

torch::nn::Sequential network() {
  torch::nn::Sequential net(torch::nn::Linear(20, 24), torch::nn::Tanh(), torch::nn::Linear(24, 24),
                            torch::nn::Tanh(), torch::nn::Linear(24, 3));
  const torch::NoGradGuard no_grad;
  int p = 0;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(formula(parameter.sizes(),
                            [&](const torch::Tensor& i) { return torch::cos(0.7 * i + p) * 0.3; }));
    ++p;
  }
  return net;
}

Value::Dict options_of(const Json& json) {
  Value::Dict options;
  for (const auto& [key, value] : json.items()) {
    if (value.is_boolean()) {
      options.set(key, value.get<bool>());
    } else if (value.is_number_integer()) {
      options.set(key, value.get<std::int64_t>());
    } else {
      options.set(key, value.get<double>());
    }
  }
  return options;
}

Hook hook_of(const Json& name) {
  return from_string<DDPCommunicationHookType>(name.get<std::string>());
}

/// Without 16 bits the same operations in the same order: what is left is how a matrix product adds
/// up. In 16 bits a product may round the other way, by one unit of the last place: 2^-11 of the
/// value in fp16, 2^-8 in bf16, and what was lost comes again as error feedback.
double tolerance_of(const Json& run) {
  if (run["hook"] == "bf16" || run["wrapper"] == "bf16") return 2e-3;
  if (run["hook"] == "fp16" || run["wrapper"] == "fp16") return 2e-4;
  return 1e-5;
}

TEST(CommHooks, GiveTheGradientsOfPython) {
  on_processes(2, [](PartialState& state) {
    std::ifstream in(test::reference_path("comm_hooks/comm_hooks.json"));
    const auto python = Json::parse(in);
    const auto stride = python["stride"].get<std::int64_t>();
    ASSERT_GE(python["runs"].size(), 20U);
    for (const auto& run : python["runs"]) {
      const auto what = run["hook"].dump() + " " + run["wrapper"].dump() + run["options"].dump();
      auto net = network();
      DataParallel parallel(*net, state.process_group(),
                            {.comm_hook = hook_of(run["hook"]),
                             .comm_wrapper = hook_of(run["wrapper"]),
                             .comm_state_option = options_of(run["options"])});
      torch::manual_seed(5);
      const auto random = at::detail::getDefaultCPUGenerator().get_state();
      const auto tolerance = tolerance_of(run);
      for (std::size_t s = 0; s < run["steps"].size(); ++s) {
        const auto x = formula({6, 20}, [&](const torch::Tensor& i) {
          return torch::sin(0.3 * i + static_cast<double>(s) + 2 * state.process_index());
        });
        test::backward(parallel, net->forward(x).pow(2).mean());
        const torch::NoGradGuard no_grad;
        std::size_t p = 0;
        for (auto& parameter : net->parameters()) {
          const auto own = parameter.grad().reshape(-1).slice(0, 0, std::nullopt, stride);
          const auto theirs = torch::tensor(run["steps"][s][p].get<std::vector<double>>());
          const auto off = (own.to(torch::kDouble) - theirs).abs().max().item<double>();
          EXPECT_LT(off, tolerance) << what << ", step " << s << ", parameter " << p;
          parameter.sub_(parameter.grad(), 0.1);
          parameter.mutable_grad() = torch::Tensor();
          ++p;
        }
      }
      EXPECT_TRUE(torch::equal(random, at::detail::getDefaultCPUGenerator().get_state()))
          << "random numbers of the program are its own";
    }
  });
}

TEST(CommHooks, WorkWithSeveralBucketsAndBucketViews) {
  on_processes(2, [](PartialState& state) {
    for (const auto hook : {Hook::kPowerSgd, Hook::kBatchedPowerSgd}) {
      for (const bool is_static : {false, true}) {
        // Two layers of 1.1 MB: two buckets.
        torch::nn::Sequential net(torch::nn::Linear(540, 512), torch::nn::Linear(512, 540));
        DataParallel parallel(*net, state.process_group(),
                              {.bucket_cap_mb = 1,
                               .gradient_as_bucket_view = true,
                               .static_graph = is_static,
                               .comm_hook = hook,
                               .comm_state_option = {{"start_powerSGD_iter", 2}}});
        for (int s = 0; s < 4; ++s) {
          torch::manual_seed(10 * s + state.process_index());
          test::backward(parallel, net->forward(torch::randn({4, 540})).pow(2).mean());
          for (const auto& parameter : net->parameters()) {
            const auto all = gather(parameter.grad().unsqueeze(0));
            EXPECT_TRUE(torch::equal(all[0], all[1]));
            EXPECT_GT(all.abs().sum().item<double>(), 0);
          }
          net->zero_grad();
        }
      }
    }
  });
}

TEST(CommHooks, RefuseOptionsThatPowerSgdDoesNotHave) {
  on_processes(2, [](PartialState& state) {
    torch::nn::Linear net(3, 2);
    const auto message = [&](Value::Dict options) {
      return test::message_of<ConfigError>([&] {
        DataParallel(*net, state.process_group(),
                     {.comm_hook = Hook::kPowerSgd, .comm_state_option = std::move(options)});
      });
    };
    EXPECT_NE(message({{"rank", 2}}).find("unknown key 'rank'"), std::string::npos);
    EXPECT_NE(message({{"warm_start", 1}}).find("warm_start = 1"), std::string::npos);
    EXPECT_NE(message({{"start_powerSGD_iter", 1}}).find("start_powerSGD_iter = 1"),
              std::string::npos);
    EXPECT_EQ(message({{"matrix_approximation_rank", 0}}),
              "comm_state_option has matrix_approximation_rank = 0, but it must be at least 1.");
    EXPECT_EQ(message({{"random_seed", -1}}),
              "comm_state_option has random_seed = -1, but it must be from 0 to 4294967295.");
    EXPECT_EQ(message({{"orthogonalization_epsilon", -1}}),
              "comm_state_option has orthogonalization_epsilon = -1, but it must be at least 0.");
  });
}

TEST(CommHooks, DrawSeedsAsNumpyDoes) {
  // numpy.random.RandomState(seed).randint(1_000_000_000), four times
  for (const auto& [seed, wanted] :
       std::vector<std::pair<std::uint32_t, std::vector<std::uint32_t>>>{
           {0U, {209652396, 398764591, 924231285, 404868288}},
           {7U, {327741615, 976413892, 128500249, 296233462}},
           {4294967295U, {419326371, 479346978, 697429004, 269265991}}}) {
    detail::parallel::NumpyRandom random(seed);
    for (const auto value : wanted) EXPECT_EQ(random.below_a_billion(), value) << seed;
  }
}

}  // namespace
}  // namespace accelerate
