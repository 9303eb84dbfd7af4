#include "accelerate/tracking/summary_writer.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/text.h"
#include "core/world.h"
#include "tracking/encodings.h"
#include "tracking/outbox.h"
#include "tracking/tracker_files.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::str;
using detail::tracking::now_seconds;
using detail::tracking::ProtoMessage;

constexpr std::string_view kFileVersion = "brain.Event:2";

/// The name of a new event file; the number at its end counts the files of this process.
std::string event_file_name(const std::string& suffix) {
  static std::atomic<int> files = 0;
  char seconds[24];
  std::snprintf(seconds, sizeof seconds, "%010.0f", std::floor(now_seconds()));
  return str("events.out.tfevents.", seconds, ".", detail::this_host_name(), ".", ::getpid(), ".",
             files++, suffix);
}

ProtoMessage event(std::optional<double> walltime, std::optional<std::int64_t> step) {
  ProtoMessage message;
  message.real(1, walltime.value_or(now_seconds()));
  if (step.value_or(0) != 0) message.number(2, *step);
  return message;
}

/// The first record of each file.
std::string version_record() {
  return detail::tracking::event_record(event({}, {}).text(3, kFileVersion).bytes());
}

/// SummaryMetadata that tells which plugin of TensorBoard shows a value.
ProtoMessage plugin(std::string_view name, const std::string& content = {}) {
  ProtoMessage data;
  data.text(1, name);
  if (!content.empty()) data.raw(2, content);
  return ProtoMessage().message(1, data);
}

ProtoMessage scalar(std::string_view tag, double value) {
  return ProtoMessage().text(1, tag).real32(2, static_cast<float>(value));
}

/// The edges between buckets: 0, and both ways from 1e-12 to 1e20 by a factor of 1.1.
const std::vector<double>& bucket_edges() {
  static const auto edges = [] {
    std::vector<double> positive;
    for (double edge = 1e-12; edge < 1e20; edge *= 1.1) positive.push_back(edge);
    std::vector<double> all;
    for (auto edge = positive.rbegin(); edge != positive.rend(); ++edge) all.push_back(-*edge);
    all.push_back(0);
    all.insert(all.end(), positive.begin(), positive.end());
    return all;
  }();
  return edges;
}

ProtoMessage histogram(const std::string& tag, std::span<const double> given) {
  std::vector<double> values;
  std::ranges::copy_if(given, std::back_inserter(values),
                       [](double x) { return std::isfinite(x); });
  const auto& edges = bucket_edges();
  std::vector<double> counts(edges.size() - 1);
  double sum = 0;
  double squares = 0;
  for (const double value : values) {
    sum += value;
    squares += value * value;
    if (value < edges.front() || value > edges.back()) continue;
    const auto above = std::ranges::upper_bound(edges, value) - edges.begin();
    ++counts[std::min(static_cast<std::size_t>(above), counts.size()) - 1];
  }
  const auto used = [](double count) { return count > 0; };
  const auto first = std::ranges::find_if(counts, used) - counts.begin();
  if (first == std::ssize(counts)) {
    throw ArgumentError(
        str("add_histogram: '", tag, "' has no finite value between -1e20 and 1e20."));
  }
  const auto end = counts.rend() - std::find_if(counts.rbegin(), counts.rend(), used);
  // TensorBoard wants the upper edge of each bucket: an empty one in front gives the lowest edge.
  std::vector<double> limits(edges.begin() + first, edges.begin() + end + 1);
  std::vector<double> buckets(counts.begin() + first, counts.begin() + end);
  buckets.insert(buckets.begin(), 0);
  const auto [low, high] = std::ranges::minmax(values);
  ProtoMessage proto;
  std::uint32_t field = 0;
  for (const double number : {low, high, static_cast<double>(values.size()), sum, squares}) {
    ++field;
    if (number != 0) proto.real(field, number);
  }
  proto.reals(6, limits).reals(7, buckets);
  return ProtoMessage().text(1, tag).message(5, proto);
}

/// The three summaries by which the hparams plugin knows a session.
std::vector<ProtoMessage> hparam_summaries(const Value::Dict& hparams) {
  ProtoMessage experiment;
  ProtoMessage start;
  for (const auto& [key, value] : hparams) {
    if (value.is_none()) continue;
    const auto number = detail::tracking::number_of(value);
    if (!number && !value.is_string()) {
      throw ArgumentError(str("The hyperparameter '", key.to_string(), "' is a ", value.kind_name(),
                              ". TensorBoard takes bools, numbers, texts and none."));
    }
    // A bool is a number here, as torch.utils.tensorboard writes it.
    const auto stored =
        number ? ProtoMessage().real(2, *number) : ProtoMessage().text(3, value.as_string());
    start.message(1, ProtoMessage().text(1, key.to_string()).message(2, stored));
    experiment.message(4, ProtoMessage().text(1, key.to_string()).number(4, number ? 3 : 1));
  }
  const auto summary = [](std::string_view tag, std::uint32_t field, const ProtoMessage& content) {
    return ProtoMessage().text(1, tag).message(
        9, plugin("hparams", ProtoMessage().message(field, content).bytes()));
  };
  return {summary("_hparams_/experiment", 2, experiment),
          summary("_hparams_/session_start_info", 3, start),
          summary("_hparams_/session_end_info", 4, ProtoMessage().number(1, 1))};
}

}  // namespace

struct SummaryWriter::Impl {
  fs::path log_dir;
  SummaryWriterOptions options;
  /// The event file of each folder: this run's, and those of `add_scalars`.
  std::map<fs::path, fs::path> files = {};
  detail::tracking::Outbox outbox{{.tracker = "tensorboard"}, detail::tracking::deliver_to_files};

  const fs::path& file_in(const fs::path& folder) {
    const auto found = files.find(folder);
    if (found != files.end()) return found->second;
    const auto path = folder / event_file_name(options.filename_suffix);
    outbox.post({.target = path.string(), .bytes = version_record()});
    return files.emplace(folder, path).first->second;
  }
  void add_event(const fs::path& file, const ProtoMessage& message) {
    outbox.post(
        {.target = file.string(), .bytes = detail::tracking::event_record(message.bytes())});
  }
  void add_value(const fs::path& folder, const ProtoMessage& value, Step step,
                 std::optional<double> walltime) {
    add_event(file_in(folder), event(walltime, step).message(5, ProtoMessage().message(1, value)));
  }
};

SummaryWriter::SummaryWriter(fs::path log_dir, const SummaryWriterOptions& options)
    : impl_(std::make_unique<Impl>(std::move(log_dir), options)) {
  const auto file = impl_->log_dir / event_file_name(options.filename_suffix);
  detail::tracking::append_to_file(file, version_record());  // the outbox would not throw
  impl_->files.emplace(impl_->log_dir, file);
  if (!options.purge_step) return;
  impl_->add_event(file, event({}, options.purge_step).text(3, kFileVersion));
  impl_->add_event(file, event({}, options.purge_step).message(7, ProtoMessage().number(1, 1)));
}

SummaryWriter::~SummaryWriter() = default;

const fs::path& SummaryWriter::log_dir() const noexcept { return impl_->log_dir; }

void SummaryWriter::close() { impl_->outbox.finish(); }

void SummaryWriter::add_scalar(const std::string& tag, double value, Step step,
                               std::optional<double> walltime) {
  impl_->add_value(impl_->log_dir, scalar(tag, value), step, walltime);
}

void SummaryWriter::add_scalars(const std::string& main_tag, const Value::Dict& values, Step step,
                                std::optional<double> walltime) {
  std::string prefix = main_tag;
  std::ranges::replace(prefix, '/', '_');
  for (const auto& [key, value] : values) {
    const auto number = detail::tracking::number_of(value);
    if (!number) {
      throw ArgumentError(str("add_scalars: '", key.to_string(), "' of '", main_tag, "' is a ",
                              value.kind_name(), ", not a number."));
    }
    const auto folder = detail::tracking::inside(impl_->log_dir, str(prefix, "_", key.to_string()));
    impl_->add_value(folder, scalar(main_tag, *number), step, walltime);
  }
}

void SummaryWriter::add_text(const std::string& tag, const std::string& text, Step step,
                             std::optional<double> walltime) {
  const auto shape = ProtoMessage().message(2, ProtoMessage().number(1, 1));
  const auto tensor = ProtoMessage().number(1, 7).message(2, shape).text(8, text);
  impl_->add_value(
      impl_->log_dir,
      ProtoMessage().text(1, tag + "/text_summary").message(8, tensor).message(9, plugin("text")),
      step, walltime);
}

void SummaryWriter::add_images(const std::string& tag, std::span<const TrackerImage> images,
                               Step step, std::optional<double> walltime) {
  detail::tracking::check_images(images, str("The images '", tag, "'"));
  const auto grid = detail::tracking::image_grid(images);
  ProtoMessage image;
  image.number(1, grid.height).number(2, grid.width).number(3, grid.channels);
  image.raw(4, detail::tracking::encode_png(grid));
  impl_->add_value(impl_->log_dir, ProtoMessage().text(1, tag).message(4, image), step, walltime);
}

void SummaryWriter::add_histogram(const std::string& tag, std::span<const double> values, Step step,
                                  std::optional<double> walltime) {
  impl_->add_value(impl_->log_dir, histogram(tag, values), step, walltime);
}

fs::path SummaryWriter::add_hparams(const Value::Dict& hparams) {
  const auto summaries = hparam_summaries(hparams);
  const auto folder = impl_->log_dir / detail::python_repr(now_seconds());
  for (const auto& summary : summaries) impl_->add_value(folder, summary, {}, {});
  impl_->files.erase(folder);
  return folder;
}

}  // namespace accelerate
