// accelerate/detail/comm/object_codec.h - objects as bytes on their way between processes.
//
// Internal to accelerate/operations/objects.h. Every piece is a type tag, a length where needed,
// and the data. Bytes that arrive are checked against the type they are read as, and lengths
// against the end of the data before memory is allocated.
//
// The format keeps what a `Value` would lose (the alternative of a variant, the width of numbers)
// and writes vectors of numbers and plain structs as one block of memory. Types with `to_value` and
// `from_value`, tensors and values travel as a `Value`.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/core/object_stream.h"
#include "accelerate/value.h"
#include "accelerate/value/node.h"
#include "accelerate/value/to_value.h"

namespace accelerate::detail::comm {

/// Writes and reads the leaves of a `Value` that need LibTorch.
[[nodiscard]] ACCELERATE_API const LeafCodec& tensor_leaf_codec();

template <class T>
concept SentAsNumber =
    (std::is_arithmetic_v<T> && sizeof(T) <= sizeof(double)) || std::is_enum_v<T>;
template <class T>
concept SentAsValue = std::same_as<T, Value> || std::same_as<T, at::Tensor> ||
                      std::same_as<T, ValueDict> || hooks::ToValue<T>;
template <class T>
concept Range = tree::detail::Sequence<T> || Set<T> || std::same_as<T, std::vector<bool>>;
template <class T>
concept SentAsTuple = tree::detail::kIs<T, std::pair> || tree::detail::kIs<T, std::tuple>;
// Also with keys that a tree cannot have.
template <class T>
concept ObjectMapping = requires { typename T::mapped_type; } || tree::detail::KeyedMapping<T>;

// Types that would carry an address of this process along if they were copied as bytes.
template <class T>
concept Borrowing = std::is_pointer_v<T> || std::is_member_pointer_v<T> ||
                    requires { typename T::element_type; } || std::same_as<T, std::string_view>;
// Types that are written item by item although they could be copied as bytes.
template <class T>
concept Composed = hooks::ToValue<T> || tree::detail::Fixed<T> ||
                   tree::detail::kIs<T, std::optional> || tree::detail::kIs<T, std::variant>;
template <class T>
concept Raw =
    std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T> && !Borrowing<T>;

// Vectors of numbers and plain structs are written as one block of memory.
template <class T>
inline constexpr bool kIsBlock = false;
template <class T>
inline constexpr bool kIsBlock<std::vector<T>> =
    !std::same_as<T, bool> &&
    (std::is_arithmetic_v<T> || (Raw<T> && std::is_class_v<T> && !Composed<T>));

/// Whether `T`, and every type in it, can be written and read back.
template <class T>
constexpr bool has_codec() {
  if constexpr (hooks::ToValue<T> && !SentAsNumber<T>) {
    return hooks::FromValue<T>;
  } else if constexpr (SentAsValue<T> || SentAsNumber<T> || std::same_as<T, std::string>) {
    return true;
  } else if constexpr (tree::detail::kIsArray<T> || Range<T> ||
                       tree::detail::kIs<T, std::optional>) {
    return has_codec<typename T::value_type>();
  } else if constexpr (SentAsTuple<T> || tree::detail::kIs<T, std::variant>) {
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
      "accelerate/value/to_value.h shows how. Plain structs need no functions as long as they "
      "hold no pointers, strings or containers.");
}

template <class T>
void write(ObjectWriter& out, const T& x) {
  if constexpr (SentAsNumber<T>) {
    out.number(x);
  } else if constexpr (std::same_as<T, std::string>) {
    out.text(x);
  } else if constexpr (std::same_as<T, Value>) {
    out.value(x, &tensor_leaf_codec());
  } else if constexpr (SentAsValue<T>) {
    write(out, to_value(x));
  } else if constexpr (tree::detail::kIs<T, std::optional>) {
    out.open(ObjectTag::kOptional, x ? 1 : 0);
    if (x) write(out, *x);
  } else if constexpr (tree::detail::kIs<T, std::variant>) {
    out.open(ObjectTag::kVariant, x.index());
    std::visit([&](const auto& held) { write(out, held); }, x);
  } else if constexpr (SentAsTuple<T>) {
    out.open(ObjectTag::kTuple, std::tuple_size_v<T>);
    std::apply([&](const auto&... all) { (write(out, all), ...); }, x);
  } else if constexpr (ObjectMapping<T>) {
    out.open(ObjectTag::kMap, x.size());
    for (const auto& entry : x) {
      write(out, tree::detail::entry_key(entry));
      write(out, tree::detail::entry_value(entry));
    }
  } else if constexpr (kIsBlock<T>) {
    out.raw(typeid(T).name(), x.data(), x.size() * sizeof(typename T::value_type));
  } else if constexpr (tree::detail::kIsArray<T> || Range<T>) {
    out.open(ObjectTag::kList, x.size());
    for (const auto& item : x) write<typename T::value_type>(out, item);
  } else {
    out.raw(typeid(T).name(), &x, sizeof(T));
  }
}

template <class T>
T read(ObjectReader& in);

template <class T>
T read_from_value(ObjectReader& in) {
  auto value = in.value(&tensor_leaf_codec());
  if constexpr (std::same_as<T, Value>) {
    return value;
  } else if constexpr (std::same_as<T, at::Tensor>) {
    if (value.is_none()) return {};
    if (!value.is_tensor()) in.refuse(value, "a tensor");
    return value.as_tensor();
  } else if constexpr (std::same_as<T, ValueDict>) {
    if (!value.is_dict()) in.refuse(value, "a dict");
    return std::move(value).as_dict();
  } else {
    return hooks::call_from_value<T>(value);
  }
}

template <class T, std::size_t I = 0>
T read_alternative(ObjectReader& in, std::uint64_t index) {
  if constexpr (I == std::variant_size_v<T>) {
    in.refuse("an alternative that this variant does not have");
  } else {
    if (index == I) return T(std::in_place_index<I>, read<std::variant_alternative_t<I, T>>(in));
    return read_alternative<T, I + 1>(in, index);
  }
}

template <class T>
T read_items(ObjectReader& in) {
  const auto count = in.open(ObjectTag::kList);
  T result{};
  if constexpr (tree::detail::kIsArray<T>) {
    if (count != result.size()) in.refuse("another number of items than the array has");
    for (auto& item : result) item = read<typename T::value_type>(in);
  } else {
    for (std::uint64_t i = 0; i < count; ++i) {
      result.insert(result.end(), read<typename T::value_type>(in));
    }
  }
  return result;
}

template <class T>
T read_map(ObjectReader& in) {
  T result;
  for (auto count = in.open(ObjectTag::kMap); count > 0; --count) {
    auto key = read<tree::detail::KeyOf<T>>(in);
    auto item = read<tree::detail::MappedOf<T>>(in);
    if constexpr (tree::detail::KeyedMapping<T>) {
      if (result.contains(key)) in.refuse("a key that was there before");
      result.insert(std::move(key), std::move(item));
    } else {
      result.emplace(std::move(key), std::move(item));
    }
  }
  return result;
}

template <class T>
T read(ObjectReader& in) {
  if constexpr (SentAsNumber<T>) {
    return in.number<T>();
  } else if constexpr (std::same_as<T, std::string>) {
    return in.text();
  } else if constexpr (SentAsValue<T>) {
    return read_from_value<T>(in);
  } else if constexpr (tree::detail::kIs<T, std::optional>) {
    return in.open(ObjectTag::kOptional) == 0 ? T() : T(read<typename T::value_type>(in));
  } else if constexpr (tree::detail::kIs<T, std::variant>) {
    return read_alternative<T>(in, in.open(ObjectTag::kVariant));
  } else if constexpr (SentAsTuple<T>) {
    if (in.open(ObjectTag::kTuple) != std::tuple_size_v<T>) in.refuse("a tuple of another size");
    return [&]<template <class...> class C, class... Ts>(std::type_identity<C<Ts...>>) {
      return T{read<Ts>(in)...};  // braces: read from left to right
    }(std::type_identity<T>{});
  } else if constexpr (ObjectMapping<T>) {
    return read_map<T>(in);
  } else if constexpr (kIsBlock<T>) {
    const auto memory = in.raw(typeid(T).name());
    T result(memory.size() / sizeof(typename T::value_type));
    if (memory.size() % sizeof(typename T::value_type) != 0) in.refuse("part of an item");
    if (!memory.empty()) std::memcpy(result.data(), memory.data(), memory.size());
    return result;
  } else if constexpr (tree::detail::kIsArray<T> || Range<T>) {
    return read_items<T>(in);
  } else {
    T result{};
    in.raw(typeid(T).name(), &result, sizeof(T));
    return result;
  }
}

template <class T>
[[nodiscard]] std::string encode_object(const T& object) {
  ObjectWriter out;
  write(out, object);
  return std::move(out).bytes();
}

/// Throws `CommError` for bytes that are not a `T`.
template <class T>
[[nodiscard]] T decode_object(std::string_view bytes) {
  ObjectReader in(bytes);
  T result = read<T>(in);
  in.finish();
  return result;
}

}  // namespace accelerate::detail::comm
