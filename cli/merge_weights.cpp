// accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH
#include <algorithm>
#include <optional>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/progress.h"
#include "cli/commands.h"
#include "core/text.h"
#include "formats/merge_weights.h"

namespace accelerate::cli {
namespace {

constexpr std::string_view kUsage =
    "usage: accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH [flags]\n\n"
    "Merges the weights that FSDP saved with SHARDED_STATE_DICT into one file in OUTPUT_PATH:\n"
    "model.safetensors. CHECKPOINT_DIR is the folder with the file .metadata, such as\n"
    "checkpoint_0/pytorch_model_fsdp_0. Memory holds one tensor at a time.\n\n"
    "      --unsafe_serialization   Write pytorch_model.bin instead. Needed for optimizers, which\n"
    "                               have values that are no tensors.\n"
    "      --remove_checkpoint_dir  Remove CHECKPOINT_DIR after success.\n";

struct Arguments {
  std::vector<std::string> paths;
  detail::formats::MergeOptions options;
};

Arguments parse(std::span<const std::string> words) {
  Arguments arguments;
  for (const auto& word : words) {
    std::string flag = word;
    std::ranges::replace(flag, '-', '_');
    if (flag == "__unsafe_serialization") {
      arguments.options.safe_serialization = false;
    } else if (flag == "__remove_checkpoint_dir") {
      arguments.options.remove_checkpoint_dir = true;
    } else if (word.starts_with("--")) {
      throw ConfigError(detail::str(
          "`accelerate merge-weights` has no flag '", word, "'.",
          detail::did_you_mean(word, {"--unsafe_serialization", "--remove_checkpoint_dir"})));
    } else {
      arguments.paths.push_back(word);
    }
  }
  if (arguments.paths.size() != 2) {
    throw ConfigError("Name two folders: accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH.");
  }
  return arguments;
}

}  // namespace

int merge_weights(std::span<const std::string> words) {
  if (std::ranges::any_of(words,
                          [](const auto& word) { return word == "--help" || word == "-h"; })) {
    print(kUsage);
    return 0;
  }
  auto [paths, options] = parse(words);
  std::optional<ProgressBar> bar;
  options.progress = [&bar, before = std::uint64_t{0}](std::uint64_t done,
                                                       std::uint64_t all) mutable {
    if (!bar) {
      bar.emplace(TqdmOptions{.main_process_only = false,
                              .desc = "merging",
                              .total = static_cast<std::int64_t>(all),
                              .leave = false,
                              .unit = "B",
                              .unit_scale = true});
    }
    bar->update(static_cast<std::int64_t>(done - before));
    before = done;
  };
  const auto path = detail::formats::merge_weights(paths[0], paths[1], options);
  bar.reset();
  print(detail::str(path.string(), "\n"));
  return 0;
}

}  // namespace accelerate::cli
