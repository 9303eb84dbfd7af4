// accelerate/tree/ivalue.h - makes `c10::IValue`, what TorchScript modules take and give, a tree.
//
// Not part of accelerate/tree.h, because <ATen/core/ivalue.h> takes long to compile. Lists, tuples
// and dictionaries are opened; they are copied first, since copies of an IValue share them. Keys
// are strings, ints and bools, also mixed: a dictionary with tensors under other keys is an
// `ArgumentError`, since a path could not name them.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/tree.h"

namespace accelerate::tree {
namespace detail {

/// The entries of a dictionary, in order, as a mapping.
struct IValueEntries {
  class Entry {
   public:
    Entry(ValueKey key, c10::IValue value) : key_(std::move(key)), value_(std::move(value)) {}
    [[nodiscard]] const ValueKey& key() const noexcept { return key_; }
    [[nodiscard]] const c10::IValue& value() const noexcept { return value_; }
    [[nodiscard]] c10::IValue& value() noexcept { return value_; }

   private:
    ValueKey key_;
    c10::IValue value_;
  };

  std::vector<Entry> items = {};
  [[nodiscard]] auto begin() { return items.begin(); }
  [[nodiscard]] auto end() { return items.end(); }
  [[nodiscard]] auto begin() const { return items.begin(); }
  [[nodiscard]] auto end() const { return items.end(); }
};

template <class V>
struct WithMapped<IValueEntries, V> {
  using type = ValueDict;
};

}  // namespace detail

template <>
struct Dynamic<c10::IValue> {
  static constexpr bool kOpens = true;

  template <class V, class F>
  static void open(V& value, F&& f) {
    if (value.isTensor()) return open_tensor(value, f);
    if (value.isTuple()) return open_items(value, value.toTuple()->elements().vec(), f);
    if (value.isList()) return open_items(value, value.toList().vec(), f);
    if (value.isGenericDict() && can_open(value.toGenericDict())) return open_dict(value, f);
    f(std::as_const(value));
  }

  /// What is no node, as a value: what `Value` has no kind for becomes its name, such as 'Device'.
  static Value other(const c10::IValue& x) {
    if (x.isNone()) return {};
    if (x.isBool()) return Value(x.toBool());
    if (x.isInt()) return Value(x.toInt());
    if (x.isDouble()) return Value(x.toDouble());
    if (x.isString()) return Value(x.toStringRef());
    return Value(x.tagKind());
  }
  static bool is_tuple(const c10::IValue& x) { return x.isTuple(); }

 private:
  template <class V, class F>
  static void open_tensor(V& value, F& f) {
    auto tensor = value.toTensor();
    f(tensor);
    if constexpr (!std::is_const_v<V>) value = tensor;
  }

  template <class V, class F>
  static void open_items(V& value, std::vector<c10::IValue> items, F& f) {
    f(items);
    if constexpr (!std::is_const_v<V>) {
      if (value.isTuple()) {
        value = c10::ivalue::Tuple::create(std::move(items));
        return;
      }
      c10::impl::GenericList list(value.toList().elementType());
      for (auto& item : items) list.push_back(std::move(item));
      value = std::move(list);
    }
  }

  template <class V, class F>
  static void open_dict(V& value, F& f) {
    const auto dict = value.toGenericDict();
    detail::IValueEntries entries;
    for (const auto& entry : dict) entries.items.emplace_back(key_of(entry.key()), entry.value());
    f(entries);
    if constexpr (!std::is_const_v<V>) {
      c10::impl::GenericDict copy(dict.keyType(), dict.valueType());
      auto item = entries.begin();
      for (const auto& entry : dict) copy.insert(entry.key(), std::move((item++)->value()));
      value = std::move(copy);
    }
  }

  /// Whether every key can be part of a path. Throws `ArgumentError` when one cannot and tensors
  /// are in the dictionary: they would be passed over without a word.
  static bool can_open(const c10::impl::GenericDict& dict) {
    for (const auto& entry : dict) {
      const c10::IValue& key = entry.key();
      if (key.isString() || key.isInt() || key.isBool()) continue;
      if (holds_tensor(dict)) {
        throw ArgumentError("A dictionary of TorchScript has tensors under keys of kind " +
                            key.tagKind() +
                            ". Only those under strings, ints and bools can be reached: use one "
                            "of these as keys.");
      }
      return false;
    }
    return true;
  }

  static bool holds_tensor(const c10::impl::GenericDict& dict) {
    bool found = false;
    for (const auto& entry : dict) {
      entry.value().visit(
          [&](const c10::IValue& part) { return found = found || part.isTensor(); });
    }
    return found;
  }

  static ValueKey key_of(const c10::IValue& key) {
    if (key.isString()) return ValueKey(key.toStringRef());
    return key.isInt() ? ValueKey(key.toInt()) : ValueKey(key.toBool());
  }
};

}  // namespace accelerate::tree
