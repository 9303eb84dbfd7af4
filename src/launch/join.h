// src/launch/join.h - connects the agent of a machine to the host of the rendezvous.
#pragma once

#include "launch/channel.h"
#include "launch/console.h"
#include "launch/launch_config.h"
#include "launch/rendezvous_conf.h"
#include "launch/signals.h"

namespace accelerate::detail::launch {

/// A signal arrived while `join_job` waited.
struct Interrupted {
  int signal = 0;
};

/// Connects to `master_addr:master_port` of the configuration and joins as `member`. Tries again
/// until a launcher there sends a welcome.
///
/// Throws `Error` with address, port and time tried after `join_timeout`; `Interrupted` after a
/// signal.
[[nodiscard]] Channel join_job(const LaunchConfig& config, Member member,
                               const RendezvousConf& conf, SignalQueue& signals, Console& console);

}  // namespace accelerate::detail::launch
