#include "accelerate/checkpoint/merge_fsdp_weights.h"

#include <exception>

#include "accelerate/constants.h"
#include "accelerate/state.h"
#include "formats/merge_weights.h"

namespace accelerate {

std::filesystem::path merge_fsdp_weights(const std::filesystem::path& checkpoint_dir,
                                         const std::filesystem::path& output_path,
                                         bool safe_serialization, bool remove_checkpoint_dir,
                                         std::source_location where) {
  const PartialState state;
  std::exception_ptr failure;
  if (state.is_main_process()) {
    try {
      (void)detail::formats::merge_weights(checkpoint_dir, output_path,
                                           {.safe_serialization = safe_serialization,
                                            .remove_checkpoint_dir = remove_checkpoint_dir});
    } catch (...) {
      failure = std::current_exception();  // the others wait
    }
  }
  state.wait_for_everyone(where);
  if (failure) std::rethrow_exception(failure);
  return output_path / (safe_serialization ? kSafeWeightsName : kWeightsName);
}

}  // namespace accelerate
