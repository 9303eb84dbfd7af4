// accelerate/launchers.h - run a function on several processes from inside a program.
//
//     accelerate::debug_launcher([] { train(); }, {.num_processes = 2});   // CPU, to try things
//     accelerate::notebook_launcher(train, {.num_processes = 8}, epochs);  // the GPUs of this host
//
// and `record`, which reports the errors of a program to its launcher. To start a
// program on several processes from outside, use the command `accelerate launch`.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/enums.h"

namespace accelerate {

/// How the processes come to be.
enum class StartMethod : std::uint8_t {
  /// Copies of this process. Fast, and everything made so far is there. Refused with `StateError`
  /// when other threads run here or CUDA is in use: neither survives in a copy. LibTorch starts
  /// threads with its first larger operation, so launch before that.
  kFork,
  /// This program again, with the same arguments, from `main` up to the same call of the launcher,
  /// where the function runs and the process ends. Works at any time. What stands before the call
  /// runs in every process; launcher calls before it are passed over. Variables that the function
  /// captures have the values of the new process. As `spawn` in Python.
  kSpawn,
};

namespace detail::inline core {
template <>
inline constexpr EnumTable kEnumTable<StartMethod>{"StartMethod", {"fork", "spawn"}};
}  // namespace detail::inline core

struct DebugLaunchOptions {
  int num_processes = 2;
  StartMethod start_method = StartMethod::kFork;
  /// The call, by which new processes of `kSpawn` find it again. Not for the caller to set.
  std::source_location where = std::source_location::current();
};

struct NotebookLaunchOptions {
  /// Per machine. Must be given.
  std::optional<int> num_processes = std::nullopt;
  PrecisionType mixed_precision = PrecisionType::kNo;
  /// Where rank 0 is met, on several machines the same on each; "0" takes a port that is free (on
  /// one machine).
  std::string use_port = "29500";
  /// An address of machine 0 that the others can reach.
  std::string master_addr = "127.0.0.1";
  /// Which of the machines this is. Its processes have the ranks from node_rank * num_processes on.
  int node_rank = 0;
  /// The launcher has to be called on each of them.
  int num_nodes = 1;
  /// "static", or on one machine "c10d".
  std::string rdzv_backend = "static";
  /// "host:port" instead of `master_addr` and `use_port`.
  std::string rdzv_endpoint = {};
  /// "timeout" (or "join_timeout"): for how many seconds the processes wait for each other. Torch's
  /// other keys have no effect, which is said once.
  std::map<std::string, std::string> rdzv_conf = {};
  std::string rdzv_id = "none";
  /// How often all processes are started again when one has failed; TORCHELASTIC_RESTART_COUNT says
  /// in them how often that has happened. On one machine.
  int max_restarts = 0;
  /// Seconds between two looks at the processes where the kernel does not report their end.
  double monitor_interval = 0.1;
  /// Stands before each line that a process writes; ${role_name}, ${rank} and ${local_rank} are
  /// filled in. Unset: the processes write to our streams themselves.
  std::optional<std::string> log_line_prefix_template = std::nullopt;
  StartMethod start_method = StartMethod::kFork;
  /// The call, by which new processes of `kSpawn` find it again. Not for the caller to set.
  std::source_location where = std::source_location::current();
};

namespace detail::inline core {
ACCELERATE_API int record_errors(const std::function<int()>& main);
}  // namespace detail::inline core

namespace detail::state {
struct ACCELERATE_API Launch {
  static void debug(const DebugLaunchOptions& options, const std::function<void()>& f);
  static void notebook(const NotebookLaunchOptions& options, const std::function<void()>& f);
};
}  // namespace detail::state

/// Runs `f(args...)` on `num_processes` processes of this host, on the CPU, as ranks of one group
/// that meet through a file. Returns when all have ended; the environment of this process is
/// unchanged.
///
/// The first process that fails ends the others (SIGTERM, after 30 s SIGKILL) and throws
/// `CommError` with its `rank()` and message here; one that exits or is killed likewise. No process
/// is left behind, also when this one is killed. Throws `StateError` when `kFork` is not possible.
template <class F, class... Args>
void debug_launcher(F&& f, const DebugLaunchOptions& options = {}, Args&&... args) {
  static_assert(std::invocable<F, Args...>,
                "accelerate: debug_launcher cannot call the function with these arguments, which "
                "follow the options.");
  detail::state::Launch::debug(
      options, [&] { std::invoke(std::forward<F>(f), std::forward<Args>(args)...); });
}

/// Runs `f(args...)` on `num_processes` processes of this host, each on its own accelerator. With
/// one process in all `f` runs right here. The `Accelerator` must be made inside `f`.
///
/// Throws `ConfigError` for options that are missing or contradict each other or a port that is
/// taken, `StateError` when this process has an `AcceleratorState` already, `UnsupportedError` for
/// restarts or c10d on several machines (use `accelerate launch`), and what `debug_launcher`
/// throws.
template <class F, class... Args>
void notebook_launcher(F&& f, const NotebookLaunchOptions& options, Args&&... args) {
  static_assert(
      std::invocable<F, Args...>,
      "accelerate: notebook_launcher cannot call the function with these arguments, which "
      "follow the options.");
  detail::state::Launch::notebook(
      options, [&] { std::invoke(std::forward<F>(f), std::forward<Args>(args)...); });
}

/// Runs the body of `main` and turns an exception into what launchers understand: the message as
/// `accelerate: ...` on stderr, type and text in the file that TORCHELASTIC_ERROR_FILE names, and
/// an exit code: 2 for `ConfigError`, 70 for `CommError`, else 1. Returns what `main` returns, or
/// 0.
///
///     int main(int argc, char** argv) {
///       return accelerate::record([&] { train(parse(argc, argv)); });
///     }
template <class F>
[[nodiscard]] int record(F&& main) {
  constexpr bool returns_nothing = requires {
    { std::invoke(main) } -> std::same_as<void>;
  };
  static_assert(std::is_invocable_r_v<int, F&> || returns_nothing,
                "accelerate: record takes a function without arguments that returns an int or "
                "nothing.");
  return detail::record_errors([&]() -> int {
    if constexpr (returns_nothing) {
      std::invoke(main);
      return 0;
    } else {
      return std::invoke(main);
    }
  });
}

}  // namespace accelerate
