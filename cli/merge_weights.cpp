// accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH
#include "formats/merge_weights.h"
#include "accelerate/errors.h"
#include "cli/commands.h"
#include "core/byte_bar.h"
#include "core/text.h"

namespace accelerate::cli {

int merge_weights(const detail::launch::Arguments& arguments) {
  const auto& paths = arguments.operands;
  if (paths.size() != 2) {
    throw ConfigError("Name two folders: accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH.");
  }
  detail::formats::MergeOptions options;
  options.safe_serialization = !arguments.on("unsafe_serialization");
  options.remove_checkpoint_dir = arguments.on("remove_checkpoint_dir");
  options.progress = detail::asked_by_command();
  const auto path = detail::formats::merge_weights(paths[0], paths[1], options);
  print(detail::str(path.string(), "\n"));
  return 0;
}

}  // namespace accelerate::cli
