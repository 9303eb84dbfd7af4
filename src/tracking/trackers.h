// src/tracking/trackers.h - the trackers of this library, and those of one run.
#pragma once

#include <any>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/tracking.h"
#include "tracking/outbox.h"

namespace accelerate::detail::tracking {

/// What the trackers of this library have in common: a name, a handle, and files that are written
/// through an outbox.
class BuiltinTracker : public GeneralTracker {
 public:
  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] bool requires_logging_directory() const override { return false; }
  [[nodiscard]] std::any tracker() override { return handle_; }
  void finish() override { outbox_.finish(); }

 protected:
  explicit BuiltinTracker(std::string name, Outbox::Deliver deliver = deliver_to_files)
      : name_(std::move(name)), outbox_({.tracker = name_}, std::move(deliver)) {}

  void append(const std::filesystem::path& file, std::string bytes) {
    outbox_.post({.target = file.string(), .bytes = std::move(bytes)});
  }
  void replace(const std::filesystem::path& file, std::string bytes) {
    outbox_.post({.target = file.string(), .bytes = std::move(bytes), .mode = WriteMode::kReplace});
  }
  /// Calls `write`. If it throws, the value is left out, with one warning per key.
  void try_value(const std::string& key, const std::function<void()>& write);

  std::any handle_;

 private:
  std::string name_;
  Outbox outbox_;
  std::set<std::string> left_out_;  ///< keys that a warning was about
};

/// Takes everything and writes nothing.
class BlankTracker final : public GeneralTracker {
 public:
  BlankTracker(std::string name, std::any handle)
      : name_(std::move(name)), handle_(std::move(handle)) {}
  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] bool requires_logging_directory() const override { return false; }
  [[nodiscard]] std::any tracker() override { return handle_; }
  void log_images(const Images&, std::optional<std::int64_t>, const Value::Dict&) override {}
  void log_table(const std::string&, const TrackerTable&, std::optional<std::int64_t>,
                 const Value::Dict&) override {}

 private:
  std::string name_;
  std::any handle_;
};

// Each throws `ArgumentError` for settings it does not know, and has no other effect.
[[nodiscard]] std::shared_ptr<GeneralTracker> make_tensorboard_tracker(const TrackerArguments&);
[[nodiscard]] std::shared_ptr<GeneralTracker> make_wandb_tracker(const TrackerArguments&);
[[nodiscard]] std::shared_ptr<GeneralTracker> make_mlflow_tracker(const TrackerArguments&);
[[nodiscard]] std::shared_ptr<GeneralTracker> make_dvclive_tracker(const TrackerArguments&);
[[nodiscard]] std::shared_ptr<GeneralTracker> make_trackio_tracker(const TrackerArguments&);
[[nodiscard]] std::shared_ptr<GeneralTracker> make_jsonl_tracker(const TrackerArguments&);
[[nodiscard]] std::shared_ptr<GeneralTracker> make_csv_tracker(const TrackerArguments&);
/// The tracker of a name. Throws what `filter_trackers` throws.
[[nodiscard]] std::shared_ptr<GeneralTracker> make_tracker(const std::string& name,
                                                           const TrackerArguments& arguments);

/// Starts, feeds and ends the trackers that were chosen. Errors after the start are warnings.
class TrackerSet {
 public:
  /// `chosen` has passed `filter_trackers`.
  TrackerSet(std::vector<TrackerChoice> chosen, std::optional<std::filesystem::path> logging_dir)
      : chosen_(std::move(chosen)), logging_dir_(std::move(logging_dir)) {}

  /// Ends and destroys the trackers of an earlier `start`. If one cannot start, those before it are
  /// ended, and what it has thrown is thrown.
  void start(const std::string& project_name, const Value::Dict& config,
             const Value::Dict& init_kwargs);
  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& log_kwargs);
  /// The tracker of this name; a blank one where none was started. Throws `ArgumentError` for an
  /// unknown name.
  [[nodiscard]] GeneralTracker& get(const std::string& name);
  /// Ends the trackers. They stay alive, for those who hold them, until the next `start`.
  void finish() noexcept;
  /// Whether trackers were chosen that were never started.
  [[nodiscard]] bool waits_for_start() const { return !chosen_.empty() && !started_; }
  [[nodiscard]] bool running() const { return running_; }

 private:
  std::vector<TrackerChoice> chosen_;
  std::optional<std::filesystem::path> logging_dir_;
  std::vector<std::shared_ptr<GeneralTracker>> trackers_;
  std::set<const GeneralTracker*> reported_;  ///< trackers whose errors were shown
  bool started_ = false;
  bool running_ = false;
};

}  // namespace accelerate::detail::tracking
