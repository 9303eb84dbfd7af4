#include "accelerate/modeling/device_map.h"

#include <ostream>
#include <unordered_map>

#include "core/bytes.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate {
namespace {

using Entry = DeviceMap::value_type;

/// True for the module itself and all below it.
bool is_inside(std::string_view name, std::string_view module) {
  if (module.empty() || name == module) return true;
  return name.starts_with(module) && name[module.size()] == '.';
}

/// Appends `entries`, which are those at and below `module`, grouped where possible.
void append_grouped(const std::vector<const Entry*>& entries, const std::string& module,
                    DeviceMap& out) {
  const auto same = [&](const Entry* entry) { return entry->second == entries.front()->second; };
  if (entries.size() > 1 && std::ranges::all_of(entries, same)) {
    out.set(module, entries.front()->second);
    return;
  }
  std::vector<std::pair<std::string, std::vector<const Entry*>>> children;
  std::unordered_map<std::string, std::size_t> numbers;
  for (const auto* entry : entries) {
    if (entry->first == module) {
      out.set(module, entry->second);
      continue;
    }
    const auto begin = module.empty() ? 0 : module.size() + 1;
    auto child = entry->first.substr(0, entry->first.find('.', begin));
    const auto [number, is_new] = numbers.try_emplace(child, children.size());
    if (is_new) children.emplace_back(std::move(child), std::vector<const Entry*>());
    children[number->second].second.push_back(entry);
  }
  for (const auto& [child, inside] : children) append_grouped(inside, child, out);
}

}  // namespace

MapDevice::MapDevice(int gpu) : text_(std::to_string(gpu)), index_(gpu), is_gpu_(true) {}

MapDevice::MapDevice(std::string_view name) : text_(name) {
  const auto number = name == "cuda" ? "0" : name.substr(name.starts_with("cuda:") ? 5 : 0);
  const auto index = detail::parse_number<int>(number);
  if (index && *index >= 0) *this = MapDevice(*index);
}

std::ostream& operator<<(std::ostream& out, const MapDevice& device) { return out << device.text_; }

MemorySize::MemorySize(std::string_view text) : bytes_(detail::convert_file_size_to_int(text)) {}

MemorySize::MemorySize(Bytes bytes) : bytes_(detail::convert_file_size_to_int(bytes.value)) {}

const MapDevice* find_in_device_map(const DeviceMap& device_map, std::string_view name) {
  for (;;) {
    if (const auto* found = device_map.find(name)) return found;
    if (name.empty()) return nullptr;
    const auto dot = name.rfind('.');
    name = dot == name.npos ? std::string_view() : name.substr(0, dot);
  }
}

DeviceMap clean_device_map(const DeviceMap& device_map, std::string_view module_name) {
  DeviceMap cleaned;
  std::vector<const Entry*> inside;
  for (const auto& entry : device_map) {
    if (is_inside(entry.first, module_name)) {
      inside.push_back(&entry);
    } else {
      cleaned.set(entry.first, entry.second);
    }
  }
  if (!inside.empty()) append_grouped(inside, std::string(module_name), cleaned);
  return cleaned;
}

}  // namespace accelerate
