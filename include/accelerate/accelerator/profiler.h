// accelerate/accelerator/profiler.h - where the time of a program goes: a trace of its operators,
// and a table of them.
//
//     auto profile = accelerator.profile({.record_shapes = true}, [&](Profiler& profiler) {
//       for (auto& batch : loader) {
//         train(batch);
//         profiler.step();
//       }
//     });
//     accelerator.print(profile.key_averages().table({.sort_by = "self_cpu_time_total"}));
//
// Names, numbers and files are those of torch.profiler. Part of accelerate/accelerator.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs.h"

namespace accelerate {

/// All calls of one operator. Times are in microseconds, "self" is without the operators that it
/// called.
struct KeyAverage {
  std::string key = {};
  /// Of each argument; only where averages are grouped by shapes.
  std::vector<std::vector<std::int64_t>> input_shapes = {};
  std::int64_t count = 0;
  double cpu_time_total = 0;
  double self_cpu_time_total = 0;
  double device_time_total = 0;
  double self_device_time_total = 0;
  // Bytes allocated less bytes freed; with `profile_memory`.
  std::int64_t cpu_memory_usage = 0;
  std::int64_t self_cpu_memory_usage = 0;
  std::int64_t device_memory_usage = 0;
  std::int64_t self_device_memory_usage = 0;
  /// Floating-point operations; with `with_flops`, of operators that LibTorch knows a formula for.
  std::int64_t flops = 0;
  /// The calls that led to it; with `with_stack`, for TorchScript only.
  std::vector<std::string> stack = {};
  /// A kernel on the device, not an operator on the host.
  bool on_device = false;
};

/// All collectives of one kind, as the program called them.
struct CollectiveAverage {
  std::string key = {};
  std::int64_t count = 0;
  /// That this process gave to them.
  std::int64_t bytes = 0;
  /// From calls to their ends, with the time in which they waited for other processes. Calls that
  /// overlap count each.
  double time_total = 0;
};

struct ProfileTableOptions {
  /// A column by Python's name: cpu_time_total, self_cpu_time_total, cpu_time, count, flops,
  /// cpu_memory_usage, self_cpu_memory_usage, and those of cpu with cuda, xpu or device instead.
  /// Empty: rows are in the order in which operators were called first.
  std::string sort_by = {};
  /// -1 for all.
  std::int64_t row_limit = 100;
  std::int64_t max_name_column_width = 55;
  std::int64_t max_shapes_column_width = 80;
};

/// What `Profiler::key_averages` returns.
class ACCELERATE_API KeyAverages {
 public:
  /// `device` heads the columns of kernels: "CUDA"; empty if none were recorded.
  explicit KeyAverages(std::vector<KeyAverage> rows,
                       std::vector<CollectiveAverage> collectives = {}, std::string device = {},
                       bool with_memory = false)
      : rows_(std::move(rows)),
        collectives_(std::move(collectives)),
        device_(std::move(device)),
        with_memory_(with_memory) {}

  [[nodiscard]] const std::vector<KeyAverage>& rows() const { return rows_; }
  [[nodiscard]] auto begin() const { return rows_.begin(); }
  [[nodiscard]] auto end() const { return rows_.end(); }
  [[nodiscard]] std::size_t size() const { return rows_.size(); }
  /// The first row of an operator, for example "aten::addmm"; nullptr if it was not called.
  [[nodiscard]] const KeyAverage* find(std::string_view key) const;
  /// Those of this process, on any thread, while steps were recorded.
  [[nodiscard]] const std::vector<CollectiveAverage>& collectives() const { return collectives_; }

  /// The time of all operators on the host.
  [[nodiscard]] double self_cpu_time_total() const;
  /// A table for a terminal, with a second one if there were collectives. Throws `ArgumentError`
  /// for another `sort_by`, with the choices.
  [[nodiscard]] std::string table(const ProfileTableOptions& options = {}) const;

 private:
  std::vector<KeyAverage> rows_;
  std::vector<CollectiveAverage> collectives_;
  std::string device_;
  bool with_memory_;
};

/// Records operators of the thread that starts it, and of the backward passes and parallel loops
/// that this thread starts. One profiler runs at a time.
///
/// `Accelerator::profile` makes one. Made by hand it is Python's `ProfileKwargs.build()`.
class ACCELERATE_API Profiler {
 public:
  /// Throws `ConfigError` for a schedule that cannot be, `UnsupportedError` for an activity that
  /// this machine does not have.
  explicit Profiler(const ProfileKwargs& options = {});
  Profiler(Profiler&&) noexcept;
  Profiler& operator=(Profiler&&) noexcept;
  /// Ends a recording that was not stopped; nothing is called or written.
  ~Profiler();

  /// Starts with the first step. Throws `StateError` if a profiler runs already.
  void start();
  /// Ends the current step: a recording that is under way calls `on_trace_ready`.
  void stop();
  /// The next step begins. What the schedule asks for is done: prepare, start, stop and call
  /// `on_trace_ready`. Throws what that function throws.
  void step();
  [[nodiscard]] std::int64_t step_num() const;

  /// The operators of the last recording by name, and by the shapes of their arguments if asked
  /// (with `record_shapes`). Throws `StateError` if nothing was recorded.
  [[nodiscard]] KeyAverages key_averages(bool group_by_input_shape = false) const;
  /// Writes the last recording as Chrome JSON (chrome://tracing, https://ui.perfetto.dev). Throws
  /// `StateError` if nothing was recorded, `ArgumentError` if the file cannot be written.
  void export_chrome_trace(const std::filesystem::path& path);
  /// Adds an entry to the traces of recordings that are prepared later; `json` must be valid.
  void add_metadata_json(const std::string& key, const std::string& json);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate
