// accelerate/modeling/ordered_map.h - a dictionary as Python has it: in the order of insertion.
//
//     DeviceMap map{{"encoder", 0}, {"decoder", "cpu"}};
//     map["head"] = "disk";
//     for (const auto& [name, device] : map) ...
//
// Included by accelerate/modeling/device_map.h and accelerate/checkpoint/shards.h.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/errors.h"

namespace accelerate {

/// A dictionary in the order of insertion. Two are equal if they have the same entries.
template <class Key, class T>
class OrderedMap {
 public:
  using key_type = Key;
  using mapped_type = T;
  using value_type = std::pair<Key, T>;
  using const_iterator = typename std::vector<value_type>::const_iterator;

  OrderedMap() = default;
  OrderedMap(std::initializer_list<value_type> entries) {
    for (const auto& [key, value] : entries) set(key, value);
  }

  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }
  [[nodiscard]] const_iterator begin() const noexcept { return entries_.begin(); }
  [[nodiscard]] const_iterator end() const noexcept { return entries_.end(); }
  [[nodiscard]] std::vector<Key> keys() const {
    std::vector<Key> keys;
    for (const auto& [key, value] : entries_) keys.push_back(key);
    return keys;
  }

  /// The value of `key`, or null.
  template <class K>
  [[nodiscard]] const T* find(const K& key) const {
    const auto found = index_.find(key);
    return found == index_.end() ? nullptr : &entries_[found->second].second;
  }
  template <class K>
  [[nodiscard]] bool contains(const K& key) const {
    return find(key) != nullptr;
  }
  /// The value of `key`, or `fallback`.
  template <class K>
  [[nodiscard]] T get(const K& key, T fallback) const {
    const T* const value = find(key);
    return value != nullptr ? *value : std::move(fallback);
  }
  /// The value of `key`. Throws `ArgumentError` if there is none.
  template <class K>
  [[nodiscard]] const T& at(const K& key) const {
    if (const T* const value = find(key)) return *value;
    throw ArgumentError("There is no entry '" + text_of(key) + "'.");
  }

  /// Changes the value of `key` in its place, or appends it.
  void set(const Key& key, T value) { (*this)[key] = std::move(value); }
  /// The value of `key`; a new one is appended if there is none.
  T& operator[](const Key& key) {
    const auto [place, is_new] = index_.try_emplace(key, entries_.size());
    if (is_new) entries_.emplace_back(key, T());
    return entries_[place->second].second;
  }

  friend bool operator==(const OrderedMap& a, const OrderedMap& b) {
    return a.size() == b.size() && std::ranges::all_of(a, [&](const value_type& entry) {
             const T* const other = b.find(entry.first);
             return other != nullptr && *other == entry.second;
           });
  }

 private:
  template <class K>
  static std::string text_of(const K& key) {
    if constexpr (std::convertible_to<const K&, std::string_view>) {
      return std::string(std::string_view(key));
    } else {
      return Key(key).to_string();
    }
  }

  std::vector<value_type> entries_;
  std::map<Key, std::size_t, std::less<>> index_;
};

}  // namespace accelerate
