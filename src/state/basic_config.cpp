#include "accelerate/checks.h"
#include "core/config.h"
#include "state/accelerator_backend.h"

namespace accelerate {

std::optional<std::filesystem::path> write_basic_config(
    const std::string& mixed_precision, const std::optional<std::filesystem::path>& save_location) {
  const auto* backend = detail::state::accelerator_backend();
  return detail::write_basic_config(mixed_precision, save_location.value_or(default_config_file()),
                                    get_current_device_type().second,
                                    backend != nullptr ? backend->device_count() : 0);
}

}  // namespace accelerate
