// src/optim/scheduler_state.h - the state of a scheduler, written and read by a list of fields.
#pragma once

#include <tuple>

#include "accelerate/errors.h"
#include "accelerate/value/fields.h"
#include "accelerate/value/from_value.h"
#include "accelerate/value/to_value.h"
#include "core/text.h"

namespace accelerate::detail::optim {

/// Sets an entry of `state` for each of `fields`.
template <class T, class... Fields>
void write_fields(Value::Dict& state, const T& object, const std::tuple<Fields...>& fields) {
  for_each_field(object, fields, [&](const auto& field, const auto& member) {
    state.set(field.name, to_value(member));
  });
}

/// Sets each of `fields` that `state` has an entry for and keeps the others, as Python does. Throws
/// `ArgumentError` that names the entry.
template <class T, class... Fields>
void read_fields(const Value::Dict& state, T& object, const std::tuple<Fields...>& fields) {
  for_each_field(object, fields, [&]<class Member>(const auto& field, Member& member) {
    const auto* const value = state.get(field.name);
    if (value == nullptr) return;
    try {
      member = from_value<Member>(*value);
    } catch (const Error& error) {
      throw ArgumentError(str("'", field.name, "' of the scheduler's state: ", error.what()));
    }
  });
}

}  // namespace accelerate::detail::optim
