// src/accelerator/run_state.h - hooks, and the save that is under way.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <source_location>
#include <thread>

#include "accelerate/accelerator/checkpoint_members.h"
#include "checkpoint/save_job.h"

namespace accelerate::detail::accelerator {

/// Hooks by the number of their registration.
template <class Hook>
using HookList = std::map<std::int64_t, Hook>;

/// What saving needs beside the objects that are saved.
class RunState {
 public:
  RunState();
  ~RunState();
  RunState(const RunState&) = delete;
  RunState& operator=(const RunState&) = delete;

  std::shared_ptr<HookList<SaveStateHook>> save_hooks = std::make_shared<HookList<SaveStateHook>>();
  std::shared_ptr<HookList<LoadStateHook>> load_hooks = std::make_shared<HookList<LoadStateHook>>();
  checkpoint::SnapshotBuffers buffers = {};
  /// How many saves this process has begun, of all accelerators: they share a store.
  static inline std::int64_t saves = 0;

  /// Runs the job on a thread of its own. Only after `wait`.
  void start(std::unique_ptr<checkpoint::SaveJob> job, const checkpoint::StoreExchange& where);
  /// Returns when no save is under way, and throws what it threw.
  void wait();
  /// As `wait`, with a warning instead of the exception.
  void wait_and_warn();
  /// `wait_and_warn` for the saves of all accelerators in this process.
  static void wait_and_warn_all();

 private:
  struct Living;
  static Living& living();

  std::exception_ptr failure_ = nullptr;
  std::jthread thread_;
};

struct AcceleratorCore;

/// `Accelerator::check_preemption`.
void check_preemption(AcceleratorCore& core, std::source_location where);

}  // namespace accelerate::detail::accelerator
