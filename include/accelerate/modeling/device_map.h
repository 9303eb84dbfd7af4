// accelerate/modeling/device_map.h - which part of a model goes where, and how much fits there.
//
//     DeviceMap map{{"encoder", 0}, {"decoder", "cpu"}, {"decoder.head", "disk"}};
//     MaxMemory budget{{0, "20GiB"}, {"cpu", "60GiB"}};
//
// Included by accelerate/modeling.h and accelerate/checkpoint.h.
#pragma once

#include <compare>
#include <concepts>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

#include "accelerate/api.h"
#include "accelerate/modeling/ordered_map.h"

namespace accelerate {

/// A place for weights: a GPU by its number, "cpu", "mps", "disk", or the name of another device.
/// `0`, "0", "cuda" and "cuda:0" are the same.
class ACCELERATE_API MapDevice {
 public:
  MapDevice() : MapDevice("cpu") {}
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
  MemorySize() = default;
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
