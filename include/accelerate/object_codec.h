// accelerate/object_codec.h - objects as bytes on their way between processes.
//
// Every piece is a type tag, a length where needed, and the data. What arrives is checked against
// the type it is read as and against its own end before memory is taken for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/object_stream.h"
#include "accelerate/object_traits.h"
#include "accelerate/to_value.h"
#include "accelerate/tree_node.h"
#include "accelerate/value.h"

namespace accelerate::detail {

ACCELERATE_API void write_tensor(ObjectWriter& out, const at::Tensor& tensor);
[[nodiscard]] ACCELERATE_API at::Tensor read_tensor(ObjectReader& in);
/// Tensors and their descriptions inside of values.
[[nodiscard]] ACCELERATE_API const LeafCodec& tensor_leaf_codec();

template <class T>
void write(ObjectWriter& out, const T& x) {
  if constexpr (std::same_as<T, bool>) {
    out.boolean(x);
  } else if constexpr (std::is_enum_v<T>) {
    out.integer(static_cast<std::int64_t>(x));
  } else if constexpr (std::unsigned_integral<T>) {
    out.natural(x);
  } else if constexpr (std::integral<T>) {
    out.integer(x);
  } else if constexpr (std::floating_point<T> && sizeof(T) <= sizeof(double)) {
    out.real(static_cast<double>(x));
  } else if constexpr (std::same_as<T, std::string>) {
    out.text(x);
  } else if constexpr (std::same_as<T, Value>) {
    out.value(x, &tensor_leaf_codec());
  } else if constexpr (std::same_as<T, at::Tensor>) {
    write_tensor(out, x);
  } else if constexpr (hooks::ToValue<T>) {
    out.value(hooks::call_to_value(x), &tensor_leaf_codec());
  } else if constexpr (tree::detail::kIs<T, std::optional>) {
    out.open(ObjectTag::kOptional, x ? 1 : 0);
    if (x) write(out, *x);
  } else if constexpr (tree::detail::kIs<T, std::variant>) {
    out.open(ObjectTag::kVariant, x.index());
    std::visit([&](const auto& held) { write(out, held); }, x);
  } else if constexpr (tree::detail::kIs<T, std::pair> || tree::detail::kIs<T, std::tuple>) {
    out.open(ObjectTag::kTuple, std::tuple_size_v<T>);
    std::apply([&](const auto&... all) { (write(out, all), ...); }, x);
  } else if constexpr (std::same_as<T, ValueDict>) {
    out.value(Value(x), &tensor_leaf_codec());
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
    for (const auto& item : x) write(out, item);
  } else {
    out.raw(typeid(T).name(), &x, sizeof(T));
  }
}

template <class T>
T read(ObjectReader& in);

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
T read_block(ObjectReader& in) {
  constexpr auto kSize = sizeof(typename T::value_type);
  const auto memory = in.raw(typeid(T).name());
  if (memory.size() % kSize != 0) in.refuse("part of an item");
  T result(memory.size() / kSize);
  if (!memory.empty()) std::memcpy(result.data(), memory.data(), memory.size());
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
  if constexpr (std::same_as<T, bool>) {
    return in.boolean();
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(in.integer());
  } else if constexpr (std::unsigned_integral<T>) {
    return in.narrow<T>(in.natural());
  } else if constexpr (std::integral<T>) {
    return in.narrow<T>(in.integer());
  } else if constexpr (std::floating_point<T> && sizeof(T) <= sizeof(double)) {
    return static_cast<T>(in.real());
  } else if constexpr (std::same_as<T, std::string>) {
    return in.text();
  } else if constexpr (std::same_as<T, Value>) {
    return in.value(&tensor_leaf_codec());
  } else if constexpr (std::same_as<T, at::Tensor>) {
    return read_tensor(in);
  } else if constexpr (hooks::FromValue<T>) {
    return hooks::call_from_value<T>(in.value(&tensor_leaf_codec()));
  } else if constexpr (tree::detail::kIs<T, std::optional>) {
    return in.open(ObjectTag::kOptional) == 0 ? T() : T(read<typename T::value_type>(in));
  } else if constexpr (tree::detail::kIs<T, std::variant>) {
    return read_alternative<T>(in, in.open(ObjectTag::kVariant));
  } else if constexpr (tree::detail::kIs<T, std::pair> || tree::detail::kIs<T, std::tuple>) {
    if (in.open(ObjectTag::kTuple) != std::tuple_size_v<T>) in.refuse("a tuple of another size");
    return [&]<template <class...> class C, class... Ts>(std::type_identity<C<Ts...>>) {
      return T{read<Ts>(in)...};  // braces: read from left to right
    }(std::type_identity<T>{});
  } else if constexpr (std::same_as<T, ValueDict>) {
    auto value = in.value(&tensor_leaf_codec());
    if (!value.is_dict()) in.refuse("a value that is no dict");
    return std::move(value).as_dict();
  } else if constexpr (ObjectMapping<T>) {
    return read_map<T>(in);
  } else if constexpr (kIsBlock<T>) {
    return read_block<T>(in);
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

}  // namespace accelerate::detail
