// accelerate/value/to_value.h - C++ data as a `Value`. Back again: accelerate/value/from_value.h.
//
//     Value value = to_value(std::map<std::string, std::vector<int>>{{"sizes", {2, 3}}});
//     value.repr();                                                        // {'sizes': [2, 3]}
//     auto back = from_value<std::map<std::string, std::vector<int>>>(value);
//
// Built in: numbers, bool, enumerations (accelerate/enums.h as their texts, others as their
// number), dtypes (as their name), strings, paths, durations (as seconds), tensors, the containers
// of the standard library, tensor trees, and structs with `value_fields`
// (accelerate/value/fields.h). Any other type of your own takes part by two functions beside it:
//
//     accelerate::Value to_value(const Score& score);
//     Score from_value(std::type_identity<Score>, const accelerate::Value& value);
//
// Needs LibTorch only where a tensor or dtype is converted.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <string>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/value.h"
#include "accelerate/value/fields.h"
#include "accelerate/value/node.h"

namespace accelerate {
namespace detail::inline core {

// Hides this library's own `to_value` and `from_value`, so that only functions beside a user's type
// are found.
namespace hooks {
void to_value() = delete;
void from_value() = delete;
template <class T>
concept ToValue = requires(const T& x) {
  { to_value(x) } -> std::same_as<Value>;
};
template <class T>
concept FromValue = requires(const Value& value) {
  { from_value(std::type_identity<T>{}, value) } -> std::same_as<T>;
};
template <class T>
Value call_to_value(const T& x) {
  return to_value(x);
}
template <class T>
T call_from_value(const Value& value) {
  return from_value(std::type_identity<T>{}, value);
}
}  // namespace hooks

template <class T>
concept Set = requires { requires std::same_as<typename T::key_type, typename T::value_type>; } &&
              !requires { typename T::mapped_type; };

// `at::ScalarType`, known by its enumerators: no Torch header is needed to ask.
template <class T>
concept Dtype = std::is_enum_v<T> && requires {
  T::Float;
  T::BFloat16;
  T::Undefined;
};
/// The name of an `at::ScalarType` in Python, such as 'torch.float32'.
[[nodiscard]] ACCELERATE_API std::string dtype_name(std::int8_t dtype);
template <Dtype T>
[[nodiscard]] std::string dtype_name(T dtype) {
  return dtype_name(static_cast<std::int8_t>(dtype));
}

template <class T>
inline constexpr bool kIsDuration = false;
template <class Rep, class Period>
inline constexpr bool kIsDuration<std::chrono::duration<Rep, Period>> = true;

template <class T>
concept WithFields = requires { value_fields(std::type_identity<T>{}); };
/// The fields by which a struct is converted.
template <class T>
constexpr auto converted_fields() {
  if constexpr (WithFields<T>) {
    return value_fields(std::type_identity<T>{});
  } else {
    return tree::detail::fields<T>();
  }
}

struct ToValueFunction {
  template <class T>
  [[nodiscard]] Value operator()(const T& x) const {
    using tree::Node;
    constexpr Node kind = tree::detail::node_of<T, at::Tensor>();
    if constexpr (std::same_as<T, Value>) {
      return x;
    } else if constexpr (hooks::ToValue<T>) {
      return hooks::call_to_value(x);
    } else if constexpr (std::same_as<T, at::Tensor>) {
      return x.defined() ? Value(x) : Value();
    } else if constexpr (Dtype<T>) {
      return Value(dtype_name(x));
    } else if constexpr (Spelled<T>) {
      return Value(to_string(x));
    } else if constexpr (std::is_enum_v<T>) {
      return Value(static_cast<std::int64_t>(x));
    } else if constexpr (kind == Node::kOptional) {
      return x ? (*this)(*x) : Value();
    } else if constexpr (kind == Node::kVariant) {
      return std::visit(*this, x);
    } else if constexpr (kind == Node::kFixed && !tree::detail::kIsArray<T>) {
      return std::apply([this](const auto&... all) { return Value::tuple({(*this)(all)...}); }, x);
    } else if constexpr (kind == Node::kMapping) {
      return mapping(x);
    } else if constexpr (WithFields<T> || kind == Node::kRecord) {
      Value::Dict dict;
      for_each_field(x, converted_fields<T>(), [&](const auto& field, const auto& member) {
        dict.set(field.name, (*this)(member));
      });
      return Value(std::move(dict));
    } else if constexpr (kIsDuration<T>) {
      return Value(std::chrono::duration<double>(x).count());
    } else if constexpr (std::same_as<T, std::filesystem::path>) {
      return Value(x.string());
    } else if constexpr (std::is_constructible_v<Value, const T&> && kind != Node::kSequence) {
      return Value(x);
    } else if constexpr (kind == Node::kSequence || kind == Node::kFixed || Set<T> ||
                         std::same_as<T, std::vector<bool>>) {
      Value::List items;
      for (const auto& item : x) items.push_back((*this)(item));
      return Value(std::move(items));
    } else {
      static_assert(hooks::ToValue<T>,
                    "accelerate: no way to turn this type into a Value. Write accelerate::Value "
                    "to_value(const YourType&) beside it.");
    }
  }

 private:
  template <class T>
  [[nodiscard]] Value mapping(const T& map) const {
    Value::Dict dict;
    for (const auto& entry : map) {
      const auto& key = tree::detail::entry_key(entry);
      auto child = (*this)(tree::detail::entry_value(entry));
      if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(key)>>) {
        dict.set(static_cast<std::int64_t>(key), std::move(child));
      } else {
        dict.set(key, std::move(child));
      }
    }
    return Value(std::move(dict));
  }
};

}  // namespace detail::inline core

/// `x` as a `Value`: sequences and arrays become lists, pairs and tuples tuples, mappings and
/// structs dicts, absent tensors and empty optionals none.
inline constexpr detail::ToValueFunction to_value{};

}  // namespace accelerate
