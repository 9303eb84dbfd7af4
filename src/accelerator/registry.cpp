#include "accelerator/registry.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "accelerate/checkpoint.h"
#include "accelerate/constants.h"
#include "accelerate/detail/accelerator/prepare.h"
#include "accelerate/state.h"
#include "accelerate/value/from_value.h"
#include "accelerator/stepped_models.h"
#include "checkpoint/sharded_state.h"
#include "checkpoint/state_files.h"
#include "core/text.h"
#include "modeling/tensors.h"
#include "optim/optimizer_state.h"
#include "parallel/engine.h"

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

/// Renames tensors of a file as the model names them: prefixes of Python's wrappers are taken off,
/// and a tensor that the model has under several names may have one of them in the file.
StateDict fitted(const StateDict& file, const StateDict& own) {
  StateDict state("Tensor");
  for (const auto& entry : file) {
    std::string_view name = entry.key();
    for (bool stripped = true; stripped && !own.contains(std::string(name));) {
      stripped = false;
      for (const std::string_view prefix : {"module.", "_orig_mod."}) {
        if (!name.starts_with(prefix)) continue;
        name.remove_prefix(prefix.size());
        stripped = true;
      }
    }
    const bool known = own.contains(std::string(name)) && !state.contains(std::string(name));
    state.insert(known ? std::string(name) : entry.key(), entry.value());
  }
  for (const auto& names : modeling::same_elements(own)) {
    const auto present =
        std::ranges::find_if(names, [&](const std::string& name) { return state.contains(name); });
    if (present == names.end()) continue;
    const auto tensor = state[*present];
    for (const auto& name : names) {
      if (!state.contains(name)) state.insert(name, tensor);
    }
  }
  return state;
}

/// The state of a prepared model: parameters and buffers by the names that the module gives them,
/// which are those in Python's files on any number of processes.
class ModelState final : public Stateful, public checkpoint::LoadsWeights {
 public:
  ModelState(std::shared_ptr<ModelCore> model, bool strict)
      : model_(std::move(model)), strict_(strict) {}

  [[nodiscard]] Value state_dict() override {
    return to_value_dict(state_dict_of(model_->module, model_, /*unwrap=*/true));
  }
  void load_state_dict(const Value& state) override {
    const auto own = accelerate::state_dict(*model_->module);
    model_->load_state_dict(fitted(to_state_dict(state), own), strict_);
  }

  [[nodiscard]] bool can_load_weights() const override {
    return !model_->engine || !model_->engine->is_sharded();
  }
  void load_weights(const std::filesystem::path& file,
                    const LoadAcceleratorStateOptions& options) override {
    const auto own = accelerate::state_dict(*model_->module);
    KeyMapping names;
    for (const std::string prefix : {"module.", "_orig_mod."}) {
      const bool has_prefix = std::ranges::any_of(
          own.keys(), [&](const std::string& name) { return name.starts_with(prefix); });
      if (!has_prefix) names.strip_prefix(prefix);
    }
    load_checkpoint_in_model(
        *model_->module, file,
        {.strict = strict_, .key_mapping = names, .progress = options.progress});
  }

 private:
  std::shared_ptr<ModelCore> model_;
  bool strict_;
};

/// The state of a module that is not prepared.
class ModuleState final : public Stateful {
 public:
  explicit ModuleState(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  [[nodiscard]] Value state_dict() override {
    return to_value_dict(accelerate::state_dict(*module_));
  }
  void load_state_dict(const Value& state) override {
    accelerate::load_state_dict(*module_, to_state_dict(state));
  }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

/// The position of a data loader.
class LoaderState final : public Stateful {
 public:
  LoaderState(std::shared_ptr<data::LoaderCore> loader, bool position)
      : loader_(std::move(loader)), position_(position) {}

  [[nodiscard]] Value state_dict() override { return Value(loader_->state_dict()); }
  void load_state_dict(const Value& state) override {
    auto position = from_value<DataLoaderState>(state);
    // From another number of processes: each one draws numbers of its own, but for those that are
    // given the same data.
    const auto place = loader_->data_place();
    if (position.base_seed && position.num_processes != place.processes) {
      *position.base_seed += static_cast<std::uint64_t>(place.index);
    }
    if (!position_) {
      position.batches_yielded = 0;
      position.samples_yielded = 0;
      position.sampler_batches = 0;
      position.dataset_state = std::nullopt;
    }
    loader_->load_state_dict(position);
  }

 private:
  std::shared_ptr<data::LoaderCore> loader_;
  bool position_;
};

/// "optimizer", "optimizer_1", ...
std::string numbered(std::string_view name, std::size_t index) {
  return index == 0 ? std::string(name) : str(name, "_", index);
}

using Models = std::vector<std::shared_ptr<ModelCore>>;

std::string name_of(const at::Tensor& parameter, const torch::nn::Module& module) {
  for (const auto& entry : module.named_parameters()) {
    if (entry.value().is_same(parameter)) return entry.key();
  }
  return "";
}

/// The names by which a sharded run would save the state of the optimizer.
std::vector<std::string> names_of(const torch::optim::Optimizer& optimizer, const Models& models) {
  std::vector<NamesInModel> names;
  for (const auto& model : models) {
    auto& own = names.emplace_back();
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& parameter : group.params()) {
        own.push_back(name_of(parameter, *model->module));
      }
    }
  }
  return stepped_names(optimizer, names);
}

/// A sharded run saves the state of an optimizer by the names of parameters. Returns it by their
/// numbers in the groups of `optimizer`.
Value by_number(const Value& saved, const torch::optim::Optimizer& optimizer,
                const Models& models) {
  const auto groups = saved.at("param_groups").items();
  const auto is_named = [](const Value& group) {
    const auto params = group.at("params").items();
    return !params.empty() && params.front().is_string();
  };
  if (std::ranges::none_of(groups, is_named)) return saved;
  const auto& states = saved.at("state").as_dict();
  const auto names = names_of(optimizer, models);
  Value::Dict numbered_states;
  Value::List numbered_groups;
  std::size_t number = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    auto group = groups[g].as_dict();
    Value::List params;
    if (g < optimizer.param_groups().size()) {
      for (std::size_t i = 0; i < optimizer.param_groups()[g].params().size(); ++i) {
        const auto* const state = states.get(names[number]);
        if (state != nullptr) numbered_states.set(number, *state);
        params.emplace_back(static_cast<std::int64_t>(number++));
      }
    }
    group.set("params", std::move(params));
    numbered_groups.emplace_back(std::move(group));
  }
  if (numbered_states.size() != states.size()) {
    throw ArgumentError(str("load_state: the optimizer was saved with states of ", states.size(),
                            " parameters by name, of which this optimizer has ",
                            numbered_states.size(),
                            ". Build it on the same parameters, and prepare their model."));
  }
  return Value::Dict{{"state", std::move(numbered_states)},
                     {"param_groups", std::move(numbered_groups)}};
}

/// The state of an optimizer whose parameters are whole.
class OptimizerState final : public Stateful {
 public:
  OptimizerState(std::shared_ptr<optim::OptimizerCore> optimizer, Models models)
      : optimizer_(std::move(optimizer)), models_(std::move(models)) {}

  [[nodiscard]] Value state_dict() override { return optimizer_.state_dict(); }
  void load_state_dict(const Value& state) override {
    optimizer_.load_state_dict(by_number(state, optimizer_.optimizer(), models_));
  }

 private:
  AcceleratedOptimizer optimizer_;
  Models models_;
};

/// What the optimizer has on this process: the state of its shards.
class LocalOptimizerState final : public Stateful {
 public:
  explicit LocalOptimizerState(std::shared_ptr<optim::OptimizerCore> optimizer)
      : optimizer_(std::move(optimizer)) {}

  [[nodiscard]] Value state_dict() override {
    return optim::optimizer_state_dict(*optimizer_->optimizer);
  }
  void load_state_dict(const Value& state) override {
    optim::load_optimizer_state_dict(*optimizer_->optimizer, state);
  }

 private:
  std::shared_ptr<optim::OptimizerCore> optimizer_;
};

}  // namespace

std::shared_ptr<checkpoint::ShardedState> sharded_state_of(const ModelCore& model) {
  auto sharded = std::dynamic_pointer_cast<checkpoint::ShardedModel>(model.engine);
  return sharded ? checkpoint::sharded_state(std::move(sharded)) : nullptr;
}

std::shared_ptr<checkpoint::ShardedState> sharded_state_of(
    const std::shared_ptr<optim::OptimizerCore>& optimizer) {
  std::vector<std::shared_ptr<checkpoint::ShardedModel>> attached;
  for (const auto& engine : optimizer->engines) {
    auto sharded = std::dynamic_pointer_cast<checkpoint::ShardedModel>(engine.lock());
    if (sharded) attached.push_back(std::move(sharded));
  }
  auto models = stepped_models(*optimizer->optimizer, attached);
  if (!models) return nullptr;
  auto names = models->names_in(*optimizer->optimizer);
  return checkpoint::sharded_optimizer_state(
      std::move(models), std::make_shared<LocalOptimizerState>(optimizer), std::move(names));
}

void refuse_empty_pointer() {
  throw ArgumentError(
      "register_for_checkpointing: the pointer is empty. Make the object before it is registered.");
}

std::shared_ptr<Stateful> stateful_module(std::shared_ptr<torch::nn::Module> module) {
  return std::make_shared<ModuleState>(std::move(module));
}

void ObjectRegistry::forget_prepared() {
  models.clear();
  optimizers.clear();
  schedulers.clear();
  loaders.clear();
}

std::vector<StateEntry> ObjectRegistry::entries(const EntryOptions& options) const {
  std::vector<StateEntry> all;
  const auto add = [&](StateKind kind, std::string_view name, const auto& objects,
                       const auto& stateful) {
    for (std::size_t i = 0; i < objects.size(); ++i) {
      all.push_back({kind, numbered(name, i), stateful(objects[i])});
    }
  };
  add(StateKind::kModel, kSafeModelName, models, [&](const auto& one) -> std::shared_ptr<Stateful> {
    if (auto sharded = std::dynamic_pointer_cast<checkpoint::ShardedModel>(one->engine)) {
      return checkpoint::sharded_state(std::move(sharded), options.strict);
    }
    return std::make_shared<ModelState>(one, options.strict);
  });
  add(StateKind::kOptimizer, kOptimizerName, optimizers,
      [this](const auto& one) -> std::shared_ptr<Stateful> {
        if (auto sharded = sharded_state_of(one)) return sharded;
        return std::make_shared<OptimizerState>(one, models);
      });
  add(StateKind::kScheduler, kSchedulerName, schedulers, [](const auto& one) {
    return state::make_stateful(std::make_shared<AcceleratedScheduler>(one));
  });
  add(StateKind::kDataLoader, "dl_state_dict", loaders,
      [&](const auto& one) { return std::make_shared<LoaderState>(one, options.positions); });
  for (auto& entry : all) {
    if (entry.kind == StateKind::kDataLoader) entry.per_process = options.loaders_per_process;
  }
  if (scaling) {
    const std::shared_ptr<GradScaler> scaler(scaling, &scaling->scaler());
    all.push_back({StateKind::kScaler, "scaler",
                   scaling_state ? scaling_state : state::make_stateful(scaler)});
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
