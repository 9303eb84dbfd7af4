// accelerate/tracking/summary_writer.h - event files for TensorBoard, by hand.
//
//     auto* writer = accelerator.get_tracker<SummaryWriter*>("tensorboard");
//     if (writer != nullptr) writer->add_histogram("weights", values, step);
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "accelerate/api.h"
#include "accelerate/tracking.h"
#include "accelerate/value.h"

namespace accelerate {

struct SummaryWriterOptions {
  /// TensorBoard hides events at this step and later that an earlier, crashed run has written.
  std::optional<std::int64_t> purge_step = std::nullopt;
  /// Appended to the name of each file.
  std::string filename_suffix = {};
};

/// Writes what torch.utils.tensorboard writes, under the same tags and into the same folders. Each
/// event is in the file when the call returns.
class ACCELERATE_API SummaryWriter {
 public:
  using Step = std::optional<std::int64_t>;

  /// Creates the folder and its event file. Throws `ConfigError` with the path if that fails.
  explicit SummaryWriter(std::filesystem::path log_dir, const SummaryWriterOptions& options = {});
  ~SummaryWriter();
  SummaryWriter(const SummaryWriter&) = delete;
  SummaryWriter& operator=(const SummaryWriter&) = delete;

  /// `walltime`: seconds since 1970; nullopt is now.
  void add_scalar(const std::string& tag, double value, Step step = std::nullopt,
                  std::optional<double> walltime = std::nullopt);
  /// One curve per entry of `values`, in a run of its own beside this one. Throws `ArgumentError`
  /// for an entry that is no number.
  void add_scalars(const std::string& main_tag, const Value::Dict& values, Step step = std::nullopt,
                   std::optional<double> walltime = std::nullopt);
  void add_text(const std::string& tag, const std::string& text, Step step = std::nullopt,
                std::optional<double> walltime = std::nullopt);
  /// The images side by side, eight in a row. They must have one size and number of channels.
  void add_images(const std::string& tag, std::span<const TrackerImage> images,
                  Step step = std::nullopt, std::optional<double> walltime = std::nullopt);
  /// Buckets as torch.utils.tensorboard chooses them. Values that are not finite are left out.
  void add_histogram(const std::string& tag, std::span<const double> values,
                     Step step = std::nullopt, std::optional<double> walltime = std::nullopt);
  /// Bools, numbers and texts, in a run of its own below this one. Returns its folder.
  std::filesystem::path add_hparams(const Value::Dict& hparams);
  /// Writes what a full disk has held back; reports what is lost.
  void close();

  [[nodiscard]] const std::filesystem::path& log_dir() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate
