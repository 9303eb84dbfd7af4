#include "accelerator/registry.h"

#include <string>
#include <string_view>
#include <utility>

#include "accelerate/constants.h"
#include "accelerate/detail/accelerator/prepare.h"
#include "accelerate/value/from_value.h"
#include "core/text.h"

namespace accelerate::detail::accelerator {
namespace {

Value to_value_dict(const StateDict& state) {
  Value::Dict entries;
  for (const auto& entry : state) entries.set(entry.key(), Value(entry.value()));
  return Value(std::move(entries));
}

StateDict to_state_dict(const Value& value) {
  StateDict state("Tensor");
  for (const auto& [key, tensor] : value.as_dict()) {
    state.insert(key.as_string(), tensor.as_tensor());
  }
  return state;
}

/// The state of a prepared model, or of a module: parameters and buffers.
template <class Model>
class ModelState final : public Stateful {
 public:
  explicit ModelState(std::shared_ptr<Model> model) : model_(std::move(model)) {}

  [[nodiscard]] Value state_dict() override {
    if constexpr (std::same_as<Model, ModelCore>) {
      return to_value_dict(model_->state_dict());
    } else {
      return to_value_dict(accelerate::state_dict(*model_));
    }
  }
  void load_state_dict(const Value& state) override {
    if constexpr (std::same_as<Model, ModelCore>) {
      model_->load_state_dict(to_state_dict(state), /*strict=*/true);
    } else {
      accelerate::load_state_dict(*model_, to_state_dict(state));
    }
  }

 private:
  std::shared_ptr<Model> model_;
};

/// The position of a data loader.
class LoaderState final : public Stateful {
 public:
  explicit LoaderState(std::shared_ptr<data::LoaderCore> loader) : loader_(std::move(loader)) {}

  [[nodiscard]] Value state_dict() override { return Value(loader_->state_dict()); }
  void load_state_dict(const Value& state) override {
    loader_->load_state_dict(from_value<DataLoaderState>(state));
  }

 private:
  std::shared_ptr<data::LoaderCore> loader_;
};

/// "optimizer", "optimizer_1", ...
std::string numbered(std::string_view name, std::size_t index) {
  return index == 0 ? std::string(name) : str(name, "_", index);
}

}  // namespace

void refuse_empty_pointer() {
  throw ArgumentError(
      "register_for_checkpointing: the pointer is empty. Make the object before it is registered.");
}

std::shared_ptr<Stateful> stateful_module(std::shared_ptr<torch::nn::Module> module) {
  return std::make_shared<ModelState<torch::nn::Module>>(std::move(module));
}

void ObjectRegistry::forget_prepared() {
  models.clear();
  optimizers.clear();
  schedulers.clear();
  loaders.clear();
}

std::vector<StateEntry> ObjectRegistry::entries() const {
  std::vector<StateEntry> all;
  const auto add = [&](StateKind kind, std::string_view name, const auto& objects,
                       const auto& stateful) {
    for (std::size_t i = 0; i < objects.size(); ++i) {
      all.push_back({kind, numbered(name, i), stateful(objects[i])});
    }
  };
  add(StateKind::kModel, kSafeModelName, models,
      [](const auto& one) { return std::make_shared<ModelState<ModelCore>>(one); });
  add(StateKind::kOptimizer, kOptimizerName, optimizers, [](const auto& one) {
    return state::make_stateful(std::make_shared<AcceleratedOptimizer>(one));
  });
  add(StateKind::kScheduler, kSchedulerName, schedulers, [](const auto& one) {
    return state::make_stateful(std::make_shared<AcceleratedScheduler>(one));
  });
  add(StateKind::kDataLoader, "dl_state_dict", loaders,
      [](const auto& one) { return std::make_shared<LoaderState>(one); });
  if (scaling) {
    const std::shared_ptr<GradScaler> scaler(scaling, &scaling->scaler());
    all.push_back({StateKind::kScaler, "scaler", state::make_stateful(scaler)});
  }
  if (random_states) {
    all.push_back({StateKind::kRandomStates, std::string(kRngStateName), random_states});
  }
  for (std::size_t i = 0; i < custom.size(); ++i) {
    all.push_back({StateKind::kCustom, str("custom_checkpoint_", i), custom[i]});
  }
  return all;
}

}  // namespace accelerate::detail::accelerator
