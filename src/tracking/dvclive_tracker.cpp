#include <set>
#include <system_error>

#include "accelerate/errors.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "core/yaml.h"
#include "tracking/tracker_files.h"
#include "tracking/trackers.h"

namespace accelerate::detail::tracking {
namespace {

namespace fs = std::filesystem;

/// The files of DVCLive, which `dvc` shows and compares. Experiments are not saved: that is a
/// commit of git, which `dvc exp save` makes.
class DvcLiveTracker final : public BuiltinTracker {
 public:
  explicit DvcLiveTracker(const TrackerArguments& arguments) : BuiltinTracker("dvclive") {
    const auto& kwargs = arguments.kwargs;
    check_kwargs(name(), kwargs, {"dir", "resume", "save_dvc_exp", "dvcyaml"});
    folder_ = text_in(kwargs, "dir").value_or("dvclive");
    resume_ = kwargs.get("resume", false).as_bool();
    if (kwargs.get("save_dvc_exp", false).as_bool()) {
      throw UnsupportedError(
          "save_dvc_exp of the tracker dvclive is true, but only Python saves experiments of DVC. "
          "Leave it out and run `dvc exp save` after the training.");
    }
    const Value dvcyaml = kwargs.get("dvcyaml", "dvc.yaml");
    if (dvcyaml.is_string()) dvcyaml_ = dvcyaml.as_string();
  }

  void start() override {
    handle_ = folder_;
    if (resume_) {
      read_latest();
    } else {
      std::error_code error;  // what is not there need not be removed
      fs::remove_all(folder_ / "plots" / "metrics", error);
      fs::remove(folder_ / "metrics.json", error);
      fs::remove(folder_ / "params.yaml", error);
    }
    make_folder(folder_);
  }

  void store_init_configuration(const Value::Dict& values) override {
    replace_file(folder_ / "params.yaml", yaml_dumps(with_valid_text(values)));
  }

  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& kwargs) override {
    check_kwargs(name(), kwargs, {});
    step_ = step.value_or(step_);
    for (const auto& [key, value] : values) {
      try_value(key.to_string(), [&] { log_metric(key.to_string(), value); });
    }
    summary_.set("step", step_);
    replace(folder_ / "metrics.json",
            json_dumps(summary_, {.indent = 4, .replace_invalid = true}) + "\n");
    ++step_;
  }

  void finish() override {
    BuiltinTracker::finish();
    std::error_code error;
    if (dvcyaml_.empty() || fs::exists(dvcyaml_, error)) return;  // theirs may say more than ours
    const auto file = [&](const char* name) { return (folder_ / name).generic_string(); };
    Value::Dict content;
    if (fs::exists(folder_ / "metrics.json", error)) {
      content.set("metrics", Value::list({file("metrics.json")}));
    }
    if (fs::exists(folder_ / "params.yaml", error)) {
      content.set("params", Value::list({file("params.yaml")}));
    }
    if (fs::exists(folder_ / "plots" / "metrics", error)) {
      const Value::Dict plot{{file("plots/metrics"), Value::Dict{{"x", "step"}}}};
      content.set("plots", Value::list({plot}));
    }
    replace_file(dvcyaml_, yaml_dumps(content));
  }

 private:
  void log_metric(const std::string& key, const Value& value) {
    if (!number_of(value) && !value.is_string()) refuse_value(value, "a number or a text");
    const auto path = inside(folder_ / "plots" / "metrics", key + ".tsv");
    const auto shown = json_value(value, NotFinite::kPython);
    std::string rows;
    if (std::error_code error; known_.insert(key).second && !fs::exists(path, error)) {
      rows = str("step\t", csv_field(fs::path(key).filename().string(), '\t'), "\n");
    }
    rows += str(step_, "\t", csv_field(python_str(shown), '\t'), "\n");
    append(path, std::move(rows));
    Value::Dict* at = &summary_;
    const auto parts = split(key, '/');
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      Value& inner = (*at)[parts[i]];
      if (!inner.is_dict()) inner = Value::Dict{};
      at = &inner.as_dict();
    }
    at->set(parts.back(), shown);
  }

  void read_latest() {
    std::error_code error;
    const auto path = folder_ / "metrics.json";
    if (!fs::exists(path, error)) return;
    const auto text = read_whole_file(path);
    if (trim(text).empty()) return;
    summary_ = json_loads(text, str("'", path.string(), "'")).as_dict();
    step_ = summary_.get("step", 0).as_int();
    if (step_ != 0) ++step_;
  }

  fs::path folder_;
  fs::path dvcyaml_;
  bool resume_ = false;
  std::int64_t step_ = 0;
  Value::Dict summary_;
  std::set<std::string> known_;  ///< metrics whose file has its header
};

}  // namespace

std::shared_ptr<GeneralTracker> make_dvclive_tracker(const TrackerArguments& arguments) {
  return std::make_shared<DvcLiveTracker>(arguments);
}

}  // namespace accelerate::detail::tracking
