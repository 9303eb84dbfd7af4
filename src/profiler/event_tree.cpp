#include "profiler/event_tree.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace accelerate::detail::profiler {
namespace {

constexpr double kMicrosecond = 1000;

/// An event, its place in the tree of its thread, and what it adds to its row.
struct Node {
  ProfileEvent event = {};
  Node* parent = nullptr;
  std::vector<Node*> children = {};
  bool removed = false;
  double kernels = 0;  // time of those that it has launched itself
  std::int64_t cpu_memory = 0;
  std::int64_t device_memory = 0;
  double device_total = 0;

  [[nodiscard]] double duration() const {
    return static_cast<double>(event.end - event.start) / kMicrosecond;
  }
  [[nodiscard]] bool in_tree() const { return !event.on_device && !event.async; }
};

using Nodes = std::vector<Node>;

/// Sums of memory up to a point in time.
class MemorySums {
 public:
  explicit MemorySums(std::span<const MemoryEvent> sorted) : events_(sorted) {
    for (const auto& one : sorted) {
      cpu_.push_back(cpu_.back() + (one.on_device ? 0 : one.bytes));
      device_.push_back(device_.back() + (one.on_device ? one.bytes : 0));
    }
    seen_.resize(sorted.size());
  }

  /// Gives a node the memory of its time.
  void add_to(Node& node) {
    const auto from =
        index(std::ranges::lower_bound(events_, node.event.start, {}, &MemoryEvent::time));
    const auto to =
        index(std::ranges::upper_bound(events_, node.event.end, {}, &MemoryEvent::time));
    node.cpu_memory = cpu_[to] - cpu_[from];
    node.device_memory = device_[to] - device_[from];
    std::fill(seen_.begin() + static_cast<std::ptrdiff_t>(from),
              seen_.begin() + static_cast<std::ptrdiff_t>(to), true);
  }
  /// Memory outside of all operators, as events of its own.
  void add_rest(Nodes& nodes) const {
    for (std::size_t i = 0; i < events_.size(); ++i) {
      if (seen_[i]) continue;
      const auto& one = events_[i];
      Node node{
          .event = {.name = "[memory]", .thread = one.thread, .start = one.time, .end = one.time}};
      (one.on_device ? node.device_memory : node.cpu_memory) = one.bytes;
      nodes.push_back(std::move(node));
    }
  }

 private:
  [[nodiscard]] std::size_t index(std::span<const MemoryEvent>::iterator at) const {
    return static_cast<std::size_t>(at - events_.begin());
  }

  std::span<const MemoryEvent> events_;
  std::vector<std::int64_t> cpu_ = {0};
  std::vector<std::int64_t> device_ = {0};
  std::vector<bool> seen_;
};

/// Kernels belong to the operator that launched them; calls of the driver, which are events of the
/// host, to its thread.
void link_launches(Nodes& nodes) {
  std::unordered_map<std::uint64_t, Node*> by_id;
  for (auto& node : nodes) {
    if (node.event.launched_by == 0 && node.in_tree()) by_id.emplace(node.event.id, &node);
  }
  for (auto& node : nodes) {
    if (node.event.launched_by == 0) continue;
    const auto found = by_id.find(node.event.launched_by);
    if (found == by_id.end()) continue;
    if (node.event.on_device) {
      found->second->kernels += node.duration();
    } else {
      node.event.thread = found->second->event.thread;
    }
  }
}

/// Nests the events of each thread: an event is in another one if it is so in time.
void build_tree(Nodes& nodes) {
  std::vector<Node*> ordered;
  for (auto& node : nodes) {
    if (node.in_tree()) ordered.push_back(&node);
  }
  std::ranges::stable_sort(ordered, {}, [](const Node* node) {
    return std::tuple(node->event.thread, node->event.start, -node->event.end);
  });
  std::vector<Node*> open;
  for (auto* node : ordered) {
    if (!open.empty() && open.back()->event.thread != node->event.thread) open.clear();
    while (!open.empty() && (node->event.start >= open.back()->event.end ||
                             node->event.end > open.back()->event.end)) {
      open.pop_back();
    }
    if (!open.empty()) {
      node->parent = open.back();
      open.back()->children.push_back(node);
    }
    open.push_back(node);
  }
}

/// An operator whose only child is itself at a lower level of the dispatcher counts once.
void remove_duplicates(Nodes& nodes) {
  for (bool changed = true; changed;) {
    changed = false;
    for (auto& node : nodes) {
      auto* const parent = node.parent;
      if (node.removed || parent == nullptr || parent->event.name != node.event.name ||
          parent->children.size() != 1) {
        continue;
      }
      parent->children = node.children;
      parent->kernels = node.kernels;
      for (auto* child : node.children) child->parent = parent;
      node.removed = changed = true;
    }
  }
}

double add_device_totals(Node& node) {
  node.device_total = node.kernels;
  for (auto* child : node.children) node.device_total += add_device_totals(*child);
  return node.device_total;
}

/// What the children of a node have of a quantity.
template <class F>
auto of_children(const Node& node, const F& quantity) {
  decltype(quantity(node)) sum = 0;
  for (const auto* child : node.children) sum += quantity(*child);
  return sum;
}

void add_to_row(KeyAverage& row, const Node& node) {
  ++row.count;
  row.flops += node.event.flops;
  row.cpu_memory_usage += node.cpu_memory;
  row.device_memory_usage += node.device_memory;
  if (node.event.on_device) {
    row.device_time_total += node.duration();
    row.self_device_time_total += node.duration();
    return;
  }
  row.cpu_time_total += node.duration();
  if (node.event.async) return;
  row.self_cpu_time_total +=
      node.duration() - of_children(node, [](const Node& one) { return one.duration(); });
  row.device_time_total += node.device_total;
  row.self_device_time_total +=
      node.device_total - of_children(node, [](const Node& one) { return one.device_total; });
  row.self_cpu_memory_usage +=
      node.cpu_memory - of_children(node, [](const Node& one) { return one.cpu_memory; });
  row.self_device_memory_usage +=
      node.device_memory - of_children(node, [](const Node& one) { return one.device_memory; });
}

}  // namespace

std::vector<KeyAverage> average_events(std::vector<ProfileEvent> events,
                                       std::vector<MemoryEvent> memory, bool group_by_input_shape) {
  std::ranges::stable_sort(memory, {}, &MemoryEvent::time);
  MemorySums sums(memory);
  Nodes nodes;
  nodes.reserve(events.size() + memory.size());  // nodes point to each other
  for (auto& event : events) {
    auto& node = nodes.emplace_back(Node{.event = std::move(event)});
    if (!node.event.on_device) sums.add_to(node);
  }
  sums.add_rest(nodes);
  link_launches(nodes);
  build_tree(nodes);
  remove_duplicates(nodes);

  std::vector<Node*> ordered;
  for (auto& node : nodes) {
    if (node.removed) continue;
    if (node.parent == nullptr && node.in_tree()) add_device_totals(node);
    ordered.push_back(&node);
  }
  std::ranges::stable_sort(ordered, {}, [](const Node* node) {
    return std::tuple(node->event.start, -node->event.end);
  });
  std::vector<KeyAverage> rows;
  std::map<std::tuple<std::string, bool, std::vector<std::vector<std::int64_t>>>, std::size_t>
      known;
  for (const auto* node : ordered) {
    const auto& event = node->event;
    const auto shapes =
        group_by_input_shape ? event.shapes : std::vector<std::vector<std::int64_t>>();
    const auto [found, is_new] =
        known.try_emplace({event.name, event.on_device, shapes}, rows.size());
    if (is_new) {
      rows.push_back({.key = event.name,
                      .input_shapes = shapes,
                      .stack = event.stack,
                      .on_device = event.on_device});
    }
    add_to_row(rows[found->second], *node);
  }
  return rows;
}

}  // namespace accelerate::detail::profiler
