// accelerate/object_traits.h - which types can be sent to other processes as objects.
//
// Included by accelerate/object_codec.h.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "accelerate/to_value.h"
#include "accelerate/tree_node.h"
#include "accelerate/value.h"

namespace accelerate::detail {

template <class T>
concept Range = tree::detail::Sequence<T> || Set<T> || std::same_as<T, std::vector<bool>>;
// Also with keys that a tree cannot have.
template <class T>
concept ObjectMapping = requires {
  typename T::mapped_type;
}
|| tree::detail::KeyedMapping<T>;

// Types that are copied byte by byte and would carry an address of this process along.
template <class T>
concept Borrowing = std::is_pointer_v<T> || std::is_member_pointer_v<T> || requires {
  typename T::element_type;
} || std::same_as<T, std::string_view>;
// Types that are written piece by piece although they may be copied as bytes.
template <class T>
concept Composed = hooks::ToValue<T> || tree::detail::Fixed<T> ||
    tree::detail::kIs<T, std::optional> || tree::detail::kIs<T, std::variant>;
template <class T>
concept Raw =
    std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T> && !Borrowing<T>;

// Vectors of numbers and plain structs are written as one piece of memory.
template <class T>
inline constexpr bool kIsBlock = false;
template <class T>
inline constexpr bool kIsBlock<std::vector<T>> =
    !std::same_as<T, bool> &&
    (std::is_arithmetic_v<T> || (Raw<T> && std::is_class_v<T> && !Composed<T>));

/// Whether `T`, and all that its type shows, can be written and read back.
template <class T>
constexpr bool has_codec() {
  if constexpr (std::same_as<T, Value> || std::same_as<T, at::Tensor> || std::is_arithmetic_v<T> ||
                std::is_enum_v<T> || std::same_as<T, std::string> || std::same_as<T, ValueDict>) {
    return true;
  } else if constexpr (hooks::ToValue<T> && hooks::FromValue<T>) {
    return true;
  } else if constexpr (tree::detail::kIsArray<T> || Range<T> ||
                       tree::detail::kIs<T, std::optional>) {
    return has_codec<typename T::value_type>();
  } else if constexpr (tree::detail::kIs<T, std::pair> || tree::detail::kIs<T, std::tuple> ||
                       tree::detail::kIs<T, std::variant>) {
    return []<template <class...> class C, class... Ts>(std::type_identity<C<Ts...>>) {
      return (has_codec<Ts>() && ...);
    }(std::type_identity<T>{});
  } else if constexpr (ObjectMapping<T>) {
    return has_codec<tree::detail::KeyOf<T>>() && has_codec<tree::detail::MappedOf<T>>();
  } else {
    return Raw<T>;
  }
}

template <class T>
constexpr void check_codec() {
  static_assert(
      has_codec<T>(),
      "accelerate: objects of this type, or something in it, cannot be sent to other "
      "processes. Write accelerate::Value to_value(const YourType&) and YourType "
      "from_value(std::type_identity<YourType>, const accelerate::Value&) beside the type; "
      "accelerate/to_value.h shows how. Plain structs need no functions as long as they "
      "hold no pointers, strings or containers.");
}

}  // namespace accelerate::detail
