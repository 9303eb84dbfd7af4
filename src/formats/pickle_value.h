// src/formats/pickle_value.h - what pickles hold besides plain data, as leaves of a `Value`.
//
// Nothing of it is ever called: a class is its name, an object is the call that would make it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/value.h"

namespace accelerate::detail::formats {

/// A class or function of Python, by name.
class PickleGlobal final : public ValueLeaf {
 public:
  PickleGlobal(std::string module, std::string name)
      : module_(std::move(module)), name_(std::move(name)) {}

  [[nodiscard]] const std::string& module() const { return module_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  /// "torch.float32".
  [[nodiscard]] std::string full_name() const { return module_ + "." + name_; }

  [[nodiscard]] std::string_view kind_name() const override { return "Python name"; }
  [[nodiscard]] bool equals(const ValueLeaf& other) const override;
  [[nodiscard]] std::string repr() const override { return full_name(); }

 private:
  std::string module_;
  std::string name_;
};

/// An object of Python: the function or class that makes it, with its arguments, and what is set,
/// appended and inserted afterwards.
class PickleCall final : public ValueLeaf {
 public:
  using Entries = std::vector<std::pair<Value, Value>>;

  std::string module;  // "collections"
  std::string name;    // "deque"
  Value::List args;
  Value kwargs;  // a dict, or none
  Value state;   // what __setstate__ would get, or none
  Value::List items;
  Entries entries;

  /// "collections.deque".
  [[nodiscard]] std::string function() const { return module + "." + name; }

  [[nodiscard]] std::string_view kind_name() const override { return "Python object"; }
  [[nodiscard]] bool equals(const ValueLeaf& other) const override;
  [[nodiscard]] std::string repr() const override;
};

/// A dict with keys that a `Value::Dict` does not have: tuples, floats, objects.
class PickleDict final : public ValueLeaf {
 public:
  explicit PickleDict(PickleCall::Entries entries) : entries_(std::move(entries)) {}

  [[nodiscard]] const PickleCall::Entries& entries() const { return entries_; }

  [[nodiscard]] std::string_view kind_name() const override { return "dict with object keys"; }
  [[nodiscard]] bool equals(const ValueLeaf& other) const override;
  [[nodiscard]] std::string repr() const override;

 private:
  PickleCall::Entries entries_;
};

/// An integer of more than 64 bits: its two's complement, the low byte first.
class PickleInt final : public ValueLeaf {
 public:
  explicit PickleInt(std::string bytes) : bytes_(std::move(bytes)) {}

  [[nodiscard]] const std::string& bytes() const { return bytes_; }

  [[nodiscard]] std::string_view kind_name() const override { return "integer of over 64 bits"; }
  [[nodiscard]] bool equals(const ValueLeaf& other) const override;
  [[nodiscard]] std::string repr() const override;

 private:
  std::string bytes_;
};

/// A storage of a torch archive, which is an entry of its own there.
class PickleStorage final : public ValueLeaf {
 public:
  std::string key;       // the entry is data/<key>
  std::string dtype;     // "float32"; empty for untyped storages
  std::string location;  // "cpu", "cuda:0"
  std::uint64_t bytes = 0;

  /// Of its dtype; bytes if it is untyped.
  [[nodiscard]] std::uint64_t elements() const;

  [[nodiscard]] std::string_view kind_name() const override { return "storage"; }
  [[nodiscard]] bool equals(const ValueLeaf& other) const override;
  [[nodiscard]] std::string repr() const override;
};

/// A strided tensor of a torch archive. `offset` and `strides` count elements; that the tensor lies
/// within its storage has been checked.
class PickleTensor final : public ValueLeaf {
 public:
  std::shared_ptr<const PickleStorage> storage;
  std::string dtype;  // "float32"
  std::int64_t offset = 0;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  bool requires_grad = false;
  bool is_parameter = false;

  [[nodiscard]] std::string_view kind_name() const override { return "stored tensor"; }
  [[nodiscard]] bool equals(const ValueLeaf& other) const override;
  [[nodiscard]] std::string repr() const override;
};

/// An array of numpy, in C order and little endian.
class PickleArray final : public ValueLeaf {
 public:
  std::string dtype;  // Torch's name, "uint32"
  std::vector<std::int64_t> sizes;
  std::string bytes;

  [[nodiscard]] std::string_view kind_name() const override { return "numpy array"; }
  [[nodiscard]] bool equals(const ValueLeaf& other) const override;
  [[nodiscard]] std::string repr() const override;
};

/// The leaf of `value` as a T, or null.
template <class T>
[[nodiscard]] const T* leaf_as(const Value& value) {
  return dynamic_cast<const T*>(value.leaf());
}

/// The call of `value` if it calls `function`, else null.
[[nodiscard]] const PickleCall* call_of(const Value& value, std::string_view function);

}  // namespace accelerate::detail::formats
