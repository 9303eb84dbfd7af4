// The command line of `accelerate launch`.
#include <array>

#include "launch/command.h"

namespace accelerate::detail::launch {
namespace {

// Flags of torchrun with another name here.
constexpr std::array<Command::Hint, 10> kTorchrunWords{{
    {"nproc_per_node", "num_processes (of all machines together)"},
    {"nproc", "num_processes"},
    {"nnodes", "num_machines"},
    {"node_rank", "machine_rank"},
    {"master_addr", "main_process_ip"},
    {"master_port", "main_process_port"},
    {"rdzv_endpoint", "main_process_ip and --main_process_port"},
    {"standalone", "main_process_port 0"},
    {"fsdp", "use_fsdp"},
    {"deepspeed", "use_deepspeed"},
}};

constexpr Command kLaunch{
    .name = "launch",
    .help = "Start a program on one or more accelerators, CPUs and machines.",
    .usage = "[flags] program [arguments of the program]",
    .about =
        "Starts a program: an executable, a Python script (its name ends in .py) or, with -m, a "
        "Python module. Flags stand before the program; every word behind it belongs to the "
        "program. Each flag is also known with hyphens and as --flag=value, each switch as "
        "--no_<switch>. A flag counts more than its [VARIABLE], and this more than the "
        "configuration file; --dry_run shows which of them was taken.",
    .flags = launch_flags,
    .operand = {.name = "program",
                .missing = "There is no program to start. Name it behind the flags, and its "
                           "arguments behind it: accelerate launch --num_processes 2 ./train "
                           "--epochs 3",
                .takes_rest = true},
    .examples =
        "  accelerate launch --num_processes 2 ./train --epochs 3\n"
        "  accelerate launch --cpu --num_processes 4 train.py\n"
        "  accelerate launch --num_processes 16 --num_machines 2 --machine_rank 0 \\\n"
        "      --main_process_ip 10.0.0.1 ./train\n",
    .hints = kTorchrunWords,
};

}  // namespace

const Command& launch_command() { return kLaunch; }

}  // namespace accelerate::detail::launch
