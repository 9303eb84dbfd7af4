// src/launch/join.h - how a machine finds the one that leads the job.
#pragma once

#include "launch/channel.h"
#include "launch/console.h"
#include "launch/launch_config.h"
#include "launch/rendezvous_conf.h"
#include "launch/signals.h"

namespace accelerate::detail {

/// A signal came while we waited.
struct Interrupted {
  int signal = 0;
};

/// Connects to `master_addr:master_port` of the configuration, again and again until somebody there
/// welcomes us, and says hello as `member`.
///
/// Throws `Error` naming address, port and time tried when nobody did; `Interrupted` after a
/// signal.
[[nodiscard]] Channel join_job(const LaunchConfig& config, Member member,
                               const RendezvousConf& conf, SignalQueue& signals, Console& console);

}  // namespace accelerate::detail
