#include "accelerate/random.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::message_of;

const nlohmann::json& python() {
  static const auto values = [] {
    std::ifstream in(test::reference_path("random/random.json"));
    return nlohmann::json::parse(in);
  }();
  return values;
}

std::vector<double> doubles(const torch::Tensor& tensor) {
  const auto wide = tensor.to(torch::kDouble).contiguous();
  return {wide.data_ptr<double>(), wide.data_ptr<double>() + wide.numel()};
}

std::vector<std::int64_t> integers(const torch::Tensor& tensor) {
  return {tensor.data_ptr<std::int64_t>(), tensor.data_ptr<std::int64_t>() + tensor.numel()};
}

TEST(SetSeed, MakesTorchDrawPythonsNumbers) {
  for (const auto& expected : python()["set_seed"]) {
    set_seed(expected["seed"].get<std::uint64_t>());
    SCOPED_TRACE(expected["seed"].dump());
    // Bit for bit: uniform and integer draws involve no libm.
    EXPECT_EQ(doubles(torch::rand({4})), expected["rand"].get<std::vector<double>>());
    const auto normal = expected["randn"].get<std::vector<double>>();
    EXPECT_TRUE(torch::allclose(torch::randn({20}).to(torch::kDouble),
                                torch::tensor(normal, torch::kDouble),
                                /*rtol=*/1e-6, /*atol=*/1e-6));
    EXPECT_EQ(integers(torch::randperm(10)), expected["randperm"].get<std::vector<std::int64_t>>());
    EXPECT_EQ(integers(torch::randint(0, 1000, {5})),
              expected["randint"].get<std::vector<std::int64_t>>());
  }
}

TEST(SetSeed, GivesTheHostEnginePythonsWords) {
  for (const auto& expected : python()["set_seed"]) {
    set_seed(expected["seed"].get<std::uint64_t>());
    for (const auto& word : expected["host"]) {
      EXPECT_EQ(host_rng()(), word.get<std::uint32_t>()) << "seed " << expected["seed"];
    }
  }
}

TEST(SetSeed, TakesSeedsOfMoreThan32BitsAsPythonsRandomDoes) {
  for (const auto& expected : python()["host"]) {
    set_seed(std::stoull(expected["seed"].get<std::string>()));
    host_rng().discard(697);  // across the first refill of the state
    for (const auto& word : expected["host"]) EXPECT_EQ(host_rng()(), word.get<std::uint32_t>());
  }
}

TEST(SetSeed, TurnsDeterministicAlgorithmsOn) {
  ASSERT_FALSE(at::globalContext().deterministicAlgorithms());
  set_seed(0, {.deterministic = true});
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  EXPECT_FALSE(at::globalContext().deterministicAlgorithmsWarnOnly());
  at::globalContext().setDeterministicAlgorithms(false, false);
}

TEST(SetSeed, DeviceSpecificNeedsToKnowTheRank) {
  PartialState::_reset_state();
  EXPECT_EQ(message_of<StateError>([] { set_seed(0, {.device_specific = true}); }),
            "set_seed with device_specific adds the rank of this process, which is not known yet. "
            "Make a PartialState or an Accelerator first.");
}

TEST(SetSeed, DeviceSpecificOfTheFirstProcessIsThePlainSeed) {
  const PartialState alone({.cpu = true});
  set_seed(42, {.device_specific = true});
  const auto specific = torch::rand({3});
  set_seed(42);
  EXPECT_TRUE(torch::equal(specific, torch::rand({3})));
  PartialState::_reset_state();
}

TEST(RngState, HasTorchsLayoutAndRepeatsTheDraws) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  (void)torch::rand({3}, generator);
  const auto state = get_rng_state(RNGType::kGenerator, generator);
  EXPECT_EQ(state.numel(), python()["generator"]["bytes"].get<std::int64_t>());
  EXPECT_EQ(state.scalar_type(), torch::kByte);

  const auto next = doubles(torch::rand({2}, generator));
  EXPECT_EQ(next, python()["generator"]["next"].get<std::vector<double>>());
  set_rng_state(RNGType::kGenerator, state, generator);
  EXPECT_EQ(doubles(torch::rand({2}, generator)), next);
}

TEST(RngState, OfTorchIsThatOfTheDefaultGenerator) {
  const auto state = get_rng_state(RNGType::kTorch);
  const auto drawn = torch::rand({2});
  set_rng_state(RNGType::kTorch, state);
  EXPECT_TRUE(torch::equal(torch::rand({2}), drawn));
}

TEST(RngState, OfAGeneratorNeedsOne) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)get_rng_state(RNGType::kGenerator); }),
            "RNGType 'generator' needs a generator: pass the one whose state is meant.");
}

TEST(RngState, NamesTheHardwareThatIsMissing) {
  for (const auto type : {RNGType::kNpu, RNGType::kMlu, RNGType::kSdaa, RNGType::kMusa,
                          RNGType::kXpu, RNGType::kHpu, RNGType::kNeuron, RNGType::kXla}) {
    const auto message = message_of<UnsupportedError>([&] { (void)get_rng_state(type); });
    auto name = std::string(to_string(type));
    for (auto& c : name) c = static_cast<char>(std::toupper(c));
    EXPECT_NE(message.find(name), std::string::npos) << message;
  }
}

TEST(SynchronizeRngStates, ChangesNothingInASingleProcess) {
  PartialState::_reset_state();
  const PartialState alone({.cpu = true});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto before = get_rng_state(RNGType::kGenerator, generator);
  synchronize_rng_states({RNGType::kTorch, RNGType::kGenerator}, generator);
  synchronize_rng_states({"torch", "generator"}, generator);
  synchronize_rng_state(RNGType::kTorch);
  EXPECT_TRUE(torch::equal(get_rng_state(RNGType::kGenerator, generator), before));
}

TEST(SynchronizeRngStates, RefusesAnUnknownNameAndListsTheKnownOnes) {
  const auto message =
      message_of<Error>([] { synchronize_rng_states(std::vector<std::string>{"gpu"}); });
  EXPECT_NE(message.find("gpu"), std::string::npos) << message;
  EXPECT_NE(message.find("generator"), std::string::npos) << message;
}

TEST(SynchronizeRngStates, MissesTheGeneratorAlsoWhenAlone) {
  const PartialState alone({.cpu = true});
  EXPECT_THROW(synchronize_rng_states({RNGType::kGenerator}), ArgumentError);
  PartialState::_reset_state();
}

}  // namespace
}  // namespace accelerate
