// accelerate/detail/comm/leaf_checks.h - errors for trees with leaves that an operation cannot use.
//
// Internal to accelerate/operations.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <variant>

#include "accelerate/api.h"
#include "accelerate/errors.h"
#include "accelerate/tree.h"

namespace accelerate::detail::comm {

/// Each throws `ArgumentError`.
struct ACCELERATE_API RefuseLeaf {
  [[noreturn]] static void other(std::string_view operation, const std::string& path,
                                 const std::type_info& type,
                                 std::string_view expected = "at::Tensor");
  /// A leaf inside of a `Value`.
  [[noreturn]] static void value(std::string_view operation, const std::string& path,
                                 const Value& value, std::string_view expected = "kind tensor");
  /// A tensor that is not defined.
  [[noreturn]] static void absent(std::string_view operation, const std::string& path);
};
/// The name of a type as written in C++.
[[nodiscard]] ACCELERATE_API std::string type_name(const std::type_info& type);

/// For `find_batch_size`. Both throw `ArgumentError`: the first always, the second for a tensor
/// without dimension 0, whose size it returns.
struct ACCELERATE_API BatchSize {
  [[noreturn]] static void refuse_empty(const TreePath& path, const std::type_info& container);
  [[nodiscard]] static std::int64_t of(const at::Tensor& tensor, const TreePath& path);
};

/// What becomes of tensors that are not defined.
enum class Undefined { kPassedOver, kRefused };

/// Throws for the first leaf that is not a `Leaf`. None counts as absent.
template <class Leaf>
struct RefuseOthers {
  std::string_view operation;
  Undefined undefined = Undefined::kPassedOver;
  void absent(const TreePath& path) const {
    if (undefined == Undefined::kRefused) RefuseLeaf::absent(operation, path.str());
  }
  template <class L>
  void leaf(const TreePath&, L&) {}
  template <class T>
  void other(const TreePath& path, T& x) {
    using Dynamic = tree::Dynamic<std::remove_const_t<T>>;
    if constexpr (Dynamic::kOpens) {
      const Value& value = Dynamic::other(x);
      if (value.is_none() || tree::HeldInValue<Leaf>::get(value)) return;
      if constexpr (std::same_as<Leaf, at::Tensor>) {
        RefuseLeaf::value(operation, path.str(), value);
      } else {
        RefuseLeaf::value(operation, path.str(), value, "type " + type_name(typeid(Leaf)));
      }
    } else {
      RefuseLeaf::other(operation, path.str(), typeid(T), type_name(typeid(Leaf)));
    }
  }
  [[nodiscard]] bool enters(const TreePath&) const { return true; }
  [[nodiscard]] tree::Order order() const { return tree::Order::kContainer; }
};

template <class Leaf, class T>
void refuse_others(std::string_view operation, const T& tree,
                   Undefined undefined = Undefined::kPassedOver) {
  RefuseOthers<Leaf> visitor{operation, undefined};
  tree::detail::walk<Leaf>(tree, visitor, TreePath());
}
template <class Leaf, class F, class T>
void refuse_others(const T& tree) {
  refuse_others<Leaf>("recursively_apply with " + type_name(typeid(F)), tree);
}

template <class T>
std::int64_t batch_size(const T& node, const TreePath& path) {
  using tree::Node;
  constexpr Node kind = tree::detail::node_of<T, at::Tensor>();
  if constexpr (kind == Node::kLeaf) {
    return BatchSize::of(node, path);
  } else if constexpr (kind == Node::kSequence ||
                       (kind == Node::kFixed && tree::detail::kIsArray<T>)) {
    if (node.empty()) BatchSize::refuse_empty(path, typeid(T));
    return batch_size(*node.begin(), path.item(0));
  } else if constexpr (kind == Node::kFixed) {
    if constexpr (std::tuple_size_v<T> == 0) {
      BatchSize::refuse_empty(path, typeid(T));
    } else {
      return batch_size(std::get<0>(node), path.item(0));
    }
  } else if constexpr (kind == Node::kMapping) {
    if (node.begin() == node.end()) BatchSize::refuse_empty(path, typeid(T));
    const auto& entry = *node.begin();
    return batch_size(tree::detail::entry_value(entry), path.entry(tree::detail::entry_key(entry)));
  } else if constexpr (kind == Node::kOptional) {
    if (!node) BatchSize::refuse_empty(path, typeid(T));
    return batch_size(*node, path);
  } else if constexpr (kind == Node::kVariant) {
    return std::visit([&](const auto& child) { return batch_size(child, path); }, node);
  } else if constexpr (kind == Node::kRecord) {
    const auto first = std::get<0>(tree::detail::fields<T>());
    return batch_size(node.*first.member, path.member(first.name));
  } else if constexpr (kind == Node::kDynamic) {
    std::int64_t size = 0;
    tree::Dynamic<T>::open(node, [&](const auto& content) {
      if constexpr (std::same_as<std::remove_cvref_t<decltype(content)>, T>) {
        RefuseLeaf::value("find_batch_size", path.str(), tree::Dynamic<T>::other(content));
      } else {
        size = batch_size(content, path);
      }
    });
    return size;
  } else {
    RefuseLeaf::other("find_batch_size", path.str(), typeid(T));
  }
}

}  // namespace accelerate::detail::comm
