// src/accelerator/monitoring.h - what an accelerator records for `accelerate monitor`.
#pragma once

#include <memory>

#include "optim/optimizer_core.h"
#include "tracking/recorder.h"

namespace accelerate::detail::accelerator {

struct AcceleratorCore;

/// Collective. The recorder of this process: the main process names the folder of the run.
[[nodiscard]] std::shared_ptr<tracking::Recorder> make_recorder(const AcceleratorCore& core);

/// Lets the recorder of `core`, if there is one, count the steps of its first optimizer.
void record_steps(AcceleratorCore& core, optim::OptimizerCore& optimizer);

}  // namespace accelerate::detail::accelerator
