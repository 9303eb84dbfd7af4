#include "core/device_planner.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <set>

#include "accelerate/errors.h"
#include "accelerate/logging.h"
#include "core/log.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

constexpr auto kTensorsAndModules = {PartKind::kParameter, PartKind::kModule};
/// Sums of a few of these fit into 64 bits.
constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max() / 8;

std::int64_t bits_of(std::int64_t bytes) { return std::min(bytes, kUnlimited / 8) * 8; }
double bytes_of(std::int64_t bits) { return static_cast<double>(bits) / 8; }

/// The largest layer of each part and how often there is one of that size in it.
struct LayerCount {
  std::int64_t bits = 0;
  std::size_t count = 0;

  void add(const LayerCount& more) {
    if (more.bits > bits) {
      *this = more;
    } else if (more.bits == bits) {
      count += more.count;
    }
  }
};

class Planner {
 public:
  Planner(const ModelOutline& outline, const MaxMemory& budgets, const PlanRules& rules);
  [[nodiscard]] DevicePlan run();

 private:
  using Part = std::size_t;
  struct Place {
    MapDevice device;
    std::int64_t limit = 0;
    /// Keeps room for the largest layer, which is brought here when it is needed.
    bool keeps_reserve = false;
    std::int64_t used = 0;
    std::int64_t buffers = 0;
  };
  /// What must go with a part because of tied parameters.
  struct Ties {
    std::vector<Part> tensors = {};  ///< tied to one inside the part, and outside of it
    std::vector<Part> entries = {};  ///< of the queue: where those tensors are
    std::int64_t bits = 0;           ///< of the part and the entries
  };

  [[nodiscard]] const ModelPart& at(Part part) const { return outline_.parts[part]; }
  [[nodiscard]] Place& here() { return places_[current_]; }
  [[nodiscard]] bool can_split(Part part) const {
    return !at(part).no_split && outline_.has_children(part);
  }
  [[nodiscard]] std::int64_t room() {
    return here().limit - (here().keeps_reserve ? reserve_.bits : 0) - here().used;
  }
  template <class... Words>
  void say(const Words&... words) const {
    if (rules_.verbose) {
      write_log("accelerate", LogLevel::kInfo, str(words...), std::source_location::current());
    }
  }

  void count_layers();
  void renew_reserve();
  void drop_from_reserve(Part part);
  [[nodiscard]] Ties ties_of(Part part, const std::deque<Part>& queue) const;
  void put_here(Part part, const Ties& ties);
  [[nodiscard]] bool split_tied(Part part, const Ties& ties);
  [[nodiscard]] bool split(Part part);
  [[nodiscard]] bool fall_back(Part part, const Ties& ties);
  [[nodiscard]] std::optional<Part> find_fitting(std::int64_t limit) const;
  void go_to_next_place(Part part, const Ties& ties);
  void place_buffers_of_split_modules();

  const ModelOutline& outline_;
  PlanRules rules_;
  std::vector<Place> places_;
  std::size_t current_ = 0;
  std::deque<Part> queue_;
  DevicePlan plan_;

  std::vector<LayerCount> layers_;           // of each part
  std::vector<std::pair<Part, Part>> tied_;  // parameters and the numbers of their groups, sorted
  std::vector<Part> split_;                  // modules whose parts are placed one by one
  std::set<Part> fallbacks_;                 // tried on the current place

  // The reserve: Python keeps a list of the largest layers and renews it when all were taken. Here
  // they are counted; `taken_` has the round in which a part was subtracted.
  LayerCount reserve_;
  unsigned round_ = 0;
  std::vector<unsigned> taken_;
};

Planner::Planner(const ModelOutline& outline, const MaxMemory& budgets, const PlanRules& rules)
    : outline_(outline), rules_(rules), taken_(outline.parts.size(), ~0U) {
  const bool has_mps = budgets.contains(MapDevice("mps"));
  for (const auto& [device, bytes] : budgets) {
    const bool main = has_mps ? device.to_string() == "mps" : places_.empty() || device.is_cpu();
    if (device.is_disk()) continue;
    places_.push_back({.device = device, .limit = bits_of(bytes), .keeps_reserve = main});
  }
  places_.push_back({.device = "disk", .limit = kUnlimited});
  for (Part group = 0; group < outline.ties.size(); ++group) {
    for (const auto part : outline.ties[group]) tied_.emplace_back(part, group);
  }
  std::ranges::sort(tied_);
  const auto parts = outline.top_parts();
  queue_.assign(parts.begin(), parts.end());
  count_layers();
  for (const auto part : queue_) reserve_.add(layers_[part]);
}

void Planner::count_layers() {
  layers_.resize(outline_.parts.size());
  for (Part part = layers_.size(); part-- > 0;) {
    if (!can_split(part)) {
      layers_[part] = {at(part).bits, 1};
      continue;
    }
    for (Part child = part + 1; child < at(part).end; child = at(child).end) {
      if (at(child).kind == PartKind::kModule) layers_[part].add(layers_[child]);
    }
  }
}

void Planner::renew_reserve() {
  ++round_;
  reserve_ = {};
  for (const auto part : queue_) {
    if (at(part).kind == PartKind::kModule) reserve_.add(layers_[part]);
  }
}

void Planner::drop_from_reserve(Part part) {
  // Tensors are among the layers of the first round only.
  const bool counts = at(part).kind == PartKind::kModule || round_ == 0;
  if (counts && taken_[part] != round_ && layers_[part].bits == reserve_.bits) {
    reserve_.count -= layers_[part].count;
  }
  if (reserve_.count == 0) renew_reserve();
  taken_[part] = round_;  // it may come back to the queue, but not to the layers of this round
}

Planner::Ties Planner::ties_of(Part part, const std::deque<Part>& queue) const {
  Ties ties{.bits = at(part).bits};
  std::set<Part> groups;
  for (auto tied = std::ranges::lower_bound(tied_, std::pair(part, Part{0}));
       tied != tied_.end() && tied->first < at(part).end; ++tied) {
    groups.insert(tied->second);
  }
  for (const auto group : groups) {
    for (const auto tensor : outline_.ties[group]) {
      if (outline_.is_inside(tensor, part)) continue;
      ties.tensors.push_back(tensor);
      const auto entry = std::ranges::find_if(
          queue, [&](Part candidate) { return outline_.is_inside(tensor, candidate); });
      if (entry == queue.end()) continue;
      ties.entries.push_back(*entry);
      ties.bits += at(*entry).bits - at(tensor).bits;
    }
  }
  return ties;
}

void Planner::put_here(Part part, const Ties& ties) {
  say("Putting ", at(part).name, " (size=", ties.bits / 8, ") on ", here().device, ".");
  here().used += ties.bits;
  plan_.map.set(at(part).name, here().device);
  for (const auto entry : ties.entries) {
    std::erase(queue_, entry);
    plan_.map.set(at(entry).name, here().device);
  }
  if (at(part).kind == PartKind::kModule) here().buffers += at(part).buffer_bits;
}

bool Planner::split_tied(Part part, const Ties& ties) {
  if (ties.tensors.empty() || at(part).bits > room()) return false;
  const auto entry = std::ranges::find_if(ties.entries, [&](Part one) { return can_split(one); });
  if (entry == ties.entries.end()) return false;
  say("Not enough space on ", here().device, " to put ", at(part).name,
      " and what is tied to it: ", "splitting ", at(*entry).name, ".");
  split_.push_back(*entry);
  const auto parts = outline_.inside(*entry, kTensorsAndModules);
  const auto place = queue_.erase(std::ranges::find(queue_, *entry));
  queue_.insert(place, parts.begin(), parts.end());
  queue_.push_front(part);
  renew_reserve();
  return true;
}

bool Planner::split(Part part) {
  if (at(part).bits < room()) return false;
  say("Not enough space on ", here().device, " to put ", at(part).name, " (available ", room() / 8,
      ", size ", at(part).bits / 8,
      "): ", can_split(part) ? "splitting it." : "it cannot be split, going to the next device.");
  if (!can_split(part)) return false;
  split_.push_back(part);
  const auto parts = outline_.inside(part, kTensorsAndModules);
  queue_.insert(queue_.begin(), parts.begin(), parts.end());
  renew_reserve();
  return true;
}

std::optional<std::size_t> Planner::find_fitting(std::int64_t limit) const {
  auto search = queue_;
  while (!search.empty()) {
    const auto part = search.front();
    search.pop_front();
    if (ties_of(part, search).bits <= limit) return part;
    if (!can_split(part)) continue;
    const auto parts = outline_.inside(part, kTensorsAndModules);
    search.insert(search.begin(), parts.begin(), parts.end());
  }
  return std::nullopt;
}

bool Planner::fall_back(Part part, const Ties& ties) {
  if (!rules_.fallback_allocation || here().used != 0 || here().device.is_disk()) return false;
  const auto limit = here().limit - std::max(reserve_.bits, ties.bits);
  const auto found = limit < 0 ? std::nullopt : find_fitting(limit);
  // A part that did not fit when it was taken will not fit now.
  if (!found || !fallbacks_.insert(*found).second) return false;
  for (;;) {
    const auto entry = std::ranges::find_if(
        queue_, [&](Part candidate) { return outline_.is_inside(*found, candidate); });
    const auto above = *entry;
    const auto place = queue_.erase(entry);
    if (above == *found) break;
    split_.push_back(above);
    const auto parts = outline_.inside(above, kTensorsAndModules);
    queue_.insert(place, parts.begin(), parts.end());
  }
  queue_.push_front(part);
  queue_.push_front(*found);
  return true;
}

void Planner::go_to_next_place(Part part, const Ties& ties) {
  const auto reserved = here().keeps_reserve ? reserve_.bits : 0;
  if (here().used == 0) {
    plan_.required_bytes.emplace_back(here().device, bytes_of(ties.bits + reserved));
  }
  here().used += reserved;
  ++current_;
  fallbacks_.clear();
  queue_.push_front(part);
}

/// Parity: Python forgets the buffers of a module whose parts it places one by one.
void Planner::place_buffers_of_split_modules() {
  std::ranges::sort(split_, std::greater());  // inner modules first
  for (const auto module : split_) {
    const auto buffers = outline_.inside(module, {PartKind::kBuffer});
    if (buffers.empty()) continue;
    for (Part part = module + 1; part < at(module).end; ++part) {
      const auto* const device = plan_.map.find(at(part).name);
      if (device == nullptr) continue;
      const MapDevice with = *device;
      for (const auto buffer : buffers) plan_.map.set(at(buffer).name, with);
      break;
    }
  }
}

DevicePlan Planner::run() {
  while (!queue_.empty()) {
    const auto part = queue_.front();
    queue_.pop_front();
    say("Treating module ", at(part).name, ".");
    drop_from_reserve(part);
    const auto ties = ties_of(part, queue_);
    if (here().device.is_disk() || ties.bits <= room()) {
      put_here(part, ties);
    } else if (!split_tied(part, ties) && !split(part) && !fall_back(part, ties)) {
      go_to_next_place(part, ties);
    }
  }
  place_buffers_of_split_modules();

  std::int64_t homeless = 0;
  bool has_gpu = false;
  for (const auto& place : places_) {
    if (place.device.is_cpu() || place.device.is_disk()) homeless += place.buffers;
  }
  const bool fits = std::ranges::any_of(places_, [&](const Place& place) {
    if (place.device.is_cpu() || place.device.is_disk()) return false;
    has_gpu = true;
    return place.limit >= homeless + place.used;
  });
  if (!rules_.offload_buffers && homeless > 0 && has_gpu && !fits) {
    plan_.homeless_buffer_bytes = bytes_of(homeless);
  }
  return std::move(plan_);
}

/// The mean size of the modules without modules that have tensors.
std::int64_t mean_leaf_bytes(const ModelOutline& outline) {
  double sum = 0;
  double count = 0;
  std::vector<bool> has_tensor(outline.parts.size());
  std::vector<bool> is_inner(outline.parts.size());
  const auto& parts = outline.parts;
  for (std::size_t part = parts.size(); part-- > 1;) {
    if (parts[part].kind != PartKind::kModule) continue;
    for (auto child = part + 1; child < parts[part].end; child = parts[child].end) {
      const bool module = parts[child].kind == PartKind::kModule;
      if (module ? has_tensor[child] : !parts[child].alias) has_tensor[part] = true;
      if (module && has_tensor[child]) is_inner[part] = true;
    }
    if (!has_tensor[part] || is_inner[part]) continue;
    sum += bytes_of(parts[part].bits);
    ++count;
  }
  return static_cast<std::int64_t>(sum / std::max(count, 1.0));
}

}  // namespace

bool ModelOutline::has_children(std::size_t part) const {
  for (auto child = part + 1; child < parts[part].end; child = parts[child].end) {
    if (parts[child].kind == PartKind::kModule) return true;
  }
  return false;
}

std::vector<std::size_t> ModelOutline::inside(std::size_t module,
                                              std::initializer_list<PartKind> kinds) const {
  std::vector<std::size_t> result;
  for (auto child = module + 1; child < parts[module].end; child = parts[child].end) {
    if (std::ranges::find(kinds, parts[child].kind) != kinds.end()) result.push_back(child);
  }
  return result;
}

std::vector<std::size_t> ModelOutline::top_parts() const {
  auto result = inside(0, kTensorsAndModules);
  const auto buffers = inside(0, {PartKind::kBuffer});
  result.insert(result.end(), buffers.begin(), buffers.end());
  return result;
}

MaxMemory in_planning_order(const MaxMemory& max_memory) {
  static const std::vector<MapDevice> kOthers{"mps", "cpu", "disk"};
  std::vector<MapDevice> gpus;
  for (const auto& [device, bytes] : max_memory) {
    if (device.is_gpu()) {
      gpus.push_back(device);
    } else if (std::ranges::count(kOthers, device) == 0) {
      throw ArgumentError(str("Device ", device,
                              " is not recognized, available devices are integers(for GPU/XPU), "
                              "'mps', 'cpu' and 'disk'"));
    }
  }
  std::ranges::sort(gpus, {}, &MapDevice::index);
  MaxMemory ordered;
  for (const auto& devices : {gpus, kOthers}) {
    for (const auto& device : devices) {
      if (const auto* bytes = max_memory.find(device)) ordered.set(device, *bytes);
    }
  }
  return ordered;
}

MaxMemory balanced_memory(const ModelOutline& outline, const MaxMemory& budgets,
                          const BalanceRules& rules) {
  std::vector<MapDevice> gpus;
  for (const auto& [device, bytes] : budgets) {
    if (device.is_gpu() && bytes > 0) gpus.push_back(device);
  }
  if (gpus.empty()) return budgets;
  auto result = budgets;
  const bool low_zero = rules.low_zero && gpus.size() > 1;
  if (gpus.size() == 1 && rules.leave_reserve) {
    const std::int64_t bytes = *budgets.find(gpus[0]);
    result.set(gpus[0], bytes / 10 * 9 + bytes % 10 * 9 / 10);
    info(str("We will use 90% of the memory on device ", gpus[0],
             " for storing the model, and 10% for the buffer to avoid OOM. You can set "
             "`max_memory` in to a higher value to use more memory (at your own risk)."));
  }
  const auto total = bytes_of(outline.parts[0].bits);
  const auto share = static_cast<double>(low_zero ? gpus.size() - 1 : gpus.size());
  const auto buffer =
      1.25 * std::max(bytes_of(rules.block_bits), static_cast<double>(mean_leaf_bytes(outline)));
  const auto per_gpu = static_cast<std::int64_t>(total / share) + static_cast<std::int64_t>(buffer);
  double others = 0;
  for (std::size_t i = 0; i + 1 < gpus.size(); ++i) {
    if (low_zero && i == 0) continue;
    result.set(gpus[i], std::min<std::int64_t>(per_gpu, *result.find(gpus[i])));
  }
  for (std::size_t i = 1; i < gpus.size(); ++i) {
    others += static_cast<double>(std::int64_t{*result.find(gpus[i])});
  }
  if (low_zero) {
    const auto rest = static_cast<std::int64_t>(std::max(0.0, total - others));
    result.set(gpus[0], std::min<std::int64_t>(rest, *result.find(gpus[0])));
  }
  return result;
}

DevicePlan plan_device_map(const ModelOutline& outline, const MaxMemory& budgets,
                           const PlanRules& rules) {
  return Planner(outline, budgets, rules).run();
}

}  // namespace accelerate::detail::inline core
