// src/accelerator/run_state.h - hooks, and the save that is under way.
#pragma once

#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <source_location>
#include <thread>

#include "accelerate/accelerator/checkpoint_members.h"
#include "checkpoint/save_job.h"

namespace accelerate::detail::accelerator {

/// Hooks in the order of registration; each is removed through its place.
template <class Hook>
using HookList = std::list<Hook>;

/// What saving needs beside the objects that are saved.
class RunState {
 public:
  RunState() = default;
  ~RunState();
  RunState(const RunState&) = delete;
  RunState& operator=(const RunState&) = delete;

  std::shared_ptr<HookList<SaveStateHook>> save_hooks = std::make_shared<HookList<SaveStateHook>>();
  std::shared_ptr<HookList<LoadStateHook>> load_hooks = std::make_shared<HookList<LoadStateHook>>();
  checkpoint::SnapshotBuffers buffers = {};
  /// How many saves this process has begun.
  std::int64_t saves = 0;

  /// Runs the job on a thread of its own. Only after `wait`.
  void start(std::unique_ptr<checkpoint::SaveJob> job, const checkpoint::StoreExchange& where);
  /// Returns when no save is under way, and throws what it threw.
  void wait();

 private:
  std::exception_ptr failure_ = nullptr;
  std::jthread thread_;
};

struct AcceleratorCore;

/// `Accelerator::check_preemption`.
void check_preemption(AcceleratorCore& core, std::source_location where);

}  // namespace accelerate::detail::accelerator
