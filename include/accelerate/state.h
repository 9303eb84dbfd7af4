// accelerate/state.h - who am I: ranks, device, process group, gradient synchronisation.
//
// Each class is a handle to one state per process: the first construction makes it, later ones
// attach to it, and a handle made before `_reset_state()` comes alive again with the next state.
//
//     accelerate::PartialState state;              // finds launcher, MPI, Slurm, or is alone
//     if (state.is_main_process()) std::cout << state;
#pragma once

#include "accelerate/state/accelerator_state.h"
#include "accelerate/state/gradient_state.h"
#include "accelerate/state/partial_state.h"
