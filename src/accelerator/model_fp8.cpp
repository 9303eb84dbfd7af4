#include "accelerator/model_fp8.h"

#include <memory>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "accelerate/logging/name_collectives.h"
#include "accelerate/torch_archive.h"
#include "checkpoint/state_files.h"
#include "core/log.h"
#include "core/text.h"
#include "parallel/engine.h"

namespace accelerate::detail::accelerator {
namespace {

constexpr std::string_view kName = "fp8_scaling";

/// All processes scale alike, as with Transformer Engine. Processes that are through with uneven
/// inputs take part in no forward: then each has scales of its own, which is as correct.
void share_maxima(AcceleratorCore& core, fp8::DelayedScaling& scaling) {
  if (!core.state.use_distributed()) return;
  scaling.reduce_max = [weak = core.weak_from_this()](at::Tensor& maxima) {
    const auto owner = weak.lock();
    if (!owner || owner->join != nullptr) return;
    const NamedCollectives named("maxima of fp8");
    std::vector<at::Tensor> tensors{maxima};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    owner->state.process_group()->allreduce(tensors, options)->wait();
  };
}

class ScalingState final : public Stateful {
 public:
  explicit ScalingState(const ObjectRegistry& registry) : registry_(registry) {}

  [[nodiscard]] Value state_dict() override {
    Value::Dict models;
    for (std::size_t i = 0; i < registry_.models.size(); ++i) {
      const auto& scaling = registry_.models[i]->delayed_scaling;
      if (scaling) models.set(str("model_", i), scaling->state_dict());
    }
    return Value(std::move(models));
  }
  void load_state_dict(const Value& state) override {
    for (std::size_t i = 0; i < registry_.models.size(); ++i) {
      const auto& scaling = registry_.models[i]->delayed_scaling;
      const auto* const saved = state.as_dict().get(str("model_", i));
      if (scaling && saved) scaling->load_state_dict(*saved);
    }
  }

 private:
  const ObjectRegistry& registry_;
};

}  // namespace

void multiply_in_8_bits(AcceleratorCore& core, ModelCore& model,
                        const std::vector<fp8::LinearLayer>& converted) {
  fp8::restore(converted);
  if (!core.fp8) return;
  if (model.device.is_cpu()) {
    warn_once(
        "mixed_precision is fp8, which a CPU has no kernels for: its numbers are emulated, more "
        "slowly than bf16 computes.");
  }
  if (const auto* ao = std::get_if<AORecipeKwargs>(&*core.fp8)) {
    fp8::convert_with_current_scales(*model.module, *ao);
    if (ao->config->enable_fsdp_float8_all_gather && model.engine && model.engine->is_sharded()) {
      warn_once(
          "enable_fsdp_float8_all_gather has no effect: weights are gathered in the dtype of the "
          "parameters and cast to 8 bits afterwards. Set it to false "
          "(ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER) to confirm.");
    }
    return;
  }
  model.delayed_scaling =
      fp8::convert_with_delayed_scales(*model.module, std::get<TERecipeKwargs>(*core.fp8));
  if (model.delayed_scaling) share_maxima(core, *model.delayed_scaling);
}

StateEntry fp8_entry(const ObjectRegistry& registry) {
  return {.kind = StateKind::kGradients,
          .name = std::string(kName),
          .object = std::make_shared<ScalingState>(registry)};
}

void load_fp8_state(const ObjectRegistry& registry, const std::filesystem::path& folder, int rank) {
  const auto entry = fp8_entry(registry);
  for (const int process : {rank, 0}) {
    const auto file = folder / checkpoint::state_file_name(entry, process, /*own=*/true);
    std::error_code error;
    if (!std::filesystem::exists(file, error)) continue;
    return entry.object->load_state_dict(torch_load(file));
  }
}

}  // namespace accelerate::detail::accelerator
