#include <exception>
#include <system_error>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "core/world.h"
#include "formats/crc32.h"
#include "formats/little_endian.h"
#include "tracking/encodings.h"
#include "tracking/tracker_files.h"
#include "tracking/trackers.h"

namespace accelerate::detail::tracking {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFileHeader{":W&B\xE1\xBE\0", 7};

/// The record for a file that is `position` bytes long: cut where blocks of 32 KiB end, as LevelDB
/// does it.
std::string framed(std::string_view record, std::size_t position) {
  constexpr std::size_t kBlock = 32768;
  constexpr std::size_t kFrame = 7;
  std::string out;
  bool begins = true;
  do {
    auto room = kBlock - (position + out.size()) % kBlock;
    if (room < kFrame) {
      out.append(room, '\0');
      room = kBlock;
    }
    const auto part = record.substr(0, room - kFrame);
    record.remove_prefix(part.size());
    const char whole_first_middle_last =
        begins ? (record.empty() ? '\1' : '\2') : (record.empty() ? '\4' : '\3');
    begins = false;
    const std::string type(1, whole_first_middle_last);
    formats::append_little(out, formats::crc32(part, formats::crc32(type)));
    formats::append_little(out, static_cast<std::uint16_t>(part.size()));
    out += type;
    out += part;
  } while (!record.empty());
  return out;
}

ProtoMessage item(std::string_view key, const Value& value) {
  return ProtoMessage().text(1, key).text(16, json_line(value, NotFinite::kBare));
}

/// Fields 1 of a record, one per entry.
ProtoMessage items(const Value::Dict& values) {
  ProtoMessage message;
  for (const auto& [key, value] : values) message.message(1, item(key.to_string(), value));
  return message;
}

/// An offline run of Weights & Biases, which `wandb sync` sends to the server.
class WandbTracker final : public BuiltinTracker {
 public:
  explicit WandbTracker(const TrackerArguments& arguments)
      : BuiltinTracker("wandb", deliver),
        project_(arguments.project_name),
        kwargs_(arguments.kwargs) {
    check_kwargs(
        name(), kwargs_,
        {"name", "id", "entity", "group", "job_type", "notes", "tags", "dir", "config", "mode"});
    if (const auto mode = text_in(kwargs_, "mode")) {
      disabled_ = *mode == "disabled";
      if (disabled_ || *mode == "offline") return;
      throw UnsupportedError(str("mode of the tracker wandb is '", *mode,
                                 "', but this library writes offline runs only. Leave it out, and "
                                 "send the run by `wandb sync`."));
    }
    const auto mode = Environment::process().get("WANDB_MODE").value_or("offline");
    disabled_ = mode == "disabled";
    if (disabled_ || mode == "offline" || mode == "dryrun") return;
    warn_once(
        str("WANDB_MODE is '", mode,
            "', but the tracker wandb writes offline runs only. Send the run by `wandb sync`, "
            "or set WANDB_MODE to offline or disabled."));
  }
  [[nodiscard]] bool disabled() const { return disabled_; }

  void start() override {
    const auto environment = Environment::process();
    const auto setting = [&](const char* key, const std::string& variable) {
      const auto given = text_in(kwargs_, key);
      return given ? given : environment.get(variable);
    };
    id_ = setting("id", "WANDB_RUN_ID")
              .value_or(random_text(8, "0123456789abcdefghijklmnopqrstuvwxyz"));
    const auto root = fs::path(setting("dir", "WANDB_DIR").value_or(".")) / "wandb";
    folder_ = inside(root, str("offline-run-", formatted_time("%Y%m%d_%H%M%S", false), "-", id_));
    make_folder(folder_ / "files");
    handle_ = folder_;
    file_ = folder_ / str("run-", id_, ".wandb");
    replace_file(file_, kFileHeader);
    std::error_code error;  // a file system without links has no latest-run
    fs::remove(root / "latest-run", error);
    fs::create_directory_symlink(folder_.filename(), root / "latest-run", error);
    started_ = now_seconds();
    // The version of the file's format, in the words of the client that wrote it first.
    post(ProtoMessage().message(
        21, ProtoMessage().message(1, ProtoMessage().text(1, "accelerate-cpp").text(2, "0.70.0"))));
    ProtoMessage run;
    run.text(1, id_);
    if (const auto text = setting("entity", "WANDB_ENTITY")) run.text(2, *text);
    run.text(3, project_);
    Value::Dict config = kwargs_.get("config", Value::Dict{}).as_dict();
    config.set("_wandb", Value::Dict{});
    run.message(4, items(config));
    if (const auto text = setting("group", "WANDB_RUN_GROUP")) run.text(6, *text);
    if (const auto text = setting("job_type", "WANDB_JOB_TYPE")) run.text(7, *text);
    if (const auto text = setting("name", "WANDB_NAME")) run.text(8, *text);
    if (const auto text = setting("notes", "WANDB_NOTES")) run.text(9, *text);
    for (const auto& tag : kwargs_.get("tags", Value::List{}).as_list())
      run.text(10, tag.as_string());
    run.text(13, this_host_name());
    run.message(17, ProtoMessage().number(1, static_cast<std::int64_t>(started_)));
    post(ProtoMessage().message(17, run));
    info(str("The tracker wandb writes an offline run. Send it by: wandb sync ", folder_.string()));
  }

  void store_init_configuration(const Value::Dict& values) override {
    post(ProtoMessage().message(5, items(values)));
  }

  // Values of one step make one row, which is written when the step is over, as Python's client
  // does it. A call without a step ends the row.
  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& kwargs) override {
    check_kwargs(name(), kwargs, {});
    if (step && *step < step_) {
      if (std::exchange(warned_, true)) return;
      warn(str("The tracker wandb leaves out values of step ", *step, ": step ", step_,
               " is there already, and steps of a run only grow."));
      return;
    }
    if (step && *step > step_) {
      write_row();
      step_ = *step;
    }
    for (const auto& [key, value] : values) row_.set(key, value);
    if (step) return;
    write_row();
    ++step_;
  }

  void log_images(const Images& images, std::optional<std::int64_t> step,
                  const Value::Dict& kwargs) override {
    for (const auto& [key, batch] : images) {
      check_images(batch, str("The images '", key, "'"));
      Value::List names;
      for (const auto& image : batch) {
        names.emplace_back(write_media("images", key, step, ".png", encode_png(image)).path);
      }
      log({{key, Value::Dict{{"_type", "images/separated"},
                             {"width", batch[0].width},
                             {"height", batch[0].height},
                             {"format", "png"},
                             {"count", batch.size()},
                             {"filenames", Value::list(std::move(names))}}}},
          step, kwargs);
    }
  }

  void log_table(const std::string& key, const TrackerTable& table,
                 std::optional<std::int64_t> step, const Value::Dict& kwargs) override {
    const Value content = Value::Dict{{"columns", table.columns}, {"data", table.data}};
    const auto text = json_line(content, NotFinite::kBare);
    const auto file = write_media("table", key, step, ".table.json", text);
    log({{key, Value::Dict{{"_type", "table-file"},
                           {"path", file.path},
                           {"sha256", file.sha256},
                           {"size", text.size()},
                           {"ncols", table.columns.size()},
                           {"nrows", table.data.size()}}}},
        step, kwargs);
  }

  void finish() override {
    write_row();
    const auto seconds = static_cast<std::int64_t>(now_seconds() - started_);
    ProtoMessage exit;
    if (std::uncaught_exceptions() > 0) exit.number(1, 1);  // the exit code of a failed run
    post(ProtoMessage().message(18, exit.number(2, seconds)));
    BuiltinTracker::finish();
  }

 private:
  struct MediaFile {
    std::string path;  ///< below the folder "files"
    std::string sha256;
  };

  MediaFile write_media(const char* kind, const std::string& key, std::optional<std::int64_t> step,
                        const char* suffix, std::string bytes) {
    const auto hash = sha256_hex(bytes);
    const auto path =
        str("media/", kind, "/", key, "_", step.value_or(step_), "_", hash.substr(0, 20), suffix);
    replace(inside(folder_ / "files", path), std::move(bytes));
    post(ProtoMessage().message(6, ProtoMessage().message(1, ProtoMessage().text(1, path))));
    return {path, hash};
  }

  void write_row() {
    if (row_.empty()) return;
    const auto now = now_seconds();
    row_.set("_timestamp", now);
    row_.set("_runtime", now - started_);
    row_.set("_step", step_);
    const auto values = items(std::exchange(row_, {}));
    ProtoMessage history = values;
    history.message(2, ProtoMessage().number(1, step_));
    post(ProtoMessage().message(2, history));
    post(ProtoMessage().message(3, values));  // the summary has the latest values
  }

  void post(const ProtoMessage& record) {
    ProtoMessage numbered;
    numbered.number(1, ++records_);
    append(file_, numbered.bytes() + record.bytes());
  }

  // Records are framed when they are written: an earlier one may have been dropped by then.
  static std::size_t deliver(std::span<const OutboxItem> waiting) {
    const auto& first = waiting.front();
    if (first.mode == WriteMode::kReplace) return deliver_to_files(waiting);
    std::error_code error;
    const auto size = fs::file_size(first.target, error);
    if (error) throw ConfigError(str("Cannot read '", first.target, "': ", error.message(), "."));
    append_to_file(first.target, framed(first.bytes, size));
    return 1;
  }

  std::string project_;
  Value::Dict kwargs_;
  std::string id_;
  fs::path folder_;
  fs::path file_;
  double started_ = 0;
  std::int64_t step_ = 0;
  Value::Dict row_;  ///< of `step_`
  bool warned_ = false;
  bool disabled_ = false;
  std::int64_t records_ = 0;
};

}  // namespace

std::shared_ptr<GeneralTracker> make_wandb_tracker(const TrackerArguments& arguments) {
  auto tracker = std::make_shared<WandbTracker>(arguments);
  if (tracker->disabled()) return std::make_shared<BlankTracker>("wandb", fs::path());
  return tracker;
}

}  // namespace accelerate::detail::tracking
