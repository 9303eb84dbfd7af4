#include "launch/mode_variables.h"

#include <string_view>

#include "core/ports.h"
#include "core/text.h"
#include "launch/checks.h"

namespace accelerate::detail::launch {
namespace {

// The spelling of Python's launcher; readers accept both.
std::string python_bool(bool truth) { return truth ? "True" : "False"; }

class Writer {
 public:
  Writer(const ResolvedLaunch& run, const Environment& outer, const MachineFacts& facts)
      : run_(run), set_(run.settings), outer_(outer), facts_(facts) {}

  std::map<std::string, std::string> write(std::vector<std::string>& warnings) {
    switches();
    devices();
    variables_["ACCELERATE_MIXED_PRECISION"] = text("mixed_precision");
    engines();
    if (!run_.deepspeed) dynamo();
    // DeepSpeed's own launcher sets the number of threads itself.
    if (!run_.uses_deepspeed_launcher()) variables_["OMP_NUM_THREADS"] = run_.threads;
    cpu();
    if (run_.mode != LaunchMode::kAgent && !run_.deepspeed) master_address();
    if (run_.deepspeed) deepspeed();
    if (run_.mode != LaunchMode::kSimple) peer_access(warnings);
    if (run_.mpi && set_.has("mpirun_ccl")) variables_["CCL_WORKER_COUNT"] = text("mpirun_ccl");
    return std::move(variables_);
  }

 private:
  std::string text(std::string_view name) const { return set_.text(name).value_or(""); }

  void put(std::string_view name, std::string value) {
    variables_[std::string(find_flag(name)->variable)] = std::move(value);
  }
  void put(std::string_view name) { put(name, text(name)); }

  void set_switch(const std::string& variable, bool on, const char* on_text, const char* off_text) {
    if (on) {
      variables_[variable] = on_text;
    } else if (outer_.flag(variable)) {
      variables_[variable] = off_text;
    }
  }

  void switches() {
    set_switch("ACCELERATE_DEBUG_MODE", set_.truth("debug"), "true", "false");
    // Given, it goes before what the program says.
    if (set_.has("monitor")) variables_["ACCELERATE_MONITOR"] = set_.truth("monitor") ? "1" : "0";
    set_switch("ACCELERATE_CPU_AFFINITY", set_.truth("enable_cpu_affinity"), "1", "0");
    set_switch("ACCELERATE_USE_DEEPSPEED", run_.deepspeed, "true", "false");
    set_switch("ACCELERATE_USE_FSDP", run_.fsdp, "true", "false");
    set_switch("ACCELERATE_USE_MEGATRON_LM", run_.megatron, "true", "false");
    set_switch("ACCELERATE_USE_PARALLELISM_CONFIG", run_.parallelism, "true", "false");
  }

  void devices() {
    const std::string ids = text("gpu_ids");
    if (ids.empty() || ids == "all") return;
    variables_[std::string(visible_devices_variable(run_.accelerator))] = ids;
  }

  // True for settings of a dimension of parallelism that is not in use.
  bool is_unused_dimension(const Flag& flag) const {
    const auto unused = [&](std::string_view size) { return set_.integer(size).value_or(1) <= 1; };
    if (flag.name == "parallelism_config_cp_comm_strategy") {
      return unused("parallelism_config_cp_size");
    }
    const bool of_sequence = flag.name.starts_with("parallelism_config_sp_seq") ||
                             flag.name == "parallelism_config_sp_attn_implementation";
    return of_sequence && unused("parallelism_config_sp_size");
  }

  // All settings of the engines in use. Python's launcher writes the truth values of DeepSpeed and
  // FSDP in lower case, and those of the other engines as str() does.
  void engines() {
    for (const Flag& flag : engine_flags()) {
      if (!engine_in_use(run_, flag) || !set_.has(flag.name) || is_unused_dimension(flag)) continue;
      const bool deepspeed = flag.group == FlagGroup::kDeepspeed;
      const bool truth = flag.kind == FlagKind::kTruth || flag.kind == FlagKind::kSwitch;
      std::string value = text(flag.name);
      if (flag.kind == FlagKind::kTruths) {
        override_precisions(split(value, ','));
      } else if (flag.variable.empty()) {
        continue;
      } else if (truth && !deepspeed && flag.group != FlagGroup::kFsdp) {
        put(flag.name, python_bool(value == "true"));
      } else if (flag.kind == FlagKind::kTruthOrChoice || (deepspeed && !flag.choices.empty())) {
        put(flag.name, to_lower(value));
      } else {
        put(flag.name, std::move(value));
      }
    }
  }

  void override_precisions(const std::vector<std::string>& words) {
    variables_["ACCELERATE_FP8_OVERRIDE_FPROP"] = python_bool(words[0] == "true");
    variables_["ACCELERATE_FP8_OVERRIDE_DGRAD"] = python_bool(words[1] == "true");
    variables_["ACCELERATE_FP8_OVERRIDE_WGRAD"] = python_bool(words[2] == "true");
  }

  void dynamo() {
    put("dynamo_backend", to_upper(text("dynamo_backend")));
    put("dynamo_mode");
    for (const auto* name :
         {"dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"}) {
      put(name, python_bool(set_.truth(name)));
    }
  }

  void cpu() {
    const bool simple = run_.mode != LaunchMode::kAgent && !run_.deepspeed;
    if (simple || run_.cpu || outer_.contains("ACCELERATE_USE_CPU")) {
      variables_["ACCELERATE_USE_CPU"] = python_bool(run_.cpu);
    }
    if (!run_.cpu) return;
    variables_["KMP_AFFINITY"] = "granularity=fine,compact,1,0";
    variables_["KMP_BLOCKTIME"] = "1";
  }

  // An MPI or Slurm job on several hosts finds rank 0 itself unless the address is given.
  bool spans_hosts() const {
    if (run_.outer == OuterJob::kSlurmTasks) return true;
    if (run_.outer != OuterJob::kMpi) return false;
    const auto size = mpi_size(outer_, 1);
    return mpi_local_size(outer_, size) < size;
  }

  void master_address() {
    if (run_.num_processes == 1 && run_.machines.max == 1) return;
    if (set_.has("main_process_ip") || !spans_hosts()) {
      variables_["MASTER_ADDR"] = set_.text("main_process_ip").value_or("127.0.0.1");
    }
    if (set_.has("main_process_port") || !spans_hosts()) {
      variables_["MASTER_PORT"] = set_.text("main_process_port").value_or(str(kDefaultPort));
    }
  }

  void deepspeed() {
    variables_["ACCELERATE_CONFIG_DS_FIELDS"] = run_.deepspeed_fields;
    const std::string path = outer_.get("PYTHONPATH").value_or("");
    std::vector<std::string> folders;
    for (const auto& folder : split(path, ':')) {
      if (!folder.empty()) folders.push_back(folder);
    }
    folders.push_back(facts_.working_directory);
    variables_["PYTHONPATH"] = join(folders, ":");
  }

  void peer_access(std::vector<std::string>& warnings) {
    if (!facts_.needs_p2p_disabled || run_.cpu) return;
    bool changed = false;
    for (const auto* name : {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"}) {
      if (outer_.contains(name)) continue;
      variables_[name] = "1";
      changed = true;
    }
    if (changed) {
      warnings.emplace_back(
          "GPUs of the RTX 40 series cannot reach each other directly with this driver: "
          "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 are set for the workers.");
    }
  }

  const ResolvedLaunch& run_;
  const Settings& set_;
  const Environment& outer_;
  const MachineFacts& facts_;
  std::map<std::string, std::string> variables_;
};

}  // namespace

std::map<std::string, std::string> mode_variables(const ResolvedLaunch& run,
                                                  const Environment& outer,
                                                  const MachineFacts& facts,
                                                  std::vector<std::string>& warnings) {
  return Writer(run, outer, facts).write(warnings);
}

}  // namespace accelerate::detail::launch
