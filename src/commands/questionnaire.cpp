#include "commands/questionnaire.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "commands/engine_questions.h"
#include "core/files.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

struct MachineType {
  DistributedType type;
  std::string_view choice;
  /// What the question for the number of processes counts.
  std::string_view unit;
};
using enum DistributedType;
constexpr std::array<MachineType, 11> kMachineTypes{{
    {kNo, "No distributed training", ""},
    {kMultiCpu, "multi-CPU", "processes"},
    {kMultiXpu, "multi-XPU", "XPU(s)"},
    {kMultiHpu, "multi-HPU", "HPU(s)"},
    {kMultiGpu, "multi-GPU", "GPU(s)"},
    {kMultiNpu, "multi-NPU", "NPU(s)"},
    {kMultiMlu, "multi-MLU", "MLU(s)"},
    {kMultiSdaa, "multi-SDAA", "SDAA(s)"},
    {kMultiMusa, "multi-MUSA", "MUSA(s)"},
    {kMultiNeuron, "multi-NEURON", "NEURON cores"},
    {kXla, "TPU", ""},
}};

class Questionnaire {
 public:
  Questionnaire(Prompter& prompter, const Environment& environment)
      : prompter_(prompter), environment_(environment) {
    // Written whatever the answers are.
    config_.downcast_bf16 = "no";
    config_.same_network = true;
    config_.tpu_env = std::vector<std::string>();
  }

  ClusterConfig run() {
    where();
    machine_type();
    machines();
    cpu();
    config_.dynamo_config = ask_for_dynamo(prompter_);
    engine();
    processes();
    devices();
    precision();
    return std::move(config_);
  }

 private:
  bool yes_no(const std::string& question, bool preset = false) {
    return ask_yes_no(prompter_, question, preset);
  }

  [[nodiscard]] bool is_accelerator() const {
    return chosen_->type != kNo && chosen_->type != kMultiCpu;
  }

  void where() {
    const auto index = prompter_.choose("In which compute environment are you running?",
                                        {"This machine", "AWS (Amazon SageMaker)"}, 0);
    if (index == 0) return;
    throw UnsupportedError(
        "Jobs on Amazon SageMaker are submitted by a Python package, so the C++ command does not "
        "ask for their settings. Run Python's `accelerate config`; its files can be read here.");
  }

  void machine_type() {
    std::vector<std::string> choices;
    for (const auto& type : kMachineTypes) choices.emplace_back(type.choice);
    chosen_ = &kMachineTypes[prompter_.choose("Which type of machine are you using?", choices, 0)];
    config_.distributed_type = chosen_->type;
    if (chosen_->type != kXla) return;
    throw UnsupportedError(
        "TPUs are reached through XLA, which exists for Python only. Run Python's `accelerate "
        "config`; its files can be read here.");
  }

  void machines() {
    if (chosen_->type == kNo) return;
    config_.num_machines = ask_integer(
        prompter_,
        "How many different machines will you use (more than 1 for multi-node training)?", 1,
        {.min = 1, .max = 65536});
    if (config_.num_machines > 1) other_machines();
    config_.debug = yes_no(
        "Should distributed operations be checked for errors while running? This avoids timeouts, "
        "but is slower.");
  }

  void other_machines() {
    std::vector<std::string> ranks;
    for (std::int64_t rank = 0; rank < config_.num_machines; ++rank) ranks.push_back(str(rank));
    config_.machine_rank =
        static_cast<std::int64_t>(prompter_.choose("What is the rank of this machine?", ranks, 0));
    config_.main_process_ip =
        ask_text(prompter_, "What is the IP address of the machine that hosts the main process?");
    config_.main_process_port = ask_integer(prompter_, "What is the port of the main process?",
                                            std::nullopt, {.min = 1, .max = 65535});
    config_.same_network = yes_no(
        "Are all machines on the same local network? Answer `no` if nodes are in the cloud or on "
        "different networks.",
        true);
    if (*config_.same_network) return;
    config_.rdzv_backend = ask_text(
        prompter_, "What rendezvous backend will you use ('static', 'c10d', ...)?", "static");
  }

  void cpu() {
    if (chosen_->type == kNo) {
      config_.use_cpu = yes_no(
          "Do you want to run your training on CPU only (even if a GPU or another accelerator is "
          "available)?");
    }
    if (chosen_->type != kMultiCpu) return;
    config_.use_cpu = true;
    if (!yes_no("Do you want accelerate to launch mpirun?")) return;
    const auto hostfile =
        ask_text(prompter_, "Please enter the path of the hostfile of mpirun", "~/hostfile");
    config_.mpirun_config.set("mpirun_hostfile", expand_user(hostfile, environment_).string());
  }

  // DeepSpeed, FSDP or Megatron-LM. The first that is wanted becomes the type of the run.
  void engine() {
    if (chosen_->type == kMultiCpu) return;
    if (yes_no("Do you want to use DeepSpeed?")) {
      refuse_neuron("DeepSpeed");
      config_.distributed_type = kDeepspeed;
      config_.deepspeed_config = ask_for_deepspeed(prompter_, config_.num_machines);
      return;
    }
    if (!is_accelerator()) return;
    if (yes_no("Do you want to use FullyShardedDataParallel?")) {
      refuse_neuron("FSDP");
      config_.distributed_type = kFsdp;
      config_.fsdp_config = ask_for_fsdp(prompter_);
      if (config_.fsdp_config.at("fsdp_version").as_int() == 2) {
        config_.parallelism_config = ask_for_parallelism(prompter_);
      }
      return;
    }
    if (chosen_->type != kMultiGpu || !yes_no("Do you want to use Megatron-LM?")) return;
    config_.distributed_type = kMegatronLm;
    config_.megatron_lm_config = ask_for_megatron(prompter_);
  }

  void refuse_neuron(std::string_view engine) const {
    if (chosen_->type != kMultiNeuron) return;
    throw ConfigError(str(engine, " is not supported on Neuron devices. Run `accelerate config` ",
                          "again and answer `no` there."));
  }

  void processes() {
    config_.num_processes = 1;
    if (config_.distributed_type == kNo) return;
    const bool plain = config_.distributed_type == chosen_->type;
    config_.num_processes = ask_integer(prompter_,
                                        str("How many ", plain ? chosen_->unit : "GPU(s)",
                                            " should be used for distributed training?"),
                                        1);
    if (config_.distributed_type == kMultiGpu && config_.num_machines == 1 &&
        config_.num_processes == 1) {
      throw ConfigError(
          "The type of machine is multi-GPU, but 1 GPU on a single machine is to be used. Run "
          "`accelerate config` again and select `No distributed training`, or name more GPUs.");
    }
  }

  void devices() {
    const bool plain = config_.distributed_type == chosen_->type;
    if (!plain || config_.use_cpu) return;
    config_.gpu_ids = ask_text(prompter_,
                               "What GPU(s) (by id) should be used for training on this machine, "
                               "as a comma-separated list?",
                               "all");
    if (chosen_->type != kNo && chosen_->type != kMultiGpu) return;
    config_.enable_cpu_affinity =
        yes_no("Would you like to enable numa efficiency (on NVIDIA hardware)?");
  }

  void precision() {
    // DeepSpeed's own file has the precision.
    if (config_.deepspeed_config.contains("deepspeed_config_file")) return;
    constexpr std::array kChoices{PrecisionType::kNo, PrecisionType::kFp16, PrecisionType::kBf16,
                                  PrecisionType::kFp8};
    std::vector<std::string> names;
    for (const auto precision : kChoices) names.emplace_back(to_string(precision));
    const auto precision =
        kChoices[prompter_.choose("Do you wish to use mixed precision?", names, 0)];
    config_.mixed_precision = precision;
    if (precision == PrecisionType::kFp8) config_.fp8_config = ask_for_fp8(prompter_);
    if (precision == PrecisionType::kNo && !config_.dynamo_config.empty() && !config_.use_cpu) {
      prompter_.say(
          "Torch dynamo without mixed precision needs TF32 to be efficient. Python's Accelerate "
          "turns it on when it starts your program.");
    }
  }

  Prompter& prompter_;
  const Environment& environment_;
  const MachineType* chosen_ = nullptr;
  ClusterConfig config_;
};

}  // namespace

ClusterConfig ask_for_config(Prompter& prompter, const Environment& environment) {
  return Questionnaire(prompter, environment).run();
}

}  // namespace accelerate::detail::commands
