// accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH
#include <cstdint>
#include <optional>

#include "accelerate/errors.h"
#include "accelerate/progress.h"
#include "cli/commands.h"
#include "core/text.h"
#include "formats/merge_weights.h"

namespace accelerate::cli {

int merge_weights(const detail::launch::Arguments& arguments) {
  const auto& paths = arguments.operands;
  if (paths.size() != 2) {
    throw ConfigError("Name two folders: accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH.");
  }
  detail::formats::MergeOptions options;
  options.safe_serialization = !arguments.on("unsafe_serialization");
  options.remove_checkpoint_dir = arguments.on("remove_checkpoint_dir");
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
