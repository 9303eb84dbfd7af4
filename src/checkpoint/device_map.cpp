#include "checkpoint/device_map.h"

#include <c10/util/Exception.h>

#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::checkpoint {

const std::string* find_in_device_map(const DeviceMap& map, std::string_view name) {
  for (;;) {
    const auto found = map.find(std::string(name));
    if (found != map.end()) return &found->second;
    if (name.empty()) return nullptr;
    const auto dot = name.rfind('.');
    name = dot == name.npos ? std::string_view() : name.substr(0, dot);
  }
}

c10::Device device_from_text(const std::string& text) {
  try {
    return c10::Device(is_digits(text) ? "cuda:" + text : text);
  } catch (const c10::Error&) {
    throw ArgumentError(str("The device map has '", text,
                            "', which is no device. Use 'cpu', 'cuda:0' or the number of a GPU."));
  }
}

}  // namespace accelerate::detail::checkpoint
