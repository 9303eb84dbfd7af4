// src/formats/pickle_value.h - what pickles hold besides plain data, as leaves of a `Value`.
//
// Nothing of it is ever called: a class is its name, an object is the call that would make it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/value.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::formats {

/// What is not the leaf of a tensor in memory. Two of one class are equal if their `identity` is.
template <class T>
class PickleLeaf : public ValueLeaf {
 public:
  [[nodiscard]] bool equals(const ValueLeaf& other) const final {
    const auto* same = dynamic_cast<const T*>(&other);
    return same != nullptr && same->identity() == static_cast<const T*>(this)->identity();
  }

 private:
  friend T;
  PickleLeaf() = default;
};

/// A class or function of Python, by name.
class PickleGlobal final : public PickleLeaf<PickleGlobal> {
 public:
  PickleGlobal(std::string module, std::string name)
      : module(std::move(module)), name(std::move(name)) {}

  std::string module;
  std::string name;

  /// "torch.float32".
  [[nodiscard]] std::string full_name() const { return module + "." + name; }

  [[nodiscard]] auto identity() const { return std::tie(module, name); }
  [[nodiscard]] std::string_view kind_name() const override { return "Python name"; }
  [[nodiscard]] std::string repr() const override { return full_name(); }
};

/// An object of Python: the function or class that makes it, with its arguments, and what is set,
/// appended and inserted afterwards.
class PickleCall final : public PickleLeaf<PickleCall> {
 public:
  using Entries = std::vector<std::pair<Value, Value>>;

  std::string module;  // "collections"
  std::string name;    // "deque"
  Value::List args;
  bool by_new = false;  // made by the `__new__` of a class, without its `__init__`
  Value kwargs;         // a dict, or none
  Value state;          // what __setstate__ would get, or none
  Value::List items;
  Entries entries;

  /// "collections.deque".
  [[nodiscard]] std::string function() const { return module + "." + name; }

  [[nodiscard]] auto identity() const {
    return std::tie(module, name, args, by_new, kwargs, state, items, entries);
  }
  [[nodiscard]] std::string_view kind_name() const override { return "Python object"; }
  [[nodiscard]] std::string repr() const override;
};

/// A dict with keys that a `Value::Dict` does not have: tuples, floats, objects.
class PickleDict final : public PickleLeaf<PickleDict> {
 public:
  explicit PickleDict(PickleCall::Entries entries) : entries(std::move(entries)) {}

  PickleCall::Entries entries;

  [[nodiscard]] auto identity() const { return std::tie(entries); }
  [[nodiscard]] std::string_view kind_name() const override { return "dict with object keys"; }
  [[nodiscard]] std::string repr() const override;
};

/// An integer of more than 64 bits: its two's complement, the low byte first.
class PickleInt final : public PickleLeaf<PickleInt> {
 public:
  explicit PickleInt(std::string bytes) : bytes(std::move(bytes)) {}

  std::string bytes;

  [[nodiscard]] auto identity() const { return std::tie(bytes); }
  [[nodiscard]] std::string_view kind_name() const override { return "integer of over 64 bits"; }
  [[nodiscard]] std::string repr() const override;
};

/// A storage of a torch archive, which is an entry of its own there.
class PickleStorage final : public PickleLeaf<PickleStorage> {
 public:
  std::string key;       // the entry is data/<key>
  std::string dtype;     // "float32"; empty for untyped storages
  std::string location;  // "cpu", "cuda:0"
  std::uint64_t bytes = 0;

  /// Of its dtype; bytes if it is untyped.
  [[nodiscard]] std::uint64_t elements() const;

  [[nodiscard]] auto identity() const { return std::tie(key, dtype, bytes); }
  [[nodiscard]] std::string_view kind_name() const override { return "storage"; }
  [[nodiscard]] std::string repr() const override;
};

/// A strided tensor of a torch archive. `offset` and `strides` count elements; that the tensor lies
/// within its storage has been checked.
class PickleTensor final : public PickleLeaf<PickleTensor> {
 public:
  std::shared_ptr<const PickleStorage> storage;
  std::string dtype;  // "float32"
  std::int64_t offset = 0;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  bool requires_grad = false;
  bool is_parameter = false;
  /// Its values are the conjugates, or the negatives, of what the storage has.
  bool is_conjugated = false;
  bool is_negated = false;

  /// Whether its values are those that the storage has.
  [[nodiscard]] bool has_plain_values() const { return !is_conjugated && !is_negated; }

  [[nodiscard]] auto identity() const {
    return std::tuple_cat(storage->identity(),
                          std::tie(dtype, offset, sizes, strides, requires_grad, is_parameter,
                                   is_conjugated, is_negated));
  }
  [[nodiscard]] std::string_view kind_name() const override { return "stored tensor"; }
  [[nodiscard]] std::string repr() const override;
};

/// An array of numpy, in C order and little endian.
class PickleArray final : public PickleLeaf<PickleArray> {
 public:
  std::string dtype;  // Torch's name, "uint32"
  std::vector<std::int64_t> sizes;
  std::string bytes;

  [[nodiscard]] auto identity() const { return std::tie(dtype, sizes, bytes); }
  [[nodiscard]] std::string_view kind_name() const override { return "numpy array"; }
  [[nodiscard]] std::string repr() const override;
};

/// The leaf of `value` as a T, or null.
template <class T>
[[nodiscard]] const T* leaf_as(const Value& value) {
  return dynamic_cast<const T*>(value.leaf());
}

/// The dtype of a global such as torch.float32, or null.
[[nodiscard]] const TorchDtype* dtype_of(const Value& value);

/// The call of `value` if it calls `function`, else null.
[[nodiscard]] const PickleCall* call_of(const Value& value, std::string_view function);

}  // namespace accelerate::detail::formats
