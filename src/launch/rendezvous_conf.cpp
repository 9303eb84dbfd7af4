#include "launch/rendezvous_conf.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

[[noreturn]] void refuse(const std::string& key, const std::string& value, const char* wanted) {
  throw ConfigError(str("--rdzv_conf: ", key, " is '", value, "', which is not ", wanted, "."));
}

std::chrono::milliseconds seconds(const std::string& key, const std::string& value) {
  constexpr double kMost = 1e7;  // 115 days
  const auto number = parse_number<double>(value);
  if (!number || !std::isfinite(*number) || *number <= 0 || *number > kMost) {
    refuse(key, value, "a positive number of seconds");
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(*number * 1000)));
}

int port(const std::string& key, const std::string& value) {
  const auto number = parse_number<std::uint16_t>(value);
  if (!number) refuse(key, value, "a port from 0 to 65535");
  return *number;
}

bool truth(const std::string& key, const std::string& value) {
  try {
    return str_to_bool(value);
  } catch (const ArgumentError&) {
    refuse(key, value, "true or false");
  }
}

}  // namespace

RendezvousConf RendezvousConf::parse(const std::map<std::string, std::string>& conf) {
  RendezvousConf result;
  for (const auto& [key, value] : conf) {
    if (key == "timeout" || key == "join_timeout") {
      result.join_timeout = seconds(key, value);
    } else if (key == "last_call_timeout") {
      result.last_call = seconds(key, value);
    } else if (key == "keep_alive") {
      result.keep_alive = seconds(key, value);
    } else if (key == "is_host") {
      result.is_host = truth(key, value);
    } else if (key == "store_port") {
      result.store_port = port(key, value);
    } else {
      throw ConfigError(str("--rdzv_conf: there is no setting '", key,
                            "'. There are: timeout, join_timeout, last_call_timeout, keep_alive, "
                            "is_host, store_port."));
    }
  }
  return result;
}

bool RendezvousConf::is_torchrun_only(std::string_view key) {
  constexpr std::array<std::string_view, 6> kKeys{"read_timeout",      "close_timeout",
                                                  "heartbeat_timeout", "keep_alive_interval",
                                                  "store_type",        "keep_alive_max_attempt"};
  return std::ranges::find(kKeys, key) != kKeys.end();
}

std::string seconds_text(std::chrono::milliseconds time) {
  if (time.count() % 1000 == 0) return str(time.count() / 1000, " s");
  return str(static_cast<double>(time.count()) / 1000.0, " s");
}

}  // namespace accelerate::detail::launch
