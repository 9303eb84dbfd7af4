#include <chrono>
#include <cstdio>

#include "accelerate/environment.h"
#include "core/config.h"
#include "core/files.h"
#include "tracking/tracker_files.h"
#include "tracking/trackers.h"

namespace accelerate::detail::tracking {
namespace {

namespace fs = std::filesystem;

std::string random_uuid() {
  std::string text = random_text(32);
  text[12] = '4';
  text[16] = "89ab"[static_cast<unsigned char>(text[16]) % 4];
  for (const std::size_t at : {20, 16, 12, 8}) text.insert(at, "-");
  return text;
}

/// Fragments in the inbox of Trackio, which its dashboard imports into its database and deletes.
class TrackioTracker final : public BuiltinTracker {
 public:
  explicit TrackioTracker(const TrackerArguments& arguments)
      : BuiltinTracker("trackio"), project_(arguments.project_name) {
    check_kwargs(name(), arguments.kwargs, {"name", "group", "config"});
    run_ = text_in(arguments.kwargs, "name").value_or("");
    if (const Value* config = arguments.kwargs.get("config")) config_ = config->as_dict();
    if (const auto group = text_in(arguments.kwargs, "group")) config_.set("_Group", *group);
  }

  void start() override {
    const auto environment = Environment::process();
    const auto given = environment.get("TRACKIO_DIR");
    const auto root =
        given ? expand_user(*given, environment) : huggingface_home(environment) / "trackio";
    inbox_ = root / "inbox" / random_text(16);
    make_folder(inbox_);
    handle_ = inbox_;
    if (run_.empty()) run_ = formatted_time("run-%Y%m%d-%H%M%S", false);
    run_id_ = random_text(32);
    written_ = std::chrono::steady_clock::now();
  }

  void store_init_configuration(const Value::Dict& values) override {
    for (const auto& [key, value] : values) config_.set(key, value);
  }

  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& kwargs) override {
    check_kwargs(name(), kwargs, {});
    const auto at = step.value_or(next_step_);
    next_step_ = std::max(next_step_, at + 1);
    add_record(values, at);
    const auto now = std::chrono::steady_clock::now();
    if (now - written_ >= kBetweenFragments || lines_.size() >= kFragmentBytes) write_fragment();
  }

  void finish() override {
    if (!config_.empty()) add_record({}, next_step_);  // nothing was logged that could carry it
    write_fragment();
    BuiltinTracker::finish();
  }

 private:
  // As often as Trackio's own client: a fragment is a file.
  static constexpr auto kBetweenFragments = std::chrono::milliseconds(500);
  static constexpr std::size_t kFragmentBytes = 1 << 20;

  void add_record(const Value::Dict& values, std::int64_t step) {
    // With its run's first record comes the configuration.
    const Value config = config_.empty() ? Value() : Value(std::exchange(config_, {}));
    const Value::Dict record{{"v", 1},
                             {"kind", "metric"},
                             {"project", project_},
                             {"run", run_},
                             {"run_id", run_id_},
                             {"metrics", values},
                             {"step", step},
                             {"timestamp", timestamp()},
                             {"config", config},
                             {"log_id", random_uuid()}};
    lines_ += json_line(record) + "\n";
  }

  static std::string timestamp() {
    char fraction[32];
    std::snprintf(fraction, sizeof fraction, ".%03d+00:00",
                  static_cast<int>(now_milliseconds() % 1000));
    return formatted_time("%Y-%m-%dT%H:%M:%S", true) + fraction;
  }

  void write_fragment() {
    if (lines_.empty()) return;
    char file[24];
    std::snprintf(file, sizeof file, "%08d.jsonl", fragments_++);
    replace(inbox_ / file, std::exchange(lines_, {}));
    written_ = std::chrono::steady_clock::now();
  }

  std::string project_;
  std::string run_;
  std::string run_id_;
  Value::Dict config_;
  fs::path inbox_;
  std::int64_t next_step_ = 0;
  std::string lines_;  ///< of the next fragment
  int fragments_ = 0;
  std::chrono::steady_clock::time_point written_;
};

}  // namespace

std::shared_ptr<GeneralTracker> make_trackio_tracker(const TrackerArguments& arguments) {
  return std::make_shared<TrackioTracker>(arguments);
}

}  // namespace accelerate::detail::tracking
