#include "tracking/recorder.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <exception>
#include <fstream>
#include <utility>

#include "accelerate/version.h"
#include "core/log.h"
#include "core/nvml.h"
#include "core/signals_blocked.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "core/world.h"
#include "tracking/tracker_files.h"

namespace accelerate::detail::tracking {
namespace {

constexpr auto kBetweenWrites = std::chrono::milliseconds(500);
constexpr auto kBetweenSamples = std::chrono::seconds(2);
// Readers refuse longer lines.
constexpr std::size_t kLongestLine = 64 << 10;
// While the disk does not answer. Beyond this, entries are dropped and counted.
constexpr std::size_t kMostHeldBytes = 8 << 20;
constexpr std::size_t kMostLogged = 256;  // values of one call of log

/// A step entry stands for a tenth of a second at first and for a second in long runs, which write
/// 15 MB per day.
std::chrono::nanoseconds entry_interval(std::chrono::nanoseconds since_start) {
  using namespace std::chrono_literals;
  return std::clamp<std::chrono::nanoseconds>(since_start / 2000, 100ms, 1s);
}

// `log` may be called in every step: text is made by hand, streams would take ten times as long.

void append_number(std::string& text, double value) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.begin(), digits.end(), value);
  text.append(digits.data(), end.ptr);
}

void append_value(std::string& text, double value) {
  if (std::isfinite(value)) return append_number(text, value);
  text += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
}

/// A number of which six digits are enough.
void append_entry(std::string& text, std::string_view key, double value) {
  std::array<char, 32> digits{};
  const auto end =
      std::to_chars(digits.begin(), digits.end(), value, std::chars_format::general, 6);
  text.append(", \"").append(key).append("\": ");
  text.append(digits.data(), end.ptr);
}

void append_quoted(std::string& text, const std::string& name) {
  const bool plain = std::ranges::all_of(
      name, [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; });
  if (plain) {
    text.append(1, '"').append(name).append(1, '"');
  } else {
    text += json_line(name);
  }
}

double milliseconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

std::string program_name() {
  const auto words = own_command_line();
  return words.empty() ? "" : std::filesystem::path(words.front()).filename().string();
}

std::optional<std::int64_t> resident_bytes() {
  std::int64_t total = 0;
  std::int64_t resident = 0;
  std::ifstream file("/proc/self/statm");
  if (!(file >> total >> resident)) return std::nullopt;
  return resident * ::sysconf(_SC_PAGESIZE);
}

/// The entries of a JSON object; returns their number.
std::size_t append_numbers(std::string& text, const std::string& prefix, const Value::Dict& values,
                           std::size_t count = 0) {
  for (const auto& [key, value] : values) {
    if (value.is_dict()) {
      count = append_numbers(text, str(prefix, key.to_string(), "/"), value.as_dict(), count);
    } else if (const auto number = number_of(value); number && count < kMostLogged) {
      if (count++ > 0) text += ", ";
      append_quoted(text, prefix + key.to_string());
      text += ": ";
      append_value(text, *number);
    }
  }
  return count;
}

}  // namespace

Recorder::Recorder(RecorderOptions options)
    : options_(std::move(options)),
      file_(options_.folder / str("rank_", options_.rank, ".jsonl")),
      outbox_(std::make_unique<Outbox>(
          OutboxOptions{.tracker = "monitor", .max_bytes = kMostHeldBytes}, deliver_to_files)) {
  quietly([&] {
    const Value::Dict facts{{"rank", options_.rank},     {"world", options_.world},
                            {"host", this_host_name()},  {"pid", static_cast<int>(::getpid())},
                            {"device", options_.device}, {"program", program_name()},
                            {"version", kVersion}};
    add(str("\"start\": ", json_line(facts)));
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
  });
}

Recorder::~Recorder() { finish(std::uncaught_exceptions() > 0); }

template <class F>
void Recorder::quietly(F f) noexcept {
  if (owner_.is_forked_copy()) return;  // only the parent has the thread, which may hold the lock
  try {
    f();
  } catch (const std::exception& error) {
    try {
      {
        const std::scoped_lock lock(mutex_);
        if (std::exchange(warned_, true)) return;
      }
      warn_from_any_rank(str("The recorder for `accelerate monitor` has left out an entry: ",
                             error.what(), " Training goes on."));
    } catch (...) {
      return;
    }
  }
}

void Recorder::add(std::string_view line) {
  std::array<char, 48> time{};
  const auto end = std::to_chars(time.begin(), time.end(), now_seconds(), std::chars_format::fixed,
                                 /*precision=*/3);
  std::string entry = "{\"time\": ";
  entry.append(time.data(), end.ptr).append(", ").append(line).append("}\n");
  const std::scoped_lock lock(mutex_);
  if (stop_) return;
  if (entry.size() > kLongestLine || lines_.size() + entry.size() > kMostHeldBytes) {
    ++lost_;
    return;
  }
  lines_ += entry;
  if (lines_.size() > kMostHeldBytes / 2) changed_->notify_one();
}

void Recorder::describe(const std::string& name, const Value::Dict& config) noexcept {
  quietly([&] {
    const auto start = str("\"name\": ", json_line(name));
    auto line = str(start, ", \"config\": ", json_line(config));
    add(line.size() < kLongestLine / 2 ? line : start);
  });
}

void Recorder::log(const Value::Dict& values, std::optional<std::int64_t> step) noexcept {
  quietly([&] {
    std::string line = "\"step\": ";
    append_number(line, static_cast<double>(step ? *step : steps()));
    line += ", \"values\": {";
    if (append_numbers(line, "", values) == 0) return;
    add(line += "}");
  });
}

std::int64_t Recorder::steps() {
  const std::scoped_lock lock(mutex_);
  return steps_;
}

bool Recorder::count_step() noexcept {
  if (owner_.is_forked_copy()) return false;
  const auto now = Clock::now();
  const std::scoped_lock lock(mutex_);
  if (steps_++ == 0) {
    // What happened before the first step is not part of a step.
    entry_time_ = last_step_ = now;
    if (options_.nanoseconds_waited) waited_ = options_.nanoseconds_waited();
    return false;
  }
  ++count_;
  longest_ = std::max(longest_, now - last_step_);
  last_step_ = now;
  return now - entry_time_ >= entry_interval(now - started_);
}

void Recorder::write_steps(const StepFacts& facts) noexcept {
  quietly([&] {
    std::string line;
    {
      const std::scoped_lock lock(mutex_);
      if (count_ == 0) return;
      const auto count = static_cast<double>(std::exchange(count_, 0));
      const auto took = last_step_ - std::exchange(entry_time_, last_step_);
      line = "\"steps\": ";
      append_number(line, static_cast<double>(steps_));
      append_entry(line, "count", count);
      append_entry(line, "ms", milliseconds(took) / count);
      append_entry(line, "max", milliseconds(std::exchange(longest_, Clock::duration(0))));
      if (options_.nanoseconds_waited) {
        const auto before = std::exchange(waited_, options_.nanoseconds_waited());
        append_entry(line, "wait",
                     milliseconds(std::chrono::nanoseconds(waited_ - before)) / count);
      }
    }
    if (facts.learning_rate && std::isfinite(*facts.learning_rate)) {
      append_entry(line, "lr", *facts.learning_rate);
    }
    if (facts.samples) line += str(", \"samples\": ", *facts.samples);
    add(line);
  });
}

void Recorder::sample_system() {
  const auto memory = resident_bytes();
  if (!memory) return;
  auto line = str("\"memory\": ", *memory);
  const auto* nvml = options_.gpu.empty() ? nullptr : Nvml::system();
  if (nvml != nullptr) {
    if (const auto usage = nvml->usage(options_.gpu)) {
      line += str(", \"gpu\": {\"used\": ", usage->used_bytes, ", \"total\": ", usage->total_bytes);
      if (usage->busy_percent) line += str(", \"busy\": ", *usage->busy_percent);
      line += "}";
    }
  }
  add(line);
}

void Recorder::run() {
  ::pthread_setname_np(::pthread_self(), "recorder");
  auto next_sample = Clock::now();
  bool stop = false;
  while (!stop) {
    quietly([&] {
      if (Clock::now() >= next_sample) {
        next_sample = Clock::now() + kBetweenSamples;
        sample_system();
      }
      deliver();
    });
    std::unique_lock lock(mutex_);
    changed_->wait_for(lock, kBetweenWrites,
                       [&] { return stop_ || lines_.size() > kMostHeldBytes / 2; });
    stop = stop_;
  }
}

void Recorder::deliver() {
  std::string lines;
  {
    const std::scoped_lock lock(mutex_);
    lines.swap(lines_);
  }
  if (!lines.empty()) outbox_->post({.target = file_.string(), .bytes = std::move(lines)});
}

void Recorder::finish(bool failed) noexcept {
  if (owner_.is_forked_copy()) {
    if (thread_.joinable()) thread_.detach();
    // The thread waits at one, whose destructor would not end; what the other holds is the
    // parent's.
    [[maybe_unused]] const auto left = std::pair(changed_.release(), outbox_.release());
    return;
  }
  if (!thread_.joinable()) return;
  write_steps({});
  quietly([&] { add(str("\"end\": \"", failed ? "failed" : "finished", "\"")); });
  quietly([&] {
    {
      const std::scoped_lock lock(mutex_);
      stop_ = true;
    }
    changed_->notify_one();
    thread_.join();
    deliver();
    if (lost_ == 0) return;
    warn_from_any_rank(str("The recorder for `accelerate monitor` has left out ", lost_,
                           lost_ == 1 ? " entry" : " entries",
                           ": too long, or the disk did not answer."));
  });
  outbox_->finish();
}

}  // namespace accelerate::detail::tracking
