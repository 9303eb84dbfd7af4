// accelerate/state/ordered_section.h - code that runs on one process, or on one process first.
//
// Internals of accelerate/state.h: `main_process_first` and `on_main_process`.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate::detail::state {

struct PartialFacts;

/// A callable that runs on the chosen process and does nothing on the others.
template <class F>
class Gated {
 public:
  Gated(F f, bool runs_here) : f_(std::move(f)), runs_here_(runs_here) {}

  template <class... Args>
    requires std::is_invocable_v<F&, Args...>
  auto operator()(Args&&... args) {
    return call(f_, runs_here_, std::forward<Args>(args)...);
  }
  template <class... Args>
    requires std::is_invocable_v<const F&, Args...>
  auto operator()(Args&&... args) const {
    return call(f_, runs_here_, std::forward<Args>(args)...);
  }

 private:
  template <class G, class... Args>
  static auto call(G& g, bool runs_here, Args&&... args) {
    using R = std::invoke_result_t<G&, Args...>;
    if constexpr (std::is_void_v<R>) {
      if (runs_here) std::invoke(g, std::forward<Args>(args)...);
    } else {
      using Result = std::optional<std::remove_cvref_t<R>>;
      return runs_here ? Result(std::invoke(g, std::forward<Args>(args)...)) : Result();
    }
  }

  F f_;
  bool runs_here_;
};

/// One `*_process_first` call: the others wait until the first ones release them.
class ACCELERATE_API OrderedSection {
 public:
  OrderedSection(const PartialState& state, std::source_location where);

  /// Collective. Returns when the first processes are done; throws `CommError` if one has failed.
  void wait_for_the_first();
  /// Collective. Lets the others run.
  void release_the_others();
  /// Collective. Lets the others throw.
  void fail(const std::string& message) noexcept;

 private:
  struct Failure {
    int rank = 0;
    std::string message;
  };
  /// Collective. One of the first processes that failed, if any did.
  [[nodiscard]] std::optional<Failure> agree(bool failed_here) const;
  [[nodiscard]] std::string message_key(int rank) const;
  [[nodiscard]] std::string message_of(int rank) const;

  const PartialState& state_;
  std::source_location where_;
  std::string key_;
};

template <class F>
decltype(auto) in_order(const PartialState& state, bool goes_first, F&& f,
                        std::source_location where) {
  using R = std::invoke_result_t<F>;
  OrderedSection section(state, where);
  if (!goes_first) {
    section.wait_for_the_first();
    return std::forward<F>(f)();
  }
  // No guard object: a barrier must not run in a destructor while an exception unwinds.
  const auto run = [&]() -> R {
    try {
      return std::forward<F>(f)();
    } catch (const std::exception& error) {
      section.fail(error.what());
      throw;
    } catch (...) {
      section.fail("an exception that is no std::exception");
      throw;
    }
  };
  if constexpr (std::is_void_v<R>) {
    run();
    section.release_the_others();
  } else {
    decltype(auto) result = run();
    section.release_the_others();
    return static_cast<R>(std::forward<decltype(result)>(result));
  }
}

/// Writes one line to stdout in one piece and flushes.
ACCELERATE_API void print_line(std::string line);

}  // namespace accelerate::detail::state
