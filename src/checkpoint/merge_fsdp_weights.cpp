#include "accelerate/checkpoint/merge_fsdp_weights.h"

#include <string>

#include "accelerate/constants.h"
#include "accelerate/operations/objects.h"
#include "accelerate/state.h"
#include "formats/merge_weights.h"

namespace accelerate {

std::filesystem::path merge_fsdp_weights(const std::filesystem::path& checkpoint_dir,
                                         const std::filesystem::path& output_path,
                                         bool safe_serialization, bool remove_checkpoint_dir,
                                         std::source_location where) {
  const PartialState state;
  // What the main process throws while it encodes its message, all throw.
  const auto merge = [&]() -> std::string {
    if (state.is_main_process()) {
      (void)detail::formats::merge_weights(checkpoint_dir, output_path,
                                           {.safe_serialization = safe_serialization,
                                            .remove_checkpoint_dir = remove_checkpoint_dir});
    }
    return {};
  };
  if (detail::comm::is_alone(/*group=*/nullptr)) {
    (void)merge();
  } else {
    (void)detail::comm::ObjectMessages::exchange(merge, /*group=*/nullptr, "merge_fsdp_weights",
                                                 where);
  }
  return output_path / (safe_serialization ? kSafeWeightsName : kWeightsName);
}

}  // namespace accelerate
