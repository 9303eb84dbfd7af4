// accelerate/value/dict.h - the dictionary inside a `Value`: insertion ordered, fast to look up.
//
//     Value::Dict dict{{"a", 1}, {7, "seven"}};
//     dict.set("b", 2.5);
//     for (const auto& [key, value] : dict) std::cout << key.repr() << ": " << value.repr();
//     if (const Value* b = dict.get("b")) use(*b);
//
// Included by accelerate/value.h; include that.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

class Value;
class ValueKey;

namespace detail::inline core {

[[noreturn]] ACCELERATE_API void refuse_number(std::uint64_t number);

template <class T>
concept Number = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char>;

/// Throws `ArgumentError` for what 64 bits with a sign cannot hold.
template <Number T>
[[nodiscard]] std::int64_t checked_int64(T number) {
  if (!std::in_range<std::int64_t>(number)) refuse_number(static_cast<std::uint64_t>(number));
  return static_cast<std::int64_t>(number);
}

}  // namespace detail::inline core

/// A key as it is looked up: text, an int or a bool, not owned. true and 1 are the same key.
class ACCELERATE_API ValueKeyView {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `dict.at("a")` and `dict.at(3)` look keys up
  ValueKeyView(const char* text) : data_(std::string_view(text)) {}
  ValueKeyView(std::string_view text) : data_(text) {}
  ValueKeyView(const std::string& text) : data_(std::string_view(text)) {}
  template <detail::Number T>
  ValueKeyView(T number) : data_(detail::checked_int64(number)) {}
  template <std::same_as<bool> T>
  ValueKeyView(T truth) : data_(truth) {}
  ValueKeyView(const ValueKey& key) noexcept;
  ValueKeyView(std::nullptr_t) = delete;
  // NOLINTEND(google-explicit-constructor)

  [[nodiscard]] std::string repr() const;
  [[nodiscard]] std::size_t hash() const noexcept;
  [[nodiscard]] const std::variant<std::string_view, std::int64_t, bool>& data() const noexcept {
    return data_;
  }
  ACCELERATE_API friend bool operator==(const ValueKeyView& a, const ValueKeyView& b) noexcept;

 private:
  std::variant<std::string_view, std::int64_t, bool> data_;
};

/// A key as it is stored.
class ACCELERATE_API ValueKey {
 public:
  explicit ValueKey(const ValueKeyView& view);

  [[nodiscard]] bool is_string() const noexcept { return data_.index() == 0; }
  [[nodiscard]] bool is_int() const noexcept { return data_.index() == 1; }
  [[nodiscard]] bool is_bool() const noexcept { return data_.index() == 2; }
  // Each throws `ArgumentError` that shows the key when it is of another kind.
  [[nodiscard]] const std::string& as_string() const;
  [[nodiscard]] std::int64_t as_int() const;
  [[nodiscard]] bool as_bool() const;

  /// 'text', 3 or True, as Python prints it.
  [[nodiscard]] std::string repr() const { return ValueKeyView(*this).repr(); }
  /// `repr` without quotes.
  [[nodiscard]] std::string to_string() const;
  /// The key as a value.
  [[nodiscard]] Value value() const;
  [[nodiscard]] const std::variant<std::string, std::int64_t, bool>& data() const noexcept {
    return data_;
  }

 private:
  std::variant<std::string, std::int64_t, bool> data_;
};

/// The dictionary of a `Value`. References to entries hold until the next `set` of a new key or
/// `erase`.
class ACCELERATE_API ValueDict {
 public:
  /// One entry, for `auto& [key, value]`: the value can be changed, the key cannot.
  class Entry;
  using iterator = Entry*;
  using const_iterator = const Entry*;

  ValueDict();
  /// A key that comes twice keeps its first place and its last value.
  ValueDict(std::initializer_list<std::pair<ValueKeyView, Value>> entries);
  ValueDict(const ValueDict& other);
  ValueDict(ValueDict&& other) noexcept;
  ValueDict& operator=(const ValueDict& other);
  ValueDict& operator=(ValueDict&& other) noexcept;
  ~ValueDict();

  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] bool empty() const noexcept { return size() == 0; }
  [[nodiscard]] iterator begin() noexcept;
  [[nodiscard]] iterator end() noexcept;
  [[nodiscard]] const_iterator begin() const noexcept;
  [[nodiscard]] const_iterator end() const noexcept;

  [[nodiscard]] bool contains(const ValueKeyView& key) const noexcept { return get(key); }

  /// The value of `key`, or null.
  [[nodiscard]] const Value* get(const ValueKeyView& key) const noexcept;
  [[nodiscard]] Value* get(const ValueKeyView& key) noexcept;

  /// The value of `key`, or `fallback`.
  [[nodiscard]] Value get(const ValueKeyView& key, Value fallback) const;

  /// The value of `key`. Throws `ArgumentError` that names the key and the nearest known ones.
  [[nodiscard]] const Value& at(const ValueKeyView& key) const;
  [[nodiscard]] Value& at(const ValueKeyView& key);

  /// The value of `key`; none is put there first when the key is new.
  Value& operator[](const ValueKeyView& key);

  /// Changes the value of `key` in its place, or appends it.
  Value& set(const ValueKeyView& key, Value value);

  /// True if the key was there. The order of the rest stays. Takes linear time.
  bool erase(const ValueKeyView& key);
  void clear() noexcept;

  /// The keys in order.
  [[nodiscard]] std::vector<ValueKey> keys() const;

  /// The same keys with equal values, in any order.
  ACCELERATE_API friend bool operator==(const ValueDict& a, const ValueDict& b);

 private:
  class Index;
  [[nodiscard]] std::size_t position(const ValueKeyView& key) const noexcept;
  [[noreturn]] void refuse(const ValueKeyView& key) const;

  std::vector<Entry> entries_;
  /// Made when the dict outgrows linear search.
  std::unique_ptr<Index> index_;
};

}  // namespace accelerate
