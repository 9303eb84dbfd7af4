#include "core/byte_bar.h"

#include <unistd.h>

#include <utility>

#include "accelerate/environment.h"

namespace accelerate::detail::inline core {
namespace {

bool stderr_is_terminal() { return ::isatty(STDERR_FILENO) == 1; }

// `ProgressBar` itself obeys ACCELERATE_PROGRESS=0.
bool is_shown(std::optional<std::int64_t> total, std::optional<bool> asked) {
  if (total && *total < kBytesWorthABar) return false;
  return asked ? *asked : parse_flag_from_env("ACCELERATE_PROGRESS");
}

}  // namespace

std::optional<bool> asked_by_command() {
  return stderr_is_terminal() ? std::optional(true) : std::nullopt;
}

ByteBar::ByteBar(std::string desc, std::optional<std::int64_t> total, std::optional<bool> asked)
    : bar_({.disable = !is_shown(total, asked),
            .desc = std::move(desc),
            .total = total,
            .leave = !stderr_is_terminal(),
            .unit = "B",
            .unit_scale = true}) {}

void ByteBar::add(std::int64_t bytes) {
  const std::scoped_lock lock(mutex_);
  bar_.update(bytes);
}

std::function<void(std::int64_t bytes)> ByteBar::next_part() {
  return [this, before = std::int64_t{0}](std::int64_t bytes) mutable {
    add(bytes - std::exchange(before, bytes));
  };
}

}  // namespace accelerate::detail::inline core
