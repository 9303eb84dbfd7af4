// accelerate/memory.h - release memory, and find the batch size that fits into it.
//
//     auto train = accelerate::find_executable_batch_size(
//         [&](std::int64_t batch_size, Net& net) { ... }, {.starting_batch_size = 128});
//     train(net);             // tries 128, 115, 103, ... until one fits
//     train.batch_size();     // the one that did; the next call starts there
#pragma once

#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <ranges>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"

namespace accelerate {

/// Gives unused memory of the accelerator's caching allocator back to the driver.
/// `garbage_collection` also returns free pages of the host's heap to the system, which is slow,
/// and what is kept at hand for the results of collectives.
ACCELERATE_API void clear_device_cache(bool garbage_collection = false);

namespace detail::state {

template <class T>
void reset_object(T& object) {
  static_assert(
      !std::is_pointer_v<T>,
      "release_memory: a raw pointer owns nothing. Pass the object or the smart pointer that "
      "holds it.");
  if constexpr (requires { object.reset(); } && !std::is_pointer_v<T>) {
    object.reset();  // tensors, smart pointers, optionals
  } else if constexpr (requires { object = nullptr; } && !std::ranges::range<T>) {
    object = nullptr;  // module holders
  } else {
    static_assert(
        std::default_initializable<T> && std::movable<T>,
        "release_memory: this type can neither be reset, nor set to nullptr, nor replaced by "
        "an empty value.");
    object = T();  // containers: clear() would keep their memory
  }
}

}  // namespace detail::state

/// Empties every argument (tensor, module holder, smart pointer, optional, container), then the
/// caches of the accelerator.
///
///     release_memory(model, optimizer_state, batches);
template <class... Ts>
void release_memory(Ts&... objects) {
  (detail::state::reset_object(objects), ...);
  clear_device_cache(/*garbage_collection=*/true);
}

/// The error says that memory ran out, on the CPU or an accelerator, or that cuDNN found no kernel
/// for that size: a smaller batch may work.
[[nodiscard]] ACCELERATE_API bool should_reduce_batch_size(const std::exception& error);
/// Checks what was caught by `catch (...)`; false for what is not a std::exception.
[[nodiscard]] ACCELERATE_API bool should_reduce_batch_size(const std::exception_ptr& error);

struct BatchSizeOptions {
  std::int64_t starting_batch_size = 128;
  /// Given the size that failed, returns the next: smaller, and not negative. Unset: nine tenths.
  std::function<std::int64_t(std::int64_t)> reduce = nullptr;
  /// All processes try the same size, and all try again when one of them ran out of memory. The
  /// calls then communicate: every process must make them. The function itself must not leave the
  /// others alone in a collective when it runs out of memory.
  bool agree_across_processes = false;
};

namespace detail::state {

/// The search itself; `BatchSizeFinder` only brings arguments and result through.
class ACCELERATE_API BatchSizeSearch {
 public:
  explicit BatchSizeSearch(BatchSizeOptions options);
  /// Collective with `agree_across_processes`. Calls `attempt` until it returns normally.
  void run(const std::function<void(std::int64_t)>& attempt, std::source_location where);
  [[nodiscard]] std::int64_t batch_size() const noexcept { return batch_size_; }

 private:
  BatchSizeOptions options_;
  std::int64_t batch_size_;
};

}  // namespace detail::state

/// A function together with the batch size that is known to fit. See `find_executable_batch_size`.
template <class F>
class BatchSizeFinder {
 public:
  BatchSizeFinder(F function, BatchSizeOptions options, std::source_location where)
      : function_(std::move(function)), search_(std::move(options)), where_(where) {}

  /// Calls `function(batch_size, arguments...)`, and again with a smaller size as long as it runs
  /// out of memory. Arguments are passed as lvalues, because there may be a second call. Throws
  /// `StateError` when no size is left; any other error of the function passes through.
  template <class... Args>
  decltype(auto) operator()(Args&&... arguments) {
    static_assert(
        std::is_invocable_v<F&, std::int64_t, Args&...>,
        "find_executable_batch_size: the function must take the batch size first and then "
        "the arguments of this call. Do not pass the batch size yourself.");
    using Result = std::invoke_result_t<F&, std::int64_t, Args&...>;
    if constexpr (std::is_void_v<Result>) {
      search_.run([&](std::int64_t size) { std::invoke(function_, size, arguments...); }, where_);
    } else if constexpr (std::is_reference_v<Result>) {
      std::remove_reference_t<Result>* result = nullptr;
      search_.run(
          [&](std::int64_t size) {
            auto&& value = std::invoke(function_, size, arguments...);
            result = std::addressof(value);
          },
          where_);
      return static_cast<Result>(*result);
    } else {
      std::optional<Result> result;
      search_.run(
          [&](std::int64_t size) {
            result.reset();  // of an attempt that did not fit elsewhere
            result.emplace(std::invoke(function_, size, arguments...));
          },
          where_);
      return Result(*std::move(result));
    }
  }

  /// The size used last, or the one to start with.
  [[nodiscard]] std::int64_t batch_size() const noexcept { return search_.batch_size(); }

 private:
  F function_;
  detail::state::BatchSizeSearch search_;
  std::source_location where_;
};

/// Wraps a function whose first parameter is a batch size, so that it is called with the largest
/// size of the sequence that does not run out of memory.
template <class F>
[[nodiscard]] BatchSizeFinder<std::decay_t<F>> find_executable_batch_size(
    F&& function, BatchSizeOptions options = {},
    std::source_location where = std::source_location::current()) {
  return {std::forward<F>(function), std::move(options), where};
}

/// "300 bytes", "2.0 KB", "1.46 MB": the largest unit of which there is one, rounded as Python
/// does.
[[nodiscard]] ACCELERATE_API std::string convert_bytes(std::int64_t size);
[[nodiscard]] ACCELERATE_API std::string convert_bytes(double size);
template <std::integral T>
[[nodiscard]] std::string convert_bytes(T size) {
  if constexpr (std::unsigned_integral<T> && sizeof(T) >= sizeof(std::int64_t)) {
    if (size > static_cast<T>(std::numeric_limits<std::int64_t>::max())) {
      return convert_bytes(static_cast<double>(size));
    }
  }
  return convert_bytes(static_cast<std::int64_t>(size));
}

/// "1MiB" -> 1048576, "5GB" -> 5 * 10^9, "1Gb" -> 125000000; a number of bytes is itself. Throws
/// `ArgumentError` for other texts and negative sizes.
[[nodiscard]] ACCELERATE_API std::int64_t convert_file_size_to_int(std::string_view size);
[[nodiscard]] ACCELERATE_API std::int64_t convert_file_size_to_int(std::int64_t size);

}  // namespace accelerate
