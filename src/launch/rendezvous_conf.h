// src/launch/rendezvous_conf.h - the settings of --rdzv_conf, checked.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace accelerate::detail::launch {

struct RendezvousConf {
  /// timeout, join_timeout: how long to wait for machines.
  std::chrono::milliseconds join_timeout = std::chrono::seconds(900);
  /// last_call_timeout: how long to wait for more after the minimum has joined (c10d).
  std::chrono::milliseconds last_call = std::chrono::seconds(30);
  /// keep_alive: a machine that sends nothing for this long is lost.
  std::chrono::milliseconds keep_alive = std::chrono::seconds(10);
  /// is_host: this machine hosts the rendezvous. nullopt: if the address is its own.
  std::optional<bool> is_host = std::nullopt;
  /// store_port: the port of the workers' store with c10d; 0 takes a free one.
  int store_port = 0;

  /// Throws `ConfigError` for an unknown key (lists the valid ones) or a value that is not valid.
  [[nodiscard]] static RendezvousConf parse(const std::map<std::string, std::string>& conf);

  /// True for keys of torchrun that have no effect here.
  [[nodiscard]] static bool is_torchrun_only(std::string_view key);

  bool operator==(const RendezvousConf&) const = default;
};

/// "900 s", "0.4 s".
[[nodiscard]] std::string seconds_text(std::chrono::milliseconds time);

}  // namespace accelerate::detail::launch
