// accelerate/state/partial_state_options.h - how the first `PartialState` of a process is made.
//
// Part of accelerate/state.h.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate {

/// A c10d object that the host program lends us. Converts from `c10::intrusive_ptr<T>`; needs T's
/// header only where it is made.
template <class T>
class Lent {
 public:
  Lent() = default;
  Lent(c10::intrusive_ptr<T> object)  // NOLINT(google-explicit-constructor): reads as the pointer
      : object_(object ? std::make_shared<const c10::intrusive_ptr<T>>(std::move(object))
                       : nullptr) {}

  explicit operator bool() const noexcept { return object_ != nullptr; }
  /// Only when there is one.
  [[nodiscard]] const c10::intrusive_ptr<T>& get() const { return *object_; }

 private:
  std::shared_ptr<const c10::intrusive_ptr<T>> object_;
};

/// How the first `PartialState` of a process is made.
struct PartialStateOptions {
  /// Stay on the CPU even where an accelerator is present.
  bool cpu = false;
  /// "gloo", "nccl" or a pair such as "cuda:nccl,cpu:gloo". Unset: chosen for the device.
  std::optional<std::string> backend = std::nullopt;
  /// "env://" (the default), "tcp://host:port" or "file:///path".
  std::optional<std::string> init_method = std::nullopt;
  /// How long a collective may wait. Unset: 10 minutes for NCCL, 30 minutes for the others.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  /// A store to meet at instead of `init_method`; `rank` and `world_size` are needed with it.
  Lent<c10d::Store> store = {};
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  /// A group that the host program has made and keeps: used as it is, never destroyed by us.
  Lent<c10d::ProcessGroup> process_group = {};
  /// The index of this process on its host and the number of processes there, where no launcher
  /// variable tells it.
  std::optional<int> local_rank = std::nullopt;
  std::optional<int> local_world_size = std::nullopt;

  /// The options that `InitProcessGroupKwargs` asks for.
  [[nodiscard]] static ACCELERATE_API PartialStateOptions
  from(const InitProcessGroupKwargs& kwargs);
};

namespace detail::state {

struct ProcessPlace {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
};

/// Collective. `options` completed by a store that rank 0 serves on a port of the system's choice.
/// `broadcast` returns the text of rank 0 on every rank: accelerate/mpi.h does it by MPI.
[[nodiscard]] ACCELERATE_API PartialStateOptions
meet_by_broadcast(PartialStateOptions options, const ProcessPlace& place,
                  const std::function<std::string(std::string)>& broadcast);

}  // namespace detail::state
}  // namespace accelerate
