// Any YAML mapping is either a configuration or refused with a ConfigError; a configuration that
// was written is read again as the same.
#include "accelerate/config.h"

#include "accelerate/errors.h"
#include "accelerate/logging.h"
#include "core/yaml.h"
#include "fuzz.h"

namespace {

template <class Config>
void round_trip(const accelerate::Value::Dict& dict) {
  using namespace accelerate;
  try {
    const auto written = Config::from_dict(dict).to_dict();
    const auto text = detail::yaml_dumps(written);
    const auto again = Config::from_dict(detail::yaml_loads(text).as_dict()).to_dict();
    fuzz::check(detail::yaml_dumps(again) == text, "a written configuration is read as the same");
  } catch (const ConfigError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  static const bool quiet = (basic_config({.sink = [](const LogEntry&) {}}), true);
  (void)quiet;
  Value value;
  try {
    value = detail::yaml_loads(fuzz::text(data, size));
  } catch (const ConfigError&) {
    return 0;
  }
  if (!value.is_dict()) return 0;
  round_trip<ClusterConfig>(value.as_dict());
  round_trip<SageMakerConfig>(value.as_dict());
  return 0;
}
