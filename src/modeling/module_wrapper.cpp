// Wrappers around modules, and how they come off again.
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;
using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

bool is_compiled_shell(WrapperKind kind) {
  return kind == WrapperKind::kCompiled || kind == WrapperKind::kCompiledRegions;
}

const char* name_of_inner(WrapperKind kind) {
  return is_compiled_shell(kind) ? "_orig_mod" : "module";
}

bool comes_off(WrapperKind kind, const ExtractModelOptions& options) {
  switch (kind) {
    case WrapperKind::kDataParallel:
    case WrapperKind::kShardedDataParallel:
      return true;
    case WrapperKind::kMixedPrecision:
      return !options.keep_fp32_wrapper;
    case WrapperKind::kCompiled:
    case WrapperKind::kCompiledRegions:
      return false;
  }
  return false;
}

ModulePtr peeled(ModulePtr module, const ExtractModelOptions& options) {
  while (const auto wrapper = std::dynamic_pointer_cast<ModuleWrapper>(module)) {
    if (!comes_off(wrapper->kind(), options)) break;
    module = wrapper->inner();
  }
  return module;
}

void replace_child(Module& parent, const std::string& path, const std::string& name,
                   const ModulePtr& child) {
  if (auto* wrapper = dynamic_cast<ModuleWrapper*>(&parent)) {
    wrapper->set_inner(child);
    return;
  }
  if (auto* list = dynamic_cast<torch::nn::ModuleListImpl*>(&parent)) {
    // A list keeps its modules twice: registered, and in order.
    const auto before = parent.named_children()[name];
    std::ranges::replace(*list, before, child);
  } else if (dynamic_cast<torch::nn::SequentialImpl*>(&parent) != nullptr ||
             dynamic_cast<torch::nn::ModuleDictImpl*>(&parent) != nullptr) {
    throw UnsupportedError(
        str("extract_model_from_parallel cannot take the wrapper off '", path,
            "': ", module_class_name(parent),
            " keeps the modules it calls to itself. Wrap the whole container, or use "
            "a ModuleList."));
  }
  parent.replace_module(name, child);
}

void peel_children(Module& module, const std::string& path, const ExtractModelOptions& options) {
  for (const auto& entry : module.named_children()) {
    const auto child_path = path.empty() ? entry.key() : path + "." + entry.key();
    const auto inner = peeled(entry.value(), options);
    if (inner != entry.value()) replace_child(module, child_path, entry.key(), inner);
    peel_children(*inner, child_path, options);
  }
}

}  // namespace

ModuleWrapper::ModuleWrapper(WrapperKind kind, ModulePtr inner) : kind_(kind) {
  if (inner == nullptr) throw ArgumentError("A wrapper needs a module to wrap, and got none.");
  inner_ = register_module(name_of_inner(kind), std::move(inner));
}

ModuleWrapper::~ModuleWrapper() = default;

void ModuleWrapper::set_inner(ModulePtr inner) {
  if (inner == nullptr) throw ArgumentError("A wrapper needs a module to wrap, and got none.");
  inner_ = replace_module(name_of_inner(kind_), std::move(inner));
}

void detail::modeling::refuse_extracted(const Module& model, const std::type_info& wanted) {
  throw ArgumentError(str("The model inside is a ", module_class_name(model), ", not the class ",
                          short_type_name(wanted), ". Ask for the class that was wrapped."));
}

ModulePtr extract_model_from_parallel(ModulePtr model, const ExtractModelOptions& options) {
  if (model == nullptr) throw ArgumentError("There is no model to extract: the pointer is empty.");
  std::shared_ptr<ModuleWrapper> shell;
  if (auto wrapper = std::dynamic_pointer_cast<ModuleWrapper>(model);
      wrapper != nullptr && is_compiled_shell(wrapper->kind())) {
    model = wrapper->inner();
    shell = std::move(wrapper);
  }
  model = peeled(std::move(model), options);
  if (options.recursive) peel_children(*model, "", options);
  if (shell == nullptr || !options.keep_torch_compile) return model;
  shell->set_inner(model);
  return shell;
}

}  // namespace accelerate
