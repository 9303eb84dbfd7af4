// src/formats/pickle.h - pickles as data: read without executing anything, written for Python.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "accelerate/value.h"

namespace accelerate::detail::formats {

struct PickleSource {
  /// The file, for messages.
  std::string name = "<memory>";
  /// Where the pickle begins in the file, for messages.
  std::uint64_t origin = 0;
  /// Larger pickles are refused.
  std::uint64_t max_bytes = std::uint64_t{256} << 20;
};

/// Decodes a pickle of protocol 2 to 5 that fills `bytes`. Plain data becomes plain values; what
/// Torch and numpy write for tensors, storages, arrays, ordered dicts and bytes becomes these; any
/// other object a `PickleCall`. Values that the pickle refers to several times are copied, tensors
/// are shared.
///
/// Throws `FormatError` with the offset for everything else: opcodes outside the closed list, dicts
/// with a key twice, cycles, values nested deeper than `kMaxValueDepth`, and pickles whose copies
/// would take more than a small multiple of their size.
[[nodiscard]] Value pickle_loads(std::string_view bytes, const PickleSource& source = {});

/// `pickle_loads` of the pickle at the start of `bytes`; removes it from `bytes`.
[[nodiscard]] Value pickle_load_first(std::string_view& bytes, const PickleSource& source = {});

/// A pickle of protocol 2 inside the opcodes that torch.load(weights_only=True) accepts. Leaves are
/// those of pickle_value.h. Throws `ArgumentError` for others and for values nested deeper than
/// `kMaxValueDepth`.
[[nodiscard]] std::string pickle_dumps(const Value& value);

}  // namespace accelerate::detail::formats
