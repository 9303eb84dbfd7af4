// src/tracking/recorder.h - writes the file of one process that `accelerate monitor` reads.
//
// One JSON object per line, each with "time" (seconds since 1970):
//
//     {"time": T, "start": {"rank": 0, "world": 2, "host": "n1", "pid": 7, "device": "cpu", ...}}
//     {"time": T, "name": "spirals", "config": {...}}               init_trackers
//     {"time": T, "step": 3, "values": {"loss": 0.1}}               log; as the tracker jsonl
//     writes
//     {"time": T, "steps": 9, "count": 3, "ms": 1.5, "max": 2.0, "wait": 0.2, "lr": 0.1, ...}
//     {"time": T, "memory": 123, "gpu": {"used": 1, "total": 2, "busy": 97}}
//     {"time": T, "end": "finished"}                                or "failed"
//
// "steps" counts the steps of the optimizer so far; "ms" and "wait" are means over the last "count"
// of them, "max" the longest. Lines are written twice a second, so that a kill loses less than a
// second.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "accelerate/value.h"
#include "core/processes.h"
#include "tracking/outbox.h"

namespace accelerate::detail::tracking {

struct RecorderOptions {
  /// The folder of the run; each process has rank_N.jsonl there.
  std::filesystem::path folder = {};
  int rank = 0;
  int world = 1;
  std::string device = "cpu";
  /// The PCI address of the GPU to observe; "" for none.
  std::string gpu = {};
  /// How long collectives have taken so far; may be empty.
  std::function<std::int64_t()> nanoseconds_waited = {};
};

/// No function throws: what goes wrong is one warning, and the training goes on.
class Recorder {
 public:
  explicit Recorder(RecorderOptions options);
  /// As `finish`; the run has failed if an exception is under way.
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// The name and hyperparameters of the run.
  void describe(const std::string& name, const Value::Dict& config) noexcept;
  /// The numbers among the values; entries of dicts as "dict/entry". Without `step`, at the latest
  /// step of the optimizer.
  void log(const Value::Dict& values, std::optional<std::int64_t> step) noexcept;

  /// Counts a step of the optimizer. True, up to ten times a second, if `write_steps` is due.
  [[nodiscard]] bool count_step() noexcept;
  struct StepFacts {
    std::optional<double> learning_rate = std::nullopt;
    /// Of all processes together in one step.
    std::optional<std::int64_t> samples = std::nullopt;
  };
  void write_steps(const StepFacts& facts) noexcept;

  /// Writes what is left. Later calls of all functions have no effect.
  void finish(bool failed = false) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void sample_system();
  /// Appends an entry with the time, and with `line` inside, to what is written next; locks.
  void add(std::string_view line);
  [[nodiscard]] std::int64_t steps();
  void deliver();
  /// Calls `f`, and reports the first exception.
  template <class F>
  void quietly(F f) noexcept;

  OwnerProcess owner_;
  RecorderOptions options_;
  std::filesystem::path file_;
  Clock::time_point started_ = Clock::now();
  std::unique_ptr<Outbox> outbox_;

  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::string lines_;  ///< not written yet
  std::int64_t lost_ = 0;
  bool stop_ = false;
  bool warned_ = false;

  // Of the steps since the last entry.
  std::int64_t steps_ = 0;
  std::int64_t count_ = 0;
  Clock::time_point entry_time_ = {};
  Clock::time_point last_step_ = {};
  Clock::duration longest_{0};
  std::int64_t waited_ = 0;

  std::thread thread_;
};

}  // namespace accelerate::detail::tracking
