#include "commands/command_table.h"

#include <algorithm>
#include <array>
#include <limits>

#include "launch/command.h"

namespace accelerate::detail::commands {
namespace {

using launch::Flag;
using launch::kHelpFlag;
using enum launch::FlagKind;

// clang-format off
constexpr auto kConfigFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "config_file", .value_name = "FILE",
     .help = "The file to write (JSON if its name ends in .json, else YAML) instead of the default one: "
             "accelerate/default_config.yaml in $HF_HOME, else in huggingface/ of $XDG_CACHE_HOME or ~/.cache."},
    {.name = "mixed_precision", .fallback = "no", .choices = "no fp16 bf16",
     .help = "The precision that `config default` writes."},
});

constexpr auto kEnvFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "config_file", .value_name = "FILE", .help = "Show this configuration file instead of the default one."},
    {.name = "json", .kind = kSwitch, .help = "Print one JSON object."},
});

constexpr auto kEstimateFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "dtypes", .kind = kWords, .choices = "float32 float16 int8 int4", .value_name = "TYPE...",
     .help = "The types to estimate for, in the order of the table. Default: all."},
    {.name = "num_processes", .value_name = "N,...", .help = "The numbers of processes of the sharding table. "
     "Default: 1,2,4,8."},
    {.name = "batch_size", .kind = kInteger, .fallback = "1", .help = "Samples per process, for the activations."},
    {.name = "sequence_length", .kind = kInteger,
     .help = "Tokens per sample, for the activations. Default: the longest of the model, 2048 at most."},
    {.name = "no_split", .kind = kTexts, .value_name = "PATTERN",
     .help = "Modules that stay on one device count as one layer: a path with * for any part, as model.layers.*."},
    {.name = "json", .kind = kSwitch, .help = "Print one JSON object, with sizes in bytes."},
    {.name = "library_name", .choices = "timm transformers", .help = "No effect: the files say what the model is."},
    {.name = "trust_remote_code", .kind = kSwitch, .help = "No effect: no code of a model is run."},
});

constexpr auto kToFsdp2Flags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "config_file", .value_name = "FILE", .help = "The configuration to convert."},
    {.name = "output_file", .value_name = "FILE", .help = "Where to write the new one. Default: over the old one, "
     "with --overwrite."},
    {.name = "overwrite", .kind = kSwitch, .help = "The output file may exist."},
});

constexpr auto kCheckpointFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "json", .kind = kSwitch, .help = "Print one JSON object instead of a table."},
});

constexpr auto kMergeFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "unsafe_serialization",
     .kind = kSwitch,
     .help = "Write pytorch_model.bin instead. Needed for optimizers, which have values that are no "
             "tensors."},
    {.name = "remove_checkpoint_dir",
     .kind = kSwitch,
     .help = "Remove CHECKPOINT_DIR after success."},
});

constexpr auto kMonitorFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "tui", .kind = kSwitch, .help = "Draw in this terminal instead."},
    {.name = "host", .fallback = "127.0.0.1", .value_name = "ADDRESS",
     .help = "The address to serve at; 0.0.0.0 for all of this machine. Other machines need a token, which is part "
             "of the printed address."},
    {.name = "port", .kind = kInteger, .fallback = "6116",
     .help = "The port; 0 takes a free one. By default the next free one if it is taken."},
    {.name = "token", .kind = kSwitch, .help = "Ask for a token on this machine too, which others may use."},
});

constexpr auto kTestFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "config_file", .value_name = "FILE", .help = "Launch with this configuration file instead of the default one."},
});

constexpr auto kTpuFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "config_file", .value_name = "FILE", .help = "For TPU pods only."},
    {.name = "tpu_name", .help = "For TPU pods only."},
    {.name = "tpu_zone", .help = "For TPU pods only."},
    {.name = "use_alpha", .kind = kSwitch, .help = "For TPU pods only."},
    {.name = "command_file", .value_name = "FILE", .help = "For TPU pods only."},
    {.name = "command", .kind = kTexts, .help = "For TPU pods only."},
    {.name = "install_accelerate", .kind = kSwitch, .help = "For TPU pods only."},
    {.name = "accelerate_version", .help = "For TPU pods only."},
    {.name = "debug", .kind = kSwitch, .help = "For TPU pods only."},
});
// clang-format on

constexpr Command kConfig{
    .name = "config",
    .help = "Ask for the settings of this machine and write them to a file.",
    .usage = "[default|update] [flags]",
    .about =
        "Asks for the settings of runs on this machine and writes them to the file that "
        "`accelerate launch` and Python Accelerate read. In a terminal, menus are used with the "
        "arrow keys, j and k or a number, and Enter. If stdin is not a terminal, every line of it "
        "answers one question: a menu takes the number of a choice, counted from 0, or its text; "
        "an empty line takes the default. `config default` asks nothing and writes a file for all "
        "accelerators of this machine. `config update` reads an existing file and writes it in the "
        "form of this version.",
    .flags = [] { return std::span<const Flag>(kConfigFlags); },
    .operand = {.name = "default|update", .choices = "default update"},
    .examples =
        "  accelerate config\n"
        "  accelerate config --config_file two_nodes.yaml\n"
        "  accelerate config default --mixed_precision bf16\n"
        "  accelerate config update --config_file old.yaml\n",
};

constexpr Command kEnv{
    .name = "env",
    .help = "Show what a report of a problem should contain.",
    .about =
        "Shows the versions of Accelerate, LibTorch, NCCL, compiler and driver, the CPUs, "
        "memory and GPUs of this machine, and the configuration file.",
    .flags = [] { return std::span<const Flag>(kEnvFlags); },
    .examples =
        "  accelerate env\n"
        "  accelerate env --json\n",
};

constexpr Command kEstimateMemory{
    .name = "estimate-memory",
    .help = "Estimate the memory that a model needs.",
    .usage = "[flags] MODEL",
    .about =
        "Estimates the memory to load a model and to train it. MODEL is a .safetensors file, a "
        "folder with one or with an index of several, or a folder with the config.json of a "
        "Hugging Face model (or that file). Only headers are read, nothing is downloaded. The "
        "first table is Python Accelerate's. The second one shows what a process holds while "
        "training with Adam: by ZeRO stage (1 shards optimizer states, 2 gradients too, 3 "
        "parameters too) and number of processes.",
    .flags = [] { return std::span<const Flag>(kEstimateFlags); },
    .operand = {.name = "MODEL",
                .missing = "There is no model. Name a .safetensors file or the folder of a model: "
                           "accelerate estimate-memory ./bert-base-cased"},
    .examples =
        "  accelerate estimate-memory ./bert-base-cased\n"
        "  accelerate estimate-memory model.safetensors --dtypes float32 float16\n"
        "  accelerate estimate-memory ./llama --num_processes 8,64 --batch_size 4\n",
};

constexpr Command kToFsdp2{
    .name = "to-fsdp2",
    .help = "Convert a configuration from FSDP 1 to 2.",
    .about =
        "Converts the fsdp_config of a configuration file from version 1 to version 2. Keys "
        "that version 2 does not have are removed, with a message for each.",
    .flags = [] { return std::span<const Flag>(kToFsdp2Flags); },
    .examples =
        "  accelerate to-fsdp2 --config_file old.yaml --output_file new.yaml\n"
        "  accelerate to-fsdp2 --config_file config.yaml --overwrite\n",
};

constexpr Command kTpuConfig{
    .name = "tpu-config",
    .help = "Refused: TPU pods are set up by Python's accelerate.",
    .about =
        "TPUs are reached through XLA, which exists for Python only. The command is known by "
        "name; it ends with an error that says what to use.",
    .flags = [] { return std::span<const Flag>(kTpuFlags); },
};

constexpr Command kCheckpoint{
    .name = "checkpoint",
    .help = "List, show, verify and compare checkpoints and their files.",
    .usage = "ls [DIR] | show PATH | verify DIR... | diff A B [flags]",
    .about =
        "`ls` lists the checkpoints of a project folder, of a folder with checkpoint_N folders "
        "(default: this folder) or a single one, and says which are complete. `show` prints the "
        "tensors of a safetensors file or of a file of torch.save: name, dtype, shape, bytes and "
        "checksum (XXH3-64, the same as `xxhsum -H3` prints for the bytes); of a checkpoint, its "
        "files and when it was saved. `verify` compares sizes and checksums of all files with the "
        "manifest accelerate_state.json; the exit code is 1 if a checkpoint is damaged or has no "
        "manifest. `diff` compares two checkpoints or two files tensor by tensor; the exit code "
        "is 1 if they differ. Nothing in a file is executed.",
    .flags = [] { return std::span<const Flag>(kCheckpointFlags); },
    .operand = {.name = "ls|show|verify|diff",
                .choices = "ls show verify diff",
                .count = std::numeric_limits<std::size_t>::max(),
                .missing = "Say what to do: accelerate checkpoint ls, show, verify or diff."},
    .examples =
        "  accelerate checkpoint ls runs/mnist\n"
        "  accelerate checkpoint show model.safetensors\n"
        "  accelerate checkpoint verify runs/mnist\n"
        "  accelerate checkpoint diff checkpoint_0 checkpoint_1\n",
};

constexpr Command kMergeWeights{
    .name = "merge-weights",
    .help = "Merge the shards of a checkpoint into one file.",
    .usage = "CHECKPOINT_DIR OUTPUT_PATH [flags]",
    .about =
        "Merges the weights that FSDP saved with SHARDED_STATE_DICT into one file in OUTPUT_PATH: "
        "model.safetensors. CHECKPOINT_DIR is the folder with the file .metadata, such as "
        "checkpoint_0/pytorch_model_fsdp_0. Memory holds one tensor at a time.",
    .flags = [] { return std::span<const Flag>(kMergeFlags); },
    .operand = {.name = "CHECKPOINT_DIR OUTPUT_PATH",
                .count = 2,
                .missing =
                    "Name two folders: accelerate merge-weights CHECKPOINT_DIR OUTPUT_PATH."},
    .examples = "  accelerate merge-weights checkpoint_0/pytorch_model_fsdp_0 merged\n",
};

constexpr Command kMonitor{
    .name = "monitor",
    .help = "Watch runs in a browser or in this terminal.",
    .usage = "[DIR] [flags]",
    .about =
        "Shows the runs in a folder and below it (default: this folder), while they go on and "
        "afterwards: losses and metrics, learning rate, throughput, step time and waiting time of "
        "each process, memory, GPUs, checkpoints and logs. It serves a page to this machine until "
        "Ctrl-C and prints its address. A run is recorded if ACCELERATE_MONITOR=1 is set, by "
        "`accelerate launch --monitor`, or with `monitor` of its ProjectConfiguration; of other "
        "runs, the files of the tracker jsonl are shown.",
    .flags = [] { return std::span<const Flag>(kMonitorFlags); },
    .operand = {.name = "DIR"},
    .examples =
        "  accelerate monitor runs\n"
        "  accelerate monitor runs/mnist --tui\n"
        "  accelerate monitor runs --host 0.0.0.0 --port 8080\n",
};

constexpr Command kTest{
    .name = "test",
    .help = "Check that the processes of a launch train together.",
    .about =
        "Launches a self-test with the settings of the configuration file, as `accelerate launch` "
        "does a program. One line says what each check has seen: ranks and devices, collectives, "
        "data loaders, random states, mixed precision, a training run that must equal that of one "
        "process, gradient accumulation, saving and loading. The first check that fails ends the "
        "test, with what each rank expected and got.",
    .flags = [] { return std::span<const Flag>(kTestFlags); },
    .examples =
        "  accelerate test\n"
        "  accelerate test --config_file two_processes.yaml\n",
};

constexpr Command kCompletion{
    .name = "completion",
    .help = "Print the completion script for bash, zsh or fish.",
    .usage = "bash|zsh|fish",
    .about = "Prints the completion script of a shell.",
    .operand = {.name = "shell",
                .choices = "bash zsh fish",
                .missing = "Name one shell: accelerate completion bash, zsh or fish."},
    .examples =
        "  source <(accelerate completion bash)     in ~/.bashrc\n"
        "  source <(accelerate completion zsh)      in ~/.zshrc, after compinit\n"
        "  accelerate completion fish | source      in ~/.config/fish/config.fish\n",
};

}  // namespace

std::span<const Command> command_table() {
  static const auto table = std::to_array<Command>({
      launch::launch_command(),
      kConfig,
      kEnv,
      kEstimateMemory,
      kToFsdp2,
      kCheckpoint,
      kMergeWeights,
      kMonitor,
      kTest,
      kCompletion,
      kTpuConfig,
  });
  return table;
}

const Command* find_command(std::string_view name) {
  const auto table = command_table();
  const auto found = std::ranges::find(table, name, &Command::name);
  return found != table.end() ? &*found : nullptr;
}

}  // namespace accelerate::detail::commands
