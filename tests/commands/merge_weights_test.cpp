// The command `accelerate merge-weights`, as a process.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support/command.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using test::Folder;

test::Outcome merge(const std::vector<std::string>& words) {
  std::vector<std::string> argv{test::built("bin/accelerate"), "merge-weights"};
  argv.insert(argv.end(), words.begin(), words.end());
  return test::run({.argv = argv});
}

std::string checkpoint(const std::string& name) {
  return test::reference_path("dcp/" + name).string();
}

TEST(MergeWeightsCommand, WritesOneFileAndPrintsItsPath) {
  const Folder folder;
  const auto outcome = merge({checkpoint("model"), folder / "out"});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(outcome.output, folder / "out/model.safetensors\n");
  EXPECT_TRUE(fs::exists(folder / "out/model.safetensors"));
}

TEST(MergeWeightsCommand, HasPythonsFlagsAlsoWithHyphens) {
  const Folder folder;
  fs::copy(checkpoint("optimizer"), folder / "in", fs::copy_options::recursive);
  const auto outcome =
      merge({folder / "in", folder / "out", "--unsafe-serialization", "--remove_checkpoint_dir"});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_TRUE(fs::exists(folder / "out/pytorch_model.bin"));
  EXPECT_FALSE(fs::exists(folder / "in"));
}

TEST(MergeWeightsCommand, RefusesWhatItCannotMergeAndKeepsTheCheckpoint) {
  const Folder folder;
  fs::copy(checkpoint("optimizer"), folder / "in", fs::copy_options::recursive);
  const auto outcome = merge({folder / "in", folder / "out", "--remove_checkpoint_dir"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.error.find("--unsafe_serialization"), std::string::npos) << outcome.error;
  EXPECT_TRUE(fs::exists(folder / "in/.metadata"));
  EXPECT_TRUE(fs::is_empty(folder / "out"));
}

TEST(MergeWeightsCommand, NamesWrongInput) {
  EXPECT_EQ(merge({"a"}).error,
            "accelerate: Name two folders: accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH.\n");
  EXPECT_EQ(merge({"a", "b", "--unsafe"}).error,
            "accelerate: --unsafe is not a flag of accelerate merge-weights. `accelerate "
            "merge-weights --help` lists them all.\n");
  EXPECT_EQ(merge({"a", "b", "--unsafe_serialisation"}).error,
            "accelerate: --unsafe_serialisation is not a flag of accelerate merge-weights; did you "
            "mean --unsafe_serialization?\n");
  const Folder folder;
  EXPECT_EQ(merge({folder / "none", folder / "out"}).error,
            "accelerate: Tried to load from " + (folder / "none") +
                " but couldn't find a valid metadata file. It is a folder that FSDP saves with "
                "SHARDED_STATE_DICT.\n");
  EXPECT_FALSE(fs::exists(folder / "out"));
}

}  // namespace
}  // namespace accelerate
