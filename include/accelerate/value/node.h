// accelerate/value/node.h - what kind of node each type is in a tensor tree.
//
// Included by accelerate/tree.h; include that. A struct of your own becomes a tree by one function
// beside it, which lists the members that hold tensors; the others are copied along:
//
//     struct Batch { at::Tensor input_ids, labels; std::vector<std::string> names; };
//     constexpr auto tensor_tree_fields(std::type_identity<Batch>) {
//       return std::tuple{accelerate::field("input_ids", &Batch::input_ids),
//                         accelerate::field("labels", &Batch::labels)};
//     }
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/fwd.h"
#include "accelerate/value.h"
#include "accelerate/value/fields.h"

namespace accelerate::tree {

enum class Node {
  kLeaf,
  kSequence,
  kFixed,
  kMapping,
  kOptional,
  kVariant,
  kRecord,
  kDynamic,
  kOther
};

/// How to open a type whose structure is known at run time only. `Value` is one
/// (accelerate/tree.h), `c10::IValue` another (accelerate/tree/ivalue.h).
template <class T>
struct Dynamic {
  static constexpr bool kOpens = false;
};

namespace detail {

template <class T, template <class...> class Template>
inline constexpr bool kIs = false;
template <class... Args, template <class...> class Template>
inline constexpr bool kIs<Template<Args...>, Template> = true;

template <class T>
inline constexpr bool kIsArray = false;
template <class T, std::size_t N>
inline constexpr bool kIsArray<std::array<T, N>> = true;

template <class T>
concept Sequence = (kIs<T, std::vector> || kIs<T, std::deque> || kIs<T, std::list>) &&
                   !std::same_as<T, std::vector<bool>>;
template <class T>
concept Fixed = kIsArray<T> || kIs<T, std::pair> || kIs<T, std::tuple>;

// Keys that a path can show and that every process sorts alike.
template <class K>
concept Key = std::convertible_to<const K&, std::string_view> || std::integral<K> ||
              std::is_enum_v<K> || std::same_as<K, ValueKey>;

// The entries of std maps are pairs; those of `torch::OrderedDict` and `Value::Dict` have key() and
// value(). Both are recognised by shape, so that <torch/torch.h> is not needed here.
template <class Map>
using EntryOf = std::remove_reference_t<decltype(*std::declval<Map&>().begin())>;
template <class T>
concept PairMapping = requires { typename T::mapped_type; } && Key<typename T::key_type> &&
                      requires(EntryOf<T>& entry) { entry.second; };
template <class T>
concept KeyedMapping = requires(EntryOf<T>& entry) {
  requires Key<std::remove_cvref_t<decltype(entry.key())>>;
  entry.value();
};
template <class T>
concept Mapping = PairMapping<T> || KeyedMapping<T>;

template <class Entry>
decltype(auto) entry_key(const Entry& entry) {
  if constexpr (requires { entry.first; }) {
    return (entry.first);
  } else {
    return entry.key();
  }
}
template <class Entry>
auto& entry_value(Entry& entry) {
  if constexpr (requires { entry.first; }) {
    return entry.second;
  } else {
    return entry.value();
  }
}
template <class Map>
using MappedOf = std::remove_cvref_t<decltype(entry_value(std::declval<EntryOf<Map>&>()))>;
template <class Map>
using KeyOf = std::remove_cvref_t<decltype(entry_key(std::declval<const EntryOf<Map>&>()))>;

// `torch::data::Example<Data, Target>`, and the form without target.
template <class T>
concept ExampleLike = requires(T& example) {
  typename T::DataType;
  typename T::TargetType;
  requires std::same_as<decltype(T::data), typename T::DataType>;
};
template <class T>
concept NamesItsFields = requires { tensor_tree_fields(std::type_identity<T>{}); };

template <class T>
constexpr auto fields() {
  if constexpr (NamesItsFields<T>) {
    return tensor_tree_fields(std::type_identity<T>{});
  } else if constexpr (std::is_void_v<typename T::TargetType>) {
    return std::tuple{field("data", &T::data)};
  } else {
    return std::tuple{field("data", &T::data), field("target", &T::target)};
  }
}

template <class T, class Leaf>
constexpr Node node_of() {
  if constexpr (std::same_as<T, Leaf>) {
    return Node::kLeaf;
  } else if constexpr (Dynamic<T>::kOpens) {
    return Node::kDynamic;
  } else if constexpr (NamesItsFields<T> || ExampleLike<T>) {
    return Node::kRecord;
  } else if constexpr (Sequence<T>) {
    return Node::kSequence;
  } else if constexpr (Fixed<T>) {
    return Node::kFixed;
  } else if constexpr (kIs<T, std::optional>) {
    return Node::kOptional;
  } else if constexpr (kIs<T, std::variant>) {
    return Node::kVariant;
  } else if constexpr (Mapping<T>) {
    return Node::kMapping;
  } else {
    return Node::kOther;
  }
}

}  // namespace detail
}  // namespace accelerate::tree
