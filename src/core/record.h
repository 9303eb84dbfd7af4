// src/core/record.h - the one implementation behind all records of accelerate/record.h.
//
// A record is described once, by its `RecordTraits`: a table of fields, and what a table cannot
// say in `finish`. Filling from variables, dictionaries and comparisons follow from the table.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/enums.h"
#include "accelerate/errors.h"
#include "accelerate/record.h"
#include "core/log.h"
#include "core/resolve.h"
#include "core/text.h"

namespace accelerate::detail {

/// Specialised for each record, and for the plain structs inside of records:
///
///     static auto fields();                                    // a tuple of `Field`s
///     static void finish(T& record, const T& given, const Environment&, Warnings&);  // optional
template <class T>
struct RecordTraits;

template <class T>
concept Described = requires {
  RecordTraits<T>::fields();
};

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

template <class T>
struct Plain {
  using type = T;
};
template <class T>
struct Plain<std::optional<T>> {
  using type = T;
};

/// One row of a table. The methods return a changed copy.
template <class Owner, class Member>
struct Field {
  using Content = typename Plain<Member>::type;

  std::string_view name;
  Member Owner::*member;
  std::string variable = {};
  std::optional<Content> fallback = std::nullopt;
  bool in_dict = true;
  bool in_kwargs = true;
  bool lower_case = false;
  bool only_true = false;

  /// Not in `to_dict` and `to_kwargs`.
  [[nodiscard]] Field hidden() const {
    auto copy = *this;
    copy.in_dict = copy.in_kwargs = false;
    return copy;
  }
  /// In `to_dict` alone.
  [[nodiscard]] Field not_passed() const {
    auto copy = *this;
    copy.in_kwargs = false;
    return copy;
  }
  /// Texts in dictionaries are lower case.
  [[nodiscard]] Field lowered() const {
    auto copy = *this;
    copy.lower_case = true;
    return copy;
  }
  /// Python compares this switch with the word "true" alone.
  [[nodiscard]] Field true_word() const {
    auto copy = *this;
    copy.only_true = true;
    return copy;
  }
};

/// A field without a variable.
template <class Owner, class Member>
[[nodiscard]] Field<Owner, Member> field(std::string_view name, Member Owner::*member) {
  return {name, member};
}

/// A field that is read from `variable`, and is `fallback` where that is unset.
template <class Owner, class T>
[[nodiscard]] Field<Owner, std::optional<T>> field(
    std::string_view name, std::optional<T> Owner::*member, std::string variable,
    std::optional<std::type_identity_t<T>> fallback = std::nullopt) {
  return {name, member, std::move(variable), std::move(fallback)};
}

/// Throws `ConfigError` naming the field.
void require_at_least(std::int64_t least, std::string_view name, std::int64_t value);
/// The same for a text that must be one of `choices`; suggests the nearest.
void require_one_of(const std::vector<std::string>& choices, std::string_view name,
                    const std::string& value);

[[nodiscard]] std::int64_t read_integer(std::string_view text, std::string_view source);
[[nodiscard]] double read_double(std::string_view text, std::string_view source);

/// The content of a variable that is set.
template <class T>
[[nodiscard]] T read(const Environment& environment, const std::string& variable) {
  const std::string text = environment.get(variable).value();
  if constexpr (std::is_same_v<T, bool>) {
    return environment.flag(variable);
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return read_integer(text, variable);
  } else if constexpr (std::is_same_v<T, double>) {
    return read_double(text, variable);
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    return split(text, ',');
  } else if constexpr (Spelled<T>) {
    return from_string<T>(text, variable);
  } else {
    return T(text);
  }
}

template <class Owner, class Member>
void fill(const Field<Owner, Member>& field, Owner& record, const Environment& environment,
          Warnings& warnings) {
  if constexpr (kIsOptional<Member>) {
    using T = typename Plain<Member>::type;
    auto& value = record.*field.member;
    if (value) return;
    if (field.variable.empty() || !environment.contains(field.variable)) {
      value = field.fallback;
      return;
    }
    if constexpr (std::is_same_v<T, bool>) {
      if (field.only_true) {
        value = read_true_word(environment, field.variable, false, warnings);
        return;
      }
    }
    if constexpr (std::is_constructible_v<T, std::string> || std::is_arithmetic_v<T> ||
                  Spelled<T> || std::is_same_v<T, std::vector<std::string>>) {
      value = read<T>(environment, field.variable);
    }
  }
}

template <class T>
[[nodiscard]] Value::Dict dict_of(const T& record);

// Declared together, since each calls the others.
template <class T>
[[nodiscard]] Value value_of(const std::optional<T>& value);
template <class T>
[[nodiscard]] Value value_of(const AutoOr<T>& value);
template <class T>
[[nodiscard]] Value value_of(const std::shared_ptr<T>& value);
template <class T>
[[nodiscard]] Value value_of(const std::vector<T>& values);
template <class T, std::size_t N>
[[nodiscard]] Value value_of(const std::array<T, N>& values);
template <class... Ts>
[[nodiscard]] Value value_of(const std::variant<Ts...>& value);

/// How a field shows in dictionaries.
template <class T>
[[nodiscard]] Value value_of(const T& value) {
  if constexpr (Spelled<T>) {
    return to_string(value);
  } else if constexpr (Described<T>) {
    return dict_of(value);
  } else if constexpr (std::is_same_v<T, std::chrono::milliseconds>) {
    return std::chrono::duration<double>(value).count();
  } else if constexpr (std::is_same_v<T, std::filesystem::path>) {
    return value.string();
  } else if constexpr (requires { value.config(); }) {
    return Value(value.config());
  } else if constexpr (std::is_constructible_v<Value, const T&>) {
    return Value(value);
  } else {
    return value ? Value("<callable>") : Value();
  }
}

template <class T>
Value value_of(const std::optional<T>& value) {
  return value ? value_of(*value) : Value();
}

template <class T>
Value value_of(const AutoOr<T>& value) {
  return value.is_auto() ? Value("auto") : Value(value.value());
}

template <class T>
Value value_of(const std::shared_ptr<T>& value) {
  return value ? Value("<object>") : Value();
}

template <class T>
Value value_of(const std::vector<T>& values) {
  Value::List list;
  for (const auto& value : values) list.push_back(value_of(value));
  return list;
}

template <class T, std::size_t N>
Value value_of(const std::array<T, N>& values) {
  return Value::tuple(Value::List(values.begin(), values.end()));
}

template <class... Ts>
Value value_of(const std::variant<Ts...>& value) {
  return std::visit([](const auto& content) { return value_of(content); }, value);
}

template <class Owner, class Member>
[[nodiscard]] Value show(const Field<Owner, Member>& field, const Owner& record) {
  Value value = value_of(record.*field.member);
  return field.lower_case && value.is_string() ? Value(to_lower(value.as_string())) : value;
}

/// All fields of a record as it is.
template <class T>
Value::Dict dict_of(const T& record) {
  Value::Dict dict;
  const auto add = [&](const auto& field) {
    if (field.in_dict) dict.set(field.name, show(field, record));
  };
  std::apply([&](const auto&... fields) { (add(fields), ...); }, RecordTraits<T>::fields());
  return dict;
}

template <Record T>
T resolve(const T& record, const Environment& environment, Warnings& warnings) {
  T result = record;
  std::apply([&](const auto&... fields) { (fill(fields, result, environment, warnings), ...); },
             RecordTraits<T>::fields());
  if constexpr (requires { RecordTraits<T>::finish(result, record, environment, warnings); }) {
    RecordTraits<T>::finish(result, record, environment, warnings);
  }
  return result;
}

/// What the fields of an untouched record become in an empty environment.
template <Record T>
[[nodiscard]] T default_record() {
  if constexpr (requires { RecordTraits<T>::kIncompleteByDefault; }) {
    return T{};
  } else {
    Warnings unheard;
    return resolve(T{}, Environment(), unheard);
  }
}

}  // namespace accelerate::detail

namespace accelerate {

template <Record T>
T resolved(const T& record, const Environment& environment) {
  detail::Warnings warnings;
  T result = detail::resolve(record, environment, warnings);
  for (const auto& warning : warnings) detail::warn_once(warning);
  return result;
}

template <Record T>
void validate(const T& record, const Environment& environment) {
  detail::Warnings unheard;
  static_cast<void>(detail::resolve(record, environment, unheard));
}

template <Record T>
Value::Dict to_dict(const T& record, const Environment& environment) {
  return detail::dict_of(resolved(record, environment));
}

template <Record T>
Value::Dict to_kwargs(const T& record, const Environment& environment) {
  const T full = resolved(record, environment);
  const T untouched = detail::default_record<T>();
  Value::Dict kwargs;
  const auto add = [&](const auto& field) {
    if (!field.in_kwargs) return;
    bool given = false;
    if constexpr (detail::kIsOptional<std::remove_cvref_t<decltype(record.*field.member)>>) {
      // What stays unset, or was dropped with a warning, says nothing.
      if (!(full.*field.member)) return;
      given = (record.*field.member).has_value();
    }
    if (given || full.*field.member != untouched.*field.member) {
      kwargs.set(field.name, detail::show(field, full));
    }
  };
  std::apply([&](const auto&... fields) { (add(fields), ...); }, detail::RecordTraits<T>::fields());
  return kwargs;
}

}  // namespace accelerate

/// Makes the functions of accelerate/record.h for one record, in the file that describes it.
#define ACCELERATE_RECORD(T)                                                   \
  template T detail::resolve(const T&, const Environment&, detail::Warnings&); \
  template ACCELERATE_API T resolved(const T&, const Environment&);            \
  template ACCELERATE_API void validate(const T&, const Environment&);         \
  template ACCELERATE_API Value::Dict to_dict(const T&, const Environment&);   \
  template ACCELERATE_API Value::Dict to_kwargs(const T&, const Environment&)
