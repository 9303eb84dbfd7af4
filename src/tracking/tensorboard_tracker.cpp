#include "accelerate/tracking/summary_writer.h"
#include "core/text.h"
#include "core/yaml.h"
#include "tracking/tracker_files.h"
#include "tracking/trackers.h"

namespace accelerate::detail::tracking {
namespace {

class TensorBoardTracker final : public BuiltinTracker {
 public:
  explicit TensorBoardTracker(const TrackerArguments& arguments)
      : BuiltinTracker("tensorboard"),
        folder_(arguments.logging_dir.value() / arguments.project_name) {
    // The last three have no effect in Python either, where the folder is given and each call of
    // `log` is flushed.
    check_kwargs(name(), arguments.kwargs,
                 {"purge_step", "filename_suffix", "comment", "max_queue", "flush_secs"});
    options_.filename_suffix = text_in(arguments.kwargs, "filename_suffix").value_or("");
    const Value purge = arguments.kwargs.get("purge_step", {});
    if (!purge.is_none()) options_.purge_step = purge.as_int();
  }

  [[nodiscard]] bool requires_logging_directory() const override { return true; }
  void start() override {
    writer_ = std::make_unique<SummaryWriter>(folder_, options_);
    handle_ = writer_.get();
  }
  void store_init_configuration(const Value::Dict& values) override {
    const auto folder = writer_->add_hparams(values);
    replace_file(folder / "hparams.yml", yaml_dumps(values));
  }
  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& kwargs) override {
    const auto walltime = walltime_in(kwargs);
    for (const auto& [given, value] : values) {
      const auto key = given.to_string();
      if (!value.is_dict()) {
        try_value(key, [&] { log_value(key, value, step, walltime); });
        continue;
      }
      for (const auto& [inner, item] : value.as_dict()) {
        try_value(str(key, "/", inner.to_string()),
                  [&] { writer_->add_scalars(key, Value::Dict{{inner, item}}, step, walltime); });
      }
    }
  }
  void log_images(const Images& images, std::optional<std::int64_t> step,
                  const Value::Dict& kwargs) override {
    const auto walltime = walltime_in(kwargs);
    for (const auto& [key, batch] : images) writer_->add_images(key, batch, step, walltime);
  }
  void finish() override { writer_->close(); }

 private:
  void log_value(const std::string& key, const Value& value, std::optional<std::int64_t> step,
                 std::optional<double> walltime) {
    if (const auto number = number_of(value)) {
      writer_->add_scalar(key, *number, step, walltime);
    } else if (value.is_string()) {
      writer_->add_text(key, value.as_string(), step, walltime);
    } else {
      refuse_value(value, "a number, a text or a dict of numbers");
    }
  }

  std::optional<double> walltime_in(const Value::Dict& kwargs) const {
    check_kwargs(name(), kwargs, {"walltime"});
    const Value* walltime = kwargs.get("walltime");
    return walltime == nullptr ? std::nullopt : std::optional(walltime->as_double());
  }

  std::filesystem::path folder_;
  SummaryWriterOptions options_;
  std::unique_ptr<SummaryWriter> writer_;
};

}  // namespace

std::shared_ptr<GeneralTracker> make_tensorboard_tracker(const TrackerArguments& arguments) {
  return std::make_shared<TensorBoardTracker>(arguments);
}

}  // namespace accelerate::detail::tracking
