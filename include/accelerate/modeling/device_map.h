// accelerate/modeling/device_map.h - which part of a model goes where, and how much fits there.
//
//     DeviceMap map{{"encoder", 0}, {"decoder", "cpu"}, {"decoder.head", "disk"}};
//     MaxMemory budget{{0, "20GiB"}, {"cpu", "60GiB"}};
//
// Included by accelerate/modeling.h and accelerate/checkpoint.h.
#pragma once

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

/// A place for weights: a GPU by its number, "cpu", "mps", "disk", or the name of another device.
/// `0`, "0", "cuda" and "cuda:0" are the same.
class ACCELERATE_API MapDevice {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `{{"encoder", 0}, {"decoder", "cpu"}}`
  MapDevice(int gpu);
  MapDevice(std::string_view name);
  MapDevice(const char* name) : MapDevice(std::string_view(name)) {}
  MapDevice(const std::string& name) : MapDevice(std::string_view(name)) {}
  // NOLINTEND(google-explicit-constructor)

  [[nodiscard]] bool is_gpu() const noexcept { return is_gpu_; }
  /// The number of a GPU; 0 for other places.
  [[nodiscard]] int index() const noexcept { return index_; }
  [[nodiscard]] bool is_cpu() const noexcept { return text_ == "cpu"; }
  [[nodiscard]] bool is_disk() const noexcept { return text_ == "disk"; }
  /// "1" for a GPU, else the name: as Python prints it.
  [[nodiscard]] const std::string& to_string() const noexcept { return text_; }

  auto operator<=>(const MapDevice&) const = default;
  ACCELERATE_API friend std::ostream& operator<<(std::ostream& out, const MapDevice& device);

 private:
  std::string text_;
  int index_ = 0;
  bool is_gpu_ = false;
};

/// A number of bytes, or a text such as "20GiB" (see `convert_file_size_to_int`). Throws
/// `ArgumentError` for other texts and negative numbers.
class ACCELERATE_API MemorySize {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `{{0, "20GiB"}, {1, 500}}`
  template <std::integral T>
  MemorySize(T bytes) : MemorySize(Bytes{static_cast<std::int64_t>(bytes)}) {}
  MemorySize(std::string_view text);
  MemorySize(const char* text) : MemorySize(std::string_view(text)) {}
  MemorySize(const std::string& text) : MemorySize(std::string_view(text)) {}
  operator std::int64_t() const noexcept { return bytes_; }
  // NOLINTEND(google-explicit-constructor)

 private:
  struct Bytes {
    std::int64_t value;
  };
  explicit MemorySize(Bytes bytes);
  std::int64_t bytes_ = 0;
};

/// A dictionary in the order of insertion. Two are equal if they have the same entries.
template <class Key, class T>
class OrderedMap {
 public:
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

  /// Changes the value of `key` in its place, or appends it.
  void set(const Key& key, T value) {
    const auto [place, is_new] = index_.try_emplace(key, entries_.size());
    if (is_new) {
      entries_.emplace_back(key, std::move(value));
    } else {
      entries_[place->second].second = std::move(value);
    }
  }

  friend bool operator==(const OrderedMap& a, const OrderedMap& b) {
    return a.size() == b.size() && std::ranges::all_of(a, [&](const value_type& entry) {
             const T* const other = b.find(entry.first);
             return other != nullptr && *other == entry.second;
           });
  }

 private:
  std::vector<value_type> entries_;
  std::map<Key, std::size_t, std::less<>> index_;
};

/// Places by the names of modules and tensors. A name stands for all below it unless a longer name
/// says otherwise; "" is the whole model.
using DeviceMap = OrderedMap<std::string, MapDevice>;

/// How many bytes of a model each place may hold.
using MaxMemory = OrderedMap<MapDevice, MemorySize>;

/// The place of a tensor or module: that of the longest name above it, or null.
[[nodiscard]] ACCELERATE_API const MapDevice* find_in_device_map(const DeviceMap& device_map,
                                                                 std::string_view name);

/// Replaces the names below a module that all have the same place by that of the module, where
/// there are at least two; from the whole model down, or from `module_name` down.
///
///     {"a.x": 0, "a.y": 0, "b": 1}  ->  {"a": 0, "b": 1}
[[nodiscard]] ACCELERATE_API DeviceMap clean_device_map(const DeviceMap& device_map,
                                                        std::string_view module_name = "");

}  // namespace accelerate
