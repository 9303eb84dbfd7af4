#include "modeling/checkpoint_marks.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerate/nn/activation_checkpoint.h"
#include "core/text.h"

namespace accelerate {
namespace detail::modeling {
namespace {

struct Mark {
  std::weak_ptr<torch::nn::Module> module;  // another one may come to its address
  std::shared_ptr<CheckpointMarks> marks;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, Mark> modules;
  std::vector<std::shared_ptr<CheckpointMarks>> unasked;
  // Without the mutex, for programs without marks: whether the containers have entries.
  std::atomic<bool> any_module = false;
  std::atomic<bool> any_unasked = false;

  void forget_unasked(const CheckpointMarks& marks) {
    std::erase_if(unasked, [&](const auto& one) { return one.get() == &marks; });
    any_unasked = !unasked.empty();
  }
};

// Never destroyed: models of static duration may still be used when the program ends.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

}  // namespace

void mark_for_checkpoints(torch::nn::Module& model, const std::vector<std::string>& names) {
  auto marks = std::make_shared<CheckpointMarks>();
  for (const auto& name : names) {
    marks->modules.push_back(get_submodule(model, name).weak_from_this());
  }
  marks->shown = str("'", names.front(), "' of class ",
                     module_class_name(get_submodule(model, names.front())));
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.modules, [](const auto& one) { return one.second.module.expired(); });
  for (const auto& module : marks->modules) {
    auto& mark = all.modules[module.lock().get()];
    if (mark.marks != nullptr) all.forget_unasked(*mark.marks);  // the new ones take their place
    mark = {module, marks};
  }
  all.unasked.push_back(std::move(marks));
  all.any_module = true;
  all.any_unasked = true;
}

std::vector<std::shared_ptr<CheckpointMarks>> unasked_marks() {
  auto& all = registry();
  if (!all.any_unasked) return {};
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.unasked, [](const auto& one) {
    return std::ranges::all_of(one->modules, [](const auto& each) { return each.expired(); });
  });
  return all.unasked;
}

void forget_unasked_marks(const CheckpointMarks& marks) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.forget_unasked(marks);
}

}  // namespace detail::modeling

std::vector<std::string> apply_activation_checkpointing(
    torch::nn::Module& model, const std::function<bool(const torch::nn::Module&)>& check_fn) {
  std::vector<std::string> names;
  for (const auto& [name, module] : get_named_module_children_bottom_up(model)) {
    if (!name.empty() && check_fn(*module)) names.push_back(name);
  }
  if (names.empty()) {
    throw ArgumentError(detail::str(
        "apply_activation_checkpointing: none of the modules below ", module_class_name(model),
        " was chosen. Choose the blocks that are repeated in the model."));
  }
  detail::modeling::mark_for_checkpoints(model, names);
  return names;
}

bool should_checkpoint(const torch::nn::Module& module) {
  auto& all = detail::modeling::registry();
  if (!all.any_module) return false;
  const std::lock_guard lock(all.mutex);
  const auto found = all.modules.find(&module);
  if (found == all.modules.end() || found->second.module.lock().get() != &module) return false;
  if (all.any_unasked) all.forget_unasked(*found->second.marks);
  return true;
}

}  // namespace accelerate
