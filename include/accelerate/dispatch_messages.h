// accelerate/dispatch_messages.h - what process 0 tells the others about a dispatched round.
//
// Internal to accelerate/dispatch.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/load_pipeline.h"
#include "accelerate/prepare_options.h"
#include "accelerate/split_range.h"
#include "accelerate/tree.h"
#include "accelerate/value.h"

namespace accelerate::detail {

/// By what the collectives of a dispatcher go in reports.
inline constexpr std::string_view kDispatcherName = "DataLoaderDispatcher";

struct RoundMessage {
  enum class Kind : std::uint8_t { kRound, kEnd, kFailure };
  Kind kind = Kind::kEnd;
  bool last = false;
  /// Samples of the round, without and with those that were repeated to fill it up.
  std::int64_t genuine = 0;
  std::int64_t padded = 0;
  /// As in `PlannedBatch`.
  std::int64_t samples_after = 0;
  std::int64_t batches_after = 0;
  /// Unset: as in the round before.
  std::optional<std::string> structure = std::nullopt;
  // Of a `DataLoaderError`:
  std::string failure = {};
  std::int64_t failed_batch = 0;
  std::vector<std::int64_t> failed_indices = {};
  std::optional<std::int64_t> failed_sample = std::nullopt;
};

/// Collective. What process 0 says.
[[nodiscard]] ACCELERATE_API RoundMessage announce(RoundMessage message);
[[nodiscard]] ACCELERATE_API RoundMessage failure_message(const std::exception_ptr& failure);
/// Throws `DataLoaderError` with the text of process 0.
ACCELERATE_API void throw_if_failed(const RoundMessage& message);

/// Collective. Runs `begin` on process 0 and gives everybody the start that it leaves there. What
/// it throws is thrown by all.
ACCELERATE_API void share_start(PassStart& start, const std::function<void()>& begin);

/// A batch without its tensors, and what these are like.
struct BatchDescription {
  Value skeleton = {};
  std::vector<std::vector<std::int64_t>> shapes = {};
  std::vector<std::int64_t> dtypes = {};
};

/// The same containers with a tensor of no elements in each place.
template <class Batch>
[[nodiscard]] Batch without_content(const Batch& batch) {
  return tree::map([](const at::Tensor& leaf) { return leaf.flatten().narrow(0, 0, 0); }, batch);
}

[[nodiscard]] ACCELERATE_API std::string encode_structure(const Value& skeleton,
                                                          const std::vector<at::Tensor>& leaves);
[[nodiscard]] ACCELERATE_API BatchDescription decode_structure(const std::string& bytes);
[[nodiscard]] ACCELERATE_API std::vector<at::Tensor> empty_leaves(const BatchDescription& like,
                                                                  at::Device device);

/// The samples of a round that belong to this process: equal parts, or where that is not possible
/// parts that differ by one.
[[nodiscard]] ACCELERATE_API SplitRange part_range(const RoundMessage& round,
                                                   const Preparation& how);

}  // namespace accelerate::detail
