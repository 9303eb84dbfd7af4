// Children, names and classes of modules.
#include <c10/util/Type.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <unordered_set>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "comm/sharded.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;
using torch::nn::Module;

/// The module or one below it passes the test. Not by `Module::modules()`, which fails for a module
/// that lives on the stack.
template <class Test>
bool any_module(const Module& module, const Test& test) {
  if (test(module)) return true;
  return std::ranges::any_of(module.children(),
                             [&](const auto& child) { return any_module(*child, test); });
}

void append_bottom_up(const std::string& name, Module& module,
                      std::vector<std::pair<std::string, Module*>>& out) {
  std::unordered_set<const Module*> seen;  // as Python, a child registered twice counts once
  for (const auto& child : module.named_children()) {
    if (!seen.insert(child.value().get()).second) continue;
    append_bottom_up(name.empty() ? child.key() : name + "." + child.key(), *child.value(), out);
  }
  out.emplace_back(name, &module);
}

/// "'l3'. Encoder has the children l1, l2. Did you mean 'l2'?"
template <class Dictionary>
[[noreturn]] void throw_not_there(std::string_view name, std::string_view part, const Module& where,
                                  const char* kinds, const Dictionary& there) {
  auto message = str("'", name, "' leads nowhere: there is no '", part, "' in ",
                     module_class_name(where), ", which has ");
  const auto keys = there.keys();
  message +=
      keys.empty() ? str("no ", kinds, ".") : str("the ", kinds, " ", detail::join(keys), ".");
  const auto meant = detail::nearest(part, keys);
  if (!meant.empty()) message += str(" Did you mean '", meant, "'?");
  throw ArgumentError(message);
}

/// The module that holds the last part of a dotted name, and that part.
std::pair<Module*, std::string> owner_of(Module& root, std::string_view name) {
  auto parts = detail::split(name, '.');
  auto last = std::move(parts.back());
  parts.pop_back();
  Module* module = &root;
  for (const auto& part : parts) {
    const auto children = module->named_children();
    const auto* child = children.find(part);
    if (child == nullptr) throw_not_there(name, part, *module, "children", children);
    module = child->get();
  }
  return {module, std::move(last)};
}

}  // namespace

namespace detail::modeling {

std::string short_class_name(std::string_view qualified) {
  // Namespaces end at the last "::" that stands in no template argument and no parameter list.
  std::size_t start = 0;
  std::size_t end = qualified.size();
  int depth = 0;
  for (std::size_t i = 0; i < qualified.size(); ++i) {
    const char c = qualified[i];
    if (c == '<' || c == '(' || c == '{') {
      if (depth++ == 0 && c == '<') end = i;
    } else if (c == '>' || c == ')' || c == '}') {
      --depth;
    } else if (depth == 0 && qualified.substr(i, 2) == "::") {
      start = i + 2;
      end = qualified.size();
    }
  }
  auto name = qualified.substr(start, end - start);
  if (name.size() > 4 && name.ends_with("Impl")) name.remove_suffix(4);
  return std::string(name);
}

std::string short_type_name(const std::type_info& type) {
  return short_class_name(c10::demangle(type.name()));
}

}  // namespace detail::modeling

bool is_repeated_blocks(const Module& module) {
  const auto* list = dynamic_cast<const torch::nn::ModuleListImpl*>(&module);
  if (list == nullptr || list->is_empty()) return false;
  const auto& first = **list->begin();
  return std::all_of(list->begin(), list->end(),
                     [&](const auto& block) { return typeid(*block) == typeid(first); });
}

bool has_repeated_blocks(const Module& module) { return any_module(module, is_repeated_blocks); }

bool model_has_dtensor(const Module& module) {
  return std::ranges::any_of(module.parameters(), detail::comm::is_sharded);
}

std::vector<std::pair<std::string, Module*>> get_named_module_children_bottom_up(Module& model) {
  std::vector<std::pair<std::string, Module*>> modules;
  append_bottom_up("", model, modules);
  return modules;
}

std::vector<Module*> get_module_children_bottom_up(Module& model) {
  std::vector<Module*> modules;
  for (const auto& [name, module] : get_named_module_children_bottom_up(model)) {
    modules.push_back(module);
  }
  return modules;
}

std::string module_class_name(const Module& module) {
  return detail::modeling::short_class_name(module.name());
}

std::optional<std::type_index> get_module_class_from_name(const Module& module,
                                                          std::string_view name) {
  if (module_class_name(module) == name ||
      detail::modeling::short_type_name(typeid(module)) == name) {
    return std::type_index(typeid(module));
  }
  for (const auto& child : module.children()) {
    if (const auto found = get_module_class_from_name(*child, name)) return found;
  }
  return std::nullopt;
}

Module& get_submodule(Module& module, std::string_view name) {
  if (name.empty()) return module;
  const auto [owner, last] = owner_of(module, name);
  const auto children = owner->named_children();
  if (const auto* child = children.find(last)) return **child;
  throw_not_there(name, last, *owner, "children", children);
}

torch::Tensor get_parameter(Module& module, std::string_view name) {
  const auto [owner, last] = owner_of(module, name);
  const auto parameters = owner->named_parameters(/*recurse=*/false);
  if (const auto* parameter = parameters.find(last)) return *parameter;
  throw_not_there(name, last, *owner, "parameters", parameters);
}

torch::Tensor get_buffer(Module& module, std::string_view name) {
  const auto [owner, last] = owner_of(module, name);
  const auto buffers = owner->named_buffers(/*recurse=*/false);
  if (const auto* buffer = buffers.find(last)) return *buffer;
  throw_not_there(name, last, *owner, "buffers", buffers);
}

// -- Compiled modules are wrappers; see module_wrapper.cpp for those.
// ------------------------------

bool is_compiled_module(const Module& module) {
  const auto* wrapper = dynamic_cast<const ModuleWrapper*>(&module);
  return wrapper != nullptr && wrapper->kind() == WrapperKind::kCompiled;
}

bool has_compiled_regions(const Module& module) { return any_module(module, is_compiled_module); }

}  // namespace accelerate
