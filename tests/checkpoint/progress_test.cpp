// Which calls show a progress bar, and that each shows all of its work.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <vector>

#include "accelerate/accelerator.h"
#include "accelerate/checkpoint.h"
#include "accelerate/environment.h"
#include "accelerate/optim.h"
#include "accelerate/safetensors.h"
#include "accelerate/state.h"
#include "accelerate/torch_archive.h"
#include "support/command.h"

namespace accelerate {
namespace {

using Lines = std::vector<std::string>;

/// The lines that `work` leaves in a log file, up to the percentage: "saving: 100%".
template <class Work>
Lines lines_of(Work work) {
  ::testing::internal::CaptureStderr();
  work();
  Lines lines;
  for (const auto& line : test::lines_of(::testing::internal::GetCapturedStderr())) {
    if (const auto end = line.find("%|"); end != std::string::npos) {
      lines.push_back(line.substr(0, end + 1));
    }
  }
  return lines;
}

class ProgressTest : public testing::Test {
 protected:
  void SetUp() override { AcceleratorState::_reset_state(/*reset_partial_state=*/true); }
  void TearDown() override { AcceleratorState::_reset_state(/*reset_partial_state=*/true); }

  test::Folder folder_;
  const std::filesystem::path& path_ = folder_.path();
  torch::nn::Linear net_{torch::nn::LinearOptions(2048, 4096)};  // 34 MB
  const Lines saving_{"saving: 100%"}, loading_{"loading: 100%"}, nothing_;
};

TEST_F(ProgressTest, IsShownForModelsWhereAnOptionAsks) {
  const Accelerator accelerator({.cpu = true});
  const auto state = state_dict(*net_);
  for (const bool safe : {true, false}) {
    const auto folder = path_ / (safe ? "safe" : "archive");
    EXPECT_EQ(lines_of([&] {
                save_model(
                    state, folder,
                    {.max_shard_size = "20MB", .safe_serialization = safe, .progress = true});
              }),
              saving_);
    EXPECT_EQ(lines_of([&] { load_checkpoint_in_model(*net_, folder, {.progress = true}); }),
              loading_);
    EXPECT_EQ(lines_of([&] { load_checkpoint_in_model(*net_, folder); }), nothing_);
  }
}

TEST_F(ProgressTest, IsShownForFilesWhereTheVariableAsks) {
  const auto state = state_dict(*net_);
  const auto save_and_load = [&] {
    torch_save(state, path_ / "a.bin");
    safetensors::save_file(state, path_ / "a.safetensors");
    (void)torch_load(path_ / "a.bin");
    (void)safetensors::File::open(path_ / "a.safetensors", {.mapped = false}).get_tensors();
  };
  EXPECT_EQ(lines_of(save_and_load), nothing_);
  const auto patched = patch_environment({{"ACCELERATE_PROGRESS", "1"}});
  EXPECT_EQ(lines_of(save_and_load),
            (Lines{"saving: 100%", "saving: 100%", "loading: 100%", "loading: 100%"}));
  EXPECT_EQ(lines_of([&] { (void)torch_load(path_ / "a.bin", {.mmap = true}); }), nothing_)
      << "nothing is read";
}

TEST_F(ProgressTest, IsShownForTheStateOfARun) {
  Accelerator accelerator({.cpu = true});
  auto [model, optimizer] = accelerator.prepare(net_, AdamW(net_->parameters(), {.lr = 1e-3}));
  accelerator.backward(model(torch::ones({1, 2048})).sum());
  optimizer.step();
  EXPECT_EQ(lines_of([&] { accelerator.save_state(path_, {.progress = true}); }), saving_);
  EXPECT_EQ(lines_of([&] { accelerator.load_state(path_, {.progress = true}); }),
            (Lines{"verifying: 100%", "loading: 100%"}));
  EXPECT_EQ(lines_of([&] { accelerator.load_state(path_); }), nothing_);
}

}  // namespace
}  // namespace accelerate
