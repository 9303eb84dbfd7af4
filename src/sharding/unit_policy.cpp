#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes parts of its own <regex> for uninitialised when sanitizers are on.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "sharding/unit_policy.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <regex>
#include <unordered_set>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "core/text.h"
#include "modeling/outline.h"

namespace accelerate::detail::sharding {
namespace {

using torch::nn::Module;
using NamedModules = std::vector<std::pair<std::string, const Module*>>;
using Tensors = std::unordered_set<const c10::TensorImpl*>;

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// All modules below, children before parents; one that is registered twice has its first name.
void append(const Module& module, const std::string& name, std::unordered_set<const Module*>& seen,
            NamedModules& out) {
  for (const auto& child : module.named_children()) {
    if (!seen.insert(child.value().get()).second) continue;
    append(*child.value(), joined(name, child.key()), seen, out);
    out.emplace_back(joined(name, child.key()), child.value().get());
  }
}

NamedModules modules_below(const Module& model) {
  NamedModules out;
  std::unordered_set<const Module*> seen{&model};
  append(model, "", seen, out);
  return out;
}

/// Elements of the parameters that are not in `counted` yet.
std::int64_t count(const Module& module, Tensors& counted) {
  std::int64_t elements = 0;
  for (const auto& parameter : module.parameters(/*recurse=*/false)) {
    if (counted.insert(parameter.unsafeGetTensorImpl()).second) elements += parameter.numel();
  }
  for (const auto& child : module.children()) elements += count(*child, counted);
  return elements;
}

bool is_within(const std::string& name, const std::string& outer) {
  return name == outer || name.starts_with(outer + ".");
}

bool is_within_any(const std::string& name, const UnitNames& outer) {
  return std::ranges::any_of(outer, [&](const auto& one) { return is_within(name, one); });
}

/// The walk of torch.distributed.fsdp.wrap.
class RemainingSizeWalk {
 public:
  RemainingSizeWalk(const Module& model, std::int64_t least, const UnitNames& ignored)
      : least_(least) {
    for (const auto& [name, module] : modules_below(model)) {
      if (!is_within_any(name, ignored)) continue;
      ignored_.insert(module);
      static_cast<void>(count(*module, ignored_tensors_));
    }
  }

  /// Returns the elements that units in `module` have.
  std::int64_t visit(const Module& module, const std::string& name) {
    Tensors counted = ignored_tensors_;
    const std::int64_t elements = count(module, counted);
    const bool is_attention =
        dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module) != nullptr;
    if (elements < least_ || is_attention) return 0;
    std::int64_t in_units = 0;
    std::unordered_set<const Module*> seen;
    for (const auto& child : module.named_children()) {
      const Module* const one = child.value().get();
      if (ignored_.contains(one) || !seen.insert(one).second) continue;
      in_units += visit(*one, joined(name, child.key()));
    }
    const bool is_container = dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
                              dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
    if (name.empty() || is_container || elements - in_units < least_) return in_units;
    units.push_back(name);
    return elements;
  }

  UnitNames units;

 private:
  std::int64_t least_;
  std::unordered_set<const Module*> ignored_;
  Tensors ignored_tensors_;
};

/// Topmost modules first, so that a module which fits is not divided.
void divide(const Module& module, const std::string& name, std::int64_t bucket,
            const UnitNames& leaves, UnitNames& units) {
  const bool is_leaf = std::ranges::find(leaves, name) != leaves.end();
  const std::int64_t elements = parameter_elements(module);
  if (!is_leaf && elements > bucket) {
    for (const auto& child : module.named_children()) {
      divide(*child.value(), joined(name, child.key()), bucket, leaves, units);
    }
    if (module.parameters(/*recurse=*/false).empty()) return;
  }
  if (!name.empty() && elements > 0) units.push_back(name);
}

UnitNames matching(const Module& model, const std::string& expression) {
  const std::regex regex(expression);
  if (std::regex_match("", regex)) {
    throw ConfigError(str("ignored_modules is '", expression,
                          "', which matches the model itself (its name is empty): nothing would "
                          "be sharded. Name parts of the model."));
  }
  UnitNames names;
  for (const auto& [name, module] : modules_below(model)) {
    if (std::regex_match(name, regex)) names.push_back(name);
  }
  return names;
}

UnitNames names_of(const Module& model, const std::vector<std::shared_ptr<Module>>& modules) {
  const auto all = modules_below(model);
  UnitNames names;
  for (const auto& module : modules) {
    const auto found = std::ranges::find(
        all, module.get(), [](const auto& one) -> const Module* { return one.second; });
    if (found == all.end()) {
      throw ConfigError(str("ignored_modules has a module ",
                            module ? str("of class ", module_class_name(*module)) : "that is empty",
                            ", which is not in the model. Name modules below the model itself."));
    }
    names.push_back(found->first);
  }
  return names;
}

}  // namespace

std::int64_t parameter_elements(const Module& module) {
  Tensors counted;
  return count(module, counted);
}

std::int64_t largest_elements(const Module& model, const UnitNames& units) {
  if (units.empty()) return parameter_elements(model);
  std::int64_t largest = 0;
  for (const auto& [name, module] : modules_below(model)) {
    if (std::ranges::find(units, name) == units.end()) continue;
    largest = std::max(largest, parameter_elements(*module));
  }
  return largest;
}

UnitNames units_by_predicate(const Module& model,
                             const std::function<bool(const Module&)>& chosen) {
  UnitNames names;
  for (const auto& [name, module] : modules_below(model)) {
    if (chosen(*module)) names.push_back(name);
  }
  return names;
}

UnitNames units_by_class(const Module& model, const std::vector<std::string>& classes) {
  for (const auto& name : classes) {
    const std::vector<std::string> one{name};
    const auto below = modules_below(model);
    const bool there =
        modeling::has_class(model, one) || std::ranges::any_of(below, [&](const auto& module) {
          return modeling::has_class(*module.second, one);
        });
    if (there) continue;
    std::vector<std::string> known;
    for (const auto& [path, module] : below) known.push_back(module_class_name(*module));
    throw ConfigError(str("Could not find the transformer layer class ", name, " in the model.",
                          did_you_mean(name, known)));
  }
  return units_by_predicate(
      model, [&](const Module& module) { return modeling::has_class(module, classes); });
}

UnitNames units_by_remaining_size(const Module& model, std::int64_t least,
                                  const UnitNames& ignored) {
  RemainingSizeWalk walk(model, least, ignored);
  static_cast<void>(walk.visit(model, ""));
  return std::move(walk.units);
}

UnitNames units_by_total_size(const Module& model, std::int64_t most) {
  return units_by_predicate(
      model, [&](const Module& module) { return parameter_elements(module) > most; });
}

UnitNames units_by_bucket(const Module& model, std::int64_t bucket, const UnitNames& leaves) {
  UnitNames units;
  divide(model, "", bucket, leaves, units);
  return units;
}

UnitNames ignored_modules(
    const Module& model,
    const std::variant<std::string, std::vector<std::shared_ptr<Module>>>& ignored) {
  const auto* expression = std::get_if<std::string>(&ignored);
  const auto names =
      expression != nullptr ? matching(model, *expression) : names_of(model, std::get<1>(ignored));
  UnitNames outermost;
  std::ranges::copy_if(names, std::back_inserter(outermost), [&](const std::string& name) {
    return std::ranges::none_of(
        names, [&](const auto& other) { return other != name && is_within(name, other); });
  });
  return outermost;
}

UnitNames outside_of(const UnitNames& ignored, UnitNames units) {
  std::erase_if(units, [&](const std::string& unit) { return is_within_any(unit, ignored); });
  return units;
}

}  // namespace accelerate::detail::sharding
