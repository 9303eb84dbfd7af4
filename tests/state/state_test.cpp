#include "accelerate/state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::message_of;

using detail::state::FromAccelerator;

nlohmann::json reference() {
  std::ifstream file(test::reference_path("state/state.json"));
  return nlohmann::json::parse(file);
}

template <class T>
std::string printed(const T& object) {
  std::ostringstream out;
  out << object;
  return out.str();
}

// Every test begins and ends without state; the environment says "CPU" and names no launcher.
class StateTest : public testing::Test {
 protected:
  StateTest() { reset(); }
  ~StateTest() override { reset(); }

  static void reset() {
    AcceleratorState::_reset_state(/*reset_partial_state=*/true);
    GradientState::_reset_state();
  }

  ClearedEnvironment cleared_;
  PatchedEnvironment patched_{{{"ACCELERATE_USE_CPU", "1"}}};
};

using PartialStateTest = StateTest;
using SplitBetweenProcessesTest = StateTest;
using GatedFunctionsTest = StateTest;
using AcceleratorStateTest = StateTest;
using GradientStateTest = StateTest;

TEST_F(PartialStateTest, IsAloneWithoutLauncher) {
  const PartialState state;
  EXPECT_EQ(state.distributed_type(), DistributedType::kNo);
  EXPECT_EQ(state.backend(), std::nullopt);
  EXPECT_EQ(state.num_processes(), 1);
  EXPECT_EQ(state.process_index(), 0);
  EXPECT_EQ(state.local_process_index(), 0);
  EXPECT_EQ(state.device(), torch::Device("cpu"));
  EXPECT_FALSE(state.use_distributed());
  EXPECT_TRUE(state.is_main_process());
  EXPECT_TRUE(state.is_local_main_process());
  EXPECT_TRUE(state.is_last_process());
  EXPECT_FALSE(state.debug());
  EXPECT_FALSE(state.fork_launched());
  EXPECT_EQ(state.num_machines(), 1);
  EXPECT_EQ(state.local_num_processes(), 1);
  EXPECT_FALSE(state.process_group());
  EXPECT_FALSE(state.store());
  EXPECT_FALSE(state.host_name().empty());
  state.wait_for_everyone();
}

TEST_F(PartialStateTest, PrintsWhatPythonPrints) {
  EXPECT_EQ(printed(PartialState()),
            reference().at("printed").at("partial_alone").get<std::string>());
}

TEST_F(PartialStateTest, IsMadeOnceAndLaterOptionsDoNotCount) {
  const PartialState first({.timeout = std::chrono::seconds(7)});
  const PartialState second({.timeout = std::chrono::seconds(9)});
  EXPECT_EQ(second.timeout(), std::chrono::seconds(7));
}

TEST_F(PartialStateTest, NamesTheAttributeReadAfterAReset) {
  const PartialState state;
  PartialState::_reset_state();
  EXPECT_FALSE(PartialState::initialized());
  EXPECT_EQ(message_of<StateError>([&] { (void)state.num_processes(); }),
            "`PartialState` object has no attribute `num_processes`. This happens if "
            "`PartialState._reset_state()` was called and no `Accelerator` or `PartialState` was "
            "made afterwards. Make one first.");
  EXPECT_THROW((void)state.on_main_process([] {}), StateError);
  EXPECT_THROW(state.main_process_first([] {}), StateError);
  EXPECT_THROW((void)state.split_between_processes(std::vector{1}), StateError);
}

TEST_F(PartialStateTest, OldHandlesComeAliveWithTheNextState) {
  const PartialState old;
  PartialState::_reset_state();
  const PartialState next({.timeout = std::chrono::seconds(3)});
  EXPECT_EQ(old.timeout(), std::chrono::seconds(3));
}

TEST_F(PartialStateTest, ReadsWhetherALauncherForkedItAtEveryConstruction) {
  const PartialState state;
  EXPECT_FALSE(state.fork_launched());
  auto patched = patch_environment({{"FORK_LAUNCHED", "1"}});
  const PartialState again;
  EXPECT_TRUE(state.fork_launched());
}

TEST_F(PartialStateTest, TakesTheDeviceOfTheVariableAsItIs) {
  auto patched = patch_environment({{"ACCELERATE_TORCH_DEVICE", "cuda:64"}});
  EXPECT_EQ(PartialState().device(), torch::Device("cuda:64"));
}

TEST_F(PartialStateTest, KnowsTheDeviceThatItWouldTakeUntold) {
  auto patched = patch_environment({{"ACCELERATE_TORCH_DEVICE", "meta"}});
  const PartialState state;
  EXPECT_EQ(state.device(), torch::Device("meta"));
  EXPECT_EQ(state.default_device(), torch::Device(torch::cuda::is_available() ? "cuda" : "cpu"));
}

TEST_F(PartialStateTest, RefusesADeviceThatDoesNotExistAndStaysUnmade) {
  auto patched = patch_environment({{"ACCELERATE_TORCH_DEVICE", "gpu0"}});
  EXPECT_EQ(message_of<ConfigError>([] { PartialState state; }),
            "ACCELERATE_TORCH_DEVICE is 'gpu0', which is not a device. Examples: cpu, cuda, "
            "cuda:1.");
  EXPECT_FALSE(PartialState::initialized());
}

TEST_F(PartialStateTest, IsNotMadeFromVariablesThatContradictEachOther) {
  {
    auto patched = patch_environment({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
    EXPECT_EQ(message_of<ConfigError>([] { PartialState state; }),
              "RANK is 2, but WORLD_SIZE is 2: ranks go from 0 to 1.");
    EXPECT_FALSE(PartialState::initialized());
  }
  EXPECT_EQ(PartialState().num_processes(), 1);
}

TEST_F(PartialStateTest, RefusesOptionsThatAreNotComplete) {
  EXPECT_EQ(message_of<ConfigError>([] { PartialState state({.rank = 0}); }),
            "rank is given without world_size. Give both or neither.");
  EXPECT_EQ(message_of<ConfigError>([] { PartialState state({.rank = 2, .world_size = 2}); }),
            "rank is 2 and world_size is 2: ranks go from 0 to world_size - 1.");
  EXPECT_EQ(message_of<ConfigError>([] { PartialState state({.rank = 0, .world_size = 2}); }),
            "MASTER_ADDR is missing: rank and world_size say who this process is, but not where "
            "the others are. Set it, or give init_method or store.");
}

TEST_F(PartialStateTest, RefusesNumbersOutsideOfTheirRange) {
  const auto refusal = [](const PartialStateOptions& options) {
    return message_of<ConfigError>([&] { PartialState state(options); });
  };
  EXPECT_EQ(refusal({.rank = 0, .world_size = 2, .local_rank = -1}),
            "local_rank is -1. It begins at 0.");
  EXPECT_EQ(refusal({.rank = 0, .world_size = 2, .local_world_size = 0}),
            "local_world_size is 0. A host has at least one process.");
  EXPECT_EQ(refusal({.rank = 0, .world_size = 2, .local_rank = 2, .local_world_size = 2}),
            "local_rank (or LOCAL_RANK) is 2, but local_world_size (or LOCAL_WORLD_SIZE) is 2: "
            "local ranks go from 0 to local_world_size - 1.");
  EXPECT_EQ(refusal({.init_method = "tcp://127.0.0.1:29500abc",
                     .rank = 1,
                     .world_size = 2,
                     .local_rank = 1,
                     .local_world_size = 2}),
            "the port in '127.0.0.1:29500abc' must be a number from 1 to 65535.");
  auto patched = patch_environment({{"MASTER_PORT", "70000"}});
  EXPECT_EQ(refusal({.rank = 0, .world_size = 2}),
            "MASTER_PORT is 70000. Ports go from 0 to 65535.");
  EXPECT_FALSE(PartialState::initialized());
}

TEST_F(PartialStateTest, IsNotMadeWhenAVariableIsNoTruthValue) {
  for (const char* name : {"FORK_LAUNCHED", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE"}) {
    auto patched = patch_environment({{name, "perhaps"}});
    EXPECT_THROW(PartialState(), ConfigError) << name;
    EXPECT_FALSE(PartialState::initialized()) << name;
  }
}

TEST_F(PartialStateTest, IsAloneWhenOneProcessWasStartedWithoutALocalRank) {
  auto patched = patch_environment({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  PartialState state;
  EXPECT_EQ(state.distributed_type(), DistributedType::kNo);
  EXPECT_FALSE(state.process_group());
}

TEST_F(PartialStateTest, RefusesSageMaker) {
  auto patched = patch_environment({{"ACCELERATE_USE_SAGEMAKER", "true"}});
  EXPECT_THROW(PartialState(), UnsupportedError);
}

TEST_F(PartialStateTest, ReadsDebugModeAndLetsItBeSwitched) {
  auto patched = patch_environment({{"ACCELERATE_DEBUG_MODE", "yes"}});
  PartialState state;
  EXPECT_TRUE(state.debug());
  state.set_debug(false);
  EXPECT_FALSE(PartialState().debug());
}

TEST_F(PartialStateTest, KnowsThePrecisionOfTheVariableUntilAnAcceleratorHasOne) {
  const PartialState state;
  EXPECT_EQ(state.mixed_precision(), PrecisionType::kNo);
  auto patched = patch_environment({{"ACCELERATE_MIXED_PRECISION", "FP16"}});
  EXPECT_EQ(state.mixed_precision(), PrecisionType::kFp16);
  const AcceleratorState accelerator({.mixed_precision = PrecisionType::kBf16}, FromAccelerator{});
  EXPECT_EQ(state.mixed_precision(), PrecisionType::kBf16);
}

TEST_F(PartialStateTest, CanBeMadeByManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> sum = 0;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { sum += PartialState().num_processes(); });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(sum, 8);
}

TEST_F(PartialStateTest, FormsAGroupOfOneUnderALauncher) {
  auto patched = patch_environment({{"RANK", "0"},
                                    {"WORLD_SIZE", "1"},
                                    {"LOCAL_RANK", "0"},
                                    {"MASTER_PORT", "0"},
                                    {"OMP_NUM_THREADS", "1"}});
  PartialState state;
  EXPECT_EQ(state.distributed_type(), DistributedType::kMultiCpu);
  EXPECT_EQ(state.backend(), "gloo");
  EXPECT_EQ(state.device(), torch::Device("cpu:0"));
  EXPECT_FALSE(state.use_distributed());
  ASSERT_TRUE(state.process_group());
  state.wait_for_everyone();
  state.destroy_process_group();
  EXPECT_FALSE(state.process_group());
}

TEST_F(PartialStateTest, PrintsOneLineWithBlanksBetweenTheArguments) {
  testing::internal::CaptureStdout();
  PartialState().print("epoch", 3, 0.5, true);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "epoch 3 0.5 true\n");
}

TEST_F(PartialStateTest, TakesItsOptionsFromTheHandler) {
  const auto options = PartialStateOptions::from(
      {.backend = "gloo", .init_method = "tcp://h:1", .timeout = std::chrono::seconds(5)});
  EXPECT_EQ(options.backend, "gloo");
  EXPECT_EQ(options.init_method, "tcp://h:1");
  EXPECT_EQ(options.timeout, std::chrono::seconds(5));
  EXPECT_EQ(PartialStateOptions::from({}).timeout, std::nullopt);
}

TEST_F(SplitBetweenProcessesTest, GivesOneProcessEverythingWithoutPaddingAndChecks) {
  const PartialState state;
  const std::map<std::string, std::vector<int>> uneven{{"a", {1, 2}}, {"b", {3}}};
  EXPECT_EQ(state.split_between_processes(uneven, {.apply_padding = true}), uneven);
  const auto tensor = torch::arange(3);
  EXPECT_TRUE(state.split_between_processes(tensor, {.apply_padding = true}).is_same(tensor));
  EXPECT_EQ(state.split_between_processes({"A", "B"}).size(), 2U);
}

TEST_F(SplitBetweenProcessesTest, HandsThePartToAFunctionAndReturnsItsResult) {
  const PartialState state;
  const int sum = state.split_between_processes(std::vector{1, 2, 3}, {}, [](auto part) {
    return std::accumulate(part.begin(), part.end(), 0);
  });
  EXPECT_EQ(sum, 6);
}

// Parts as processes of larger runs would get them.
detail::state::SplitShare share(int processes, int index, bool padding = false) {
  return {
      .num_processes = processes, .process_index = index, .options = {.apply_padding = padding}};
}

TEST(Split, TurnsSequencesIntoVectors) {
  const std::array<int, 3> array{1, 2, 3};
  EXPECT_EQ(detail::state::split(array, share(2, 0)), (std::vector{1, 2}));
  EXPECT_EQ(detail::state::split(std::span(array), share(2, 1, true)), (std::vector{3, 3}));
  EXPECT_EQ(detail::state::split(std::vector<bool>{true, false, true}, share(2, 1)),
            (std::vector<bool>{true}));
  EXPECT_EQ(detail::state::split(std::vector<int>{}, share(2, 1, true)), std::vector<int>{});
}

TEST(Split, TurnsATupleOfOneTypeIntoAVectorAndAMixedOneIntoVariants) {
  EXPECT_EQ(detail::state::split(std::tuple{1, 2, 3}, share(2, 1)), (std::vector{3}));
  using Item = std::variant<int, std::string>;
  const auto mixed = detail::state::split(std::tuple{1, std::string("two"), 3}, share(2, 0));
  EXPECT_EQ(mixed, (std::vector<Item>{1, std::string("two")}));
}

TEST(Split, CutsMapsLeafByLeaf) {
  using Leaf = std::variant<std::vector<int>, std::vector<std::string>, torch::Tensor>;
  std::map<std::string, std::map<std::string, Leaf>> batch;
  batch["x"]["ids"] = std::vector{0, 1, 2, 3, 4, 5, 6, 7};
  batch["x"]["words"] = std::vector<std::string>{"a", "b", "c", "d", "e", "f", "g", "h"};
  batch["y"]["labels"] = torch::arange(8);
  const auto part = detail::state::split(batch, share(4, 1));
  EXPECT_EQ(std::get<0>(part.at("x").at("ids")), (std::vector{2, 3}));
  EXPECT_EQ(std::get<1>(part.at("x").at("words")), (std::vector<std::string>{"c", "d"}));
  EXPECT_TRUE(torch::equal(std::get<2>(part.at("y").at("labels")), torch::tensor({2, 3})));
  EXPECT_EQ(std::get<0>(batch.at("x").at("ids")).size(), 8U);  // the caller's is untouched
}

TEST(Split, NamesTheLeavesOfAMapThatDifferInLength) {
  const std::map<std::string, std::map<std::string, std::vector<int>>> batch{
      {"x", {{"ids", {1, 2, 3}}}}, {"y", {{"labels", {1, 2}}}}};
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)detail::state::split(batch, share(2, 0)); }),
            "split_between_processes: all values of a map must have the same length, but 'x.ids' "
            "has 3 items and 'y.labels' has 2.");
}

TEST(Split, HandsEveryProcessWhatIsNoSequenceInsideAMap) {
  using Leaf = std::variant<std::vector<int>, double, std::string>;
  const std::map<std::string, Leaf> batch{
      {"ids", std::vector{1, 2}}, {"scale", 0.5}, {"task", std::string("copy")}};
  const auto part = detail::state::split(batch, share(2, 1));
  EXPECT_EQ(std::get<0>(part.at("ids")), (std::vector{2}));
  EXPECT_EQ(std::get<1>(part.at("scale")), 0.5);
  EXPECT_EQ(std::get<2>(part.at("task")), "copy");
}

TEST(Split, CutsRowsOfTensorsAndPadsWithTheLastRowOfAll) {
  const auto rows = torch::arange(14).reshape({7, 2});
  EXPECT_TRUE(torch::equal(detail::state::split(rows, share(3, 1)), rows.slice(0, 3, 5)));
  const auto padded = detail::state::split(rows, share(3, 1, true));
  EXPECT_TRUE(torch::equal(padded, torch::cat({rows.slice(0, 3, 5), rows.slice(0, 6, 7)})));
  EXPECT_EQ(detail::state::split(torch::empty({0, 2}), share(3, 1, true)).sizes(),
            (std::vector<std::int64_t>{0, 2}));
  EXPECT_THROW((void)detail::state::split(torch::tensor(1), share(2, 0)), ArgumentError);
}

TEST(Split, CutsDynamicValues) {
  const Value value = Value::Dict{{"ids", Value::List{1, 2, 3}}, {"task", "copy"}};
  const Value part = detail::state::split(value, share(2, 1, true));
  EXPECT_EQ(part, (Value::Dict{{"ids", Value::List{3, 3}}, {"task", "copy"}}));
  const Value uneven = Value::Dict{{"a", Value::List{1}}, {"b", Value::List{1, 2}}};
  EXPECT_THROW((void)detail::state::split(uneven, share(2, 0)), ArgumentError);
}

struct Squares : torch::data::datasets::Dataset<Squares, int> {
  int get(std::size_t i) override { return static_cast<int>(i * i); }
  torch::optional<std::size_t> size() const override { return 7; }
};

struct Letters {
  std::string letters = "ABCDE";
  std::size_t size() const { return letters.size(); }
  char get(std::size_t i) const { return letters[i]; }
};

TEST(Split, MakesADatasetOfTheItemsOfOneProcess) {
  auto part = detail::state::split(Squares(), share(3, 1, true));  // items 3, 4 and 4 again
  EXPECT_EQ(part.size(), 3U);
  EXPECT_EQ(part.get(0), 9);
  EXPECT_EQ(part.get(2), 16);
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(part, 2);
  std::vector<std::vector<int>> batches;
  for (auto& batch : *loader) batches.push_back(batch);
  EXPECT_EQ(batches, (std::vector<std::vector<int>>{{9, 16}, {16}}));
}

TEST(Split, RefersToANamedDatasetAndKeepsATemporaryOne) {
  Letters letters;
  auto view = detail::state::split(letters, share(2, 1));
  letters.letters = "VWXYZ";
  EXPECT_EQ(view.get(0), 'Y');
  auto owner = detail::state::split(Letters(), share(2, 1));
  EXPECT_EQ(owner.get(0), 'D');
  EXPECT_EQ(owner.size(), 2U);
  EXPECT_EQ(detail::state::split(std::as_const(letters), share(2, 0)).get(2), 'X');
}

TEST_F(GatedFunctionsTest, RunWhenNotDistributedWhateverTheIndex) {
  const PartialState state;
  int runs = 0;
  const auto count = [&] { ++runs; };
  state.on_main_process(count)();
  state.on_local_main_process(count)();
  state.on_last_process(count)();
  state.on_process(count, 5)();
  state.on_process(5)(count)();
  state.on_local_process(count, 5)();
  state.on_local_process(5)(count)();
  EXPECT_EQ(runs, 7);
}

TEST_F(GatedFunctionsTest, ReturnTheResultAsAnOptionalAndForwardTheArguments) {
  const PartialState state;
  auto twice = state.on_main_process([](int x) { return 2 * x; });
  static_assert(std::is_same_v<decltype(twice(1)), std::optional<int>>);
  EXPECT_EQ(twice(21), 42);
  EXPECT_EQ(detail::state::Gated([](int x) { return x; }, false)(1), std::nullopt);
  auto moved = state.on_main_process([](std::unique_ptr<int> p) { return *p; });
  EXPECT_EQ(moved(std::make_unique<int>(3)), 3);
}

TEST_F(GatedFunctionsTest, MainProcessFirstReturnsWhatItsFunctionReturns) {
  const PartialState state;
  EXPECT_EQ(state.main_process_first([] { return 7; }), 7);
  int value = 1;
  int& same = state.local_main_process_first([&]() -> int& { return value; });
  EXPECT_EQ(&same, &value);
  EXPECT_EQ(*state.main_process_first([] { return std::make_unique<int>(4); }), 4);
  EXPECT_THROW(state.main_process_first([] { throw std::logic_error("x"); }), std::logic_error);
}

TEST_F(AcceleratorStateTest, IsMadeByAnAcceleratorOnlyAndLeavesNothingBehindOtherwise) {
  EXPECT_EQ(message_of<StateError>([] { AcceleratorState state; }),
            "There is no accelerator state yet. Make one by `Accelerator accelerator;` before "
            "anything that asks for it.");
  EXPECT_FALSE(is_initialized());
  EXPECT_FALSE(PartialState::initialized());
}

TEST_F(AcceleratorStateTest, PrintsWhatPythonPrints) {
  const AcceleratorState state({.mixed_precision = PrecisionType::kBf16}, FromAccelerator{});
  EXPECT_EQ(printed(state), reference().at("printed").at("accelerator_alone").get<std::string>());
  EXPECT_EQ(printed(AcceleratorState()), printed(state));
}

TEST_F(AcceleratorStateTest, HasEverythingOfPartialState) {
  const AcceleratorState state({}, FromAccelerator{});
  EXPECT_TRUE(is_initialized());
  EXPECT_TRUE(PartialState::initialized());
  EXPECT_EQ(state.num_processes(), 1);
  EXPECT_TRUE(state.device().is_cpu());
  EXPECT_TRUE(state.is_main_process());
  EXPECT_EQ(state.mixed_precision(), PrecisionType::kNo);
  EXPECT_FALSE(state.is_fsdp2());
  EXPECT_EQ(state.deepspeed_plugin(), nullptr);
  EXPECT_EQ(state.main_process_first([] { return 1; }), 1);
}

TEST_F(AcceleratorStateTest, TakesThePrecisionOfTheVariableInAnyCase) {
  auto patched = patch_environment({{"ACCELERATE_MIXED_PRECISION", "BF16"}});
  EXPECT_EQ(AcceleratorState({}, FromAccelerator{}).mixed_precision(), PrecisionType::kBf16);
}

TEST_F(AcceleratorStateTest, LeavesNothingBehindWhenThePrecisionIsUnknown) {
  auto patched = patch_environment({{"ACCELERATE_MIXED_PRECISION", "bfloat16"}});
  const auto message =
      message_of<ConfigError>([] { AcceleratorState state({}, FromAccelerator{}); });
  EXPECT_NE(message.find("ACCELERATE_MIXED_PRECISION"), std::string::npos) << message;
  EXPECT_NE(message.find("bfloat16"), std::string::npos) << message;
  EXPECT_FALSE(is_initialized());
  EXPECT_FALSE(PartialState::initialized());
}

TEST_F(AcceleratorStateTest, CannotBeChangedByALaterConstruction) {
  const AcceleratorState state({.mixed_precision = PrecisionType::kBf16}, FromAccelerator{});
  EXPECT_EQ(message_of<ConfigError>(
                [] { AcceleratorState other({.mixed_precision = PrecisionType::kFp16}); }),
            "The accelerator state is already set up with mixed_precision = 'bf16' and cannot be "
            "changed. Pass mixed_precision = 'fp16' to the first `Accelerator`.");
  EXPECT_EQ(AcceleratorState({.mixed_precision = PrecisionType::kBf16}).mixed_precision(),
            PrecisionType::kBf16);
}

TEST_F(AcceleratorStateTest, CannotMoveToTheCpuAfterwards) {
  auto patched = patch_environment({{"ACCELERATE_TORCH_DEVICE", "meta"}});
  auto without = patch_environment({{"ACCELERATE_USE_CPU", "0"}});
  const std::string refusal =
      "cpu is true, but the state of this process is already set up with device meta and cannot be "
      "changed. Pass it to the first `PartialState` or `Accelerator`, or leave it out.";
  const PartialState partial;
  EXPECT_EQ(
      message_of<ConfigError>([] { AcceleratorState other({.cpu = true}, FromAccelerator{}); }),
      refusal);
  EXPECT_TRUE(PartialState::initialized());
  EXPECT_FALSE(AcceleratorState::initialized());
  const AcceleratorState state({}, FromAccelerator{});
  EXPECT_EQ(message_of<ConfigError>([] { AcceleratorState other({.cpu = true}); }), refusal);
}

TEST_F(AcceleratorStateTest, NamesTheAttributeReadAfterAResetAndKeepsPartialState) {
  const AcceleratorState state({}, FromAccelerator{});
  AcceleratorState::_reset_state();
  EXPECT_TRUE(PartialState::initialized());
  EXPECT_EQ(message_of<StateError>([&] { (void)state.device(); }),
            "`AcceleratorState` object has no attribute `device`. This happens if "
            "`AcceleratorState._reset_state()` was called and no `Accelerator` or `PartialState` "
            "was made afterwards. Make one first.");
  EXPECT_THROW((void)state.mixed_precision(), StateError);
}

TEST_F(AcceleratorStateTest, BringsPartialStateBackWhenThatAloneWasReset) {
  const AcceleratorState state({}, FromAccelerator{});
  PartialState::_reset_state();
  EXPECT_EQ(AcceleratorState().num_processes(), 1);
}

TEST_F(AcceleratorStateTest, RefusesFp8WithoutEngine) {
  EXPECT_EQ(message_of<UnsupportedError>([] {
              AcceleratorState state({.mixed_precision = PrecisionType::kFp8}, FromAccelerator{});
            }),
            "fp8 precision is asked for by mixed_precision, but this version has no engine for it "
            "yet. Use bf16, which needs no scaling either.");
  EXPECT_FALSE(PartialState::initialized());
}

TEST_F(AcceleratorStateTest, RefusesDeepSpeedWithoutEngine) {
  auto patched = patch_environment({{"ACCELERATE_USE_DEEPSPEED", "true"}});
  EXPECT_EQ(message_of<UnsupportedError>([] { AcceleratorState state({}, FromAccelerator{}); }),
            "DeepSpeed is asked for by ACCELERATE_USE_DEEPSPEED, but this version has no engine "
            "for it yet. Leave it out: data parallelism needs no plugin.");
  EXPECT_FALSE(is_initialized());
  EXPECT_FALSE(PartialState::initialized());
}

TEST_F(AcceleratorStateTest, ARunHasOneEngine) {
  const auto deepspeed =
      std::make_shared<DeepSpeedPlugin>(resolved(DeepSpeedPlugin{.zero_stage = 2}));
  auto patched = patch_environment({{"ACCELERATE_USE_FSDP", "true"}});
  EXPECT_EQ(message_of<ConfigError>([&] {
              AcceleratorState state({.deepspeed_plugins = {{"default", deepspeed}}},
                                     FromAccelerator{.fsdp = true, .deepspeed = true});
            }),
            "deepspeed_plugins and ACCELERATE_USE_FSDP ask for two engines, but a run has one. "
            "Leave one of them out.");
}

TEST_F(AcceleratorStateTest, SelectsAmongSeveralDeepSpeedPlugins) {
  const auto plugin = [](std::int64_t stage) {
    return std::make_shared<DeepSpeedPlugin>(resolved(DeepSpeedPlugin{.zero_stage = stage}));
  };
  const auto two = plugin(2);
  const auto three = plugin(3);
  AcceleratorState state({.mixed_precision = PrecisionType::kBf16,
                          .deepspeed_plugins = {{"student", two}, {"teacher", three}}},
                         FromAccelerator{.deepspeed = true});
  EXPECT_EQ(state.distributed_type(), DistributedType::kDeepspeed);
  EXPECT_EQ(PartialState().distributed_type(), DistributedType::kDeepspeed);
  EXPECT_EQ(state.mixed_precision(), PrecisionType::kBf16);
  EXPECT_EQ(state.deepspeed_plugin(), two);
  EXPECT_EQ(state.get_deepspeed_plugin("teacher"), three);
  state.select_deepspeed_plugin("teacher");
  EXPECT_EQ(state.deepspeed_plugin(), three);
  EXPECT_EQ(message_of<ArgumentError>([&] { state.select_deepspeed_plugin("x"); }),
            "There is no DeepSpeed plugin 'x'. Choose one of: student, teacher.");
  EXPECT_NE(printed(state).find("\nMixed precision type: bf16\nds_config: {"), std::string::npos)
      << printed(state);
}

TEST_F(AcceleratorStateTest, HasNoDeepSpeedPluginToSelectOtherwise) {
  AcceleratorState state({}, FromAccelerator{});
  EXPECT_EQ(message_of<StateError>([&] { (void)state.get_deepspeed_plugin("x"); }),
            "The run does not use DeepSpeed, so it has no plugin 'x'.");
  EXPECT_THROW(state.select_deepspeed_plugin("x"), StateError);
}

struct FakeLoader : DataLoaderStateMixin {
  bool end = false;
  std::int64_t extra = -1;
  bool end_of_dataloader() const override { return end; }
  std::int64_t remainder() const override { return extra; }
};

TEST_F(GradientStateTest, BeginsSynchronisedWithOneStepOutsideOfALoader) {
  const GradientState state;
  EXPECT_TRUE(state.sync_gradients());
  EXPECT_EQ(state.num_steps(), 1);
  EXPECT_FALSE(state.adjust_scheduler());
  EXPECT_TRUE(state.sync_with_dataloader());
  EXPECT_FALSE(state.sync_each_batch());
  EXPECT_FALSE(state.in_dataloader());
  EXPECT_FALSE(state.end_of_dataloader());
  EXPECT_EQ(state.remainder(), -1);
  EXPECT_EQ(state.active_dataloader(), nullptr);
}

TEST_F(GradientStateTest, PrintsWhatPythonPrints) {
  const auto expected = reference().at("gradient");
  EXPECT_EQ(printed(GradientState()), expected.at(0).at("printed").get<std::string>());
  EXPECT_EQ(printed(GradientState(GradientAccumulationPlugin{.num_steps = 4})),
            expected.at(1).at("printed").get<std::string>());
  EXPECT_EQ(printed(GradientState(GradientAccumulationPlugin{
                .num_steps = 2, .sync_with_dataloader = false, .sync_each_batch = true})),
            expected.at(2).at("printed").get<std::string>());
}

TEST_F(GradientStateTest, TakesThePluginOfALaterConstructionAndKeepsItWithoutOne) {
  const GradientState state(GradientAccumulationPlugin{.num_steps = 2});
  const GradientState other(GradientAccumulationPlugin{.num_steps = 4, .adjust_scheduler = true});
  const GradientState plain;
  EXPECT_EQ(state.num_steps(), 4);
  EXPECT_TRUE(plain.adjust_scheduler());
}

TEST_F(GradientStateTest, SeesANewNumberOfSteps) {
  GradientState state;
  state.set_num_steps(4);
  EXPECT_EQ(GradientState().num_steps(), 4);
  EXPECT_EQ(message_of<ArgumentError>([&] { state.set_num_steps(0); }),
            "num_steps is 0, but an optimizer step takes at least one batch.");
}

TEST_F(GradientStateTest, FollowsTheInnermostLoaderThatIsAlive) {
  GradientState state;
  auto outer = std::make_shared<FakeLoader>();
  auto inner = std::make_shared<FakeLoader>();
  inner->end = true;
  inner->extra = 3;
  state._add_dataloader(outer);
  state._add_dataloader(inner);
  EXPECT_EQ(state.active_dataloader(), inner);
  EXPECT_EQ(state.dataloader_references().size(), 2U);
  EXPECT_TRUE(state.end_of_dataloader());
  EXPECT_EQ(state.remainder(), 3);
  inner.reset();
  EXPECT_EQ(state.active_dataloader(), outer);
  EXPECT_FALSE(state.end_of_dataloader());
  state._remove_dataloader(outer);
  EXPECT_FALSE(state.in_dataloader());
}

TEST_F(GradientStateTest, RemovesALoaderFromTheMiddle) {
  GradientState state;
  auto a = std::make_shared<FakeLoader>();
  auto b = std::make_shared<FakeLoader>();
  state._add_dataloader(a);
  state._add_dataloader(b);
  state._remove_dataloader(a);
  EXPECT_EQ(state.dataloader_references(), (std::vector<std::shared_ptr<DataLoaderStateMixin>>{b}));
}

// Says goodbye as real loaders do.
struct LoaderThatLeaves : FakeLoader {
  ~LoaderThatLeaves() override { GradientState()._remove_dataloader(this); }
};

TEST_F(GradientStateTest, LetsALoaderLeaveFromItsDestructor) {
  GradientState state;
  auto kept = std::make_shared<FakeLoader>();
  state._add_dataloader(kept);
  state._add_dataloader(std::make_shared<LoaderThatLeaves>());
  auto leaving = std::make_shared<LoaderThatLeaves>();
  state._add_dataloader(leaving);
  leaving.reset();
  EXPECT_EQ(state.active_dataloader(), kept);
  EXPECT_EQ(state.dataloader_references().size(), 1U);
  GradientState::_reset_state();
  state._remove_dataloader(kept);  // nothing to do, and nothing to complain about
  EXPECT_FALSE(GradientState::initialized());
}

TEST_F(GradientStateTest, CountsShardedGradientsAsSynchronised) {
  GradientState state;
  EXPECT_FALSE(state.is_xla_gradients_synced());
  {
    auto patched = patch_environment({{"ACCELERATE_USE_FSDP", "true"}});
    EXPECT_TRUE(state.is_xla_gradients_synced());
  }
  state.set_is_xla_gradients_synced(true);
  EXPECT_TRUE(state.is_xla_gradients_synced());
}

TEST_F(GradientStateTest, NamesTheAttributeReadAfterAReset) {
  GradientState state;
  state._set_sync_gradients(false);
  EXPECT_FALSE(state.sync_gradients());
  GradientState::_reset_state();
  EXPECT_FALSE(GradientState::initialized());
  const auto message = message_of<StateError>([&] { (void)state.sync_gradients(); });
  EXPECT_NE(message.find("`GradientState` object has no attribute `sync_gradients`"),
            std::string::npos);
  EXPECT_TRUE(GradientState().sync_gradients());
  EXPECT_TRUE(state.sync_gradients());
}

}  // namespace
}  // namespace accelerate
