// accelerate/detail/comm/tree_rebind.h - the type of a tree with other leaves, and how it is built.
//
// Included by accelerate/tree.h; include that.
#pragma once

#include <functional>
#include <map>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "accelerate/detail/comm/tree_walk.h"
#include "accelerate/tree/traits.h"
#include "accelerate/value/to_value.h"

namespace accelerate::tree {
namespace detail {

template <class T, class R, class Leaf>
struct Rebind;
template <class T, class R, class Leaf>
using RebindOf = typename Rebind<T, R, Leaf>::type;

// The container of the same template with other content. A mapping that is no template of key and
// value becomes an std::map.
template <class T, class V>
struct WithMapped {
  using type = std::map<typename T::key_type, V>;
};
template <class K, class Old, class Less, class Allocator, class V>
struct WithMapped<std::map<K, Old, Less, Allocator>, V> {
  using type = std::map<K, V, Less>;
};
template <class K, class Old, class Hash, class Equal, class Allocator, class V>
struct WithMapped<std::unordered_map<K, Old, Hash, Equal, Allocator>, V> {
  using type = std::unordered_map<K, V, Hash, Equal>;
};
template <template <class, class> class Map, class K, class Old, class V>
  requires KeyedMapping<Map<K, Old>>
struct WithMapped<Map<K, Old>, V> {
  using type = Map<K, V>;
};
template <class V>
struct WithMapped<ValueDict, V> {
  using type = ValueDict;
};

template <class T, class R, class Leaf, Node Kind = node_of<T, Leaf>()>
struct RebindNode {
  using type = T;
};
template <class T, class R, class Leaf>
struct RebindNode<T, R, Leaf, Node::kLeaf> {
  using type = R;
};
template <class T, class R, class Leaf>
struct RebindNode<T, R, Leaf, Node::kDynamic> {
  using type = Value;
};
template <class T, class R, class Leaf>
struct RebindNode<T, R, Leaf, Node::kRecord> {
  using type = ValueDict;
};
template <class T, class R, class Leaf>
struct RebindNode<T, R, Leaf, Node::kMapping> : WithMapped<T, RebindOf<MappedOf<T>, R, Leaf>> {};
template <template <class...> class C, class T, class A, class R, class Leaf>
struct RebindNode<C<T, A>, R, Leaf, Node::kSequence> {
  using type = C<RebindOf<T, R, Leaf>>;
};
template <template <class...> class C, class... Ts, class R, class Leaf>
struct RebindNode<C<Ts...>, R, Leaf, Node::kFixed> {
  using type = C<RebindOf<Ts, R, Leaf>...>;
};
template <class T, std::size_t N, class R, class Leaf>
struct RebindNode<std::array<T, N>, R, Leaf, Node::kFixed> {
  using type = std::array<RebindOf<T, R, Leaf>, N>;
};
template <class T, class R, class Leaf>
struct RebindNode<std::optional<T>, R, Leaf, Node::kOptional> {
  using type = std::optional<RebindOf<T, R, Leaf>>;
};
template <class... Ts, class R, class Leaf>
struct RebindNode<std::variant<Ts...>, R, Leaf, Node::kVariant> {
  using type = std::variant<RebindOf<Ts, R, Leaf>...>;
};
template <class T, class R, class Leaf>
struct Rebind : RebindNode<T, R, Leaf> {};

template <class R, class Leaf, class F, class T>
RebindOf<T, R, Leaf> rebuild(F& f, const T& node);

template <class R, class Leaf, class F, class T>
RebindOf<T, R, Leaf> rebuild_mapping(F& f, const T& node) {
  RebindOf<T, R, Leaf> result;
  for (const auto& entry : node) {
    auto child = rebuild<R, Leaf>(f, entry_value(entry));
    if constexpr (requires { result.set(entry.key(), std::move(child)); }) {
      result.set(entry.key(), std::move(child));
    } else if constexpr (requires { result.emplace(entry_key(entry), std::move(child)); }) {
      result.emplace(entry_key(entry), std::move(child));
    } else {
      result.insert(entry_key(entry), std::move(child));
    }
  }
  return result;
}

/// A value is rebuilt kind by kind: lists stay lists and tuples tuples.
template <class R, class Leaf, class F, class V>
Value rebuild_dynamic(F& f, const V& node) {
  Value result;
  Dynamic<V>::open(node, [&](const auto& content) {
    using Content = std::remove_cvref_t<decltype(content)>;
    if constexpr (std::same_as<Content, V>) {
      const Value& other = Dynamic<V>::other(content);
      const auto leaf = HeldInValue<Leaf>::get(other);
      result = leaf ? to_value(R(std::invoke(f, *leaf))) : other;
    } else {
      result = to_value(rebuild<R, Leaf>(f, content));
    }
  });
  return Dynamic<V>::is_tuple(node) ? Value::tuple(std::move(result).as_list()) : result;
}

template <class R, class Leaf, class F, class T>
RebindOf<T, R, Leaf> rebuild(F& f, const T& node) {
  using Result = RebindOf<T, R, Leaf>;
  constexpr Node kind = node_of<T, Leaf>();
  if constexpr (kind == Node::kLeaf) {
    return is_absent(node) ? R{} : R(std::invoke(f, node));
  } else if constexpr (kind == Node::kSequence) {
    Result result;
    for (const auto& child : node) result.push_back(rebuild<R, Leaf>(f, child));
    return result;
  } else if constexpr (kind == Node::kFixed) {
    return std::apply(
        [&](const auto&... children) { return Result{rebuild<R, Leaf>(f, children)...}; }, node);
  } else if constexpr (kind == Node::kMapping) {
    return rebuild_mapping<R, Leaf>(f, node);
  } else if constexpr (kind == Node::kOptional) {
    return node ? Result(rebuild<R, Leaf>(f, *node)) : Result();
  } else if constexpr (kind == Node::kVariant) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      Result result;
      // By index: two alternatives may have become one type.
      ((node.index() == I
            ? void(result.template emplace<I>(rebuild<R, Leaf>(f, *std::get_if<I>(&node))))
            : void()),
       ...);
      return result;
    }(std::make_index_sequence<std::variant_size_v<T>>{});
  } else if constexpr (kind == Node::kRecord) {
    ValueDict result;
    const auto put = [&](const auto& field) {
      result.set(field.name, to_value(rebuild<R, Leaf>(f, node.*field.member)));
    };
    std::apply([&](const auto&... all) { (put(all), ...); }, fields<T>());
    return result;
  } else if constexpr (kind == Node::kDynamic) {
    return rebuild_dynamic<R, Leaf>(f, node);
  } else {
    return node;
  }
}

}  // namespace detail

/// The type of a tree `T` with `R` in place of its leaves.
template <class T, class R, class Leaf = at::Tensor>
using rebind_t = detail::RebindOf<T, R, Leaf>;

}  // namespace accelerate::tree
