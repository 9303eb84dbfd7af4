#include "training/living_models.h"

#include <mutex>

namespace accelerate::detail {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<ModelCore>> models;
};

Registry& registry() {
  static Registry all;
  return all;
}

}  // namespace

void add_living_model(const std::shared_ptr<ModelCore>& model) {
  auto& [mutex, models] = registry();
  const std::lock_guard lock(mutex);
  std::erase_if(models, [](const auto& one) { return one.expired(); });
  models.push_back(model);
}

void living_models(std::vector<std::shared_ptr<ModelCore>>& models) {
  models.clear();
  auto& [mutex, all] = registry();
  const std::lock_guard lock(mutex);
  for (const auto& one : all) {
    if (auto model = one.lock()) models.push_back(std::move(model));
  }
}

}  // namespace accelerate::detail
