// accelerate/accelerator/tracking_members.h - the trackers of an `Accelerator`.
//
// Part of accelerate/accelerator.h: a base class of `Accelerator`.
#pragma once

#include <any>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/fwd.h"
#include "accelerate/tracking.h"
#include "accelerate/value.h"

namespace accelerate {

namespace detail {
namespace accelerator {
struct AcceleratorCore;
}
namespace tracking {
class Recorder;
class TrackerSet;
}  // namespace tracking
}  // namespace detail

/// The images of a batch [N, C, H, W], or of one image [C, H, W], on any device: uint8 as it is,
/// other types times 255. Throws `ArgumentError` for another shape.
[[nodiscard]] ACCELERATE_API std::vector<TrackerImage> tracker_images(const at::Tensor& batch);

class ACCELERATE_API TrackingMembers {
 public:
  TrackingMembers(const TrackingMembers&) = delete;
  TrackingMembers& operator=(const TrackingMembers&) = delete;

  /// On the main process: starts the trackers of `log_with` and stores `config` as hyperparameters.
  /// `init_kwargs` has a dict of settings per tracker. Throws what a tracker throws that cannot
  /// start.
  void init_trackers(const std::string& project_name, const Value::Dict& config = {},
                     const Value::Dict& init_kwargs = {});
  /// On the main process: gives the values to each tracker that was started, and to `accelerate
  /// monitor` if the run is recorded; tensors of dimension 0 as numbers. `log_kwargs` has a dict
  /// per tracker. What goes wrong is a warning, once per tracker.
  void log(const Value::Dict& values, std::optional<std::int64_t> step = std::nullopt,
           const Value::Dict& log_kwargs = {});
  /// A tracker that was started; on other processes, and before `init_trackers`, a blank one whose
  /// functions do nothing. Throws `ArgumentError` for a name that `log_with` does not have.
  [[nodiscard]] GeneralTracker& get_tracker(const std::string& name);
  /// Python's `unwrap=True`: the tracker's own handle, such as `SummaryWriter*` of tensorboard.
  /// Where `get_tracker` gives a blank tracker, an empty `Handle`. Throws `ArgumentError` if the
  /// tracker has a handle of another type.
  template <class Handle>
  [[nodiscard]] Handle get_tracker(const std::string& name) {
    const std::any handle = get_tracker(name).tracker();
    if (!handle.has_value()) return Handle{};
    if (const auto* found = std::any_cast<Handle>(&handle)) return *found;
    refuse_handle(name);
  }

 protected:
  explicit TrackingMembers(const detail::accelerator::AcceleratorCore& core);
  /// Ends the trackers, if `finish_trackers` has not; nothing is thrown.
  ~TrackingMembers();
  void finish_trackers() noexcept;

 private:
  [[noreturn]] static void refuse_handle(const std::string& name);

  std::unique_ptr<detail::tracking::TrackerSet> trackers_;
  std::shared_ptr<detail::tracking::Recorder> recorder_;  ///< of the core; may be null
  bool is_main_process_;
};

}  // namespace accelerate
