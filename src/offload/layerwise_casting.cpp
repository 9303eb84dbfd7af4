#include "accelerate/big_modeling/layerwise_casting.h"

#include <ATen/Functions.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "formats/pattern.h"
#include "modeling/outline.h"
#include "modeling/tensors.h"
#include "offload/lazy_params.h"

namespace accelerate {

using detail::offload::LazyParams;
using detail::offload::NamedTensor;
using torch::nn::Module;

struct LayerwiseCasting::State {
  /// One per device, in which weights are put together.
  std::map<c10::Device, LazyParams, decltype([](const c10::Device& a, const c10::Device& b) {
             return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
           })>
      engines;
  std::vector<std::string> layers;
};

namespace {

bool is_cast(const Module& module) {
  const auto is = [&]<class... Kinds>(std::type_identity<Kinds>...) {
    return ((dynamic_cast<const Kinds*>(&module) != nullptr) || ...);
  };
  using namespace torch::nn;
  return is(std::type_identity<LinearImpl>(), std::type_identity<Conv1dImpl>(),
            std::type_identity<Conv2dImpl>(), std::type_identity<Conv3dImpl>(),
            std::type_identity<ConvTranspose1dImpl>(), std::type_identity<ConvTranspose2dImpl>(),
            std::type_identity<ConvTranspose3dImpl>());
}

/// The largest number of an 8-bit format; beyond it a conversion gives NaN or infinity.
double largest(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float8_e4m3fn:
      return 448;
    case c10::ScalarType::Float8_e5m2:
      return 57344;
    default:
      return std::numeric_limits<double>::infinity();
  }
}

class Caster {
 public:
  Caster(c10::ScalarType storage, c10::ScalarType compute, const LayerwiseCastingOptions& options,
         LayerwiseCasting::State& state)
      : storage_(storage),
        compute_(compute),
        classes_(options.skip_modules_classes),
        state_(state) {
    for (const auto& pattern : options.skip_modules_pattern) patterns_.emplace_back(pattern);
  }

  void cast_all(Module& model) {
    walk("", model);
    for (const auto& [name, module] : layers_) check_not_offloaded(name, *module);
    for (const auto& [name, module] : layers_) cast(name, *module);
  }

 private:
  void walk(const std::string& name, Module& module) {
    if (is_skipped(name, module)) return;
    if (is_cast(module)) {
      layers_.emplace_back(name, &module);
      return;
    }
    for (const auto& child : module.named_children()) {
      walk(name.empty() ? child.key() : name + "." + child.key(), *child.value());
    }
  }

  static void check_not_offloaded(const std::string& name, const Module& module) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!detail::offload::is_offloaded(item.value())) continue;
      throw StateError(detail::str(
          "The weights of '", name,
          "' are offloaded or cast already. Layerwise casting is for weights that stay on their "
          "device: call remove_hooks() first. To keep offloaded weights in fewer bits, load them "
          "with `dtype` or quantize them."));
    }
  }

  [[nodiscard]] bool is_skipped(const std::string& name, const Module& module) const {
    if (detail::modeling::has_class(module, classes_)) return true;
    return std::ranges::any_of(patterns_, [&](const auto& pattern) {
      detail::formats::MatchBudget budget(1'000'000);
      return !pattern.find_all(name, budget).empty();
    });
  }

  void cast(const std::string& name, Module& module) {
    const at::NoGradGuard no_grad;
    std::map<std::string, at::Tensor> kept;
    std::vector<NamedTensor> tensors;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto& tensor = item.value();
      // One that is tied to a layer before is cast already.
      if (!tensor.defined() || !tensor.is_floating_point() ||
          detail::offload::is_offloaded(tensor)) {
        continue;
      }
      const auto full = name.empty() ? item.key() : name + "." + item.key();
      if (std::isfinite(largest(storage_)) && tensor.numel() > 0 &&
          tensor.abs().max().item<double>() > largest(storage_)) {
        detail::warn(detail::str("'", full, "' has values beyond ", largest(storage_),
                                 ", the largest of ", toString(storage_),
                                 ": they become NaN or infinite. Skip this layer."));
      }
      // Rounded once: the compute dtype holds every number of the storage dtype.
      detail::modeling::replace_data(tensor, tensor.detach().to(storage_).to(compute_), full);
      kept.emplace(full, tensor);
      tensors.push_back({full, tensor});
    }
    if (tensors.empty()) return;
    const auto device = tensors.front().tensor.device();
    auto& engine =
        state_.engines.try_emplace(device, LazyOptions{.prefetch_depth = 0}).first->second;
    engine.manage(name, tensors, device, [&](const detail::offload::GroupPlan& plan) {
      return detail::offload::make_cast_store(
          plan, [&](const std::string& wanted) { return kept.at(wanted); }, storage_);
    });
    state_.layers.push_back(name);
  }

  c10::ScalarType storage_;
  c10::ScalarType compute_;
  std::vector<detail::formats::Pattern> patterns_;
  std::vector<std::string> classes_;
  std::vector<std::pair<std::string, Module*>> layers_;
  LayerwiseCasting::State& state_;
};

}  // namespace

LayerwiseCasting::LayerwiseCasting(std::unique_ptr<State> state) : state_(std::move(state)) {}
LayerwiseCasting::~LayerwiseCasting() = default;
LayerwiseCasting::LayerwiseCasting(LayerwiseCasting&&) noexcept = default;
LayerwiseCasting& LayerwiseCasting::operator=(LayerwiseCasting&&) noexcept = default;

void LayerwiseCasting::remove() {
  for (auto& [device, engine] : state_->engines) engine.restore();
  state_->engines.clear();
  state_->layers.clear();
}

const std::vector<std::string>& LayerwiseCasting::layers() const { return state_->layers; }

LayerwiseCasting attach_layerwise_casting_hooks(Module& module, c10::ScalarType storage_dtype,
                                                c10::ScalarType compute_dtype,
                                                const LayerwiseCastingOptions& options) {
  auto state = std::make_unique<LayerwiseCasting::State>();
  Caster(storage_dtype, compute_dtype, options, *state).cast_all(module);
  return LayerwiseCasting(std::move(state));
}

}  // namespace accelerate
