#include "accelerator/model_registry.h"

#include <algorithm>
#include <mutex>

namespace accelerate::detail::accelerator {
namespace {

struct ModelRegistry {
  std::mutex mutex;
  std::vector<std::weak_ptr<ModelCore>> models;
};

ModelRegistry& registry() {
  static ModelRegistry all;
  return all;
}

}  // namespace

void add_to_model_registry(const std::shared_ptr<ModelCore>& model) {
  auto& [mutex, models] = registry();
  const std::lock_guard lock(mutex);
  std::erase_if(models, [](const auto& one) { return one.expired(); });
  const auto is_known = [&](const auto& one) { return one.lock() == model; };
  if (std::ranges::none_of(models, is_known)) models.push_back(model);
}

void list_model_registry(std::vector<std::shared_ptr<ModelCore>>& models) {
  models.clear();
  auto& [mutex, all] = registry();
  const std::lock_guard lock(mutex);
  for (const auto& one : all) {
    if (auto model = one.lock()) models.push_back(std::move(model));
  }
}

std::vector<std::shared_ptr<parallel::Engine>> list_engines() {
  std::vector<std::shared_ptr<ModelCore>> models;
  list_model_registry(models);
  std::vector<std::shared_ptr<parallel::Engine>> engines;
  for (const auto& model : models) engines.push_back(model->engine);
  return engines;
}

}  // namespace accelerate::detail::accelerator
