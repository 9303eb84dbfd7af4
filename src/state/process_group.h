// src/state/process_group.h - where processes meet, and the group they form.
//
// Internal. c10d is used behind these functions only.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "accelerate/fwd.h"

namespace c10d {
class Backend;
}

namespace accelerate::detail::comm {
class DeviceCallGuard;
}  // namespace accelerate::detail::comm

namespace accelerate::detail::state {

class Roster;

/// Where the processes meet, and the place of this one.
struct Rendezvous {
  /// "tcp://host:port" or "file:///path".
  std::string init_method = {};
  int rank = 0;
  int world_size = 1;
  /// How long to wait for the others before the error that names the missing ones.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// The store is served by another process (torchrun's agent); rank 0 is a client too.
  bool served_elsewhere = false;
  /// Grows with every restart of the job, so that a new attempt never sees keys of an old one.
  int attempt = 0;
  /// The number of a listening socket that the launcher has bound for rank 0, as
  /// `kListenFdVariable` says it; "" when there is none.
  std::string listen_fd = {};
};

/// How long processes wait for each other when the program does not say. Set by launchers inside
/// of a program, before the function runs.
[[nodiscard]] std::optional<std::chrono::milliseconds>& meeting_timeout();

/// Collective. Connects to the others and returns the store that all of them share.
///
/// Throws `CommError` naming address, port and time tried if there is no answer, and the missing
/// ranks if some have not arrived at the end of the timeout.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> meet(const Rendezvous& rendezvous);

/// Collective. As `meet`, through a store of the host program.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> meet_at(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const Rendezvous& rendezvous);

struct ProcessGroupOptions {
  /// "gloo", "nccl", or a pair such as "cuda:nccl,cpu:gloo".
  std::string backend = "gloo";
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// The device of this process; NCCL binds to it.
  c10::Device device = c10::Device(c10::kCPU);
  /// The ranks of the group in the run, for error texts; empty for the group of the run itself.
  std::vector<int> global_ranks = {};
  /// The address of this host that the peers can reach; "" asks Gloo to choose.
  std::string address = "127.0.0.1";
};

/// Collective. Throws `ConfigError` for a backend that does not exist, `UnsupportedError` for one
/// that this build or machine lacks.
[[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, const ProcessGroupOptions& options);

/// The address of this host on the way to `master`: what peers on other hosts can reach us by.
/// "" when only a loopback address could be found.
[[nodiscard]] std::string address_towards(const std::string& master);

/// Collective. Returns when every process of the group has called it.
void barrier(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device,
             std::chrono::milliseconds timeout, std::source_location where);

/// Collective. The largest `own` of all processes of the group.
[[nodiscard]] std::int64_t all_reduce_max(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                          std::int64_t own, c10::Device device,
                                          std::chrono::milliseconds timeout,
                                          std::source_location where);

/// The backends for CPU tensors. Both are guarded: a rank that diverges is named.
struct HostBackends {
  /// Shared memory if all ranks of the group are on one host; shared memory and Gloo if some share
  /// a host; null if Gloo alone is to be used.
  c10::intrusive_ptr<c10d::Backend> cpu;
  c10::intrusive_ptr<c10d::Backend> gloo;
};

/// Collective. In comm/host_backends.cpp: the collectives are that area's.
[[nodiscard]] HostBackends make_host_backends(const c10::intrusive_ptr<c10d::Store>& store,
                                              const ProcessGroupOptions& options,
                                              const Roster& roster);

/// Collective. In comm/host_backends.cpp: the guard of a backend whose collectives run on a device.
[[nodiscard]] std::shared_ptr<comm::DeviceCallGuard> make_device_guard(
    const ProcessGroupOptions& options, const Roster& roster);

/// A TCP store on a port that the system chose, for programs that pass the address on by other
/// means (MPI). `port` 0 on the serving side; returns the store and the port it serves.
struct ServedStore {
  c10::intrusive_ptr<c10d::Store> store;
  int port = 0;
};
[[nodiscard]] ServedStore serve_store(std::chrono::milliseconds timeout);
[[nodiscard]] c10::intrusive_ptr<c10d::Store> connect_store(const std::string& host, int port,
                                                            std::chrono::milliseconds timeout);

}  // namespace accelerate::detail::state
