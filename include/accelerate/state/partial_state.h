// accelerate/state/partial_state.h - which process this is, on which device, and who the others
// are.
//
// Part of accelerate/state.h. "Collective" functions must be called by every process, in one order.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <source_location>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/state/ordered_section.h"
#include "accelerate/state/partial_state_options.h"
#include "accelerate/state/split.h"

namespace accelerate {

/// The process-wide state of a run. Copies are handles to the same state.
///
/// Every accessor throws `StateError` while there is no state, that is after `_reset_state()`.
class ACCELERATE_API PartialState {
 public:
  /// Collective when a launcher, MPI or Slurm has started several processes. Makes the state, or
  /// attaches to it: then the options do not count. A constructor that throws leaves no state.
  ///
  /// Throws `ConfigError` for variables or options that are missing or contradict each other and
  /// `CommError` when the processes do not find each other within the timeout.
  explicit PartialState(const PartialStateOptions& options = {});

  /// Whether there is a state.
  [[nodiscard]] static bool initialized() noexcept;
  /// Forgets the state, for tests. The process group lives on and the next state adopts it.
  static void _reset_state();

  /// The device this process computes on: indexed when distributed, "cuda" or "cpu" when alone.
  [[nodiscard]] c10::Device device() const;
  /// The device a process takes that is alone and not told otherwise.
  [[nodiscard]] c10::Device default_device() const;
  [[nodiscard]] DistributedType distributed_type() const;
  /// "gloo", "nccl", a pair such as "cuda:nccl,cpu:gloo", or nothing when alone.
  [[nodiscard]] std::optional<std::string> backend() const;
  [[nodiscard]] int num_processes() const;
  [[nodiscard]] int process_index() const;
  /// The index of this process on its host.
  [[nodiscard]] int local_process_index() const;
  /// The accelerator's precision if there is one, else ACCELERATE_MIXED_PRECISION, else `kNo`.
  [[nodiscard]] PrecisionType mixed_precision() const;
  /// Whether several processes work together.
  [[nodiscard]] bool use_distributed() const;
  /// Process 0; with Megatron-LM the last process.
  [[nodiscard]] bool is_main_process() const;
  /// The first process of each host; with Megatron-LM the last process of all.
  [[nodiscard]] bool is_local_main_process() const;
  [[nodiscard]] bool is_last_process() const;
  /// Whether collectives compare their inputs across processes first (ACCELERATE_DEBUG_MODE).
  [[nodiscard]] bool debug() const;
  /// Switches these comparisons; every process must do the same.
  void set_debug(bool enabled);
  /// Whether a launcher function of this library made this process (FORK_LAUNCHED).
  [[nodiscard]] bool fork_launched() const;

  /// How many processes run on this host, and on how many hosts the run is, where that is known.
  [[nodiscard]] std::optional<int> local_num_processes() const;
  [[nodiscard]] std::optional<int> num_machines() const;
  [[nodiscard]] const std::string& host_name() const;
  /// How long a collective may wait for the others.
  [[nodiscard]] std::chrono::milliseconds timeout() const;
  /// The group of all processes; null when alone, and after `destroy_process_group()`. To call this
  /// or `store()` include <torch/csrc/distributed/c10d/ProcessGroup.hpp>. Both throw `StateError`,
  /// as does every collective, in a forked copy of the process that made the group.
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;
  /// The key-value store that all processes share; null when alone or when a group was lent
  /// without.
  [[nodiscard]] c10::intrusive_ptr<c10d::Store> store() const;

  /// Collective. Returns when every process has called it; at once when alone.
  void wait_for_everyone(std::source_location where = std::source_location::current()) const;
  /// Makes `device()` the current device of this thread.
  void set_device();
  /// Ends `group`, or the default group when none is given, and the groups that were split off it,
  /// for example those of a `DeviceMesh`: their calls throw `StateError` afterwards. Does nothing
  /// in a process that a launcher function of this library made (it ends the group itself), unless
  /// a group is given. A group that the host program lent us is let go, not ended.
  void destroy_process_group(const Lent<c10d::ProcessGroup>& group = {});

  /// This process's part of `inputs`: earlier processes get one item more when it does not divide.
  /// See accelerate/state/split.h for what can be split. With one process: all of it.
  ///
  ///     for (const auto& prompt : state.split_between_processes(prompts)) generate(prompt);
  template <class Inputs>
  [[nodiscard]] auto split_between_processes(Inputs&& inputs, SplitOptions options = {}) const {
    return detail::state::split(std::forward<Inputs>(inputs), share(options));
  }
  template <class T>
  [[nodiscard]] std::vector<T> split_between_processes(std::initializer_list<T> inputs,
                                                       SplitOptions options = {}) const {
    return detail::state::split(std::vector<T>(inputs), share(options));
  }
  /// Hands the part of this process to `f` and returns what `f` returns.
  template <class Inputs, class F>
  decltype(auto) split_between_processes(Inputs&& inputs, SplitOptions options, F&& f) const {
    return std::forward<F>(f)(detail::state::split(std::forward<Inputs>(inputs), share(options)));
  }

  /// Collective. Runs `f` on the main process, then on all others, and returns what it returns.
  /// When it throws on the main process, the others throw `CommError` with the message and the
  /// rank.
  ///
  ///     auto data = state.main_process_first([&] { return download_or_open(path); });
  template <class F>
  decltype(auto) main_process_first(
      F&& f, std::source_location where = std::source_location::current()) const {
    return detail::state::in_order(*this, is_main_process(), std::forward<F>(f), where);
  }
  /// Collective. The same with the first process of each host going first.
  template <class F>
  decltype(auto) local_main_process_first(
      F&& f, std::source_location where = std::source_location::current()) const {
    return detail::state::in_order(*this, is_local_main_process(), std::forward<F>(f), where);
  }

  /// `f` as a callable that runs on one process only, and always when not distributed. Which one is
  /// decided here, not at the call. Elsewhere it returns `std::nullopt` (nothing for void).
  ///
  ///     auto report = state.on_main_process([&](double loss) { std::cout << loss << '\n'; });
  template <class F>
  [[nodiscard]] auto on_main_process(F&& f) const {
    return gated(std::forward<F>(f), is_main_process());
  }
  template <class F>
  [[nodiscard]] auto on_local_main_process(F&& f) const {
    return gated(std::forward<F>(f), is_local_main_process());
  }
  template <class F>
  [[nodiscard]] auto on_last_process(F&& f) const {
    return gated(std::forward<F>(f), is_last_process());
  }
  template <class F>
  [[nodiscard]] auto on_process(F&& f, int process_index) const {
    return gated(std::forward<F>(f), this->process_index() == process_index);
  }
  /// `on_process(2)(f)`: the same with the process chosen first.
  [[nodiscard]] auto on_process(int process_index) const {
    return [state = *this, process_index](auto&& f) {
      return state.on_process(std::forward<decltype(f)>(f), process_index);
    };
  }
  template <class F>
  [[nodiscard]] auto on_local_process(F&& f, int local_process_index) const {
    return gated(std::forward<F>(f), this->local_process_index() == local_process_index);
  }
  [[nodiscard]] auto on_local_process(int local_process_index) const {
    return [state = *this, local_process_index](auto&& f) {
      return state.on_local_process(std::forward<decltype(f)>(f), local_process_index);
    };
  }

  /// One line on stdout, the arguments separated by blanks; only on the first process of each host.
  template <class... Args>
  void print(const Args&... args) const {
    if (!is_local_main_process()) return;
    std::ostringstream line;
    line << std::boolalpha;
    const char* separator = "";
    ((line << separator << args, separator = " "), ...);
    detail::state::print_line(std::move(line).str());
  }

 protected:
  /// The handle inside an `AcceleratorState`: needs that state as well, and errors name it.
  PartialState(std::nullptr_t, const char* owner) noexcept : owner_(owner) {}

 private:
  template <class F>
  auto gated(F&& f, bool chosen) const {
    return detail::state::Gated<std::decay_t<F>>(std::forward<F>(f), chosen || !use_distributed());
  }
  [[nodiscard]] detail::state::SplitShare share(SplitOptions options) const;
  [[nodiscard]] detail::state::PartialFacts& facts(const char* attribute) const;

  const char* owner_ = "PartialState";
};

/// Five lines: type and backend, number of processes, both indexes, device.
ACCELERATE_API std::ostream& operator<<(std::ostream& out, const PartialState& state);

/// Collective. `PartialState().wait_for_everyone()`.
ACCELERATE_API void wait_for_everyone(std::source_location where = std::source_location::current());

}  // namespace accelerate
