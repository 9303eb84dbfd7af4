// src/commands/monitor/feed.h - one line of a file that a run has written for `accelerate monitor`.
//
// The lines are those of tracking/recorder.h, and of the trackers jsonl and csv.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace accelerate::detail::commands {

/// Longer lines are left out.
inline constexpr std::size_t kLongestFeedLine = 64 << 10;

struct FeedStart {
  int rank = 0;
  int world = 1;
  std::string host = {};
  std::string device = {};
  std::string program = {};
};
struct FeedName {
  std::string name = {};
  std::vector<std::pair<std::string, std::string>> config = {};
};
struct FeedValues {
  std::optional<double> step = std::nullopt;
  std::vector<std::pair<std::string, double>> values = {};
};
/// Times in milliseconds, means over `count` steps.
struct FeedSteps {
  double steps = 0;
  double count = 1;
  double time = 0;
  double longest = 0;
  std::optional<double> wait = std::nullopt;
  std::optional<double> learning_rate = std::nullopt;
  std::optional<double> samples = std::nullopt;
};
struct FeedSystem {
  double memory = 0;
  std::optional<double> gpu_used = std::nullopt;
  std::optional<double> gpu_total = std::nullopt;
  std::optional<double> gpu_busy = std::nullopt;
};
struct FeedEnd {
  bool failed = false;
};

struct FeedEntry {
  double time = 0;  ///< seconds since 1970
  std::variant<FeedStart, FeedName, FeedValues, FeedSteps, FeedSystem, FeedEnd> what = FeedEnd{};
};

/// nullopt for a line that is none of these: torn, foreign, or of a later version.
[[nodiscard]] std::optional<FeedEntry> parse_feed_line(std::string_view line);
/// A row of the tracker csv: time,step,name,value.
[[nodiscard]] std::optional<FeedEntry> parse_csv_row(std::string_view line);

}  // namespace accelerate::detail::commands
