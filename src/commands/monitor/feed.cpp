#include "commands/monitor/feed.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "accelerate/value.h"
#include "core/json.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::size_t kLongestName = 200;
constexpr std::size_t kMostConfig = 100;

/// Numbers that are not finite are words in JSON.
std::optional<double> number_of(const Value& value) {
  if (value.is_bool()) return value.as_bool() ? 1.0 : 0.0;
  if (value.is_int() || value.is_double()) return value.as_double();
  if (!value.is_string()) return std::nullopt;
  if (value.as_string() == "NaN") return std::nan("");
  if (value.as_string() == "Infinity") return std::numeric_limits<double>::infinity();
  if (value.as_string() == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

std::optional<double> number_in(const Value::Dict& dict, std::string_view key) {
  const auto* value = dict.get(key);
  const auto number = value != nullptr ? number_of(*value) : std::nullopt;
  return number && std::isfinite(*number) ? number : std::nullopt;
}

int small_in(const Value::Dict& dict, std::string_view key, int fallback) {
  return static_cast<int>(std::clamp(number_in(dict, key).value_or(fallback), 0.0, 1e6));
}

std::string text_in(const Value::Dict& dict, std::string_view key) {
  const auto* value = dict.get(key);
  return value != nullptr && value->is_string() ? value->as_string().substr(0, kLongestName) : "";
}

void collect(const std::string& prefix, const Value::Dict& dict, FeedValues& values) {
  for (const auto& [key, value] : dict) {
    const auto name = (prefix + key.to_string()).substr(0, kLongestName);
    if (value.is_dict()) {
      collect(name + "/", value.as_dict(), values);
    } else if (const auto number = number_of(value)) {
      values.values.emplace_back(name, *number);
    }
  }
}

FeedName name_of(const Value::Dict& line, const Value* config) {
  FeedName name{.name = text_in(line, "name")};
  if (config == nullptr || !config->is_dict()) return name;
  for (const auto& [key, value] : config->as_dict()) {
    if (name.config.size() == kMostConfig) break;
    const auto text = value.is_string() ? value.as_string() : value.repr();
    name.config.emplace_back(key.to_string().substr(0, kLongestName), text.substr(0, kLongestName));
  }
  return name;
}

FeedSystem system_of(const Value::Dict& line, double memory) {
  FeedSystem system{.memory = memory};
  const auto* gpu = line.get("gpu");
  if (gpu == nullptr || !gpu->is_dict()) return system;
  system.gpu_used = number_in(gpu->as_dict(), "used");
  system.gpu_total = number_in(gpu->as_dict(), "total");
  system.gpu_busy = number_in(gpu->as_dict(), "busy");
  return system;
}

FeedSteps steps_of(const Value::Dict& line, double steps) {
  return {.steps = steps,
          .count = std::max(number_in(line, "count").value_or(1), 1.0),
          .time = number_in(line, "ms").value_or(0),
          .longest = number_in(line, "max").value_or(0),
          .wait = number_in(line, "wait"),
          .learning_rate = number_in(line, "lr"),
          .samples = number_in(line, "samples")};
}

}  // namespace

std::optional<FeedEntry> parse_feed_line(std::string_view text) {
  if (text.size() > kLongestFeedLine) return std::nullopt;
  const auto line = json_object(text);
  if (!line) return std::nullopt;
  const auto time = number_in(*line, "time");
  if (!time) return std::nullopt;
  FeedEntry entry{.time = *time};
  if (const auto* values = line->get("values"); values != nullptr && values->is_dict()) {
    if (line->get("table") != nullptr) return std::nullopt;  // of `log_table`
    FeedValues found{.step = number_in(*line, "step")};
    collect("", values->as_dict(), found);
    entry.what = std::move(found);
  } else if (const auto steps = number_in(*line, "steps")) {
    entry.what = steps_of(*line, *steps);
  } else if (const auto memory = number_in(*line, "memory")) {
    entry.what = system_of(*line, *memory);
  } else if (const auto* start = line->get("start"); start != nullptr && start->is_dict()) {
    const auto& facts = start->as_dict();
    entry.what = FeedStart{.rank = small_in(facts, "rank", 0),
                           .world = small_in(facts, "world", 1),
                           .host = text_in(facts, "host"),
                           .device = text_in(facts, "device"),
                           .program = text_in(facts, "program")};
  } else if (const auto* config = line->get("config"); config || line->get("name")) {
    entry.what = name_of(*line, config);
  } else if (line->get("end") != nullptr) {
    entry.what = FeedEnd{.failed = text_in(*line, "end") == "failed"};
  } else {
    return std::nullopt;
  }
  return entry;
}

// A name with a comma or a quote is quoted; a quote in it is doubled.
std::optional<FeedEntry> parse_csv_row(std::string_view line) {
  const auto first = line.find(',');
  const auto second = first == line.npos ? first : line.find(',', first + 1);
  const auto last = line.rfind(',');
  if (second == line.npos || last <= second || line.size() > kLongestFeedLine) return std::nullopt;
  const auto time = parse_number<double>(line.substr(0, first));
  auto name = line.substr(second + 1, last - second - 1);
  auto value = line.substr(last + 1);
  if (value.ends_with('\r')) value.remove_suffix(1);
  const auto number = parse_number<double>(value);
  if (!time || !std::isfinite(*time) || !number || name.empty()) return std::nullopt;
  std::string plain;
  if (name.size() >= 2 && name.front() == '"' && name.back() == '"') {
    name = name.substr(1, name.size() - 2);
    for (std::size_t i = 0; i < name.size(); ++i) {
      if (name[i] == '"' && i + 1 < name.size() && name[i + 1] == '"') ++i;
      plain += name[i];
    }
  } else {
    plain = name;
  }
  const auto step = parse_number<double>(line.substr(first + 1, second - first - 1));
  return FeedEntry{.time = *time,
                   .what = FeedValues{.step = step && std::isfinite(*step) ? step : std::nullopt,
                                      .values = {{plain.substr(0, kLongestName), *number}}}};
}

}  // namespace accelerate::detail::commands
