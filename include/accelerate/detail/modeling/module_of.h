// accelerate/detail/modeling/module_of.h - the module that a holder or a smart pointer leads to.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>

namespace accelerate::detail::modeling {

/// `pointer` is null for an empty holder.
template <class Holder>
struct ModuleOf;
template <class Holder>
  requires torch::detail::is_module_holder<Holder>::value
struct ModuleOf<Holder> {
  using type = typename Holder::ContainedType;
  static std::shared_ptr<type> pointer(const Holder& holder) {
    return holder.is_empty() ? nullptr : holder.ptr();
  }
};
template <std::derived_from<torch::nn::Module> M>
struct ModuleOf<std::shared_ptr<M>> {
  using type = M;
  static const std::shared_ptr<M>& pointer(const std::shared_ptr<M>& holder) { return holder; }
};

template <class T>
concept ModelHolder = requires { typename ModuleOf<T>::type; };

}  // namespace accelerate::detail::modeling
