// src/commands/monitor/runs.h - the runs under a folder, read while they go on.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/value.h"
#include "commands/checkpoint_folders.h"

namespace accelerate::detail::commands {

/// Longer lines are left out.
inline constexpr std::size_t kLongestLine = 64 << 10;
/// A rate in a table is that of the last seconds.
inline constexpr double kTableSeconds = 10;

struct Point {
  double step = 0;
  double time = 0;  ///< seconds since 1970
  double value = 0;
};

struct Series {
  std::vector<Point> points = {};
  /// NaN and infinite values, which are no points.
  std::int64_t not_finite = 0;
  double first_not_finite = 0;  ///< its step

  /// Beyond some millions, every second point is dropped.
  void add(const Point& point);
  /// nullopt if there are no points.
  [[nodiscard]] std::optional<double> last() const;
  /// The mean of the values since `time`; nullopt if there are none.
  [[nodiscard]] std::optional<double> mean_since(double time) const;
};

enum class Axis : std::uint8_t { kStep, kTime };

/// What a curve shows in one column of the screen.
struct Bucket {
  double x = 0;
  double low = 0;
  double high = 0;
  double mean = 0;
};
struct CurveView {
  Axis axis = Axis::kStep;
  double time_zero = 0;  ///< of the time axis
  std::size_t columns = 400;
  /// The part to show; all if `from` is not less than `to`.
  double from = 0;
  double to = 0;
};
/// The least and greatest x of some points; nullopt if there are none.
[[nodiscard]] std::optional<std::pair<double, double>> x_range(const std::vector<Point>& points,
                                                               const CurveView& view);
/// At most `columns` buckets, by x. Lowest and highest values of each column are kept.
[[nodiscard]] std::vector<Bucket> curve_of(const std::vector<Point>& points, const CurveView& view);

/// What one process has written.
struct RankRecord {
  std::string host = {};
  std::string device = {};
  Series step_time = {};  ///< milliseconds, as `wait`
  Series wait = {};
  Series memory = {};  ///< bytes, as `gpu_memory`
  Series gpu_memory = {};
  Series gpu_busy = {};  ///< percent
  double gpu_total = 0;
  double steps = 0;
  double updated = 0;  ///< time of the last entry
  /// How it ended; nullopt if it has not.
  std::optional<bool> failed = std::nullopt;
};

/// A rank that the others wait for.
struct Straggler {
  int rank = 0;
  /// How long the others wait for it, as a part of a step.
  double share = 0;
};

enum class RunState : std::uint8_t { kRunning, kFinished, kFailed, kSilent };
/// "running", "finished", "failed", or "silent": no end was written, and nothing for some seconds.
[[nodiscard]] std::string_view to_string(RunState state);

struct Run {
  int id = 0;  ///< in the order in which runs were found
  std::filesystem::path folder = {};
  /// Where the program keeps its files: the logging_dir.
  std::filesystem::path project = {};
  std::string path_name = {};  ///< relative to the folder that is monitored
  std::string started_text = {};
  std::string given_name = {};  ///< of `init_trackers`
  std::string program = {};
  std::vector<std::pair<std::string, std::string>> config = {};
  std::map<int, RankRecord> ranks = {};
  std::map<std::string, Series> metrics = {};
  Series learning_rate = {};
  Series throughput = {};
  bool counts_samples = false;  ///< throughput is in samples per second, else in steps
  double started = 0;

  [[nodiscard]] std::string name() const;
  [[nodiscard]] double updated() const { return greatest(&RankRecord::updated); }
  [[nodiscard]] double steps() const { return greatest(&RankRecord::steps); }
  [[nodiscard]] RunState state(double now) const;
  /// By the last half minute of the run.
  [[nodiscard]] std::optional<Straggler> straggler() const;
  /// The straggler in words; "" if no rank is waited for.
  [[nodiscard]] std::string straggler_text() const;

  /// A line of the file of a rank, in the form of tracking/recorder.h or of the tracker jsonl. One
  /// that is torn, foreign or too long is left out.
  void add_line(int rank, std::string_view text);

 private:
  [[nodiscard]] double greatest(double RankRecord::* member) const;
  void add_values(const std::string& prefix, const Value::Dict& values, std::optional<double> step,
                  double time);
  void add_steps(int rank, const Value::Dict& line, double time);
  void set_config(const Value::Dict& settings);
};

/// Finds runs and reads what they add to their files.
class RunSet {
 public:
  /// Throws `ConfigError` if there is no such folder.
  explicit RunSet(std::filesystem::path folder);
  ~RunSet();
  RunSet(const RunSet&) = delete;
  RunSet& operator=(const RunSet&) = delete;

  /// Looks for new files from time to time, and reads for at most `limit`.
  void refresh(std::chrono::milliseconds limit);
  /// Reads everything that is there.
  void refresh_all();

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  /// By the start, latest first.
  [[nodiscard]] std::vector<const Run*> runs() const;
  /// Those of the project of a run.
  [[nodiscard]] const CheckpointList& checkpoints(const Run& run);
  /// The files whose names end in .log, latest first.
  [[nodiscard]] const std::vector<std::filesystem::path>& logs() const { return logs_; }
  /// The last lines of one of them, as a terminal would show them.
  [[nodiscard]] static std::vector<std::string> tail(const std::filesystem::path& log,
                                                     std::size_t lines);
  /// Bytes read so far, and of all files.
  [[nodiscard]] std::uint64_t bytes_read() const { return bytes_read_; }
  [[nodiscard]] std::uint64_t bytes_known() const { return bytes_known_; }

 private:
  struct Source;
  using Clock = std::chrono::steady_clock;

  void discover();
  void look_at(const std::filesystem::path& file, std::set<std::filesystem::path>& trackers);
  Run& run_of(const std::filesystem::path& folder);
  bool read_some(Source& source);

  std::filesystem::path folder_;
  std::map<std::filesystem::path, std::unique_ptr<Run>> runs_;  // by folder
  std::map<std::filesystem::path, std::unique_ptr<Source>> sources_;
  std::vector<std::filesystem::path> logs_;
  Clock::time_point next_discovery_ = {};
  std::uint64_t bytes_read_ = 0;
  std::uint64_t bytes_known_ = 0;
  struct Listed {
    Clock::time_point until = {};
    CheckpointList list = {};
  };
  std::map<std::filesystem::path, Listed> checkpoints_;  // by project
};

/// Seconds since 1970.
[[nodiscard]] double now_in_seconds();

}  // namespace accelerate::detail::commands
