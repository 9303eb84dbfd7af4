// Trackers that write plain text: JSON Lines and CSV.

#include "core/json.h"
#include "core/python_text.h"
#include "core/text.h"
#include "tracking/tracker_files.h"
#include "tracking/trackers.h"

namespace accelerate::detail::tracking {
namespace {

namespace fs = std::filesystem;

/// One file in the folder of the project, which a later run appends to.
class TextTracker : public BuiltinTracker {
 public:
  TextTracker(const std::string& name, const TrackerArguments& arguments)
      : BuiltinTracker(name),
        file_(arguments.logging_dir.value() / arguments.project_name / str("metrics.", name)) {
    check_kwargs(name, arguments.kwargs, {});
  }
  [[nodiscard]] bool requires_logging_directory() const override { return true; }
  void start() override {
    append_to_file(file_, {});
    handle_ = file_;
  }

 protected:
  fs::path file_;
};

class JsonlTracker final : public TextTracker {
 public:
  explicit JsonlTracker(const TrackerArguments& arguments) : TextTracker("jsonl", arguments) {}

  void store_init_configuration(const Value::Dict& values) override {
    write({{"time", now_seconds()}, {"config", values}});
  }
  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& kwargs) override {
    check_kwargs(name(), kwargs, {});
    write({{"time", now_seconds()}, {"step", step}, {"values", values}});
  }
  void log_table(const std::string& key, const TrackerTable& table,
                 std::optional<std::int64_t> step, const Value::Dict& kwargs) override {
    check_kwargs(name(), kwargs, {});
    Value::Dict content{{"columns", table.columns}, {"data", table.data}};
    write({{"time", now_seconds()}, {"step", step}, {"table", key}, {"values", content}});
  }

 private:
  void write(const Value::Dict& entries) { append(file_, json_line(entries) + "\n"); }
};

/// One row per value, so that a new name needs no new column.
class CsvTracker final : public TextTracker {
 public:
  explicit CsvTracker(const TrackerArguments& arguments) : TextTracker("csv", arguments) {}

  void start() override {
    TextTracker::start();
    if (fs::file_size(file_) == 0) append_to_file(file_, "time,step,name,value\n");
  }
  void store_init_configuration(const Value::Dict& values) override {
    replace_file(
        file_.parent_path() / "config.json",
        json_dumps(json_value(values, NotFinite::kWords), {.indent = 2, .replace_invalid = true}) +
            "\n");
  }
  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& kwargs) override {
    check_kwargs(name(), kwargs, {});
    const auto start = str(python_repr(now_seconds()), ",", step ? str(*step) : "", ",");
    std::string rows;
    for (const auto& [key, value] : values) add_rows(rows, start, key.to_string(), value);
    append(file_, std::move(rows));
  }

 private:
  static void add_rows(std::string& rows, const std::string& start, const std::string& key,
                       const Value& value) {
    if (!value.is_dict()) {
      rows += str(start, csv_field(key, ','), ",", csv_field(python_str(value), ','), "\n");
      return;
    }
    for (const auto& [inner, item] : value.as_dict()) {
      add_rows(rows, start, str(key, "/", inner.to_string()), item);
    }
  }
};

}  // namespace

std::shared_ptr<GeneralTracker> make_jsonl_tracker(const TrackerArguments& arguments) {
  return std::make_shared<JsonlTracker>(arguments);
}
std::shared_ptr<GeneralTracker> make_csv_tracker(const TrackerArguments& arguments) {
  return std::make_shared<CsvTracker>(arguments);
}

}  // namespace accelerate::detail::tracking
