// src/core/options.h - the one implementation behind all options structs of
// accelerate/kwargs/options.h.
//
// An options struct `T` is described by up to three functions in namespace accelerate, in the file
// that instantiates it with ACCELERATE_OPTIONS:
//
//     static auto value_fields(std::type_identity<T>);   // all fields, in Python's order
//     static T option_defaults(std::type_identity<T>);   // values of optional fields
//     static void finish(T& options, const T& given, const Environment&, detail::Warnings&);
//
// `finish` does what a table cannot say: checks, and values that depend on others. The last two may
// be absent.
#pragma once

#include <cstdint>
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
#include "accelerate/kwargs/options.h"
#include "accelerate/value/fields.h"
#include "accelerate/value/to_value.h"
#include "core/log.h"
#include "core/resolve.h"
#include "core/text.h"

namespace accelerate::detail::inline core {

template <class T>
inline constexpr bool kIsOptional = tree::detail::kIs<T, std::optional>;
template <class T>
inline constexpr bool kIsAutoOr = false;
template <class T>
inline constexpr bool kIsAutoOr<AutoOr<T>> = true;

enum class OptionRule : std::uint8_t {
  kNone,
  kHidden,     // neither in `to_dict` nor in `to_kwargs`
  kDictOnly,   // not in `to_kwargs`
  kLowerCase,  // texts in dictionaries are lower case
  kTrueWord    // Python compares the variable with the word "true" alone
};

/// A field with the environment variable that it is read from ("" for none) and a rule.
template <class Owner, class Member>
struct Option : Field<Owner, Member> {
  std::string variable = {};
  OptionRule rule = OptionRule::kNone;
};

template <class Owner, class Member>
[[nodiscard]] Option<Owner, Member> option(std::string_view name, Member Owner::* member,
                                           std::string variable,
                                           OptionRule rule = OptionRule::kNone) {
  return {{name, member}, std::move(variable), rule};
}

/// These fields with the variables `prefix` and the name in upper case.
template <class... Fields>
[[nodiscard]] auto with_variables(std::string_view prefix, const std::tuple<Fields...>& fields) {
  return std::apply(
      [&](const auto&... all) {
        return std::tuple{option(all.name, all.member, str(prefix, to_upper(all.name)))...};
      },
      fields);
}

/// Throws `ConfigError` that names the field.
void require_at_least(std::int64_t least, std::string_view name, std::int64_t value);
/// Throws `ConfigError` that names the field, lists the choices and suggests the nearest.
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
  } else if constexpr (kIsAutoOr<T>) {
    using Number = std::remove_cvref_t<decltype(std::declval<T>().value())>;
    return text == "auto" ? T(kAuto) : T(read<Number>(environment, variable));
  } else {
    return T(text);
  }
}

/// How a field shows in dictionaries.
template <class Row, class Member>
[[nodiscard]] Value show(const Row& row, const Member& member) {
  using Content = std::remove_cvref_t<Member>;
  if constexpr (kIsOptional<Content>) {
    return member ? show(row, *member) : Value();
  } else if constexpr (tree::detail::kIs<Content, std::shared_ptr>) {
    return member ? Value("<object>") : Value();
  } else if constexpr (tree::detail::kIs<Content, std::variant>) {
    return std::visit([&](const auto& content) { return show(row, content); }, member);
  } else if constexpr (tree::detail::kIsArray<Content>) {
    return Value::tuple(Value::List(member.begin(), member.end()));
  } else if constexpr (tree::detail::kIs<Content, std::vector>) {
    Value::List items;
    for (const auto& item : member) items.push_back(show(row, item));
    return items;
  } else {
    Value value = to_value(member);
    if constexpr (requires { row.rule; }) {
      if (row.rule == OptionRule::kLowerCase) return to_lower(value.as_string());
    }
    return value;
  }
}

template <class Row>
[[nodiscard]] bool is_shown(const Row& row, bool in_kwargs) {
  if constexpr (requires { row.rule; }) {
    if (row.rule == OptionRule::kHidden) return false;
    return !in_kwargs || row.rule != OptionRule::kDictOnly;
  }
  return true;
}

/// All fields as they are.
template <class T>
[[nodiscard]] Value::Dict dict_of(const T& options) {
  Value::Dict dict;
  for_each_field(options, converted_fields<T>(), [&](const auto& row, const auto& member) {
    if (is_shown(row, /*in_kwargs=*/false)) dict.set(row.name, show(row, member));
  });
  return dict;
}

/// The content of an unset option: its variable, else the default.
template <class Row, class T>
void fill(const Row& row, std::optional<T>& member, const std::optional<T>& fallback,
          const Environment& environment, Warnings& warnings) {
  if (member) return;
  member = fallback;
  if constexpr (requires { row.variable; }) {
    if (row.variable.empty() || !environment.contains(row.variable)) return;
    if (row.rule == OptionRule::kTrueWord) {
      if constexpr (std::is_same_v<T, bool>) {
        member = read_true_word(environment, row.variable, warnings);
      }
    } else {
      member = read<T>(environment, row.variable);
    }
  }
}

template <OptionsStruct T>
T resolve(const T& given, const Environment& environment, Warnings& warnings) {
  T result = given;
  const T defaults = [] {
    if constexpr (requires { option_defaults(std::type_identity<T>{}); }) {
      return option_defaults(std::type_identity<T>{});
    } else {
      return T{};
    }
  }();
  for_each_field(result, converted_fields<T>(), [&](const auto& row, auto& member) {
    if constexpr (kIsOptional<std::remove_cvref_t<decltype(member)>>) {
      fill(row, member, defaults.*row.member, environment, warnings);
    }
  });
  if constexpr (requires { finish(result, given, environment, warnings); }) {
    finish(result, given, environment, warnings);
  }
  return result;
}

/// The fields of untouched options in an empty environment; as they are where that is not valid.
template <OptionsStruct T>
[[nodiscard]] T resolved_defaults() {
  try {
    Warnings ignored;
    return resolve(T{}, Environment(), ignored);
  } catch (const ConfigError&) {
    return T{};
  }
}

}  // namespace accelerate::detail::inline core

namespace accelerate {

template <OptionsStruct T>
T resolved(const T& options, const Environment& environment) {
  detail::Warnings warnings;
  T result = detail::resolve(options, environment, warnings);
  for (const auto& warning : warnings) detail::warn_once(warning);
  return result;
}

template <OptionsStruct T>
void validate(const T& options, const Environment& environment) {
  detail::Warnings ignored;
  static_cast<void>(detail::resolve(options, environment, ignored));
}

template <OptionsStruct T>
Value::Dict to_dict(const T& options, const Environment& environment) {
  return detail::dict_of(resolved(options, environment));
}

template <OptionsStruct T>
Value::Dict to_kwargs(const T& options, const Environment& environment) {
  const T full = resolved(options, environment);
  const T untouched = detail::resolved_defaults<T>();
  Value::Dict kwargs;
  for_each_field(full, detail::converted_fields<T>(), [&](const auto& row, const auto& member) {
    if (!detail::is_shown(row, /*in_kwargs=*/true)) return;
    bool given = false;
    if constexpr (detail::kIsOptional<std::remove_cvref_t<decltype(member)>>) {
      if (!member) return;  // unset, or dropped with a warning
      given = (options.*row.member).has_value();
    }
    if (given || member != untouched.*row.member) kwargs.set(row.name, detail::show(row, member));
  });
  return kwargs;
}

}  // namespace accelerate

/// Makes the functions of accelerate/kwargs/options.h for one struct, in the file that describes
/// it.
#define ACCELERATE_OPTIONS(T)                                                  \
  template T detail::resolve(const T&, const Environment&, detail::Warnings&); \
  template ACCELERATE_API T resolved(const T&, const Environment&);            \
  template ACCELERATE_API void validate(const T&, const Environment&);         \
  template ACCELERATE_API Value::Dict to_dict(const T&, const Environment&);   \
  template ACCELERATE_API Value::Dict to_kwargs(const T&, const Environment&)
