#include "sharding/units.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "accelerate/errors.h"
#include "accelerate/state_dict.h"
#include "core/text.h"
#include "modeling/tensors.h"

namespace accelerate::detail::sharding {
namespace {

/// The module that a parameter is registered in: "a.b" of "a.b.weight".
std::string_view owner_of(std::string_view parameter) {
  const auto dot = parameter.rfind('.');
  return parameter.substr(0, dot == std::string_view::npos ? 0 : dot);
}

bool is_in(std::string_view module, std::string_view ancestor) {
  return ancestor.empty() || module == ancestor ||
         (module.starts_with(ancestor) && module[ancestor.size()] == '.');
}

/// The deepest of `modules` that has all of `names`, or null.
const std::string* deepest(const std::vector<std::string>& modules,
                           const std::vector<std::string>& names) {
  const std::string* found = nullptr;
  for (const auto& one : modules) {
    const auto has = [&](const std::string& name) { return is_in(owner_of(name), one); };
    if (!std::ranges::all_of(names, has)) continue;
    if (found == nullptr || one.size() > found->size()) found = &one;
  }
  return found;
}

void check_names(const torch::nn::Module& module, const std::vector<std::string>& names,
                 const char* what) {
  const auto known = module.named_modules("", /*include_self=*/false);
  for (const auto& name : names) {
    if (name.empty() || known.contains(name)) continue;
    throw ArgumentError(str("prepare: the model has no module '", name, "', which is to be ", what,
                            ". Its modules are: ", join(known.keys()), "."));
  }
}

StateDict parameters_of(const torch::nn::Module& module) {
  StateDict all("Parameter");
  for (const auto& entry : module.named_parameters()) {
    if (entry.value().defined()) all.insert(entry.key(), entry.value());
  }
  return all;
}

void check_buffers(const torch::nn::Module& module, const StateDict& parameters) {
  std::map<const void*, std::string> by_memory;
  for (const auto& entry : parameters) {
    if (entry.value().numel() > 0) {
      by_memory.emplace(modeling::memory_of(entry.value()), entry.key());
    }
  }
  for (const auto& entry : module.named_buffers()) {
    if (!entry.value().defined() || entry.value().numel() == 0) continue;
    const auto found = by_memory.find(modeling::memory_of(entry.value()));
    if (found == by_memory.end()) continue;
    throw ArgumentError(str("prepare: the buffer '", entry.key(),
                            "' shares its memory with the parameter '", found->second,
                            "', which is to be sharded. Give the buffer memory of its own."));
  }
}

}  // namespace

UnitPlan plan_units(const torch::nn::Module& module, const ShardSpec& spec) {
  check_names(module, spec.units, "sharded as a unit");
  check_names(module, spec.ignored, "ignored");
  const auto parameters = parameters_of(module);
  check_buffers(module, parameters);

  auto modules = spec.units;
  modules.emplace_back();
  std::map<std::string, PlannedUnit> by_name;
  UnitPlan plan;
  std::vector<std::string> order{""};
  for (auto& names : modeling::same_elements(parameters)) {
    PlannedParameter parameter{.names = std::move(names), .leaves = {}};
    for (const auto& name : parameter.names) {
      const auto& leaf = parameters[name];
      const auto same = [&](const at::Tensor& one) { return one.is_same(leaf); };
      if (std::ranges::none_of(parameter.leaves, same)) parameter.leaves.push_back(leaf);
    }
    if (parameter.tensor().numel() == 0 || deepest(spec.ignored, parameter.names) != nullptr) {
      plan.whole.push_back(std::move(parameter));
      continue;
    }
    const auto& unit = *deepest(modules, parameter.names);
    if (std::ranges::find(order, unit) == order.end()) order.push_back(unit);
    by_name[unit].parameters.push_back(std::move(parameter));
  }
  for (const auto& name : order) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) continue;
    found->second.name = name;
    plan.units.push_back(std::move(found->second));
  }
  return plan;
}

}  // namespace accelerate::detail::sharding
