// accelerate/modeling.h - look into models: wrappers, children, names, tensors, sizes, device maps.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeindex>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/modeling/device_map.h"
#include "accelerate/modeling/planning.h"
#include "accelerate/modeling/tensors.h"

namespace accelerate {

/// Why a module is wrapped into another.
enum class WrapperKind : std::uint8_t {
  kDataParallel,         ///< gradients are averaged over processes
  kShardedDataParallel,  ///< parameters are spread over processes
  kMixedPrecision,       ///< runs under autocast and returns float32
  kCompiled,             ///< runs as a captured or compiled program
  kCompiledRegions       ///< parts of it do; `inner` is the module as it was before
};

/// The base of modules that stand around another one.
///
/// The inner module is registered as "module", or "_orig_mod" for compiled ones: the prefixes that
/// Python's parallel and compiled wrappers have in state dictionaries.
class ACCELERATE_API ModuleWrapper : public torch::nn::Module {
 public:
  ~ModuleWrapper() override;

  [[nodiscard]] WrapperKind kind() const noexcept { return kind_; }
  [[nodiscard]] const std::shared_ptr<torch::nn::Module>& inner() const noexcept { return inner_; }
  /// Puts another module inside. Wrappers that hold more than the pointer override it.
  virtual void set_inner(std::shared_ptr<torch::nn::Module> inner);

 protected:
  /// Throws `ArgumentError` when `inner` is null.
  ModuleWrapper(WrapperKind kind, std::shared_ptr<torch::nn::Module> inner);

 private:
  std::shared_ptr<torch::nn::Module> inner_;
  WrapperKind kind_;
};

struct ExtractModelOptions {
  /// Leave autocast and the conversion of outputs to float32 on the model.
  bool keep_fp32_wrapper = true;
  /// Leave the compiled shell around the extracted model.
  bool keep_torch_compile = true;
  /// Also take the wrappers off its submodules.
  bool recursive = false;
};

namespace detail::modeling {

/// Throws `ArgumentError`.
[[noreturn]] ACCELERATE_API void refuse_extracted(const torch::nn::Module& model,
                                                  const std::type_info& wanted);

}  // namespace detail::modeling

/// Takes the parallel wrappers off a model. A model without any comes back as it is.
///
/// A compiled shell that is kept holds the extracted model afterwards, as in Python. `recursive`
/// replaces registered children and the entries of a `ModuleList`; a wrapper inside a `Sequential`
/// or another container that keeps its entries to itself throws `UnsupportedError` naming it.
[[nodiscard]] ACCELERATE_API std::shared_ptr<torch::nn::Module> extract_model_from_parallel(
    std::shared_ptr<torch::nn::Module> model, const ExtractModelOptions& options = {});
/// Returns the class `M` that the model has inside; throws `ArgumentError` for another class.
///
///     auto net = extract_model_from_parallel<NetImpl>(wrapped);
template <std::derived_from<torch::nn::Module> M>
[[nodiscard]] std::shared_ptr<M> extract_model_from_parallel(
    const std::shared_ptr<torch::nn::Module>& model, const ExtractModelOptions& options = {}) {
  const auto extracted = extract_model_from_parallel(model, options);
  auto typed = std::dynamic_pointer_cast<M>(extracted);
  if (typed == nullptr) detail::modeling::refuse_extracted(*extracted, typeid(M));
  return typed;
}
/// A model whose class is known and is no wrapper keeps its class.
template <std::derived_from<torch::nn::Module> M>
  requires(!std::derived_from<M, ModuleWrapper> && !std::same_as<M, torch::nn::Module>)
[[nodiscard]] std::shared_ptr<M> extract_model_from_parallel(
    const std::shared_ptr<M>& model, const ExtractModelOptions& options = {}) {
  return std::static_pointer_cast<M>(
      extract_model_from_parallel(std::shared_ptr<torch::nn::Module>(model), options));
}
template <class Contained>
[[nodiscard]] auto extract_model_from_parallel(const torch::nn::ModuleHolder<Contained>& model,
                                               const ExtractModelOptions& options = {}) {
  return extract_model_from_parallel(model ? model.ptr() : std::shared_ptr<Contained>(), options);
}

[[nodiscard]] ACCELERATE_API bool is_compiled_module(const torch::nn::Module& module);
/// The module is compiled, or one below it is.
[[nodiscard]] ACCELERATE_API bool has_compiled_regions(const torch::nn::Module& module);
/// A `ModuleList` that is not empty and whose modules are all of one class.
[[nodiscard]] ACCELERATE_API bool is_repeated_blocks(const torch::nn::Module& module);
/// The module is such a list, or one below it is.
[[nodiscard]] ACCELERATE_API bool has_repeated_blocks(const torch::nn::Module& module);
/// A parameter of the model is spread over processes.
[[nodiscard]] ACCELERATE_API bool model_has_dtensor(const torch::nn::Module& module);

/// Every module below `model`, children before parents, in the order of registration, `model` last.
[[nodiscard]] ACCELERATE_API std::vector<torch::nn::Module*> get_module_children_bottom_up(
    torch::nn::Module& model);
/// These modules with their dotted names; that of `model` is "".
///
///     Net(enc(l1, l2), head)  ->  enc.l1, enc.l2, enc, head, ""
[[nodiscard]] ACCELERATE_API std::vector<std::pair<std::string, torch::nn::Module*>>
get_named_module_children_bottom_up(torch::nn::Module& model);

/// "Linear" for torch::nn::LinearImpl; a name given to the constructor of `Module` goes first.
[[nodiscard]] ACCELERATE_API std::string module_class_name(const torch::nn::Module& module);
/// The class of the first module, parents before children, whose class name is `name`.
[[nodiscard]] ACCELERATE_API std::optional<std::type_index> get_module_class_from_name(
    const torch::nn::Module& module, std::string_view name);

/// The module, parameter or buffer at a dotted name; "" is the module itself. A name that leads
/// nowhere throws `ArgumentError` that says where it ended and what there is.
///
///     get_parameter(*net, "encoder.layers.0.weight");
[[nodiscard]] ACCELERATE_API torch::nn::Module& get_submodule(torch::nn::Module& module,
                                                              std::string_view name);
[[nodiscard]] ACCELERATE_API torch::Tensor get_parameter(torch::nn::Module& module,
                                                         std::string_view name);
[[nodiscard]] ACCELERATE_API torch::Tensor get_buffer(torch::nn::Module& module,
                                                      std::string_view name);

namespace detail::modeling {

/// The last part of a qualified name, without template arguments and the Impl of module classes.
[[nodiscard]] ACCELERATE_API std::string short_class_name(std::string_view qualified);
[[nodiscard]] ACCELERATE_API std::string short_type_name(const std::type_info& type);

}  // namespace detail::modeling

/// The class of an object as messages show it: "AdamW", "Linear".
template <class T>
[[nodiscard]] std::string get_pretty_name(const T& object) {
  if constexpr (std::is_base_of_v<torch::nn::Module, T>) {
    return module_class_name(object);
  } else {
    return detail::modeling::short_type_name(typeid(object));
  }
}
template <class Contained>
[[nodiscard]] std::string get_pretty_name(const torch::nn::ModuleHolder<Contained>& holder) {
  return module_class_name(*holder);
}

}  // namespace accelerate
