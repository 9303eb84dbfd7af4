// src/launch/rendezvous_conf.h - the settings of --rdzv_conf, checked.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace accelerate::detail {

struct RendezvousConf {
  /// timeout, join_timeout: how long machines may be missing.
  std::chrono::milliseconds join_timeout = std::chrono::seconds(900);
  /// last_call_timeout: how long more are waited for once enough are here (c10d).
  std::chrono::milliseconds last_call = std::chrono::seconds(30);
  /// keep_alive: after this long without a word a machine counts as gone.
  std::chrono::milliseconds keep_alive = std::chrono::seconds(10);
  /// is_host: whether this machine is the one that the others meet at; unset: look at the address.
  std::optional<bool> is_host = std::nullopt;
  /// store_port: the port of the workers' store with c10d; 0 takes a free one.
  int store_port = 0;

  /// Throws `ConfigError` for a key that is not known (lists those that are) or a value that is no
  /// number of seconds, truth value or port.
  [[nodiscard]] static RendezvousConf parse(const std::map<std::string, std::string>& conf);

  /// Keys that torchrun knows and that command lines carry along: accepted, of no use here.
  [[nodiscard]] static bool only_of_torchrun(std::string_view key);

  bool operator==(const RendezvousConf&) const = default;
};

/// "900 s", "0.4 s".
[[nodiscard]] std::string seconds_text(std::chrono::milliseconds time);

}  // namespace accelerate::detail
