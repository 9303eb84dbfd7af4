// Which trackers there are, by name.
#include <algorithm>
#include <mutex>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "tracking/trackers.h"

namespace accelerate {
namespace {

using detail::str;

struct Registration {
  std::string name;
  bool requires_logging_directory = false;
  TrackerFactory factory;
};

struct Registry {
  std::mutex mutex;
  /// In the order of Python's get_available_trackers, then ours.
  std::vector<Registration> trackers = {
      {"tensorboard", true, detail::tracking::make_tensorboard_tracker},
      {"wandb", false, detail::tracking::make_wandb_tracker},
      {"mlflow", false, detail::tracking::make_mlflow_tracker},
      {"dvclive", false, detail::tracking::make_dvclive_tracker},
      {"trackio", false, detail::tracking::make_trackio_tracker},
      {"jsonl", true, detail::tracking::make_jsonl_tracker},
      {"csv", true, detail::tracking::make_csv_tracker},
  };
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: threads may still log
  return *instance;
}

std::optional<Registration> find(const std::string& name) {
  const std::lock_guard lock(registry().mutex);
  const auto& trackers = registry().trackers;
  const auto found = std::ranges::find(trackers, name, &Registration::name);
  return found == trackers.end() ? std::nullopt : std::optional(*found);
}

/// What to use in place of a tracker of Python that is not here.
std::string_view instead_of(LoggerType type) {
  switch (type) {
    case LoggerType::kAim:
      return "its store is a database of its own. Log with tensorboard and run `aim convert "
             "tensorboard`";
    case LoggerType::kClearml:
      return "it needs ClearML's Python client. Log with tensorboard or mlflow";
    case LoggerType::kCometml:
      return "it needs Comet's Python client. Log with tensorboard and run `cometx log "
             "--type=tensorboard`, or with mlflow";
    case LoggerType::kSwanlab:
      return "it needs SwanLab's Python client. Log with tensorboard and run `swanlab convert -t "
             "tensorboard`";
    default:
      return "";
  }
}

Registration checked(const TrackerChoice& choice,
                     const std::optional<std::filesystem::path>& logging_dir) {
  const auto& name = choice.name();
  const auto found = find(name);
  if (!found && contains<LoggerType>(name)) {
    throw UnsupportedError(str("log_with asks for ", name, ", which is not here: ",
                               instead_of(from_string<LoggerType>(name)), "."));
  }
  if (!found) {
    auto names = get_available_trackers();
    names.insert(names.begin(), to_string(LoggerType::kAll));
    throw ConfigError(str("Unsupported logging capability: ", name, ". Choose between [",
                          detail::join(names), "].", detail::did_you_mean(name, names)));
  }
  if (found->requires_logging_directory && !logging_dir) {
    throw ConfigError(str("Logging with `", name,
                          "` requires a `logging_dir` to be passed in. Set project_dir, or "
                          "logging_dir of project_config."));
  }
  return *found;
}

}  // namespace

GeneralTracker::~GeneralTracker() = default;

void GeneralTracker::store_init_configuration(const Value::Dict&) {}

void GeneralTracker::log(const Value::Dict&, std::optional<std::int64_t>, const Value::Dict&) {}

void GeneralTracker::log_images(const Images&, std::optional<std::int64_t>, const Value::Dict&) {
  throw UnsupportedError(
      str("The tracker ", name(), " takes no images. tensorboard and wandb do."));
}

void GeneralTracker::log_table(const std::string&, const TrackerTable&, std::optional<std::int64_t>,
                               const Value::Dict&) {
  throw UnsupportedError(str("The tracker ", name(), " takes no tables. wandb and jsonl do."));
}

TrackerChoice::TrackerChoice(Object, std::shared_ptr<GeneralTracker> tracker)
    : object_(std::move(tracker)) {
  if (!object_) throw ArgumentError("log_with: a tracker is null.");
  name_ = object_->name();
}

void register_tracker_class(const std::string& name, bool requires_logging_directory,
                            TrackerFactory factory) {
  if (name.empty()) throw ArgumentError("register_tracker_class: the name is empty.");
  if (!factory) {
    throw ArgumentError(str("register_tracker_class: '", name, "' has no factory."));
  }
  Registration made{name, requires_logging_directory, std::move(factory)};
  const std::lock_guard lock(registry().mutex);
  auto& trackers = registry().trackers;
  const auto found = std::ranges::find(trackers, name, &Registration::name);
  if (found == trackers.end()) {
    trackers.push_back(std::move(made));
    return;
  }
  detail::warn(
      str("register_tracker_class: there is a tracker '", name, "' already; it is replaced."));
  *found = std::move(made);
}

std::vector<std::string> get_available_trackers() {
  const std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& tracker : registry().trackers) names.push_back(tracker.name);
  return names;
}

std::vector<TrackerChoice> filter_trackers(
    const std::vector<TrackerChoice>& log_with,
    const std::optional<std::filesystem::path>& logging_dir) {
  const auto all = to_string(LoggerType::kAll);
  const auto is_all = [&](const auto& choice) { return !choice.object() && choice.name() == all; };
  std::vector<TrackerChoice> wanted = log_with;
  if (std::ranges::any_of(log_with, is_all)) {
    std::erase_if(wanted, [](const auto& choice) { return !choice.object(); });
    for (const auto& name : get_available_trackers()) wanted.emplace_back(name);
  }
  std::vector<TrackerChoice> result;
  for (const auto& choice : wanted) {
    const auto same = [&](const auto& other) {
      return !other.object() && other.name() == choice.name();
    };
    if (!choice.object()) {
      if (std::ranges::any_of(result, same)) continue;
      static_cast<void>(checked(choice, logging_dir));
    }
    result.push_back(choice);
  }
  return result;
}

namespace detail::tracking {

std::shared_ptr<GeneralTracker> make_tracker(const std::string& name,
                                             const TrackerArguments& arguments) {
  auto tracker = checked(name, arguments.logging_dir).factory(arguments);
  if (!tracker) throw ArgumentError(str("The factory of the tracker '", name, "' returned null."));
  return tracker;
}

}  // namespace detail::tracking
}  // namespace accelerate
