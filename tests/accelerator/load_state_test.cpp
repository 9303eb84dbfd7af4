// load_state of one process: which objects get what, and what does not fit.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/runs.h"
#include "accelerator/trace_runs.h"
#include "checkpoint/models.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using test::anew;
using test::damage;
using test::has;
using test::Json;
using test::message_of;
using test::Mlp;
using test::names_in;
using test::Progress;
using test::SavedRun;

class LoadStateTest : public test::WithFolder {};
class RandomStatesTest : public LoadStateTest {};
class GradientsTest : public LoadStateTest {};
class LoaderStateTest : public LoadStateTest {};
class AcceleratorStateTest : public LoadStateTest {};

/// Weights go straight into the model, or by way of tensors in a place that was asked for.
const std::vector<std::optional<MapLocation>> kLocations = {std::nullopt, MapLocation::kCpu,
                                                            MapLocation::kOnDevice};

/// The folder without its manifest: one that Python might have written.
void make_unverified(const fs::path& folder) { fs::remove(folder / "accelerate_state.json"); }

// ---- folders ------------------------------------------------------------------------------------

TEST_F(LoadStateTest, AMissingFolderIsNamed) {
  SavedRun run;
  EXPECT_TRUE(has(message_of<ArgumentError>([&] { run.accelerator.load_state(path_ / "none"); }),
                  (path_ / "none").string() + " but folder does not exist"));
}

TEST_F(LoadStateTest, ComparesChecksumsUnlessToldNotTo) {
  SavedRun run(anew(), /*value=*/1);
  Progress progress;
  run.accelerator.register_for_checkpointing(progress);
  run.accelerator.save_state(path_);
  run.fill(2);
  damage(path_ / "model.safetensors");
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { run.accelerator.load_state(path_); }),
                  "'model.safetensors' has the checksum"));
  EXPECT_EQ(run.value(), 2) << "nothing is loaded from a damaged checkpoint";
  run.accelerator.load_state(path_, {.verify = false});
  EXPECT_NE(run.value(), 2);

  fs::resize_file(path_ / "custom_checkpoint_0.pkl", 7);
  EXPECT_TRUE(has(
      message_of<CheckpointError>([&] { run.accelerator.load_state(path_, {.verify = false}); }),
      "'custom_checkpoint_0.pkl' has 7 bytes"));
}

TEST_F(LoadStateTest, AFileThatAnObjectNeedsIsNamedWhenItIsMissing) {
  SavedRun run;
  run.accelerator.save_state(path_);
  auto optimizer = run.accelerator.prepare(SGD(run.net->parameters(), {.lr = 0.1}));
  EXPECT_TRUE(has(message_of<CheckpointError>([&] { run.accelerator.load_state(path_); }),
                  "optimizer.bin"));
  make_unverified(path_);
  fs::remove(path_ / "model.safetensors");
  EXPECT_TRUE(
      has(message_of<CheckpointError>([&] { run.accelerator.load_state(path_); }), "model"));
}

TEST_F(LoadStateTest, ReadsACheckpointOfPython) {
  const auto next = test::read_json(test::reference_path("run_state/next.json"));
  for (const std::string format : {"safetensors", "bin"}) {
    SCOPED_TRACE(format);
    Accelerator accelerator(anew());
    torch::nn::Linear net(2, 2);
    auto sgd = SGD(net->parameters(), {.lr = 9, .momentum = 0.5});
    auto steps = StepLR(sgd, {.step_size = 2, .gamma = 0.5});
    auto [model, optimizer, scheduler] = accelerator.prepare(net, std::move(sgd), std::move(steps));
    Progress progress;
    accelerator.register_for_checkpointing(progress);
    accelerator.load_state(test::reference_path("run_state/" + format), {.strict_rng = true});

    EXPECT_EQ(progress.batches, 3);
    Json python, numpy, torch;
    for (int i = 0; i < 3; ++i) python.push_back(host_rng()());
    for (int i = 0; i < 3; ++i) numpy.push_back(numpy_rng()());
    const auto drawn = torch::randint(0, std::int64_t{1} << 31, {3}, torch::kLong);
    for (int i = 0; i < 3; ++i) torch.push_back(drawn[i].item<std::int64_t>());
    EXPECT_EQ((Json{{"python", python}, {"numpy", numpy}, {"torch", torch}}), next.at("random"));

    for (int i = 0; i < 3; ++i, ++progress.batches) {
      const auto accumulating = accelerator.accumulate(model);
      const auto x = torch::tensor({{1.0F, 0.5F}}) * (progress.batches % 2 + 1) / 4;
      const auto loss = model(x).sum() / 2;
      accelerator.backward(loss);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      EXPECT_EQ(loss.item<double>(), next.at("losses")[i].get<double>());
      EXPECT_EQ(scheduler.get_last_lr().at(0), next.at("rates")[i].get<double>());
    }
    const auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(parameters[i].detach().flatten().equal(
          torch::tensor(next.at("parameters")[i].get<std::vector<float>>())));
    }
  }
}

// ---- weights ------------------------------------------------------------------------------------

TEST_F(LoadStateTest, TiedWeightsSurvive) {
  for (const bool safe : {true, false}) {
    const auto folder = path_ / (safe ? "safe" : "bin");
    {
      const test::CapturedLog log;
      Accelerator accelerator(anew());
      auto model = accelerator.prepare(test::filled<test::Tied>());
      accelerator.save_state(folder, {.safe_serialization = safe});
      ASSERT_EQ(log.messages().size(), safe ? 1 : 0);
      if (safe) {
        EXPECT_TRUE(has(log.messages()[0], "Removed shared tensor"));
      }
    }
    for (const auto& location : kLocations) {
      Accelerator accelerator(anew());
      auto net = std::make_shared<test::Tied>();
      auto model = accelerator.prepare(net);
      accelerator.load_state(folder, {.map_location = location});
      test::expect_equal(*net, *test::filled<test::Tied>());
      const auto own = state_dict(*net);
      EXPECT_EQ(own["embed.weight"].data_ptr(), own["head.weight"].data_ptr()) << "one tensor";
    }
  }
}

TEST_F(LoadStateTest, PrefixesOfWrappersAreTakenOff) {
  SavedRun run(anew(), /*value=*/4);
  run.accelerator.save_state(path_);
  make_unverified(path_);
  for (const std::string prefix : {"module.", "_orig_mod.", "module._orig_mod."}) {
    StateDict prefixed("Tensor");
    for (const auto& entry : state_dict(*run.net)) {
      prefixed.insert(prefix + entry.key(), torch::full_like(entry.value(), 4));
    }
    safetensors::save_file(prefixed, path_ / "model.safetensors");
    for (const auto& location : kLocations) {
      run.fill(0);
      run.accelerator.load_state(path_, {.map_location = location});
      EXPECT_EQ(run.value(), 4) << prefix;
    }
  }
}

TEST_F(LoadStateTest, OtherWeightsAreRefusedUnlessLoadingIsNotStrict) {
  Accelerator accelerator(anew());
  auto [first, second] =
      std::pair{torch::nn::Sequential(torch::nn::Linear(1, 1)), torch::nn::Linear(1, 1)};
  auto model = accelerator.prepare(first);
  accelerator.save_state(path_);
  Accelerator other(anew());
  auto other_model = other.prepare(second);
  const test::CapturedLog log;
  for (const auto& location : kLocations) {
    const auto message =
        message_of<StateDictMismatch>([&] { other.load_state(path_, {.map_location = location}); });
    EXPECT_TRUE(has(message, "Missing key(s) in state_dict: "));
    EXPECT_TRUE(has(message, "Unexpected key(s) in state_dict: \"0.bias\", \"0.weight\""));
    other.load_state(path_, {.map_location = location, .strict = false});
  }
}

TEST_F(LoadStateTest, TakesTensorsThroughTheDeviceOrTheCpu) {
  SavedRun run(anew(), /*value=*/1);
  run.accelerator.save_state(path_);
  for (const auto& location : kLocations) {
    run.fill(0);
    run.accelerator.load_state(path_, {.map_location = location});
    EXPECT_EQ(run.value(), 1);
  }
  EXPECT_EQ(from_string<MapLocation>("on_device", "map_location"), MapLocation::kOnDevice);
}

// ---- objects of the program ---------------------------------------------------------------------

TEST_F(LoadStateTest, AnotherNumberOfRegisteredObjectsIsRefusedBeforeAnythingIsLoaded) {
  Progress first{.batches = 1}, second{.batches = 2}, third;
  {
    SavedRun run(anew(), /*value=*/1);
    run.accelerator.register_for_checkpointing(first, second);
    run.accelerator.save_state(path_);
  }
  for (int registered : {0, 1, 3}) {
    SavedRun run(anew(), /*value=*/9);
    if (registered > 0) run.accelerator.register_for_checkpointing(third);
    if (registered == 3) run.accelerator.register_for_checkpointing(third, third);
    const auto message = message_of<StateError>([&] { run.accelerator.load_state(path_); });
    EXPECT_TRUE(has(message, "Found checkpoints: 2"));
    EXPECT_TRUE(has(message, "Registered objects: " + std::to_string(registered)));
    EXPECT_EQ(run.value(), 9);
  }
  SavedRun run;
  Progress one, two;
  run.accelerator.register_for_checkpointing(two, one);
  run.accelerator.load_state(path_);
  EXPECT_EQ(two.batches, 1) << "by the order of registration";
  EXPECT_EQ(one.batches, 2);
}

TEST_F(LoadStateTest, NothingIsRegisteredWhereOneObjectCannotBe) {
  SavedRun run;
  Progress progress;
  EXPECT_THROW(run.accelerator.register_for_checkpointing(progress, std::shared_ptr<Progress>()),
               ArgumentError);
  run.accelerator.save_state(path_);
  EXPECT_FALSE(fs::exists(path_ / "custom_checkpoint_0.pkl"));
}

// ---- random states ------------------------------------------------------------------------------

struct Drawn {
  Drawn() : host(host_rng()()), numpy(numpy_rng()()), torch(torch::rand({1}).item<double>()) {}
  std::uint64_t host, numpy;
  double torch;
  bool operator==(const Drawn&) const = default;
};

TEST_F(RandomStatesTest, NumbersAfterLoadingAreThoseAfterSaving) {
  SavedRun run;
  set_seed(4);
  run.accelerator.save_state(path_);
  const Drawn after_saving;
  EXPECT_FALSE(after_saving == Drawn());
  run.accelerator.load_state(path_, {.strict_rng = true});
  EXPECT_TRUE(after_saving == Drawn());
}

TEST_F(RandomStatesTest, APartThatDoesNotFitLeavesTheOthers) {
  SavedRun run;
  set_seed(4);
  run.accelerator.save_state(path_);
  const Drawn expected;
  make_unverified(path_);
  auto states = load(path_ / "random_states_0.pkl").as_dict();
  states.set("random_state", Value("not a state"));
  states.set("step", Value(12));
  torch_save(Value(states), path_ / "random_states_0.pkl");
  {
    const test::CapturedLog log;
    set_seed(5);
    run.accelerator.load_state(path_);
    ASSERT_EQ(log.messages().size(), 1);
    EXPECT_TRUE(has(log.messages()[0], "'random_state'"));
  }
  const Drawn drawn;
  EXPECT_NE(drawn.host, expected.host);
  EXPECT_EQ(drawn.numpy, expected.numpy);
  EXPECT_EQ(drawn.torch, expected.torch);
  for (const auto& entry : run.accelerator._state_entries()) {
    if (entry.kind == StateKind::kRandomStates) {
      EXPECT_EQ(entry.object->state_dict().at("step"), Value(12));
    }
  }
  EXPECT_THROW(run.accelerator.load_state(path_, {.strict_rng = true}), Error);
}

TEST_F(RandomStatesTest, AMissingFileIsAWarning) {
  SavedRun run(anew(), /*value=*/2);
  run.accelerator.save_state(path_);
  make_unverified(path_);
  fs::remove(path_ / "random_states_0.pkl");
  run.fill(0);
  const test::CapturedLog log;
  run.accelerator.load_state(path_);
  EXPECT_EQ(run.value(), 2);
  ASSERT_EQ(log.messages().size(), 1);
  EXPECT_TRUE(has(log.messages()[0], "random_states_0.pkl"));
  EXPECT_THROW(run.accelerator.load_state(path_, {.strict_rng = true}), CheckpointError);
}

// ---- gradients ----------------------------------------------------------------------------------

TEST_F(GradientsTest, OfBatchesThatAreOnlyAccumulatedAreSaved) {
  SavedRun run(anew({.gradient_accumulation_steps = 2}));
  auto optimizer = run.accelerator.prepare(SGD(run.net->parameters(), {.lr = 0.1}));
  const auto batch = [&](double scale) {
    const auto accumulating = run.accelerator.accumulate(run.model);
    run.accelerator.backward((run.model(torch::ones({1, 3})) * scale).sum());
    optimizer.step();
    optimizer.zero_grad();
  };
  batch(1);
  run.accelerator.save_state(path_ / "middle");
  EXPECT_TRUE(fs::exists(path_ / "middle/accumulated_gradients_0.bin"));
  batch(2);
  const auto expected = run.net->second->bias.detach().clone();
  run.accelerator.save_state(path_ / "end");
  EXPECT_FALSE(fs::exists(path_ / "end/accumulated_gradients_0.bin"));

  run.fill(5);
  batch(7);  // leaves gradients that the checkpoint knows nothing of
  run.accelerator.load_state(path_ / "middle");
  batch(2);
  EXPECT_TRUE(run.net->second->bias.equal(expected)) << "the second batch of the same step";

  batch(7);
  run.accelerator.load_state(path_ / "end");
  EXPECT_FALSE(run.net->second->bias.grad().defined()) << "none were saved";
  EXPECT_TRUE(run.net->second->bias.equal(expected));
}

TEST_F(GradientsTest, SparseOnesAreSaved) {
  Accelerator accelerator(anew({.gradient_accumulation_steps = 2}));
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(6, 2).sparse(true));
  auto model = accelerator.prepare(net);
  {
    const auto accumulating = accelerator.accumulate(model);
    accelerator.backward(model(torch::tensor({1, 4, 4})).sum());
  }
  accelerator.save_state(path_);
  const auto expected = net->weight.grad().to_dense();
  net->weight.mutable_grad().reset();
  accelerator.load_state(path_);
  ASSERT_TRUE(net->weight.grad().is_sparse());
  EXPECT_TRUE(net->weight.grad().to_dense().equal(expected));
}

// ---- data ---------------------------------------------------------------------------------------

std::vector<std::int64_t> rest_of(DataLoader<torch::Tensor>& loader, int batches = 99) {
  std::vector<std::int64_t> rows;
  for (auto& batch : loader) {
    for (std::int64_t i = 0; i < batch.size(0); ++i) rows.push_back(batch[i].item<std::int64_t>());
    if (--batches == 0) break;
  }
  return rows;
}

/// The rows of the epoch that the checkpoint was taken in, behind those that had been seen, and of
/// the next epoch.
struct Resumed {
  Resumed(const fs::path& folder, bool seedable, bool stateful) {
    Accelerator accelerator(anew({.dataloader_config = {.use_seedable_sampler = seedable,
                                                        .use_stateful_dataloader = stateful}}));
    const auto make = [&] {
      set_seed(3);
      return accelerator.prepare(
          make_data_loader(torch::arange(20), {.batch_size = 3, .shuffle = true}));
    };
    auto loader = make();
    (void)rest_of(loader);
    int seen = 0;
    for (auto& batch : loader) {
      if (++seen <= 2) {
        if (seen == 2) accelerator.save_state(folder);
        continue;
      }
      for (std::int64_t i = 0; i < batch.size(0); ++i) {
        expected.push_back(batch[i].item<std::int64_t>());
      }
    }
    expected_next = rest_of(loader);
    accelerator.free_memory();
    auto other = make();
    accelerator.load_state(folder);
    EXPECT_EQ(other.iteration(), 1);
    if (stateful) {
      found = rest_of(other);
    } else {
      auto skipped = accelerator.skip_first_batches(other, 2);
      found = rest_of(skipped);
      other.set_epoch(2);
    }
    found_next = rest_of(other);
  }
  std::vector<std::int64_t> expected, found, expected_next, found_next;
};

TEST_F(LoaderStateTest, APassGoesOnBehindTheLastBatch) {
  for (const bool seedable : {true, false}) {
    const Resumed run(path_, seedable, /*stateful=*/true);
    EXPECT_EQ(run.expected.size(), 14);
    EXPECT_EQ(run.found, run.expected);
    EXPECT_EQ(run.found_next, run.expected_next);
  }
}

TEST_F(LoaderStateTest, WithoutPositionsSkippedBatchesLeaveTheSameOnes) {
  for (const bool seedable : {true, false}) {
    const Resumed run(path_, seedable, /*stateful=*/false);
    EXPECT_EQ(run.expected.size(), 14);
    EXPECT_EQ(run.found, run.expected);
    if (seedable) {
      EXPECT_EQ(run.found_next, run.expected_next);
    }
  }
}

// ---- the functions below ------------------------------------------------------------------------

TEST_F(AcceleratorStateTest, ObjectsOfAProgramWithoutAnAcceleratorAreSavedAndLoaded) {
  const PartialState state({.cpu = true});
  const auto saved = std::make_shared<GradScaler>(GradScalerKwargs{.init_scale = 8});
  const auto loaded = std::make_shared<GradScaler>(GradScalerKwargs{});
  const auto progress = std::make_shared<Progress>(Progress{.batches = 5});
  const auto entries = [&](const std::shared_ptr<GradScaler>& scaler) {
    return std::vector<StateEntry>{
        {StateKind::kScaler, "scaler", detail::state::make_stateful(scaler)},
        {StateKind::kCustom, "custom_checkpoint_0", detail::state::make_stateful(progress)}};
  };
  const std::vector<StateDict> weights{state_dict(*test::filled<test::Small>())};
  EXPECT_EQ(save_accelerator_state(path_, weights, entries(saved)), path_);
  EXPECT_EQ(names_in(path_), (std::vector<std::string>{"custom_checkpoint_0.pkl",
                                                       "model.safetensors", "scaler.pt"}));
  progress->batches = 0;
  load_accelerator_state(path_, entries(loaded));
  EXPECT_EQ(loaded->state_dict(), saved->state_dict());
  EXPECT_EQ(progress->batches, 5);
}

TEST_F(AcceleratorStateTest, CustomStatesHaveNumbers) {
  const PartialState state({.cpu = true});
  Progress progress{.batches = 7}, other;
  save_custom_state(progress, path_, 3);
  EXPECT_EQ(names_in(path_), std::vector<std::string>{"custom_checkpoint_3.pkl"});
  load_custom_state(other, path_, 3);
  EXPECT_EQ(other.batches, 7);
}

}  // namespace
}  // namespace accelerate
