#include "accelerate/state/accelerator_state.h"

#include <ATen/Context.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <mutex>
#include <ostream>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "accelerate/parallelism_config.h"
#include "core/log.h"
#include "core/megatron_run.h"
#include "core/text.h"
#include "state/partial_facts.h"

namespace accelerate {
namespace detail::state {

/// What an `Accelerator` has fixed. Kept after a reset, since a reader may still hold it.
struct AcceleratorFacts {
  PrecisionType precision = PrecisionType::kNo;
  /// The type of parallelism as the plugins refine it.
  DistributedType type = DistributedType::kNo;
  AcceleratorStateOptions options = {};
  /// The plugins of engines as they were given: `options` has what the precision made of them.
  AcceleratorStateOptions given = {};
  /// The active plugin of `options.deepspeed_plugins`.
  std::atomic<std::size_t> active_deepspeed = 0;
};

namespace {

constexpr const char* kOwner = "AcceleratorState";

struct AcceleratorSlot {
  std::mutex mutex;
  std::atomic<AcceleratorFacts*> current = nullptr;
  std::vector<std::unique_ptr<AcceleratorFacts>> all;
};

AcceleratorSlot& slot() {
  static auto* const the_slot = new AcceleratorSlot;  // never destroyed, as PartialState's
  return *the_slot;
}

AcceleratorFacts* current_accelerator() noexcept {
  return slot().current.load(std::memory_order_acquire);
}

bool is_multi_accelerator(DistributedType type) {
  switch (type) {
    case DistributedType::kNo:
    case DistributedType::kMultiCpu:
    case DistributedType::kDeepspeed:
    case DistributedType::kFsdp:
    case DistributedType::kXla:
    case DistributedType::kMegatronLm:
      return false;
    default:
      return true;
  }
}

[[noreturn]] void refuse(std::string_view what, std::string_view asked_by,
                         std::string_view instead) {
  throw UnsupportedError(str(what, " is asked for by ", asked_by,
                             ", but this version has no engine for it yet. ", instead));
}

/// Of a plugin that may not be resolved. A resolved one is not resolved again, which would warn of
/// what resolving itself has filled in.
std::int64_t version_of(const FullyShardedDataParallelPlugin& plugin) {
  return plugin.fsdp_version ? *plugin.fsdp_version : *resolved(plugin).fsdp_version;
}

/// Puts the precision, the type and the plugins of a new accelerator state together.
class Refinement {
 public:
  Refinement(const AcceleratorStateOptions& options, FromAccelerator engines,
             const Environment& environment)
      : options_(options), engines_(engines), env_(environment) {}

  PrecisionType precision() const {
    const PrecisionType wanted =
        options_.mixed_precision ? *options_.mixed_precision : precision_from_environment();
    if (wanted != PrecisionType::kFp8) return wanted;
    if (!engines_.fp8) {
      refuse("fp8 precision",
             options_.mixed_precision ? "mixed_precision" : "ACCELERATE_MIXED_PRECISION",
             "Use bf16, which needs no scaling either.");
    }
    // The CPU, and older GPUs on request, compute the same numbers by emulation.
    const bool emulates = options_.cpu || env_.flag("ACCELERATE_FP8_EMULATE");
    if (!emulates && is_cuda_available() && !check_cuda_fp8_capability()) {
      warn(
          "fp8 needs a GPU of compute capability 8.9 or more: fp16 is used instead. "
          "ACCELERATE_FP8_EMULATE=1 computes the numbers of fp8 without such kernels.");
      return PrecisionType::kFp16;
    }
    return wanted;
  }

  DistributedType type(DistributedType base, PrecisionType precision) const {
    if (const auto asked = deepspeed_asked_by(); !asked.empty()) return deepspeed(asked, precision);
    const bool shardable = is_multi_accelerator(base) || base == DistributedType::kMultiCpu;
    if (!shardable) {
      // One process trains by calls that are whole steps, too.
      if (base == DistributedType::kNo && engines_.megatron_lm && !megatron_asked_by().empty()) {
        warn_without_effect({fsdp_asked_by()});
        return DistributedType::kMegatronLm;
      }
      warn_without_effect({fsdp_asked_by(), megatron_asked_by()});
      return base;
    }
    check_context_parallelism();
    DistributedType type = base;
    if (const auto asked = fsdp_asked_by(); !asked.empty()) type = fsdp(asked, precision);
    if (const auto asked = megatron_asked_by();
        !asked.empty() && base != DistributedType::kMultiXpu) {
      if (!engines_.megatron_lm) {
        refuse("Megatron-LM", asked, "Leave it out: data parallelism needs no plugin.");
      }
      type = DistributedType::kMegatronLm;
    }
    return type;
  }

 private:
  /// What asks for DeepSpeed, or "".
  std::string deepspeed_asked_by() const {
    if (!options_.deepspeed_plugins.empty()) return "deepspeed_plugins";
    return env_.flag("ACCELERATE_USE_DEEPSPEED") ? "ACCELERATE_USE_DEEPSPEED" : "";
  }

  /// Python takes DeepSpeed where several engines are asked for.
  void check_one_engine(const std::string& deepspeed) const {
    for (const auto& other : {fsdp_asked_by(), megatron_asked_by()}) {
      if (other.empty()) continue;
      throw ConfigError(str(deepspeed, " and ", other,
                            " ask for two engines, but a run has one. Leave one of them out."));
    }
  }

  DistributedType deepspeed(const std::string& asked_by, PrecisionType precision) const {
    if (!engines_.deepspeed) {
      refuse("DeepSpeed", asked_by, "Leave it out: data parallelism needs no plugin.");
    }
    if (options_.deepspeed_plugins.empty()) {
      throw ConfigError(
          "ACCELERATE_USE_DEEPSPEED is on, but no plugin was given. Pass a DeepSpeedPlugin to the "
          "first `Accelerator`.");
    }
    check_one_engine(asked_by);
    for (const auto& [name, plugin] : options_.deepspeed_plugins) {
      plugin->set_mixed_precision(to_string(precision));
    }
    return DistributedType::kDeepspeed;
  }

  std::string fsdp_asked_by() const {
    if (options_.fsdp_plugin) return "fsdp_plugin";
    if (env_.flag("ACCELERATE_USE_FSDP")) return "ACCELERATE_USE_FSDP";
    if (context_parallel()) return "cp_size";
    return "";
  }

  std::string megatron_asked_by() const {
    if (options_.megatron_lm_plugin) return "megatron_lm_plugin";
    return env_.flag("ACCELERATE_USE_MEGATRON_LM") ? "ACCELERATE_USE_MEGATRON_LM" : "";
  }

  DistributedType fsdp(const std::string& asked_by, PrecisionType precision) const {
    if (!engines_.fsdp) {
      refuse("Fully sharded data parallelism", asked_by,
             "Leave it out: data parallelism keeps a whole model on each process.");
    }
    if (options_.fsdp_plugin && precision != PrecisionType::kNo) {
      options_.fsdp_plugin->set_mixed_precision(to_string(precision));
    }
    return DistributedType::kFsdp;
  }

  bool context_parallel() const {
    return options_.parallelism_config && options_.parallelism_config->cp_enabled();
  }

  void check_context_parallelism() const {
    if (!context_parallel() || env_.flag("ACCELERATE_ALLOW_CP_STANDALONE")) return;
    if (!options_.fsdp_plugin) {
      throw ConfigError(
          "parallelism_config has cp_size > 1, but there is no fsdp_plugin: context parallelism "
          "shards the model as well. Pass one with fsdp_version 2.");
    }
    if (version_of(*options_.fsdp_plugin) == 1) {
      throw ConfigError(
          "parallelism_config has cp_size > 1, which needs fsdp_version 2, but the fsdp_plugin has "
          "version 1.");
    }
  }

  static void warn_without_effect(std::initializer_list<std::string> engines) {
    for (const auto& asked : engines) {
      if (!asked.empty()) warn(str(asked, " has no effect: this run has one process."));
    }
  }

  const AcceleratorStateOptions& options_;
  FromAccelerator engines_;
  const Environment& env_;
};

std::shared_ptr<DeepSpeedPlugin> active_plugin(const AcceleratorFacts& facts,
                                               DistributedType type) {
  if (type != DistributedType::kDeepspeed) return nullptr;
  return facts.options.deepspeed_plugins[facts.active_deepspeed].second;
}

PrecisionType precision_of(const AcceleratorFacts& facts, DistributedType type) {
  const auto plugin = active_plugin(facts, type);
  if (!plugin || facts.precision == PrecisionType::kFp8) return facts.precision;
  const HfDeepSpeedConfig config(plugin->deepspeed_config());
  if (config.is_true("fp16.enabled")) return PrecisionType::kFp16;
  if (config.is_true("bf16.enabled")) return PrecisionType::kBf16;
  return PrecisionType::kNo;
}

template <class Plugin>
std::shared_ptr<Plugin> copy_of(const std::shared_ptr<Plugin>& plugin) {
  return plugin ? std::make_shared<Plugin>(*plugin) : nullptr;
}

template <class Plugin>
bool same(const std::shared_ptr<Plugin>& a, const std::shared_ptr<Plugin>& b) {
  return a == b || (a && b && *a == *b);
}

/// Copies of the plugins that ask for an engine, without those that `known` has too.
AcceleratorStateOptions engines_of(const AcceleratorStateOptions& options,
                                   const AcceleratorStateOptions& known = {}) {
  AcceleratorStateOptions found;
  const auto take = [](const auto& plugin, const auto& other, auto& target) {
    if (!same(plugin, other)) target = copy_of(plugin);
  };
  take(options.fsdp_plugin, known.fsdp_plugin, found.fsdp_plugin);
  take(options.megatron_lm_plugin, known.megatron_lm_plugin, found.megatron_lm_plugin);
  const bool as_known = std::ranges::equal(
      options.deepspeed_plugins, known.deepspeed_plugins, [](const auto& one, const auto& other) {
        return one.first == other.first && same(one.second, other.second);
      });
  if (as_known) return found;
  for (const auto& [name, plugin] : options.deepspeed_plugins) {
    found.deepspeed_plugins.emplace_back(name, copy_of(plugin));
  }
  return found;
}

/// The sizes as this run has them, or null.
std::shared_ptr<ParallelismConfig> parallelism_of(const AcceleratorStateOptions& options,
                                                  const PartialFacts& partial, DistributedType type,
                                                  const Environment& environment) {
  if (type == DistributedType::kMegatronLm && options.megatron_lm_plugin) {
    if (options.parallelism_config) {
      throw ConfigError(
          "parallelism_config and megatron_lm_plugin both say how processes are divided. Leave one "
          "of them out.");
    }
    return std::make_shared<ParallelismConfig>(
        megatron_parallelism(*options.megatron_lm_plugin, partial.num_processes));
  }
  if (!options.parallelism_config) return nullptr;
  ParallelismFacts facts{.num_processes = partial.num_processes,
                         .distributed = partial.use_distributed(),
                         .allow_cp_standalone = environment.flag("ACCELERATE_ALLOW_CP_STANDALONE")};
  if (options.fsdp_plugin) facts.fsdp_version = version_of(*options.fsdp_plugin);
  return std::make_shared<ParallelismConfig>(validated_for(*options.parallelism_config, facts));
}

[[noreturn]] void refuse_late(std::string_view what) {
  throw ConfigError(str("The accelerator state is already set up without this ", what,
                        " and cannot be changed. Pass it to the first `Accelerator`, or leave it "
                        "out."));
}

/// An engine is refused, or has no effect, for the same reasons as at the first construction; one
/// that would have an effect comes too late.
void check_engines_unchanged(const AcceleratorStateOptions& options, FromAccelerator engines,
                             const PartialFacts& partial, const AcceleratorFacts& facts) {
  const AcceleratorStateOptions late = engines_of(options, facts.given);
  const Environment no_variables;  // they have spoken at the first construction
  const Refinement refinement(late, engines, no_variables);
  if (refinement.type(partial.base_type, facts.precision) == partial.base_type) return;
  refuse_late(!late.deepspeed_plugins.empty() ? "deepspeed_plugin"
              : late.fsdp_plugin              ? "fsdp_plugin"
                                              : "megatron_lm_plugin");
}

// The first construction has fixed these.
void check_unchanged(const AcceleratorStateOptions& options, const PartialFacts& partial,
                     const AcceleratorFacts& facts) {
  const PrecisionType precision = precision_of(facts, facts.type);
  const auto& wanted = options.mixed_precision;
  if (wanted && *wanted != precision && partial.type != DistributedType::kDeepspeed) {
    throw ConfigError(str("The accelerator state is already set up with mixed_precision = '",
                          precision, "' and cannot be changed. Pass mixed_precision = '", *wanted,
                          "' to the first `Accelerator`."));
  }
  const auto& dynamo = options.dynamo_plugin;
  if (dynamo && resolved(*dynamo).backend != DynamoBackend::kNo &&
      !same(dynamo, facts.options.dynamo_plugin)) {
    refuse_late("dynamo_plugin");
  }
}

// TF32 keeps the range of float32 and is what compiled matrix products are tuned for.
void allow_tf32_for_compiled(const AcceleratorStateOptions& options, PrecisionType precision,
                             const PartialFacts& partial) {
  if (!options.dynamo_plugin || precision != PrecisionType::kNo || !partial.device.is_cuda())
    return;
  if (resolved(*options.dynamo_plugin).backend == DynamoBackend::kNo) return;
  at::globalContext().setAllowTF32CuBLAS(true);
}

/// Calls `f(partial facts)` with a `PartialState`, which is reset again if `f` throws and it was
/// made here. One that was there before is checked to be what `options` and `cpu` ask for.
template <class F>
void with_partial_state(const AcceleratorStateOptions& options, bool cpu, F&& f) {
  const bool had_partial = PartialState::initialized();
  PartialStateOptions partial_options = options.process_group;
  partial_options.cpu = partial_options.cpu || cpu;
  if (had_partial) check_as_made(partial_options);
  const PartialState partial(partial_options);
  try {
    f(*current_facts());
  } catch (...) {
    if (!had_partial) PartialState::_reset_state();
    throw;
  }
}

void make(const AcceleratorStateOptions& options, FromAccelerator engines, bool cpu,
          const Environment& environment) {
  const Refinement refinement(options, engines, environment);
  const PrecisionType precision = refinement.precision();
  auto facts = std::make_unique<AcceleratorFacts>();
  facts->options = options;
  facts->given = engines_of(options);
  with_partial_state(options, cpu, [&](PartialFacts& partial) {
    const DistributedType type = refinement.type(partial.base_type, precision);
    facts->options.parallelism_config = parallelism_of(options, partial, type, environment);
    facts->type = type;
    // DeepSpeed uses its own configuration, except for fp8.
    const bool by_config = type == DistributedType::kDeepspeed && precision != PrecisionType::kFp8;
    facts->precision = by_config ? PrecisionType::kNo : precision;
    allow_tf32_for_compiled(options, precision, partial);
    partial.type = type;
    slot().all.push_back(std::move(facts));
    slot().current.store(slot().all.back().get(), std::memory_order_release);
  });
}

void attach(const AcceleratorStateOptions& options, FromAccelerator engines, bool cpu,
            const Environment& environment) {
  const AcceleratorFacts& facts = *current_accelerator();
  // Made again if the partial state alone was reset.
  with_partial_state(options, cpu, [&](PartialFacts& partial) {
    partial.type = facts.type;
    check_unchanged(options, partial, facts);
    check_engines_unchanged(options, engines, partial, facts);
    const auto wanted = parallelism_of(options, partial, facts.type, environment);
    if (wanted && !same(wanted, facts.options.parallelism_config)) {
      refuse_late("parallelism_config");
    }
  });
}

}  // namespace

bool accelerator_state_exists() noexcept { return current_accelerator() != nullptr; }

std::optional<PrecisionType> accelerator_precision() {
  const auto* facts = current_accelerator();
  const auto* partial = current_facts();
  if (facts == nullptr || partial == nullptr) return std::nullopt;
  return precision_of(*facts, partial->type);
}

}  // namespace detail::state

using detail::str;

namespace {

const AcceleratorStateOptions& for_existing(const AcceleratorStateOptions& options) {
  if (AcceleratorState::initialized()) return options;
  throw StateError(
      "There is no accelerator state yet. Make one by `Accelerator accelerator;` before anything "
      "that asks for it.");
}

}  // namespace

AcceleratorState::AcceleratorState(const AcceleratorStateOptions& options)
    : AcceleratorState(for_existing(options), detail::state::FromAccelerator{}) {}

AcceleratorState::AcceleratorState(const AcceleratorStateOptions& options,
                                   detail::state::FromAccelerator engines)
    : PartialState(nullptr, detail::state::kOwner) {
  const Environment environment = Environment::process();
  const bool cpu = options.cpu || environment.flag("ACCELERATE_USE_CPU");
  const std::lock_guard lock(detail::state::slot().mutex);
  if (detail::state::current_accelerator() == nullptr) {
    detail::state::make(options, engines, cpu, environment);
    return;
  }
  detail::state::attach(options, engines, cpu, environment);
}

bool AcceleratorState::initialized() noexcept { return detail::state::accelerator_state_exists(); }

bool is_initialized() noexcept { return AcceleratorState::initialized(); }

void AcceleratorState::_reset_state(bool reset_partial_state) {
  {
    const std::lock_guard lock(detail::state::slot().mutex);
    detail::state::slot().current.store(nullptr, std::memory_order_release);
  }
  if (reset_partial_state) PartialState::_reset_state();
}

detail::state::AcceleratorFacts& AcceleratorState::accelerator_facts(const char* attribute) const {
  if (auto* facts = detail::state::current_accelerator()) return *facts;
  throw StateError(str("`AcceleratorState` object has no attribute `", attribute,
                       "`. This happens if `AcceleratorState._reset_state()` was called and no "
                       "`Accelerator` was made afterwards. Make one first."));
}

PrecisionType AcceleratorState::mixed_precision() const {
  return detail::state::precision_of(accelerator_facts("mixed_precision"), distributed_type());
}

bool AcceleratorState::is_fsdp2() const {
  const auto plugin = fsdp_plugin();
  return distributed_type() == DistributedType::kFsdp && plugin &&
         detail::state::version_of(*plugin) == 2;
}

std::shared_ptr<TorchDynamoPlugin> AcceleratorState::dynamo_plugin() const {
  return accelerator_facts("dynamo_plugin").options.dynamo_plugin;
}
std::shared_ptr<FullyShardedDataParallelPlugin> AcceleratorState::fsdp_plugin() const {
  return accelerator_facts("fsdp_plugin").options.fsdp_plugin;
}
std::shared_ptr<TorchTensorParallelPlugin> AcceleratorState::torch_tp_plugin() const {
  return accelerator_facts("torch_tp_plugin").options.torch_tp_plugin;
}
std::shared_ptr<MegatronLMPlugin> AcceleratorState::megatron_lm_plugin() const {
  return accelerator_facts("megatron_lm_plugin").options.megatron_lm_plugin;
}
std::shared_ptr<DeviceMesh> AcceleratorState::device_mesh() const {
  const auto config = parallelism_config();
  return config ? config->device_mesh : nullptr;
}

std::shared_ptr<ParallelismConfig> AcceleratorState::parallelism_config() const {
  return accelerator_facts("parallelism_config").options.parallelism_config;
}

std::shared_ptr<DeepSpeedPlugin> AcceleratorState::deepspeed_plugin() const {
  return detail::state::active_plugin(accelerator_facts("deepspeed_plugin"), distributed_type());
}

namespace {

std::size_t deepspeed_index(const AcceleratorState& state,
                            const detail::state::AcceleratorFacts& facts, const std::string& name) {
  if (state.distributed_type() != DistributedType::kDeepspeed) {
    throw StateError(str("The run does not use DeepSpeed, so it has no plugin '", name, "'."));
  }
  std::vector<std::string> names;
  for (const auto& [each, plugin] : facts.options.deepspeed_plugins) {
    if (each == name) return names.size();
    names.push_back(each);
  }
  throw ArgumentError(
      str("There is no DeepSpeed plugin '", name, "'. Choose one of: ", detail::join(names), "."));
}

}  // namespace

std::shared_ptr<DeepSpeedPlugin> AcceleratorState::get_deepspeed_plugin(
    const std::string& name) const {
  const auto& facts = accelerator_facts("deepspeed_plugins");
  return facts.options.deepspeed_plugins[deepspeed_index(*this, facts, name)].second;
}

void AcceleratorState::select_deepspeed_plugin(const std::string& name) {
  auto& facts = accelerator_facts("deepspeed_plugins");
  facts.active_deepspeed = deepspeed_index(*this, facts, name);
}

std::ostream& operator<<(std::ostream& out, const AcceleratorState& state) {
  out << static_cast<const PartialState&>(state)
      << "\nMixed precision type: " << state.mixed_precision() << "\n";
  if (const auto plugin = state.deepspeed_plugin()) {
    out << "ds_config: " << Value(plugin->deepspeed_config()).repr() << "\n";
  }
  return out;
}

}  // namespace accelerate
