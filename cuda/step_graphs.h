// cuda/step_graphs.h - steps recorded as CUDA graphs.
#pragma once

#include <memory>

#include "state/step_graph.h"

namespace accelerate::detail::cuda {

/// Graphs on one device, with one pool of memory.
[[nodiscard]] std::unique_ptr<state::StepGraphs> make_step_graphs(c10::Device device);

}  // namespace accelerate::detail::cuda
