// accelerate/tree_ivalue.h - makes `c10::IValue`, what TorchScript modules take and give, a tree.
//
// Not part of accelerate/tree.h, because <ATen/core/ivalue.h> takes long to compile. Lists, tuples
// and dictionaries are opened; they are copied first, since copies of an IValue share them.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <utility>
#include <vector>

#include "accelerate/tree.h"

namespace accelerate::tree {

template <>
struct Dynamic<c10::IValue> {
  static constexpr bool kOpens = true;

  template <class V, class F>
  static void open(V& value, F&& f) {
    if (value.isTensor()) return open_tensor(value, f);
    if (value.isTuple()) return open_items(value, value.toTuple()->elements().vec(), f);
    if (value.isList()) return open_items(value, value.toList().vec(), f);
    if (value.isGenericDict() &&
        value.toGenericDict().keyType()->kind() == c10::TypeKind::StringType) {
      return open_dict(value, f);
    }
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
    Entries entries;
    for (const auto& entry : dict)
      entries.items.push_back({entry.key().toStringRef(), entry.value()});
    f(entries);
    if constexpr (!std::is_const_v<V>) {
      c10::impl::GenericDict copy(dict.keyType(), dict.valueType());
      for (auto& [key, item] : entries.items) copy.insert(key, std::move(item));
      value = std::move(copy);
    }
  }

  /// The entries of a dictionary, in order, as a mapping.
  struct Entries {
    using key_type = std::string;
    using mapped_type = c10::IValue;
    std::vector<std::pair<std::string, c10::IValue>> items = {};
    [[nodiscard]] auto begin() { return items.begin(); }
    [[nodiscard]] auto end() { return items.end(); }
    [[nodiscard]] auto begin() const { return items.begin(); }
    [[nodiscard]] auto end() const { return items.end(); }
  };
};

}  // namespace accelerate::tree
