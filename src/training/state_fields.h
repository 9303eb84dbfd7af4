// src/training/state_fields.h - reading the state of a scheduler.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/enums.h"
#include "accelerate/errors.h"
#include "accelerate/value.h"
#include "core/text.h"

namespace accelerate::detail {

inline void take(const Value& value, double& field) { field = value.as_double(); }
inline void take(const Value& value, std::int64_t& field) { field = value.as_int(); }
inline void take(const Value& value, bool& field) { field = value.as_bool(); }
inline void take(const Value& value, std::string& field) { field = value.as_string(); }

inline void take(const Value& value, std::optional<double>& field) {
  field = value.is_none() ? std::nullopt : std::optional(value.as_double());
}

template <class T>
void take(const Value& value, std::vector<T>& field) {
  std::vector<T> items;
  for (const auto& item : value.items()) take(item, items.emplace_back());
  field = std::move(items);
}

template <Spelled E>
void take(const Value& value, E& field) {
  field = from_string<E>(value.as_string());
}

/// Sets `field` where the state has `key`; Python too keeps what a state does not mention.
template <class T>
void take_field(const Value::Dict& state, std::string_view key, T& field) {
  const auto* value = state.get(key);
  if (!value) return;
  try {
    take(*value, field);
  } catch (const Error& error) {
    throw ArgumentError(str("'", key, "' of the scheduler's state: ", error.what()));
  }
}

}  // namespace accelerate::detail
