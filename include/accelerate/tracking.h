// accelerate/tracking.h - experiment trackers: where a run writes its numbers.
//
//     Accelerator accelerator({.log_with = {LoggerType::kTensorboard, "jsonl"}, .project_dir =
//     "runs"}); accelerator.init_trackers("mnist", {{"lr", 1e-3}}); accelerator.log({{"loss",
//     loss}}, step); accelerator.end_training();
//
// Trackers run on the main process. What goes wrong when one starts is thrown; later a full disk or
// a server that does not answer is reported once, values are kept in memory (up to 64 MiB) and
// written when it works again. docs/trackers.md has the files and settings of each tracker.
#pragma once

#include <any>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/value.h"

namespace accelerate {

/// An image of 8-bit pixels, row by row, the channels of a pixel side by side: 1 (gray), 3 (RGB) or
/// 4 (RGB and alpha). `tracker_images` (accelerate/accelerator.h) makes them from a tensor.
struct TrackerImage {
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::int64_t channels = 3;
  std::string pixels = {};  ///< height * width * channels bytes
};

struct TrackerTable {
  std::vector<std::string> columns = {};
  std::vector<Value::List> data = {};  ///< one row each, as long as `columns`
};

/// The interface of a tracker. Derive from it for one of your own:
///
///     auto mine = std::make_shared<MyTracker>("out.csv");
///     Accelerator accelerator({.log_with = {mine}});
///
/// Constructing a tracker has no side effect; the work begins with `start`. Exceptions of `log` are
/// reported as a warning and do not reach the training loop.
class ACCELERATE_API GeneralTracker {
 public:
  using Images = std::vector<std::pair<std::string, std::vector<TrackerImage>>>;

  GeneralTracker() = default;
  virtual ~GeneralTracker();
  GeneralTracker(const GeneralTracker&) = delete;
  GeneralTracker& operator=(const GeneralTracker&) = delete;

  /// What `get_tracker`, `init_kwargs` and `log_kwargs` call it.
  [[nodiscard]] virtual std::string_view name() const = 0;
  /// Whether it cannot start without `ProjectConfiguration::logging_dir`.
  [[nodiscard]] virtual bool requires_logging_directory() const = 0;
  /// Its own handle of the run, for what this interface does not have.
  [[nodiscard]] virtual std::any tracker() = 0;

  virtual void start() {}
  /// Stores the hyperparameters of the run.
  virtual void store_init_configuration(const Value::Dict& values);
  /// Values are bools, numbers, texts, dicts of these, or whatever else the tracker can take.
  /// `Accelerator::log` has turned tensors of dimension 0 into numbers.
  virtual void log(const Value::Dict& values, std::optional<std::int64_t> step = std::nullopt,
                   const Value::Dict& kwargs = {});
  /// Unless overridden these throw `UnsupportedError` with the name of the tracker.
  virtual void log_images(const Images& images, std::optional<std::int64_t> step = std::nullopt,
                          const Value::Dict& kwargs = {});
  virtual void log_table(const std::string& name, const TrackerTable& table,
                         std::optional<std::int64_t> step = std::nullopt,
                         const Value::Dict& kwargs = {});
  /// Writes what is left. Nothing is logged afterwards.
  virtual void finish() {}
};

/// What `log_with` lists: one of Python's trackers, the name of one that is here or was registered,
/// or an object.
class ACCELERATE_API TrackerChoice {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `.log_with = {LoggerType::kWandb, "csv", mine}`
  TrackerChoice(LoggerType type) : name_(to_string(type)) {}
  TrackerChoice(const char* name) : name_(name) {}
  TrackerChoice(std::string name) : name_(std::move(name)) {}
  template <std::derived_from<GeneralTracker> Tracker>
  TrackerChoice(std::shared_ptr<Tracker> tracker) : TrackerChoice(Object{}, std::move(tracker)) {}
  // NOLINTEND(google-explicit-constructor)

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// Null unless an object was given.
  [[nodiscard]] const std::shared_ptr<GeneralTracker>& object() const noexcept { return object_; }

 private:
  struct Object {};
  TrackerChoice(Object, std::shared_ptr<GeneralTracker> tracker);

  std::string name_;
  std::shared_ptr<GeneralTracker> object_;
};

/// What a tracker is made from when it is chosen by its name.
struct TrackerArguments {
  std::string project_name = {};
  /// That of the project configuration.
  std::optional<std::filesystem::path> logging_dir = std::nullopt;
  /// The entry of `init_kwargs` under its name.
  Value::Dict kwargs = {};
};
using TrackerFactory = std::function<std::shared_ptr<GeneralTracker>(const TrackerArguments&)>;

/// Makes a tracker available by name, to `log_with` and to `LoggerType::kAll`. One that has the
/// name already is replaced, with a warning. Throws `ArgumentError` for an empty name or factory.
ACCELERATE_API void register_tracker_class(const std::string& name, bool requires_logging_directory,
                                           TrackerFactory factory);

/// The names that `log_with` can ask for: in Python's order tensorboard, wandb, mlflow, dvclive and
/// trackio, then jsonl and csv, then registered ones.
[[nodiscard]] ACCELERATE_API std::vector<std::string> get_available_trackers();

/// The trackers of a `log_with`: objects as they are, names once each; with `all` the objects and
/// then all that are available. Throws `ConfigError` for an unknown name, and where a tracker needs
/// a logging directory and there is none; `UnsupportedError` for trackers of Python that are not
/// here.
[[nodiscard]] ACCELERATE_API std::vector<TrackerChoice> filter_trackers(
    const std::vector<TrackerChoice>& log_with,
    const std::optional<std::filesystem::path>& logging_dir = std::nullopt);

}  // namespace accelerate
