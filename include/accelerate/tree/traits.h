// accelerate/tree/traits.h - which types are tensor trees.
//
// Included by accelerate/tree.h; include that.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <tuple>
#include <type_traits>

#include "accelerate/value/node.h"

namespace accelerate {
namespace tree::detail {

enum class Leaves { kAny, kAll };

template <Leaves Which>
constexpr bool combine(std::initializer_list<bool> children) {
  for (const bool child : children) {
    if (child != (Which == Leaves::kAll)) return child;
  }
  return Which == Leaves::kAll;
}

/// Whether some leaf, or every leaf, that can be seen in the type is a `Leaf`.
template <class T, class Leaf, Leaves Which>
constexpr bool holds() {
  constexpr Node node = node_of<T, Leaf>();
  if constexpr (node == Node::kLeaf || node == Node::kDynamic) {
    return true;
  } else if constexpr (node == Node::kSequence || node == Node::kOptional) {
    return holds<typename T::value_type, Leaf, Which>();
  } else if constexpr (node == Node::kMapping) {
    return holds<MappedOf<T>, Leaf, Which>();
  } else if constexpr (kIsArray<T>) {
    return holds<typename T::value_type, Leaf, Which>();
  } else if constexpr (node == Node::kFixed || node == Node::kVariant) {
    return []<template <class...> class C, class... Ts>(std::type_identity<C<Ts...>>) {
      return combine<Which>({holds<Ts, Leaf, Which>()...});
    }(std::type_identity<T>{});
  } else if constexpr (node == Node::kRecord) {
    return []<class... R, class... M>(std::type_identity<std::tuple<Field<R, M>...>>) {
      return combine<Which>({holds<M, Leaf, Which>()...});
    }(std::type_identity<decltype(fields<T>())>{});
  } else {
    return false;
  }
}

}  // namespace tree::detail

/// Types in which a tensor may occur.
template <class T>
concept TensorTree =
    tree::detail::holds<std::remove_cvref_t<T>, at::Tensor, tree::detail::Leaves::kAny>();
/// Trees in which every leaf that the type shows is a tensor: what collectives take.
template <class T>
concept PureTensorTree =
    tree::detail::holds<std::remove_cvref_t<T>, at::Tensor, tree::detail::Leaves::kAll>();

}  // namespace accelerate
