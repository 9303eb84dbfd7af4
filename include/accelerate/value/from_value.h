// accelerate/value/from_value.h - C++ data out of a `Value`. accelerate/value/to_value.h lists the
// types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/errors.h"
#include "accelerate/value.h"
#include "accelerate/value/node.h"
#include "accelerate/value/path.h"
#include "accelerate/value/to_value.h"

namespace accelerate {
namespace detail::inline core {

/// Each throws `ArgumentError` that says where, and which kind there is.
struct ACCELERATE_API ReadValue {
  [[noreturn]] static void refuse(const TreePath& path, const Value& value,
                                  const std::string& wanted);
  /// The items of a list or tuple, `size` of them if that is not negative.
  static std::span<const Value> items(const TreePath& path, const Value& value,
                                      std::int64_t size = -1);
  /// The `at::ScalarType` of a name such as 'torch.float32'.
  [[nodiscard]] static std::int8_t dtype(const TreePath& path, const Value& value);
  /// The enumerator of a text; the error lists the choices.
  [[nodiscard]] static int spelling(const TreePath& path, const Value& value,
                                    const EnumTable& table);
};

template <class T>
T read_value(const TreePath& path, const Value& value);

template <class T, std::size_t... I>
T read_fixed(const TreePath& path, std::span<const Value> items, std::index_sequence<I...>) {
  return T{read_value<std::tuple_element_t<I, T>>(path.item(I), items[I])...};
}

template <class T>
T read_number(const TreePath& path, const Value& value) {
  if constexpr (std::same_as<T, bool>) {
    if (value.is_bool()) return value.as_bool();
    ReadValue::refuse(path, value, "a bool");
  } else if constexpr (std::integral<T>) {
    if (value.is_int() && std::in_range<T>(value.as_int())) return static_cast<T>(value.as_int());
    ReadValue::refuse(path, value, "an int that fits");
  } else {
    if (value.is_double() || value.is_int()) return static_cast<T>(value.as_double());
    ReadValue::refuse(path, value, "a number");
  }
}

template <class T>
T read_mapping(const TreePath& path, const Value& value) {
  if (!value.is_dict()) ReadValue::refuse(path, value, "a dict");
  if constexpr (std::same_as<T, ValueDict>) {
    return value.as_dict();
  } else {
    T result;
    for (const auto& [key, item] : value.as_dict()) {
      auto own_key = read_value<tree::detail::KeyOf<T>>(path, key.value());
      auto child = read_value<tree::detail::MappedOf<T>>(path.entry(key), item);
      if constexpr (tree::detail::PairMapping<T>) {
        result.emplace(std::move(own_key), std::move(child));
      } else {
        result.insert(std::move(own_key), std::move(child));
      }
    }
    return result;
  }
}

/// The members that the struct lists; all must be there, others are left at their defaults.
template <class T>
T read_struct(const TreePath& path, const Value& value) {
  if (!value.is_dict()) ReadValue::refuse(path, value, "a dict");
  T result{};
  for_each_field(result, converted_fields<T>(), [&](const auto& field, auto& member) {
    const Value* item = value.as_dict().get(field.name);
    if (item == nullptr) {
      ReadValue::refuse(path, value, "a dict with the key '" + std::string(field.name) + "'");
    }
    member = read_value<std::remove_cvref_t<decltype(member)>>(path.member(field.name), *item);
  });
  return result;
}

/// The first alternative that takes the value.
template <class T, std::size_t I = 0>
T read_variant(const TreePath& path, const Value& value) {
  if constexpr (I + 1 == std::variant_size_v<T>) {
    return T(std::in_place_index<I>, read_value<std::variant_alternative_t<I, T>>(path, value));
  } else {
    try {
      return T(std::in_place_index<I>, read_value<std::variant_alternative_t<I, T>>(path, value));
    } catch (const ArgumentError&) {
      return read_variant<T, I + 1>(path, value);
    }
  }
}

template <class T>
T read_value(const TreePath& path, const Value& value) {
  using tree::Node;
  [[maybe_unused]] constexpr Node kind = tree::detail::node_of<T, at::Tensor>();
  if constexpr (std::same_as<T, Value>) {
    return value;
  } else if constexpr (hooks::FromValue<T>) {
    return hooks::call_from_value<T>(value);
  } else if constexpr (Dtype<T>) {
    return static_cast<T>(ReadValue::dtype(path, value));
  } else if constexpr (Spelled<T>) {
    return static_cast<T>(ReadValue::spelling(path, value, kEnumTable<T>));
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(read_number<std::underlying_type_t<T>>(path, value));
  } else if constexpr (std::is_arithmetic_v<T>) {
    return read_number<T>(path, value);
  } else if constexpr (std::same_as<T, std::string> || std::same_as<T, std::filesystem::path>) {
    if (!value.is_string()) ReadValue::refuse(path, value, "a string");
    return T(value.as_string());
  } else if constexpr (kIsDuration<T>) {
    const std::chrono::duration<double> seconds(read_number<double>(path, value));
    return std::chrono::duration_cast<T>(seconds);
  } else if constexpr (std::same_as<T, at::Tensor>) {
    if (value.is_none()) return T();
    if (!value.is_tensor()) ReadValue::refuse(path, value, "a tensor");
    return value.as_tensor();
  } else if constexpr (tree::detail::kIs<T, std::optional>) {
    return value.is_none() ? T() : T(read_value<typename T::value_type>(path, value));
  } else if constexpr (tree::detail::kIs<T, std::variant>) {
    return read_variant<T>(path, value);
  } else if constexpr (tree::detail::Fixed<T>) {
    constexpr auto size = std::tuple_size_v<T>;
    return read_fixed<T>(path, ReadValue::items(path, value, size),
                         std::make_index_sequence<size>{});
  } else if constexpr (WithFields<T> || kind == Node::kRecord) {
    return read_struct<T>(path, value);
  } else if constexpr (kind == Node::kMapping) {
    return read_mapping<T>(path, value);
  } else if constexpr (Set<T> ||
                       requires(T t) { t.push_back(std::declval<typename T::value_type>()); }) {
    T result;
    std::int64_t index = 0;
    for (const auto& item : ReadValue::items(path, value)) {
      result.insert(result.end(), read_value<typename T::value_type>(path.item(index++), item));
    }
    return result;
  } else {
    static_assert(hooks::FromValue<T>,
                  "accelerate: no way to make this type from a Value. Write from_value("
                  "std::type_identity<YourType>, const accelerate::Value&) beside it.");
  }
}

}  // namespace detail::inline core

/// A `T` made from a value. Throws `ArgumentError` with the path of the first item that does not
/// fit. An std::variant takes its first alternative that fits.
template <class T>
[[nodiscard]] T from_value(const Value& value) {
  return detail::read_value<T>(TreePath(), value);
}

/// Sets each listed field of `object` whose name is a key of `dict`; the others keep their values.
/// Throws `ArgumentError` as `from_value` does.
template <class T, class... Fields>
void set_fields(T& object, const std::tuple<Fields...>& fields, const Value::Dict& dict) {
  for_each_field(object, fields, [&](const auto& field, auto& member) {
    const Value* item = dict.get(field.name);
    if (item == nullptr) return;
    using Member = std::remove_cvref_t<decltype(member)>;
    member = detail::read_value<Member>(TreePath().member(field.name), *item);
  });
}

}  // namespace accelerate
