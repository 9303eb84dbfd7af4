// src/formats/pickle_objects.h - what well-known calls and ids of pickles stand for.
#pragma once

#include <functional>
#include <optional>

#include "formats/pickle_value.h"

namespace accelerate::detail::formats {

/// Throws an error that tells where the call is in the file.
using RefuseCall = std::function<void(std::string_view reason)>;

/// The plain data, tensor or array that a call makes; nullopt for functions that are not known and
/// for arguments that these functions do not write. A tensor that is not inside its storage, or
/// otherwise impossible, is refused.
[[nodiscard]] std::optional<Value> resolve_call(const PickleCall& call, const RefuseCall& refuse);

/// The storage of a persistent id. Other ids are refused.
[[nodiscard]] Value resolve_persistent_id(const Value& id, const RefuseCall& refuse);

/// True if a `Value::Dict` can have all keys: texts, integers and bools.
[[nodiscard]] bool has_plain_keys(const PickleCall::Entries& entries);
/// The dict of entries with such keys. A key that is there twice is refused.
[[nodiscard]] Value::Dict to_dict(PickleCall::Entries entries, const RefuseCall& refuse);

}  // namespace accelerate::detail::formats
