#include "accelerate/precision/autocast.h"

#include <ATen/autocast_mode.h>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {
namespace {

namespace autocast = at::autocast;

void check(c10::DeviceType device_type, at::ScalarType dtype, bool enabled) {
  if (!autocast::is_autocast_available(device_type)) {
    throw ArgumentError(detail::str("There is no autocast for ",
                                    c10::DeviceTypeName(device_type, /*lower_case=*/true),
                                    ". Compute without mixed precision there."));
  }
  if (enabled && dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw ArgumentError(detail::str(
        "Autocast on ", c10::DeviceTypeName(device_type, /*lower_case=*/true),
        " computes in bfloat16 or float16, not in ", c10::toString(dtype),
        ". Choose one of these, or AutocastKwargs{.enabled = false} for full precision."));
  }
}

}  // namespace

AutocastScope::AutocastScope(c10::DeviceType device_type, at::ScalarType dtype,
                             const AutocastKwargs& kwargs) {
  check(device_type, dtype, kwargs.enabled);
  device_type_ = device_type;
  was_enabled_ = autocast::is_autocast_enabled(device_type);
  dtype_was_ = autocast::get_autocast_dtype(device_type);
  cache_was_enabled_ = autocast::is_autocast_cache_enabled();
  autocast::set_autocast_enabled(device_type, kwargs.enabled);
  autocast::set_autocast_dtype(device_type, dtype);
  autocast::set_autocast_cache_enabled(kwargs.cache_enabled.value_or(cache_was_enabled_));
  autocast::increment_nesting();
  active_ = true;
}

AutocastScope::~AutocastScope() {
  if (!active_) return;
  // Weights may change before the next scope, so their converted copies are stale.
  if (autocast::decrement_nesting() == 0) autocast::clear_cache();
  autocast::set_autocast_enabled(device_type_, was_enabled_);
  autocast::set_autocast_dtype(device_type_, dtype_was_);
  autocast::set_autocast_cache_enabled(cache_was_enabled_);
}

}  // namespace accelerate
