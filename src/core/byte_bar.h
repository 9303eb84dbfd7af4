// src/core/byte_bar.h - the progress bar of long work: bytes that are loaded, saved, hashed,
// merged.
//
//     ByteBar bar("saving", bytes, options.progress);
//     ...
//     bar.add(written);
//
// On a terminal the bar is gone at the end. A log file gets a line now and then, and the last one.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "accelerate/progress.h"

namespace accelerate::detail::inline core {

/// Less work than this is over before a bar could be read, and shows none.
inline constexpr std::int64_t kBytesWorthABar = 16 << 20;

/// What a command asks for: a bar on a terminal, nothing elsewhere.
[[nodiscard]] std::optional<bool> asked_by_command();

class ByteBar {
 public:
  /// `asked` is what the caller wants; nullopt: what ACCELERATE_PROGRESS says, and nothing if that
  /// is not set. ACCELERATE_PROGRESS=0 is stronger than `asked`. Without a `total` a count is
  /// shown.
  explicit ByteBar(std::string desc, std::optional<std::int64_t> total,
                   std::optional<bool> asked = std::nullopt);

  /// Counts bytes that are done. By any thread.
  void add(std::int64_t bytes);
  /// For work that tells how many bytes of its part are done so far.
  [[nodiscard]] std::function<void(std::int64_t bytes)> next_part();

 private:
  std::mutex mutex_;
  ProgressBar bar_;
};

}  // namespace accelerate::detail::inline core
