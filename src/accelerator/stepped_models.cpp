#include "accelerator/stepped_models.h"

#include <algorithm>
#include <utility>

#include "core/text.h"

namespace accelerate::detail::accelerator {
namespace {

using checkpoint::LocalShard;
using checkpoint::ShardedModel;
using torch::optim::Optimizer;

std::string prefix_of(std::size_t index) { return index == 0 ? "" : str("model_", index, "."); }

bool has_any(const NamesInModel& names) {
  return std::ranges::any_of(names, [](const std::string& name) { return !name.empty(); });
}

class SteppedModels final : public ShardedModel {
 public:
  SteppedModels(std::vector<std::shared_ptr<ShardedModel>> models, std::vector<std::string> names,
                StateDict others)
      : models_(std::move(models)), names_(std::move(names)), others_(std::move(others)) {}

  [[nodiscard]] std::vector<LocalShard> local_shards() override {
    std::vector<LocalShard> shards;
    for (std::size_t i = 0; i < models_.size(); ++i) {
      for (auto& shard : models_[i]->local_shards()) {
        shard.name = prefix_of(i) + shard.name;
        if (!shard.tied_to.empty()) shard.tied_to = prefix_of(i) + shard.tied_to;
        shards.push_back(std::move(shard));
      }
    }
    return shards;
  }
  [[nodiscard]] StateDict whole_tensors() override {
    StateDict whole = others_;
    for (std::size_t i = 0; i < models_.size(); ++i) {
      for (const auto& entry : models_[i]->whole_tensors()) {
        whole.insert(prefix_of(i) + entry.key(), entry.value());
      }
    }
    return whole;
  }
  void loaded() override {
    for (const auto& model : models_) model->loaded();
  }
  [[nodiscard]] std::vector<std::string> names_in(const Optimizer& /*optimizer*/) override {
    return names_;
  }
  [[nodiscard]] StateDictType state_dict_type() const override {
    return models_.front()->state_dict_type();
  }
  [[nodiscard]] bool has_deepspeed_names() const override {
    return models_.front()->has_deepspeed_names();
  }

 private:
  std::vector<std::shared_ptr<ShardedModel>> models_;
  std::vector<std::string> names_;
  /// Parameters of no model.
  StateDict others_;
};

}  // namespace

std::vector<std::string> stepped_names(const Optimizer& optimizer,
                                       std::span<const NamesInModel> models) {
  std::vector<std::string> names;
  const auto& groups = optimizer.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (std::size_t i = 0; i < groups[group].params().size(); ++i) {
      names.push_back(str("group_", group, ".", i));
    }
  }
  std::vector<bool> is_named(names.size());
  std::size_t owners = 0;
  for (const auto& model : models) {
    if (!has_any(model)) continue;
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (model[i].empty() || is_named[i]) continue;
      names[i] = prefix_of(owners) + model[i];
      is_named[i] = true;
    }
    ++owners;
  }
  return names;
}

std::shared_ptr<ShardedModel> stepped_models(
    const Optimizer& optimizer, const std::vector<std::shared_ptr<ShardedModel>>& models) {
  std::vector<std::shared_ptr<ShardedModel>> owners;
  std::vector<NamesInModel> names;
  for (const auto& model : models) {
    auto own = model->names_in(optimizer);
    if (!has_any(own)) continue;
    owners.push_back(model);
    names.push_back(std::move(own));
  }
  if (owners.empty()) return nullptr;
  auto all = stepped_names(optimizer, names);
  StateDict others("Tensor");
  std::size_t position = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto at = position++;
      const auto has_it = [&](const NamesInModel& model) { return !model[at].empty(); };
      if (std::ranges::none_of(names, has_it)) others.insert(all[at], parameter);
    }
  }
  return std::make_shared<SteppedModels>(std::move(owners), std::move(all), std::move(others));
}

}  // namespace accelerate::detail::accelerator
