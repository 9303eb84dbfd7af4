#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "accelerate/accelerator.h"
#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/safetensors.h"
#include "accelerate/state.h"
#include "checkpoint/models.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::files_in;
using test::filled;
using test::Folder;
using test::message_of;
using test::names_in;
using Names = std::vector<std::string>;

class SaveModelTest : public testing::Test {
 protected:
  void SetUp() override { AcceleratorState::_reset_state(/*reset_partial_state=*/true); }
  void TearDown() override { AcceleratorState::_reset_state(/*reset_partial_state=*/true); }

  Folder folder_;
  const std::filesystem::path& path_ = folder_.path();
};

template <class Net>
void expect_the_bytes_of_python(const std::string& model) {
  const test::CapturedLog log;
  Accelerator accelerator({.cpu = true});
  for (const ShardSize& limit : std::vector<ShardSize>{"10GB", 100, 32}) {
    const Folder folder;
    accelerator.save_model(filled<Net>(), folder.path(), {.max_shard_size = limit});
    const auto text = limit.index() == 0 ? std::to_string(std::get<0>(limit)) : std::get<1>(limit);
    const auto name = "models/" + model + "_" + text + "_safetensors";
    EXPECT_EQ(files_in(folder.path()), files_in(test::reference_path(name))) << name;
  }
}

TEST_F(SaveModelTest, WritesTheBytesOfPython) {
  expect_the_bytes_of_python<test::Small>("small");
  expect_the_bytes_of_python<test::Tied>("tied");
  expect_the_bytes_of_python<test::Mixed>("mixed");
}

TEST_F(SaveModelTest, WritesTorchArchivesThatItLoads) {
  Accelerator accelerator({.cpu = true});
  accelerator.save_model(filled<test::Tied>(), path_,
                         {.max_shard_size = 100, .safe_serialization = false});
  EXPECT_EQ(names_in(path_), names_in(test::reference_path("models/tied_100_bin")));
  test::Tied loaded;
  load_checkpoint_in_model(loaded, path_, {.strict = true});
  test::expect_equal(loaded, *filled<test::Tied>());
}

TEST_F(SaveModelTest, RemovesStaleFilesOfItsFormatAndNothingElse) {
  Accelerator accelerator({.cpu = true});
  const auto net = filled<test::Small>();
  std::ofstream(path_ / "model-00001-of-00002.safetensors.txt") << "mine";
  std::ofstream(path_ / "my-model-00001-of-00002.safetensors") << "mine";
  accelerator.save_model(net, path_, {.max_shard_size = 32});
  accelerator.save_model(net, path_, {.max_shard_size = 100});
  EXPECT_EQ(names_in(path_),
            (Names{"model-00001-of-00002.safetensors.txt", "model-00001-of-00003.safetensors",
                   "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
                   "model.safetensors.index.json", "my-model-00001-of-00002.safetensors"}));
  accelerator.save_model(net, path_);
  EXPECT_EQ(names_in(path_), (Names{"model-00001-of-00002.safetensors.txt", "model.safetensors",
                                    "my-model-00001-of-00002.safetensors"}));
  accelerator.save_model(net, path_, {.max_shard_size = 100});
  EXPECT_FALSE(std::filesystem::exists(path_ / "model.safetensors"));
}

TEST_F(SaveModelTest, WarnsOfWeightsOfTheOtherFormat) {
  Accelerator accelerator({.cpu = true});
  accelerator.save_model(filled<test::Small>(), path_, {.safe_serialization = false});
  const test::CapturedLog log;
  accelerator.save_model(filled<test::Small>(), path_);
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_EQ(log.messages()[0],
            "[RANK 0] '" + path_.string() +
                "' also has weights of the other format, 'pytorch_model.bin'. Loaders of folders, "
                "Python's too, prefer 'pytorch_model.bin': remove the files that you do not want.");
}

TEST_F(SaveModelTest, WritesNothingForAModelWithoutTensors) {
  Accelerator accelerator({.cpu = true});
  accelerator.save_model(std::make_shared<test::Leaf>(test::Tied::Pairs{}), path_ / "empty");
  EXPECT_EQ(names_in(path_ / "empty"), Names{});

  const auto old = path_ / "old";
  accelerator.save_model(filled<test::Small>(), old);
  const test::CapturedLog log;
  accelerator.save_model(std::make_shared<test::Leaf>(test::Tied::Pairs{}), old);
  EXPECT_EQ(names_in(old), Names{"model.safetensors"});
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_EQ(log.messages()[0], "[RANK 0] The model has no tensors: nothing is written to '" +
                                   old.string() + "', and weights that are there stay.");
}

TEST_F(SaveModelTest, RefusesAFileAndTensorsWithoutMemory) {
  Accelerator accelerator({.cpu = true});
  const auto file = path_ / "file";
  std::ofstream(file) << "x";
  EXPECT_EQ(message_of<ArgumentError>([&] { accelerator.save_model(filled<test::Small>(), file); }),
            "Provided path (" + file.string() + ") should be a directory, not a file");
  auto meta = std::make_shared<test::Leaf>(
      test::Tied::Pairs{{"w", torch::zeros(3, torch::TensorOptions().device(torch::kMeta))}});
  EXPECT_EQ(message_of<StateError>([&] { accelerator.save_model(meta, path_ / "x"); }),
            "You can't save the model since some parameters are on the meta device. 'w' is the "
            "first; load its weights before.");
  EXPECT_FALSE(std::filesystem::exists(path_ / "x"));
  EXPECT_EQ(message_of<ArgumentError>([&] {
              accelerator.save_model(filled<test::Small>(), path_ / "x", {.max_shard_size = "7"});
            }),
            "The size '7' has the unit '7'; supported units are TB, GB, MB, KB. Use a number of "
            "bytes, or a text such as '5GB'.");
}

TEST_F(SaveModelTest, GivesTheStateDictOfWhatAWrapperHolds) {
  Accelerator accelerator({.cpu = true});
  const auto model = accelerator.prepare(filled<test::Small>());
  EXPECT_EQ(accelerator.get_state_dict(model).keys().front(), "linear1.weight");
  EXPECT_EQ(accelerator.get_state_dict(model, /*unwrap=*/false).keys().front(), "linear1.weight");
}

TEST_F(SaveModelTest, SavesObjectsAndStateDicts) {
  const test::CapturedLog log;
  Accelerator accelerator({.cpu = true});
  accelerator.save(Value::Dict{{"epoch", 3}, {"loss", 0.5}}, path_ / "state.bin");
  EXPECT_EQ(load(path_ / "state.bin"), Value(Value::Dict{{"epoch", 3}, {"loss", 0.5}}));

  accelerator.save(state_dict(*filled<test::Tied>()), path_ / "model.safetensors",
                   {.safe_serialization = true});
  const auto file = safetensors::File::open(path_ / "model.safetensors");
  EXPECT_EQ(file.keys(), (Names{"block.bias", "block.weight", "embed.weight"}));
  EXPECT_EQ(file.metadata(), (safetensors::Metadata{{"format", "pt"}}));

  accelerator.save(Value::Dict{{"w", torch::ones(2)}}, path_ / "w.safetensors",
                   {.safe_serialization = true});
  EXPECT_TRUE(torch::equal(load_state_dict(path_ / "w.safetensors")["w"], torch::ones(2)));
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { accelerator.save(Value(3), path_ / "x", {.safe_serialization = true}); }),
            "save: a safetensors file holds tensors by name, and this is of kind int. Pass a state "
            "dict, or save without safe_serialization.");
  EXPECT_EQ(message_of<ArgumentError>([&] {
              accelerator.save(Value::Dict{{"a", 1}}, path_ / "x", {.safe_serialization = true});
            }),
            "save: a safetensors file holds tensors by name, and the entry 'a' is of kind int. "
            "Leave it out, or save without safe_serialization.");
}

// The second of the new shards cannot be written, and the first has the name of an old one.
TEST_F(SaveModelTest, LeavesTheOldShardsWhenANewOneFails) {
  Accelerator accelerator({.cpu = true});
  const auto shards = [](float value) {
    return std::make_shared<test::Leaf>(
        test::Tied::Pairs{{"a", torch::full(8, value)}, {"b", torch::full(8, value)}});
  };
  accelerator.save_model(shards(1), path_, {.max_shard_size = 32});
  const auto second = path_ / "model-00002-of-00002.safetensors";
  std::filesystem::remove(second);
  std::filesystem::create_directory(second);
  EXPECT_NE(message_of<CheckpointError>([&] {
              accelerator.save_model(shards(2), path_, {.max_shard_size = 32});
            }).find(second.string()),
            std::string::npos);
  std::filesystem::remove(second);
  EXPECT_EQ(names_in(path_),
            (Names{"model-00001-of-00002.safetensors", "model.safetensors.index.json"}));
  EXPECT_TRUE(torch::equal(load_state_dict(path_ / "model-00001-of-00002.safetensors")["a"],
                           torch::ones(8)));
}

// A limit on the size of files stands for a full disk: the write fails midway.
TEST_F(SaveModelTest, LeavesTheOldFilesWhenTheDiskIsFull) {
  Accelerator accelerator({.cpu = true});
  accelerator.save_model(filled<test::Small>(), path_);
  const auto before = files_in(path_);

  auto large = std::make_shared<test::Leaf>(test::Tied::Pairs{{"w", torch::zeros(1 << 16)}});
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{.rlim_cur = 1 << 16, .rlim_max = old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  std::string safe, archive;
  try {
    safe = message_of<CheckpointError>([&] { accelerator.save_model(large, path_); });
    archive = message_of<CheckpointError>(
        [&] { accelerator.save_model(large, path_, {.safe_serialization = false}); });
  } catch (...) {
    ADD_FAILURE();
  }
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, ignored);

  EXPECT_NE(safe.find("model.safetensors"), std::string::npos) << safe;
  EXPECT_NE(safe.find("File too large"), std::string::npos) << safe;
  EXPECT_NE(archive.find("pytorch_model.bin"), std::string::npos) << archive;
  EXPECT_EQ(files_in(path_), before);
}

// The child writes again and again and is killed at any moment: what is there is always whole.
TEST_F(SaveModelTest, LeavesAWholeFileWhenItIsKilled) {
  const auto state = [] {
    StateDict made("Tensor");
    made.insert("w", torch::ones(1 << 20));
    return made;
  }();
  safetensors::save_file(state, path_ / "model.safetensors");
  for (int round = 0; round < 5; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (;;) safetensors::save_file(state, path_ / "model.safetensors");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20 + 30 * round));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    EXPECT_TRUE(torch::equal(load_state_dict(path_ / "model.safetensors")["w"], state["w"]));
  }
}

}  // namespace
}  // namespace accelerate
