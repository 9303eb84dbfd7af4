#include "accelerator/monitoring.h"

#include <torch/optim/optimizer.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/operations.h"
#include "accelerator/accelerator_core.h"
#include "comm/call_log.h"
#include "core/log.h"
#include "core/text.h"
#include "state/accelerator_backend.h"
#include "tracking/tracker_files.h"

namespace accelerate::detail::accelerator {
namespace {

/// "20261116-133246-5f3a": runs sort by their start, and no two share a folder.
std::string new_run_name() {
  return str(tracking::formatted_time("%Y%m%d-%H%M%S", /*universal=*/false), "-",
             tracking::random_text(4));
}

/// Lets NCCL measure its collectives; those of the host are measured always.
void time_collectives(const AcceleratorState& state) {
  if (!state.use_distributed() || state.device().is_cpu()) return;
  try {
    state.process_group()->getBackend(state.device().type())->enableCollectivesTiming();
  } catch (const c10::Error& error) {
    warn_once(str("The time in collectives is not recorded: ", error.what_without_backtrace()));
  }
}

std::optional<double> learning_rate_of(const torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  if (groups.empty() || !groups.front().has_options()) return std::nullopt;
  try {
    return groups.front().options().get_lr();
  } catch (const c10::Error&) {  // an optimizer of the program that does not tell
    return std::nullopt;
  }
}

/// Of all processes in a step: what the first loader of batches has, times the accumulated batches.
std::optional<std::int64_t> samples_per_step(const AcceleratorCore& core) {
  for (const auto& loader : core.registry.loaders) {
    if (const auto size = loader->total_batch_size()) {
      return *size * core.num_steps();
    }
  }
  return std::nullopt;
}

}  // namespace

std::shared_ptr<tracking::Recorder> make_recorder(const AcceleratorCore& core) {
  std::vector<std::string> run{new_run_name()};
  if (core.state.use_distributed()) broadcast_object_list(run);
  time_collectives(core.state);
  tracking::RecorderOptions options{
      .folder = core.project.logging_dir.value_or(".") / "monitor" / run.front(),
      .rank = core.state.process_index(),
      .world = core.state.num_processes(),
      .device = core.state.device().str()};
  if (auto* gpu = state::accelerator_backend(); gpu != nullptr && !core.state.device().is_cpu()) {
    options.gpu = gpu->pci_bus_id(state::gpu_index(core.state.device()));
  }
  if (core.state.use_distributed()) options.nanoseconds_waited = comm::nanoseconds_in_collectives;
  return std::make_shared<tracking::Recorder>(std::move(options));
}

void record_steps(AcceleratorCore& core, optim::OptimizerCore& optimizer) {
  if (!core.recorder || core.registry.optimizers.size() != 1) return;
  optimizer.after_step = [weak = core.weak_from_this()](const torch::optim::Optimizer& stepped) {
    const auto owner = weak.lock();
    if (!owner || !owner->recorder->count_step()) return;
    owner->recorder->write_steps(
        {.learning_rate = learning_rate_of(stepped), .samples = samples_per_step(*owner)});
  };
}

}  // namespace accelerate::detail::accelerator
