// tools/shard_schedule.h - what a step of sharded training sends, and how much of it compute hides.
//
// A model of the schedule, not of a machine: all units are equal, each process has one link, over
// which collectives go one after another as rings, and compute never waits for anything else.
#pragma once

#include <cstdint>

namespace accelerate::tools {

/// What processes keep a part of.
enum class Sharding : std::uint8_t { kNone, kOptimizer, kGradients, kParameters };

/// Of a link of a process to the next one in a ring.
struct Link {
  double bytes_per_second = 1;
  double latency_seconds = 0;  ///< of each of the steps of a ring
};

struct Setting {
  Sharding sharding = Sharding::kParameters;
  /// Of `kParameters`: a unit is gathered for forward and again for backward.
  bool reshard = true;
  /// Units that are gathered once even so: they are the last of forward, the first of backward.
  std::int64_t kept_units = 0;
  /// Of several micro-batches: whole gradients are kept, and reduced once.
  bool accumulate_unsharded = true;
  /// How many units are gathered before they are needed.
  std::int64_t prefetch = 1;

  std::int64_t shard_ranks = 8;  ///< N
  std::int64_t replicas = 1;     ///< R; more than one is hybrid sharding
  std::int64_t micro_batches = 1;
  std::int64_t units = 32;
  double parameters = 7e9;
  double param_bytes = 2;   ///< of a parameter that is gathered
  double reduce_bytes = 4;  ///< of a gradient that is reduced

  Link shard_link = {};
  Link replica_link = {};
  double forward_seconds = 0;   ///< of a unit
  double backward_seconds = 0;  ///< of a unit; with activation checkpointing one forward more
};

struct Outcome {
  double bytes_sent = 0;  ///< by each process
  std::int64_t calls = 0;
  double compute_seconds = 0;
  /// How much longer the step takes than its compute.
  double exposed_seconds = 0;
  /// Of parameters, gradients, two moments and masters in mixed precision, and of what is gathered.
  double memory_bytes = 0;
};

[[nodiscard]] Outcome simulate(const Setting& setting);

}  // namespace accelerate::tools
