#include "launch/flags.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

using enum FlagGroup;
using enum FlagKind;
using enum AgentUse;

constexpr std::array<GroupText, kFlagGroupCount> kGroups{{
    {"General", "The program, the configuration file and messages."},
    {"Hardware selection", "The devices to run on."},
    {"Resource selection", "How much of the hardware to use, and how."},
    {"Training paradigm", "Which engine splits the work."},
    {"Processes and machines", "How the processes of one machine or several find each other."},
    {"Output of the workers", "Log files and prefixes."},
    {"DeepSpeed", "With --use_deepspeed."},
    {"FSDP", "With --use_fsdp."},
    {"Megatron-LM", "With --use_megatron_lm."},
    {"FP8", "With --mixed_precision fp8."},
    {"Parallelism", "With --use_parallelism_config."},
    {"MPI", "Starting through mpirun."},
    {"TPU", "Known by name, but XLA exists for Python only: use Python's accelerate for TPUs."},
    {"Amazon SageMaker",
     "Known by name, but jobs there are submitted by Python's accelerate only."},
}};

// clang-format off
constexpr auto kGeneralFlags = std::to_array<Flag>({
    kHelpFlag,
    {.name = "config_file", .group = kGeneral, .value_name = "FILE",
     .help = "Take settings from this file (YAML or JSON) instead of the default one."},
    {.name = "dry_run", .group = kGeneral, .kind = kOptional, .choices = "text json",
     .help = "Start nothing. Show every setting with its source and every process with its variables; "
             "--dry_run=json for programs."},
    {.name = "quiet", .group = kGeneral, .kind = kSwitch, .short_name = 'q',
     .help = "Print no report of failed processes and no warnings."},
    {.name = "debug", .group = kGeneral, .kind = kSwitch, .variable = "ACCELERATE_DEBUG_MODE", .key = "debug",
     .help = "Workers check before each collective that their inputs fit together."},
    {.name = "monitor", .group = kGeneral, .kind = kSwitch, .variable = "ACCELERATE_MONITOR",
     .help = "Workers record what `accelerate monitor` shows, in monitor/ of their project."},
    {.name = "module", .group = kGeneral, .kind = kSwitch, .short_name = 'm',
     .help = "The program is the name of a Python module, as with `python -m`."},
    {.name = "no_python", .group = kGeneral, .kind = kSwitch,
     .help = "Execute the program itself, even when its name ends in .py."},

    {.name = "cpu", .group = kHardware, .kind = kSwitch, .variable = "ACCELERATE_USE_CPU", .key = "use_cpu",
     .help = "Train on the CPU, even if there are accelerators."},
    {.name = "multi_gpu", .group = kHardware, .kind = kSwitch,
     .help = "Train on several accelerators, one process each."},
    {.name = "tpu", .group = kHardware, .kind = kSwitch,
     .help = "Refused: XLA exists for Python only."},

    {.name = "mixed_precision", .group = kResources, .choices = "no fp16 bf16 fp8",
     .variable = "ACCELERATE_MIXED_PRECISION", .key = "mixed_precision",
     .help = "The precision of the forward and backward pass."},
    {.name = "num_processes", .group = kResources, .kind = kInteger, .key = "num_processes",
     .help = "Processes in all, over all machines. Default: one per accelerator."},
    {.name = "num_machines", .group = kResources, .kind = kMachines, .key = "num_machines", .value_name = "N[:MAX]",
     .help = "Machines of the run. MIN:MAX with --rdzv_backend c10d: start with MIN, let more join up to MAX."},
    {.name = "num_cpu_threads_per_process", .group = kResources, .kind = kInteger, .variable = "OMP_NUM_THREADS",
     .help = "CPU threads of each process. Default: 1, and on CPU runs the cores shared out."},
    {.name = "enable_cpu_affinity", .group = kResources, .kind = kSwitch, .variable = "ACCELERATE_CPU_AFFINITY",
     .key = "enable_cpu_affinity",
     .help = "Keep each process on the CPUs next to its accelerator, or on a NUMA node of its own."},
    {.name = "dynamo_backend", .group = kResources,
     .choices = "no eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensorrt "
                "aot_torchxla_trace_once torchxla_trace_once tvm hpu_backend neuron",
     .loose = true, .variable = "ACCELERATE_DYNAMO_BACKEND", .key = "dynamo_config", .value_name = "BACKEND",
     .help = "What Python programs compile the model with."},
    {.name = "dynamo_mode", .group = kResources, .fallback = "default",
     .choices = "default reduce-overhead max-autotune", .variable = "ACCELERATE_DYNAMO_MODE", .key = "dynamo_config",
     .help = "What the compiler optimises for."},
    {.name = "dynamo_use_fullgraph", .group = kResources, .kind = kSwitch, .fallback = "false",
     .variable = "ACCELERATE_DYNAMO_USE_FULLGRAPH", .key = "dynamo_config",
     .help = "Compile the model as one graph or not at all."},
    {.name = "dynamo_use_dynamic", .group = kResources, .kind = kSwitch, .fallback = "false",
     .variable = "ACCELERATE_DYNAMO_USE_DYNAMIC", .key = "dynamo_config", .help = "Compile for shapes that change."},
    {.name = "dynamo_use_regional_compilation", .group = kResources, .kind = kSwitch, .fallback = "false",
     .variable = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", .key = "dynamo_config",
     .help = "Compile repeated blocks once."},

    {.name = "use_deepspeed", .group = kParadigm, .kind = kSwitch, .variable = "ACCELERATE_USE_DEEPSPEED",
     .help = "DeepSpeed (a Python engine)."},
    {.name = "use_fsdp", .group = kParadigm, .kind = kSwitch, .variable = "ACCELERATE_USE_FSDP",
     .help = "Fully sharded data parallelism."},
    {.name = "use_parallelism_config", .group = kParadigm, .kind = kSwitch,
     .variable = "ACCELERATE_USE_PARALLELISM_CONFIG",
     .help = "Several kinds of parallelism at once; needs --use_fsdp --fsdp_version 2."},
    {.name = "use_megatron_lm", .group = kParadigm, .kind = kSwitch, .variable = "ACCELERATE_USE_MEGATRON_LM",
     .help = "A pipeline in the words of Megatron-LM."},

    {.name = "gpu_ids", .group = kDistributed, .key = "gpu_ids", .value_name = "IDS",
     .help = "The accelerators of this machine to use: \"0,1\", or \"all\"."},
    {.name = "same_network", .group = kDistributed, .kind = kSwitch, .key = "same_network",
     .several_machines = true, .help = "All machines are in one network."},
    {.name = "machine_rank", .group = kDistributed, .kind = kInteger, .key = "machine_rank",
     .help = "The number of this machine, counted from 0."},
    {.name = "main_process_ip", .group = kDistributed, .variable = "MASTER_ADDR", .key = "main_process_ip",
     .value_name = "ADDRESS", .help = "The address, or name, of machine 0."},
    {.name = "main_process_port", .group = kDistributed, .kind = kInteger, .variable = "MASTER_PORT",
     .key = "main_process_port", .value_name = "PORT",
     .help = "The port of the rendezvous on machine 0 (29500); 0 takes a free one."},
    {.name = "rdzv_backend", .group = kDistributed, .fallback = "static", .key = "rdzv_backend",
     .value_name = "BACKEND", .suggestions = "static c10d", .agent = kOnly,
     .help = "The rendezvous: static, every machine has a fixed rank; c10d, machines may join and leave."},
    {.name = "rdzv_conf", .group = kDistributed, .value_name = "K=V,...", .agent = kOnly, .several_machines = true,
     .help = "Settings of the rendezvous, in seconds: timeout=900 to wait for machines, last_call_timeout=30 to wait "
             "for more of them (c10d), keep_alive=10 of silence after which a machine is lost; is_host=yes|no, "
             "store_port=0 (c10d)."},
    {.name = "rdzv_id", .group = kDistributed, .fallback = "none", .variable = "PET_RDZV_ID", .value_name = "ID",
     .agent = kOnly, .help = "The name of the run: machines with another name are refused."},
    {.name = "local_addr", .group = kDistributed, .variable = "PET_LOCAL_ADDR", .value_name = "ADDRESS",
     .agent = kOnly, .several_machines = true, .help = "The address under which others reach this machine."},
    {.name = "max_restarts", .group = kDistributed, .kind = kInteger, .fallback = "0",
     .agent = kDemand, .help = "How often all workers are started again after a failure."},
    {.name = "monitor_interval", .group = kDistributed, .kind = kNumber, .fallback = "0.1", .value_name = "SECONDS",
     .agent = kOnly, .help = "How often the agent checks its workers and the other machines."},
    {.name = "signals_to_handle", .group = kDistributed, .fallback = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
     .variable = "PET_SIGNALS_TO_HANDLE", .value_name = "NAMES", .agent = kDemand,
     .help = "Signals that are passed on to the workers."},
    {.name = "shutdown_timeout", .group = kDistributed, .kind = kInteger, .fallback = "30",
     .variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", .value_name = "SECONDS",
     .agent = kDemand, .help = "How long workers may take to end after a signal before they are killed."},

    {.name = "tee", .group = kOutput, .short_name = 't', .fallback = "0", .value_name = "STREAMS",
     .suggestions = "0 1 2 3", .agent = kDemand,
     .help = "Also write into files: 1 stdout, 2 stderr, 3 both; by local rank: 0:3,1:1."},
    {.name = "redirects", .group = kOutput, .short_name = 'r', .fallback = "0", .variable = "PET_REDIRECTS",
     .value_name = "STREAMS", .suggestions = "0 1 2 3", .agent = kDemand,
     .help = "Write into files instead of to the console; as --tee."},
    {.name = "log_dir", .group = kOutput, .value_name = "DIR", .agent = kDemand,
     .help = "The folder of these files."},
    {.name = "role", .group = kOutput, .fallback = "default",
     .agent = kOnly, .help = "The name of the workers in the prefix of their lines."},
    {.name = "log_line_prefix_template", .group = kOutput, .variable = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
     .value_name = "TEMPLATE", .agent = kOnly,
     .help = "The prefix of lines, of rank 0 too, with ${role_name}, ${rank}, ${local_rank}. Without "
             "it rank 0 has none, the others have [${role_name}${local_rank}]:"},
    {.name = "local_ranks_filter", .group = kOutput, .variable = "PET_LOCAL_RANKS_FILTER", .value_name = "RANKS",
     .agent = kDemand, .help = "Show these local ranks only, e.g. 0,1."},

    {.name = "mpirun_hostfile", .group = kMpi, .key = "mpirun_config", .value_name = "FILE",
     .help = "Start CPU processes with mpirun on the hosts of this file."},
    {.name = "mpirun_bind_to", .group = kMpi, .fallback = "socket", .value_name = "UNIT",
     .help = "What Open MPI binds processes to."},
    {.name = "mpirun_ccl", .group = kMpi, .key = "mpirun_config", .file_only = true},

    {.name = "tpu_cluster", .group = kTpu, .kind = kSwitch, .help = "Refused."},
    {.name = "tpu_use_sudo", .group = kTpu, .kind = kSwitch, .help = "For TPU pods only."},
    {.name = "vm", .group = kTpu, .kind = kTexts, .help = "For TPU pods only."},
    {.name = "env", .group = kTpu, .kind = kTexts, .help = "For TPU pods only."},
    {.name = "main_training_function", .group = kTpu, .help = "For TPUs only."},
    {.name = "downcast_bf16", .group = kTpu, .kind = kSwitch, .help = "For TPUs only."},
    {.name = "aws_access_key_id", .group = kAws, .help = "For SageMaker only."},
    {.name = "aws_secret_access_key", .group = kAws, .help = "For SageMaker only."},
});
// clang-format on

[[noreturn]] void refuse(std::string_view source, std::string_view text, std::string_view wanted) {
  throw ConfigError(str(source, " is '", text, "', expected ", wanted, "."));
}

std::string integer(std::string_view text, std::string_view source) {
  if (const auto number = parse_signed_number<std::int64_t>(text)) return str(*number);
  // Files say 1e8 and 4.0 for whole numbers.
  const auto number = parse_signed_number<double>(text);
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (!number || std::trunc(*number) != *number || std::abs(*number) > kExact) {
    refuse(source, text, "a whole number");
  }
  return str(static_cast<std::int64_t>(*number));
}

std::string number(std::string_view text, std::string_view source) {
  const auto value = parse_signed_number<double>(text);
  if (!value || !std::isfinite(*value)) refuse(source, text, "a number");
  return python_repr(*value);
}

std::optional<std::string> truth_word(std::string_view text) {
  try {
    return str_to_bool(text) ? "true" : "false";
  } catch (const ArgumentError&) {
    return std::nullopt;
  }
}

std::string truth(std::string_view text, std::string_view source) {
  if (const auto word = truth_word(text)) return *word;
  refuse(source, text, "true or false (or yes, no, on, off, 1, 0)");
}

std::string truths(std::string_view text, std::string_view source) {
  // Python's questionnaire writes the tuple as a text: "(false, true, false)".
  auto inner = trim(text);
  if (inner.size() >= 2 && (inner.front() == '(' || inner.front() == '[')) {
    inner = inner.substr(1, inner.size() - 2);
  }
  std::vector<std::string> words;
  for (const auto& part : split(inner, ',')) words.push_back(truth(trim(part), source));
  if (words.size() != 3) {
    refuse(source, text, "three truth values with commas between them: fprop,dgrad,wgrad");
  }
  return join(words, ",");
}

std::string machines(std::string_view text, std::string_view source) {
  const auto parts = split(trim(text), ':');
  std::vector<int> numbers;
  for (const auto& part : parts) {
    if (const auto value = parse_signed_number<int>(part)) numbers.push_back(*value);
  }
  if (numbers.size() != parts.size() || numbers.size() > 2) {
    refuse(source, text, "a number of machines, or MIN:MAX");
  }
  if (numbers.front() < 1) refuse(source, text, "at least one machine");
  if (numbers.back() < numbers.front()) refuse(source, text, "MIN:MAX with MIN not above MAX");
  return numbers.size() == 2 ? str(numbers[0], ":", numbers[1]) : str(numbers[0]);
}

void check_choice(const Flag& flag, std::string_view text, std::string_view source) {
  const auto choices = flag.choice_list();
  if (std::ranges::find(choices, text) != choices.end()) return;
  if (flag.loose) {
    const auto same = [&](const std::string& c) { return to_lower(c) == to_lower(text); };
    if (std::ranges::any_of(choices, same)) return;
    const auto position = parse_number<std::size_t>(text);
    const bool by_position = flag.group == kFsdp && flag.kind != kTruthOrChoice;
    if (by_position && position && *position >= 1 && *position <= choices.size()) return;
  }
  throw ConfigError(str(source, " is '", text, "'. Choose one of: ", join(choices), ".",
                        did_you_mean(to_lower(text), choices)));
}

std::string unchecked_value(const Flag& flag, std::string_view text, std::string_view source) {
  const bool may_be_auto = flag.kind == kIntegerOrAuto || flag.kind == kNumberOrAuto;
  if (may_be_auto && to_lower(trim(text)) == "auto") return "auto";
  switch (flag.kind) {
    case kSwitch:
    case kTruth:
      return truth(text, source);
    case kTruthOrChoice:
      return truth_word(text).value_or(std::string(text));
    case kInteger:
    case kIntegerOrAuto:
      return integer(text, source);
    case kNumber:
    case kNumberOrAuto:
      return number(text, source);
    case kMachines:
      return machines(text, source);
    case kTruths:
      return truths(text, source);
    default:
      return std::string(text);
  }
}

}  // namespace

std::vector<std::string> Flag::choice_list() const {
  return choices.empty() ? std::vector<std::string>{} : split(choices, ' ');
}

std::span<const Flag> general_flags() { return kGeneralFlags; }

std::span<const Flag> launch_flags() {
  static const auto all = [] {
    std::vector<Flag> flags(general_flags().begin(), general_flags().end());
    flags.insert(flags.end(), engine_flags().begin(), engine_flags().end());
    return flags;
  }();
  return all;
}

const Flag* find_flag(std::span<const Flag> flags, std::string_view name) {
  const auto found = std::ranges::find(flags, name, &Flag::name);
  return found != flags.end() ? &*found : nullptr;
}

const Flag* find_short_flag(std::span<const Flag> flags, char letter) {
  const auto found = std::ranges::find(flags, letter, &Flag::short_name);
  return letter != '\0' && found != flags.end() ? &*found : nullptr;
}

const Flag* find_flag(std::string_view name) { return find_flag(launch_flags(), name); }

GroupText group_text(FlagGroup group) { return kGroups[static_cast<std::size_t>(group)]; }

std::string canonical_value(const Flag& flag, std::string_view text, std::string_view source) {
  auto value = unchecked_value(flag, text, source);
  if (!flag.choices.empty()) check_choice(flag, value, source);
  return value;
}

MachineRange machine_range(std::string_view text) {
  const auto parts = split(text, ':');
  const int min = parse_signed_number<int>(parts.front()).value_or(1);
  return {.min = min, .max = parse_signed_number<int>(parts.back()).value_or(min)};
}

}  // namespace accelerate::detail::launch
