// accelerate/kwargs/options.h - what all handlers, plugins and configurations have in common.
//
// An options struct is a plain aggregate. A field of optional type that is left out comes from its
// environment variable, then from its default:
//
//     TorchDynamoPlugin plugin{.mode = "max-autotune"};
//     auto full = resolved(plugin);    // backend from ACCELERATE_DYNAMO_BACKEND, else kNo
//     to_kwargs(plugin);               // {'mode': 'max-autotune'}
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/environment.h"
#include "accelerate/value.h"

namespace accelerate {

/// A type with a name as an options struct: what the functions below take.
template <class T>
concept OptionsStruct = requires {
  { T::kOptionsName } -> std::convertible_to<std::string_view>;
};

/// `options` with every field filled that has a value: the given one, else the variable, else the
/// default. Throws `ConfigError` for fields or variables that do not parse or contradict each
/// other. Warns once about each given field that has no effect.
template <OptionsStruct T>
[[nodiscard]] ACCELERATE_API T resolved(const T& options,
                                        const Environment& environment = Environment::process());

/// Throws the error that `resolved` would throw.
template <OptionsStruct T>
ACCELERATE_API void validate(const T& options,
                             const Environment& environment = Environment::process());

/// All fields of the resolved options under Python's names. Enumerators are their texts, durations
/// seconds, functions the text "<callable>".
template <OptionsStruct T>
[[nodiscard]] ACCELERATE_API Value::Dict to_dict(
    const T& options, const Environment& environment = Environment::process());

/// The fields that were given, and those whose resolved value differs from the default in an empty
/// environment.
template <OptionsStruct T>
[[nodiscard]] ACCELERATE_API Value::Dict to_kwargs(
    const T& options, const Environment& environment = Environment::process());

/// A function in an options struct. Unlike `std::function` it can be compared: copies are equal.
template <class Signature>
class Callback;

template <class R, class... Args>
class Callback<R(Args...)> {
 public:
  // Implicit, as `std::function`. NOLINTBEGIN(google-explicit-constructor)
  Callback() = default;
  Callback(std::nullptr_t) {}
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, Callback>) &&
            std::is_invocable_r_v<R, std::remove_cvref_t<F>&, Args...>
  Callback(F&& function)
      : function_(std::make_shared<const std::function<R(Args...)>>(std::forward<F>(function))) {}
  // NOLINTEND(google-explicit-constructor)

  explicit operator bool() const noexcept { return function_ != nullptr; }
  /// Only when there is a function.
  R operator()(Args... args) const { return (*function_)(std::forward<Args>(args)...); }
  /// "<callable>", or none when there is no function.
  explicit operator Value() const { return function_ ? Value("<callable>") : Value(); }

  bool operator==(const Callback&) const = default;

 private:
  std::shared_ptr<const std::function<R(Args...)>> function_;
};

/// The word "auto" of DeepSpeed configurations: the value is found when objects are prepared.
struct Auto {
  bool operator==(const Auto&) const = default;
};
inline constexpr Auto kAuto{};

/// A value, or "auto".
template <class T>
class AutoOr {
 public:
  // Implicit, so that a field is set with a plain number. NOLINTBEGIN(google-explicit-constructor)
  AutoOr(Auto) {}
  AutoOr(T value) : value_(std::move(value)) {}
  // NOLINTEND(google-explicit-constructor)

  [[nodiscard]] bool is_auto() const noexcept { return !value_; }
  /// Only when it is not "auto".
  [[nodiscard]] const T& value() const { return value_.value(); }
  /// The value, or the text "auto".
  explicit operator Value() const { return value_ ? Value(*value_) : Value("auto"); }

  bool operator==(const AutoOr&) const = default;

 private:
  std::optional<T> value_;
};

template <class T>
[[nodiscard]] AutoOr<T> from_value(std::type_identity<AutoOr<T>>, const Value& value) {
  if (value == Value("auto")) return kAuto;
  if constexpr (std::integral<T>) return value.as_int();
  if constexpr (std::floating_point<T>) return value.as_double();
}

}  // namespace accelerate
