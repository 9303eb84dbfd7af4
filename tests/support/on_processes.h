// tests/support/on_processes.h - tests that need several processes.
//
//     TEST(Gather, ConcatenatesInRankOrder) {
//       on_processes(3, [](PartialState& state) {
//         auto ranks = gather(torch::full({1}, state.process_index()));
//         EXPECT_EQ(to_vector(ranks), (std::vector{0, 1, 2}));
//       });
//     }
//
// The test binary is executed once more per rank, with a filter for the running test and the
// variables of a launcher. A rank runs the test up to the same call of `on_processes` (earlier
// calls are skipped), runs the function there and ends. So what stands before the call runs in
// every rank too: keep it small. Failures of a rank are failures of the test and show the rank and
// its output.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace accelerate {

struct OnProcessesOptions {
  /// After this the processes are killed and the test fails, or before it if those that are left
  /// are all stopped (SIGSTOP). Longer on a busy machine and under sanitizers: see `patient`.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// Variables set, or with no value unset, in every rank; they win over those of the harness.
  std::vector<std::pair<std::string, std::optional<std::string>>> environment = {};
  /// A store file to meet at (ACCELERATE_DEBUG_RDV_FILE). Off: the test brings its own rendezvous.
  bool rendezvous = true;
  /// Ranks believe that each host has this many processes: LOCAL_RANK and LOCAL_WORLD_SIZE follow.
  std::optional<int> processes_per_host = std::nullopt;
  /// A listening socket for rank 0, as our launcher hands it over.
  std::optional<int> listen_fd = std::nullopt;
  /// The command that starts a rank, made of the plain one: on another host (hosts.h), in another
  /// namespace. It must become that rank, so that signals and the time limit reach it.
  std::function<std::vector<std::string>(int rank, const std::vector<std::string>& argv)>
      started_by = nullptr;
};

/// How one rank ended.
struct RankOutcome {
  int exit_code = 0;       ///< -1 when a signal ended it
  int signal = 0;          ///< 0 when it ended by itself
  bool timed_out = false;  ///< killed by the harness
  std::string output;      ///< stdout and stderr together
  double seconds = 0;

  [[nodiscard]] bool ok() const { return exit_code == 0 && signal == 0 && !timed_out; }
  [[nodiscard]] bool output_contains(const std::string& text) const {
    return output.find(text) != std::string::npos;
  }
};

namespace harness {

[[nodiscard]] std::vector<RankOutcome> run_processes(int n, const OnProcessesOptions& options,
                                                     const std::function<void()>& f);
void expect_success(const std::vector<RankOutcome>& outcomes);

// The parameter of a function that takes one thing, e.g. `PartialState&`.
template <class T>
struct Parameter : Parameter<decltype(&T::operator())> {};
template <class R, class A>
struct Parameter<R(A)> : std::type_identity<std::remove_cvref_t<A>> {};
template <class R, class A>
struct Parameter<R (*)(A)> : Parameter<R(A)> {};
template <class C, class R, class A>
struct Parameter<R (C::*)(A)> : Parameter<R(A)> {};
template <class C, class R, class A>
struct Parameter<R (C::*)(A) const> : Parameter<R(A)> {};

template <class F>
std::function<void()> bind_state(F f) {
  if constexpr (std::is_invocable_v<F&>) {
    return [f = std::move(f)]() mutable { f(); };
  } else {
    return [f = std::move(f)]() mutable {
      typename Parameter<F>::type state;  // PartialState, Accelerator, ...: made in the rank
      f(state);
    };
  }
}

}  // namespace harness

/// Runs `f` in `n` processes and returns how each ended, for tests that expect ranks to die. `f`
/// takes nothing, or a reference to something default-constructible such as `PartialState&`.
///
/// A rank ends with 0; with 1 after a gtest failure or an exception that left `f`, whose type and
/// text are then in its output.
template <class F>
[[nodiscard]] std::vector<RankOutcome> run_processes(int n, const OnProcessesOptions& options,
                                                     F f) {
  return harness::run_processes(n, options, harness::bind_state(std::move(f)));
}

/// Runs `f` in `n` processes; every rank must succeed.
template <class F>
void on_processes(int n, const OnProcessesOptions& options, F f) {
  harness::expect_success(harness::run_processes(n, options, harness::bind_state(std::move(f))));
}

template <class F>
void on_processes(int n, F f) {
  on_processes(n, OnProcessesOptions{}, std::move(f));
}

/// True in a process started by the harness.
[[nodiscard]] bool in_child_process();

}  // namespace accelerate
