#include "tracking/trackers.h"

#include <exception>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"

namespace accelerate::detail::tracking {
namespace {

/// The settings for one tracker: the entry of its name, which may be none.
Value::Dict kwargs_of(const Value::Dict& all, std::string_view name, std::string_view argument) {
  const Value* kwargs = all.get(name);
  if (kwargs == nullptr || kwargs->is_none()) return {};
  if (kwargs->is_dict()) return kwargs->as_dict();
  throw ArgumentError(
      str(argument, "['", name, "'] is a ", kwargs->kind_name(), ". Expected a dict of settings."));
}

}  // namespace

void BuiltinTracker::try_value(const std::string& key, const std::function<void()>& write) {
  try {
    write();
  } catch (const std::exception& error) {
    if (!left_out_.insert(key).second) return;
    warn(str("The tracker ", name_, " leaves out '", key, "': ", error.what()));
  }
}

void TrackerSet::start(const std::string& project_name, const Value::Dict& config,
                       const Value::Dict& init_kwargs) {
  finish();
  trackers_.clear();
  reported_.clear();
  started_ = true;
  std::vector<std::shared_ptr<GeneralTracker>> made;
  for (const auto& choice : chosen_) {
    made.push_back(choice.object() ? choice.object()
                                   : make_tracker(choice.name(),
                                                  {.project_name = project_name,
                                                   .logging_dir = logging_dir_,
                                                   .kwargs = kwargs_of(init_kwargs, choice.name(),
                                                                       "init_kwargs")}));
  }
  running_ = !made.empty();
  try {
    for (const auto& tracker : made) {
      tracker->start();
      trackers_.push_back(tracker);
    }
    if (config.empty()) return;
    for (const auto& tracker : trackers_) tracker->store_init_configuration(config);
  } catch (...) {
    finish();
    trackers_.clear();
    throw;
  }
}

void TrackerSet::log(const Value::Dict& values, std::optional<std::int64_t> step,
                     const Value::Dict& log_kwargs) {
  if (!running_) return;
  for (const auto& tracker : trackers_) {
    try {
      tracker->log(values, step, kwargs_of(log_kwargs, tracker->name(), "log_kwargs"));
    } catch (const std::exception& error) {
      if (!reported_.insert(tracker.get()).second) continue;
      warn(str("The tracker ", tracker->name(), " did not log: ", error.what(),
               " More of its errors are not shown."));
    }
  }
}

GeneralTracker& TrackerSet::get(const std::string& name) {
  static BlankTracker blank("", {});
  if (trackers_.empty()) return blank;
  std::vector<std::string> names;
  for (const auto& tracker : trackers_) {
    if (tracker->name() == name) return *tracker;
    names.emplace_back(tracker->name());
  }
  throw ArgumentError(str(name,
                          " is not an available tracker stored inside the `Accelerator`. "
                          "Choose one of: ",
                          join(names), "."));
}

void TrackerSet::finish() noexcept {
  if (!std::exchange(running_, false)) return;
  for (const auto& tracker : trackers_) {
    try {
      tracker->finish();
    } catch (const std::exception& error) {
      warn(str("The tracker ", tracker->name(), " did not finish: ", error.what()));
    }
  }
}

}  // namespace accelerate::detail::tracking
