// accelerate/detail/comm/tree_walk.h - the one recursion under all tree operations.
//
// Included by accelerate/tree.h; include that.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/tree/traits.h"
#include "accelerate/value/path.h"

namespace accelerate::tree {

/// In which order the entries of mappings are visited: as they lie in the container, or by key.
/// Processes that communicate visit by key, since an unordered_map or a dictionary filled in
/// another order would pair tensors that do not belong together.
enum class Order { kContainer, kSorted };

template <>
struct Dynamic<Value> {
  static constexpr bool kOpens = true;

  /// Calls `f` with the content, which is a static tree again or a leaf of no interest.
  template <class V, class F>
  static void open(V& value, F&& f) {
    switch (value.kind()) {
      case Value::Kind::kList:
        return f(value.as_list());
      case Value::Kind::kTuple:
        return f(value.as_tuple());
      case Value::Kind::kDict:
        return f(value.as_dict());
      case Value::Kind::kTensor:
        return open_tensor(value, f);
      default:
        return f(std::as_const(value));
    }
  }

  /// What is no node, as a value.
  static const Value& other(const Value& x) { return x; }
  static bool is_tuple(const Value& x) { return x.is_tuple(); }

 private:
  template <class V, class F>
  static void open_tensor(V& value, F& f) {
    if constexpr (std::is_const_v<V>) {
      f(value.as_tensor());
    } else {
      auto tensor = value.as_tensor();
      f(tensor);
      if (!tensor.is_same(value.as_tensor())) value = Value(tensor);
    }
  }
};

/// Leaves that a `Value` can hold as they are: a pointer or an optional, empty where it holds
/// something else.
template <class Leaf>
struct HeldInValue {
  static const Leaf* get(const Value&) { return nullptr; }
};
template <>
struct HeldInValue<bool> {
  static std::optional<bool> get(const Value& value) {
    return value.is_bool() ? std::optional(value.as_bool()) : std::nullopt;
  }
};
template <>
struct HeldInValue<std::int64_t> {
  static std::optional<std::int64_t> get(const Value& value) {
    return value.is_int() ? std::optional(value.as_int()) : std::nullopt;
  }
};
template <>
struct HeldInValue<double> {
  static std::optional<double> get(const Value& value) {
    return value.is_double() ? std::optional(value.as_double()) : std::nullopt;
  }
};
template <>
struct HeldInValue<std::string> {
  static const std::string* get(const Value& value) {
    return value.is_string() ? &value.as_string() : nullptr;
  }
};
template <>
struct HeldInValue<at::Tensor> {
  static const at::Tensor* get(const Value& value) {
    return value.is_tensor() ? &value.as_tensor() : nullptr;
  }
};

namespace detail {

template <class Map>
concept SortedMapping = requires { typename Map::key_compare; };

template <class K>
bool key_less(const K& a, const K& b) {
  if constexpr (std::same_as<K, ValueKey>) {
    return a.data() < b.data();
  } else {
    return a < b;
  }
}

template <class Leaf>
[[nodiscard]] bool is_absent(const Leaf& leaf) {
  if constexpr (std::same_as<Leaf, at::Tensor>) {
    return !leaf.defined();
  } else {
    return false;
  }
}

template <class Leaf, class T, class Visitor>
void walk_mapping(T& node, Visitor& visitor, const TreePath& path);

/// Calls `visitor.leaf(path, leaf)` for every leaf that is there and `visitor.other(path, x)` for
/// whatever is neither leaf nor node. Entries and members for which `visitor.enters(path)` is false
/// are left alone. A visitor may also have `absent(path)`, for tensors that are not defined, and
/// `alternative(path, index)`, for variants before they are entered. `T` may be const.
template <class Leaf, class T, class Visitor>
void walk(T& node, Visitor& visitor, const TreePath& path) {
  using Bare = std::remove_const_t<T>;
  constexpr Node kind = node_of<Bare, Leaf>();
  if constexpr (kind == Node::kLeaf) {
    if (!is_absent(node)) {
      visitor.leaf(path, node);
    } else if constexpr (requires { visitor.absent(path); }) {
      visitor.absent(path);
    }
  } else if constexpr (kind == Node::kSequence || kIsArray<Bare>) {
    std::int64_t index = 0;
    for (auto& child : node) walk<Leaf>(child, visitor, path.item(index++));
  } else if constexpr (kind == Node::kFixed) {
    std::apply(
        [&](auto&... children) {
          [[maybe_unused]] std::int64_t index = 0;
          (walk<Leaf>(children, visitor, path.item(index++)), ...);
        },
        node);
  } else if constexpr (kind == Node::kMapping) {
    walk_mapping<Leaf>(node, visitor, path);
  } else if constexpr (kind == Node::kOptional) {
    if (node) walk<Leaf>(*node, visitor, path);
  } else if constexpr (kind == Node::kVariant) {
    if (!node.valueless_by_exception()) {
      if constexpr (requires { visitor.alternative(path, node.index()); }) {
        visitor.alternative(path, node.index());
      }
      std::visit([&](auto& child) { walk<Leaf>(child, visitor, path); }, node);
    }
  } else if constexpr (kind == Node::kRecord) {
    const auto visit = [&](const auto& field) {
      const TreePath here = path.member(field.name);
      if (visitor.enters(here)) walk<Leaf>(node.*field.member, visitor, here);
    };
    std::apply([&](const auto&... all) { (visit(all), ...); }, fields<Bare>());
  } else if constexpr (kind == Node::kDynamic) {
    Dynamic<Bare>::open(node, [&](auto& content) {
      using Content = std::remove_const_t<std::remove_reference_t<decltype(content)>>;
      if constexpr (std::same_as<Content, Bare>) {
        visitor.other(path, content);
      } else {
        walk<Leaf>(content, visitor, path);
      }
    });
  } else {
    visitor.other(path, node);
  }
}

template <class Leaf, class T, class Visitor>
void walk_mapping(T& node, Visitor& visitor, const TreePath& path) {
  const auto visit = [&](auto& entry) {
    const TreePath here = path.entry(entry_key(entry));
    if (visitor.enters(here)) walk<Leaf>(entry_value(entry), visitor, here);
  };
  if (visitor.order() == Order::kContainer || SortedMapping<std::remove_const_t<T>>) {
    for (auto& entry : node) visit(entry);
    return;
  }
  std::vector<EntryOf<T>*> entries;
  for (auto& entry : node) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(),
            [](auto* a, auto* b) { return key_less(entry_key(*a), entry_key(*b)); });
  for (auto* entry : entries) visit(*entry);
}

/// A visitor made of a callable for the leaves; everything else is passed over.
template <class F>
struct LeafVisitor {
  F& f;
  Order visiting_order = Order::kContainer;

  template <class L>
  void leaf(const TreePath& path, L& leaf) {
    f(path, leaf);
  }
  template <class T>
  void other(const TreePath&, T&) {}
  [[nodiscard]] bool enters(const TreePath&) const { return true; }
  [[nodiscard]] Order order() const { return visiting_order; }
};

}  // namespace detail
}  // namespace accelerate::tree
