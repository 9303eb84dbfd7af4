#include "commands/engine_questions.h"

#include <string>
#include <utility>
#include <vector>

#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

using Words = std::vector<std::string>;

// Answers that become the keys of a section.
class Section {
 public:
  Section(Prompter& prompter, std::string prefix)
      : prompter_(prompter), prefix_(std::move(prefix)) {}

  void set(const std::string& key, Value value) { entries_.set(prefix_ + key, std::move(value)); }

  std::string choose(const std::string& key, const std::string& question, const Words& choices,
                     std::size_t preset = 0) {
    auto chosen = choices[prompter_.choose(question, choices, preset)];
    set(key, chosen);
    return chosen;
  }
  /// Also of a question that is no key.
  bool wants(const std::string& question, bool preset = false) {
    return ask_yes_no(prompter_, question, preset);
  }
  bool yes_no(const std::string& key, const std::string& question, bool preset = false) {
    const bool answer = wants(question, preset);
    set(key, answer);
    return answer;
  }
  std::int64_t integer(const std::string& key, const std::string& question, std::int64_t preset,
                       std::int64_t min = 1) {
    const auto answer = ask_integer(prompter_, question, preset, {.min = min});
    set(key, answer);
    return answer;
  }
  void number(const std::string& key, const std::string& question, double preset) {
    set(key, ask_number(prompter_, question, preset));
  }
  void text(const std::string& key, const std::string& question,
            const std::optional<std::string>& preset = std::nullopt) {
    set(key, ask_text(prompter_, question, preset));
  }

  Value::Dict take() { return std::move(entries_); }

 private:
  Prompter& prompter_;
  std::string prefix_;
  Value::Dict entries_;
};

void ask_for_zero(Section& section, Prompter& prompter) {
  const Words devices{"none", "cpu", "nvme"};
  const auto stage = prompter.choose("What should be your DeepSpeed's ZeRO optimization stage?",
                                     {"0", "1", "2", "3"}, 2);
  section.set("zero_stage", stage);
  if (stage >= 2) {
    const auto optimizer =
        section.choose("offload_optimizer_device", "Where to offload optimizer states?", devices);
    const auto parameters =
        section.choose("offload_param_device", "Where to offload parameters?", devices);
    if (parameters == "nvme") {
      section.text("offload_param_nvme_path", "NVMe path to offload parameters?", "/nvme");
    }
    if (optimizer == "nvme") {
      section.text("offload_optimizer_nvme_path", "NVMe path to offload optimizer states?",
                   "/nvme");
    }
  }
  section.integer("gradient_accumulation_steps",
                  "How many gradient accumulation steps does your program use?", 1);
  if (section.wants("Do you want to use gradient clipping?")) {
    section.number("gradient_clipping", "What is the gradient clipping value?", 1.0);
  }
  if (stage == 3) {
    section.yes_no("zero3_save_16bit_model",
                   "Do you want to save 16-bit model weights when using ZeRO Stage-3?");
  }
}

void ask_for_deepspeed_hosts(Section& section) {
  const auto launcher =
      section.choose("deepspeed_multinode_launcher", "Which type of launcher do you want to use?",
                     {"pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"});
  if (launcher == "standard") return;
  section.text("deepspeed_hostfile",
               "DeepSpeed finds its machines in a hostfile with a line `hostname slots=[num_gpus]` "
               "for each, e.g. `localhost slots=2`. Where is the hostfile?");
  if (section.wants("Do you want to specify an exclusion filter string?")) {
    section.text("deepspeed_exclusion_filter", "DeepSpeed exclusion filter string");
  }
  if (section.wants("Do you want to specify an inclusion filter string?")) {
    section.text("deepspeed_inclusion_filter", "DeepSpeed inclusion filter string");
  }
}

void ask_for_wrapping(Section& section) {
  const auto policy = section.choose("auto_wrap_policy", "What should be your auto wrap policy?",
                                     {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"});
  if (policy == "SIZE_BASED_WRAP") {
    section.integer("min_num_params",
                    "What should be the minimum number of parameters of a wrapped module?",
                    100'000'000);
  }
  if (policy != "TRANSFORMER_BASED_WRAP") return;
  if (section.wants("Do you want to wrap the model's `_no_split_modules`? Only for Transformers "
                    "models.")) {
    return;
  }
  section.text(
      "transformer_layer_cls_to_wrap",
      "Which transformer layer classes should be wrapped (comma-separated, case-sensitive, "
      "e.g. `BertLayer,BertEmbeddings`)?");
}

// Margin, interval, format and history of Transformer Engine.
void ask_for_transformer_engine(Section& section) {
  section.yes_no(
      "use_autocast_during_eval",
      "Do you want to use FP8 autocast during eval mode? Metrics are better without it.");
  section.integer("margin", "What margin should be used for gradient scaling?", 0, 0);
  section.integer("interval", "How often, in steps, is the scaling factor recomputed?", 1);
  section.choose("fp8_format", "Which weight format should be used?", {"HYBRID", "E4M3", "E5M2"});
  section.integer("amax_history_length",
                  "What length of history should be used for the amax scaling factor?", 1024);
  section.choose("amax_compute_algorithm",
                 "Which algorithm should be used for the amax scaling factor?",
                 {"max", "most_recent"});
  Value::List higher(3, false);
  if (section.wants("Do you want to execute `fprop`, `dgrad` and `wgrad` GEMMs in higher "
                    "precision?")) {
    for (const auto& [index, name] :
         {std::pair<std::size_t, const char*>{0, "fprop"}, {1, "dgrad"}, {2, "wgrad"}}) {
      higher[index] = section.wants(str("Should `", name, "` be executed in higher precision?"));
    }
  }
  section.set("override_linear_precision", Value(std::move(higher)));
}

}  // namespace

Value::Dict ask_for_dynamo(Prompter& prompter) {
  Section section(prompter, "dynamo_");
  if (!section.wants("Do you wish to optimize your program with torch dynamo?")) return {};
  const Words backends = split(
      "eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt "
      "tensorrt aot_torchxla_trace_once torchxla_trace_once tvm",
      ' ');
  const auto backend = prompter.choose("Which dynamo backend would you like to use?", backends, 2);
  section.set("backend", to_upper(backends[backend]));
  if (section.wants("Do you want to customize the defaults sent to torch.compile?")) {
    section.choose("mode", "Which mode do you want to use?",
                   {"default", "reduce-overhead", "max-autotune"});
    section.yes_no("use_fullgraph",
                   "Do you want the fullgraph mode (`no` may break the model into subgraphs)?");
    section.yes_no("use_dynamic", "Do you want to enable dynamic shape tracing?");
    section.yes_no("use_regional_compilation", "Do you want to enable regional compilation?");
  }
  return section.take();
}

Value::Dict ask_for_deepspeed(Prompter& prompter, std::int64_t num_machines) {
  Section section(prompter, "");
  if (section.wants("Do you want to specify a json file to a DeepSpeed config?")) {
    section.text("deepspeed_config_file",
                 "Please enter the path of the json file with the DeepSpeed config", "none");
  } else {
    ask_for_zero(section, prompter);
  }
  section.yes_no(
      "zero3_init_flag",
      "Do you want to enable `deepspeed.zero.Init` with ZeRO Stage-3, to construct massive "
      "models?");
  if (section.wants("Do you want to enable Mixture-of-Experts training (MoE)?")) {
    section.text("deepspeed_moe_layer_cls_names",
                 "Which are the MoE layer classes (comma-separated, case-sensitive, e.g. "
                 "`MixtralSparseMoeBlock`, `JetMoEAttention,JetMoEBlock`)?");
  }
  if (num_machines > 1) ask_for_deepspeed_hosts(section);
  return section.take();
}

Value::Dict ask_for_fsdp(Prompter& prompter) {
  Section section(prompter, "fsdp_");
  const auto version =
      prompter.choose("What should be your FSDP version?", {"FSDP1", "FSDP2"}, 1) + 1;
  section.set("version", version);
  if (version == 1) {
    section.choose(
        "reshard_after_forward", "What should be your sharding strategy?",
        {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"});
  } else {
    section.yes_no("reshard_after_forward", "Do you want to enable resharding after forward?",
                   true);
  }
  section.yes_no("offload_params", "Do you want to offload parameters and gradients to CPU?");
  ask_for_wrapping(section);
  if (version == 1) {
    section.choose("backward_prefetch", "What should be your FSDP's backward prefetch policy?",
                   {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"});
  }
  section.choose("state_dict_type", "What should be your FSDP's state dict type?",
                 version == 1 ? Words{"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"}
                              : Words{"SHARDED_STATE_DICT", "FULL_STATE_DICT"});
  if (version == 1) {
    section.yes_no("forward_prefetch", "Do you want to enable FSDP's forward prefetch policy?");
    section.yes_no("use_orig_params", "Do you want to enable FSDP's `use_orig_params` feature?",
                   true);
  }
  const bool efficient = section.yes_no(
      "cpu_ram_efficient_loading",
      "Do you want to enable CPU RAM efficient model loading? Only for Transformers models.", true);
  if (version == 1 && efficient) section.set("sync_module_states", true);
  if (version == 1 && !efficient) {
    section.yes_no(
        "sync_module_states",
        "Do you want each wrapped FSDP unit to broadcast module parameters from rank 0 at "
        "the start?",
        true);
  }
  section.yes_no("activation_checkpointing",
                 "Do you want to enable FSDP activation checkpointing?");
  return section.take();
}

Value::Dict ask_for_parallelism(Prompter& prompter) {
  Section section(prompter, "parallelism_config_");
  if (!section.wants("Do you want to use the parallelism config?")) return {};
  section.integer("dp_replicate_size", "What is the data parallelism replicate size?", 1);
  section.integer("dp_shard_size", "What is the FSDP shard size?", 1);
  section.integer("tp_size", "What is the tensor parallelism size?", 1);
  if (section.integer("cp_size", "What is the context parallelism size?", 1) > 1) {
    section.choose("cp_comm_strategy", "What is the context parallelism communication strategy?",
                   {"allgather", "alltoall"});
  }
  return section.take();
}

Value::Dict ask_for_megatron(Prompter& prompter) {
  Section section(prompter, "megatron_lm_");
  if (section.integer("tp_degree", "What is the Tensor Parallelism degree/size?", 1) > 1) {
    section.yes_no("sequence_parallelism", "Do you want to enable Sequence Parallelism?", true);
  }
  if (section.integer("pp_degree", "What is the Pipeline Parallelism degree/size?", 1) > 1) {
    section.integer("num_micro_batches", "What is the number of micro-batches?", 1);
  }
  section.yes_no("recompute_activations",
                 "Do you want to enable selective activation recomputation?", true);
  section.yes_no("use_distributed_optimizer",
                 "Do you want to use distributed optimizer, which shards optimizer state and "
                 "gradients across data parallel ranks?",
                 true);
  section.number("gradient_clipping",
                 "What is the gradient clipping value based on global L2 Norm (0 to disable)?",
                 1.0);
  return section.take();
}

Value::Dict ask_for_fp8(Prompter& prompter) {
  Section section(prompter, "");
  const Words backends{"ao", "te", "msamp"};
  const auto backend =
      backends[prompter.choose("Which FP8 backend do you want to use?", backends, 0)];
  section.set("backend", to_upper(backend));
  if (backend == "te") ask_for_transformer_engine(section);
  if (backend == "msamp") {
    section.choose("optimization_level", "Which optimization level should be used?", {"O1", "O2"},
                   1);
  }
  if (backend == "ao") {
    section.yes_no("enable_fsdp_float8_all_gather",
                   "Do you want to enable FSDP2 float8 all gather? Recommended with FSDP2.", true);
    section.yes_no(
        "pad_inner_dim",
        "Do you want to pad the inner dimension of weight matrices before float8 matmuls? "
        "_scaled_mm needs it; padding may cause memory spikes.",
        true);
  }
  return section.take();
}

}  // namespace accelerate::detail::commands
