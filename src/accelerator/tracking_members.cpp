// The trackers of an accelerator: which process runs them, and tensors among their values.
#include "accelerate/accelerator/tracking_members.h"

#include <ATen/ATen.h>

#include <exception>

#include "accelerate/errors.h"
#include "accelerator/accelerator_core.h"
#include "core/log.h"
#include "core/text.h"
#include "tracking/recorder.h"
#include "tracking/trackers.h"

namespace accelerate {
namespace {

bool has_number(const Value& value) {
  if (!value.is_tensor()) return false;
  const auto& tensor = value.as_tensor();
  return tensor.defined() && tensor.dim() == 0 && !tensor.is_meta() && !tensor.is_complex();
}

/// The values with tensors of dimension 0 as numbers, also those in dicts.
Value::Dict with_numbers(const Value::Dict& values) {
  Value::Dict result;
  for (const auto& [key, value] : values) {
    if (value.is_dict()) {
      result.set(key, with_numbers(value.as_dict()));
    } else if (!has_number(value)) {
      result.set(key, value);
    } else if (const auto number = value.as_tensor().item(); number.isBoolean()) {
      result.set(key, number.to<bool>());
    } else if (number.isIntegral(/*includeBool=*/false)) {
      result.set(key, number.to<std::int64_t>());
    } else {
      result.set(key, number.to<double>());
    }
  }
  return result;
}

}  // namespace

std::vector<TrackerImage> tracker_images(const at::Tensor& batch) {
  if (!batch.defined() || batch.dim() < 3 || batch.dim() > 4) {
    throw ArgumentError(
        detail::str("tracker_images: expected images [N, C, H, W] or one image [C, H, W], not ",
                    batch.defined() ? detail::str("a tensor of shape ", batch.sizes())
                                    : std::string("an undefined tensor"),
                    "."));
  }
  auto pixels = batch.detach().cpu();
  if (pixels.dim() == 3) pixels = pixels.unsqueeze(0);
  if (pixels.scalar_type() != at::kByte) {
    // In their own type: 3/255 in float32 is 3 again.
    pixels = (pixels * 255).clamp(0, 255).to(at::kByte);
  }
  pixels = pixels.permute({0, 2, 3, 1}).contiguous();  // [N, H, W, C]
  std::vector<TrackerImage> images;
  for (std::int64_t i = 0; i < pixels.size(0); ++i) {
    const auto image = pixels[i];
    images.push_back({.height = image.size(0), .width = image.size(1), .channels = image.size(2)});
    images.back().pixels.assign(static_cast<const char*>(image.const_data_ptr()), image.nbytes());
  }
  return images;
}

TrackingMembers::TrackingMembers(const detail::accelerator::AcceleratorCore& core)
    : trackers_(std::make_unique<detail::tracking::TrackerSet>(
          core.state.is_main_process() ? core.options.log_with : std::vector<TrackerChoice>(),
          core.project.logging_dir)),
      recorder_(core.recorder),
      is_main_process_(core.state.is_main_process()) {}

TrackingMembers::~TrackingMembers() { finish_trackers(); }

void TrackingMembers::finish_trackers() noexcept {
  trackers_->finish();
  if (recorder_) recorder_->finish(std::uncaught_exceptions() > 0);
}

void TrackingMembers::init_trackers(const std::string& project_name, const Value::Dict& config,
                                    const Value::Dict& init_kwargs) {
  if (recorder_ && is_main_process_) recorder_->describe(project_name, config);
  trackers_->start(project_name, config, init_kwargs);
}

void TrackingMembers::log(const Value::Dict& values, std::optional<std::int64_t> step,
                          const Value::Dict& log_kwargs) {
  const bool recorded = recorder_ && is_main_process_;
  if (!trackers_->running() && !recorded) return;
  const auto numbers = with_numbers(values);
  if (recorded) recorder_->log(numbers, step);
  trackers_->log(numbers, step, log_kwargs);
}

GeneralTracker& TrackingMembers::get_tracker(const std::string& name) {
  if (trackers_->waits_for_start()) {
    detail::warn_once(detail::str("get_tracker('", name,
                                  "') before init_trackers gives a tracker that does nothing. Call "
                                  "init_trackers first."));
  }
  return trackers_->get(name);
}

void TrackingMembers::refuse_handle(const std::string& name) {
  throw ArgumentError(
      detail::str("get_tracker<Handle>('", name,
                  "'): the handle of this tracker has another type. docs/trackers.md lists "
                  "them."));
}

}  // namespace accelerate
