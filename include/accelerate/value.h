// accelerate/value.h - the dynamic value of pickles, JSON, YAML, objects and trackers.
//
//     Value options = Value::Dict{{"lr", 1e-3}, {"layers", Value::List{2, 4}}, {"name", "tiny"}};
//     options.at("lr").as_double();   // 0.001
//     options.repr();                 // {'lr': 0.001, 'layers': [2, 4], 'name': 'tiny'}
//
// Kinds: none, bool, int (64 bits), double, string, bytes, list, tuple, dict, tensor, object.
// Copies are deep, tensors and objects are shared. Nothing here needs LibTorch; accelerate/tree.h
// turns nested C++ data into values and back.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/core/value_leaf.h"
#include "accelerate/fwd.h"
#include "accelerate/value/dict.h"

namespace accelerate {

class ACCELERATE_API Value {
 public:
  // clang-format off
  enum class Kind {
    kNone, kBool, kInt, kDouble, kString, kBytes, kList, kTuple, kDict, kTensor, kObject
  };
  // clang-format on
  using Key = ValueKey;
  using List = std::vector<Value>;
  using Dict = ValueDict;
  using Leaf = std::shared_ptr<const detail::ValueLeaf>;

  // Implicit, so that `dict.set("lr", 1e-3)` and `Value::List{1, "a", nullptr}` compile.

  // NOLINTBEGIN(google-explicit-constructor)
  Value() = default;
  Value(std::nullptr_t) {}
  Value(std::nullopt_t) {}
  template <std::same_as<bool> T>  // no pointer turns into a truth value
  Value(T truth) : data_(truth) {}
  template <detail::Number T>
  Value(T number) : data_(detail::checked_int64(number)) {}
  template <std::floating_point T>
  Value(T number) : data_(static_cast<double>(number)) {}
  Value(const char* text) : data_(std::string(text)) {}
  Value(std::string_view text) : data_(std::string(text)) {}
  Value(std::string text) : data_(std::move(text)) {}
  Value(List items) : data_(std::move(items)) {}
  Value(Dict entries) : data_(std::move(entries)) {}
  template <class T>
  Value(const std::vector<T>& items) : data_(List(items.begin(), items.end())) {}
  template <class T>
  Value(const std::optional<T>& maybe) : Value(maybe ? Value(*maybe) : Value()) {}
  template <std::same_as<at::Tensor> T>
  Value(const T& tensor) : Value(detail::tensor_leaf(tensor)) {}
  // NOLINTEND(google-explicit-constructor)
  /// A tensor or an object; `leaf` must not be null.
  explicit Value(Leaf leaf);

  Value(const Value&);
  Value(Value&&) noexcept;
  Value& operator=(const Value&);
  Value& operator=(Value&&) noexcept;
  ~Value();

  // Braces hold items, also a single list: compilers disagree on what `List{a_list}` is.
  [[nodiscard]] static Value list(std::initializer_list<Value> items) { return List(items); }
  [[nodiscard]] static Value list(std::same_as<List> auto items) { return Value(std::move(items)); }
  [[nodiscard]] static Value tuple(std::initializer_list<Value> items) {
    return as_tuple_of(items);
  }
  [[nodiscard]] static Value tuple(std::same_as<List> auto items) {
    return as_tuple_of(std::move(items));
  }
  [[nodiscard]] static Value dict(Dict entries) { return Value(std::move(entries)); }
  [[nodiscard]] static Value bytes(std::string data);

  [[nodiscard]] Kind kind() const noexcept;
  /// The kind in words: "int", "dict", "tensor"; an object says what it is.
  [[nodiscard]] std::string_view kind_name() const;

  [[nodiscard]] bool is_none() const noexcept { return kind() == Kind::kNone; }
  [[nodiscard]] bool is_bool() const noexcept { return kind() == Kind::kBool; }
  [[nodiscard]] bool is_int() const noexcept { return kind() == Kind::kInt; }
  [[nodiscard]] bool is_double() const noexcept { return kind() == Kind::kDouble; }
  [[nodiscard]] bool is_string() const noexcept { return kind() == Kind::kString; }
  [[nodiscard]] bool is_bytes() const noexcept { return kind() == Kind::kBytes; }
  [[nodiscard]] bool is_list() const noexcept { return kind() == Kind::kList; }
  [[nodiscard]] bool is_tuple() const noexcept { return kind() == Kind::kTuple; }
  [[nodiscard]] bool is_dict() const noexcept { return kind() == Kind::kDict; }
  [[nodiscard]] bool is_tensor() const noexcept { return kind() == Kind::kTensor; }

  // Each throws `ArgumentError` that says which kind it is when it is another one.
  [[nodiscard]] bool as_bool() const;
  [[nodiscard]] std::int64_t as_int() const;
  /// Also of an int.
  [[nodiscard]] double as_double() const;
  [[nodiscard]] const std::string& as_string() const&;
  [[nodiscard]] std::string as_string() &&;
  [[nodiscard]] const std::string& as_bytes() const&;
  [[nodiscard]] std::string as_bytes() &&;
  [[nodiscard]] const List& as_list() const&;
  [[nodiscard]] List& as_list() &;
  [[nodiscard]] List as_list() &&;
  [[nodiscard]] const List& as_tuple() const&;
  [[nodiscard]] List& as_tuple() &;
  [[nodiscard]] List as_tuple() &&;
  [[nodiscard]] const Dict& as_dict() const&;
  [[nodiscard]] Dict& as_dict() &;
  [[nodiscard]] Dict as_dict() &&;
  [[nodiscard]] const at::Tensor& as_tensor() const;
  /// The tensor or object as it is held; null for every other kind.
  [[nodiscard]] const detail::ValueLeaf* leaf() const noexcept;

  /// The items of a list or of a tuple.
  [[nodiscard]] std::span<const Value> items() const&;
  std::span<const Value> items() && = delete;  // they would be gone
  /// An entry of a dict, as `as_dict().at(key)`.
  [[nodiscard]] const Value& at(ValueKeyView key) const& { return as_dict().at(key); }
  [[nodiscard]] Value at(ValueKeyView key) && { return std::move(as_dict().at(key)); }

  /// As Python prints it: {'a': [2, 3], 'b': (None, True, 1e-05, b'\x00')}.
  /// Throws `ArgumentError` for values nested deeper than `kMaxValueDepth`.
  [[nodiscard]] std::string repr() const;

  /// Equal as in Python: 2 == 2.0, true == 1, a list never equals a tuple, the order of a dict does
  /// not count, tensors are equal when dtype, shape and every element are.
  ACCELERATE_API friend bool operator==(const Value& a, const Value& b);

 private:
  struct Bytes {
    std::string data;
  };
  struct Tuple {
    List items;
  };
  using Data = std::variant<std::monostate, bool, std::int64_t, double, std::string, Bytes, List,
                            Tuple, Dict, Leaf>;

  [[nodiscard]] static Value as_tuple_of(List items);
  [[noreturn]] void refuse_kind(std::string_view wanted) const;

  Data data_;
};

class ACCELERATE_API ValueDict::Entry {
 public:
  Entry(ValueKey key, Value value) : key_(std::move(key)), value_(std::move(value)) {}

  [[nodiscard]] const ValueKey& key() const noexcept { return key_; }
  [[nodiscard]] const Value& value() const noexcept { return value_; }
  [[nodiscard]] Value& value() noexcept { return value_; }

  // For structured bindings.
  template <std::size_t I>
  [[nodiscard]] auto& get() const noexcept {
    if constexpr (I == 0) return key_;
    if constexpr (I == 1) return value_;
  }
  template <std::size_t I>
  [[nodiscard]] auto& get() noexcept {
    if constexpr (I == 0) return std::as_const(key_);
    if constexpr (I == 1) return value_;
  }

 private:
  ValueKey key_;
  Value value_;
};

/// Values that this library reads from files and messages are never nested deeper than this.
inline constexpr int kMaxValueDepth = 500;

[[nodiscard]] ACCELERATE_API std::string_view to_string(Value::Kind kind);

/// Merges `source` into `destination`, dict by dict; where both have a key, `source` wins. Returns
/// `destination`. A dict on one side against something else on the other throws `ArgumentError`
/// with the path of the key, and changes nothing.
ACCELERATE_API Value::Dict& merge_dicts(const Value::Dict& source, Value::Dict& destination);

}  // namespace accelerate

template <>
struct std::tuple_size<accelerate::ValueDict::Entry> : std::integral_constant<std::size_t, 2> {};
template <std::size_t I>
struct std::tuple_element<I, accelerate::ValueDict::Entry> {
  using type = std::conditional_t<I == 0, const accelerate::ValueKey, accelerate::Value>;
};
