// From the graph of a pickle to values.
#include <bit>
#include <tuple>
#include <unordered_map>

#include "core/text.h"
#include "formats/format_error.h"
#include "formats/pickle_graph.h"
#include "formats/pickle_objects.h"

namespace accelerate::detail::formats {
namespace {

/// A call is larger than other values.
constexpr std::uint64_t kCallCost = 16;
/// Of a leaf, beside its own size: what counts its owners, and its place among the shared ones.
constexpr std::uint64_t kLeafCost = 128;

class TreeBuilder {
 public:
  TreeBuilder(const PickleGraph& graph, const PickleSource& source)
      : graph_(graph),
        source_(source),
        open_(graph.nodes.size(), false),
        // Every node once, and some copies of what is shared; a text counts by its length.
        budget_(4 * graph.end + 65536),
        memory_left_(memory_for_pickle(graph.end)) {}

  Value build(NodeId id, int depth = 0) {
    const auto& node = graph_.nodes[id];
    spend(1 + (is_text(node.kind) ? node.size / 16 : 0));
    if (is_text(node.kind)) take_memory(node.size);
    switch (node.kind) {
      case NodeKind::kNone:
        return {};
      case NodeKind::kTrue:
        return Value(true);
      case NodeKind::kFalse:
        return Value(false);
      case NodeKind::kInt:
        return Value(static_cast<std::int64_t>(node.bits));
      case NodeKind::kDouble:
        return Value(std::bit_cast<double>(node.bits));
      case NodeKind::kText:
        return Value(text(node));
      case NodeKind::kBytes:
        return Value::bytes(std::string(text(node)));
      case NodeKind::kBigInt:
        take_memory(sizeof(PickleInt) + kLeafCost);
        return Value(std::make_shared<PickleInt>(std::string(text(node))));
      case NodeKind::kGlobal: {
        const auto [module, name] = name_of(id);
        take_memory(sizeof(PickleGlobal) + kLeafCost);
        return Value(std::make_shared<PickleGlobal>(module, name));
      }
      default:
        return nested(id, depth + 1);
    }
  }

 private:
  static bool is_text(NodeKind kind) {
    return kind == NodeKind::kText || kind == NodeKind::kBytes || kind == NodeKind::kBigInt;
  }
  [[nodiscard]] std::string_view text(const PickleNode& node) const {
    return graph_.input.substr(node.bits, node.size);
  }
  /// Module and name; protocol 2 calls `builtins` by its name in Python 2.
  [[nodiscard]] std::pair<std::string, std::string> name_of(NodeId id) {
    const auto& global = graph_.globals[graph_.nodes[id].bits];
    spend((global.module.size() + global.name.size()) / 16);
    take_memory(global.module.size() + global.name.size());
    return {std::string(global.module == "__builtin__" ? "builtins" : global.module),
            std::string(global.name)};
  }

  [[noreturn]] void refuse(std::uint64_t offset, std::string_view reason) const {
    throw format_error(source_.name, source_.origin + offset, "pickle: " + std::string(reason));
  }

  void spend(std::uint64_t cost) {
    if (cost > budget_) refuse(graph_.end, "copies of its shared parts would take too much memory");
    budget_ -= cost;
  }

  /// Bytes of the values, before they are allocated.
  void take_memory(std::uint64_t bytes) {
    if (bytes > memory_left_) refuse(graph_.end, "its values would take too much memory");
    memory_left_ -= bytes;
  }

  Value nested(NodeId id, int depth) {
    if (const auto found = shared_.find(id); found != shared_.end()) return found->second;
    if (depth > kMaxValueDepth) {
      refuse(graph_.end, str("values are nested deeper than ", kMaxValueDepth, " levels"));
    }
    if (open_[id]) refuse(graph_.end, "a value contains itself");
    open_[id] = true;
    Value value = container(id, depth);
    open_[id] = false;
    return value;
  }

  Value container(NodeId id, int depth) {
    const auto& node = graph_.nodes[id];
    switch (node.kind) {
      case NodeKind::kList:
        return Value(list(graph_.items(node), depth));
      case NodeKind::kTuple:
        return Value::tuple(list(graph_.items(node), depth));
      case NodeKind::kSet:
      case NodeKind::kFrozenSet: {
        // As protocol 2 writes it, which has no opcodes for sets.
        spend(kCallCost);
        take_memory(sizeof(PickleCall) + kLeafCost);
        auto call = std::make_shared<PickleCall>();
        call->module = "builtins";
        call->name = node.kind == NodeKind::kSet ? "set" : "frozenset";
        call->args.emplace_back(list(graph_.items(node), depth));
        return Value(Value::Leaf(std::move(call)));
      }
      case NodeKind::kDict:
        return dict(graph_.items(node), depth);
      case NodeKind::kCall:
        return called(id, depth);
      default: {
        const auto left = memory_left_;
        auto storage = resolve_persistent_id(build(node.size, depth),
                                             [&](std::string_view why) { refuse(node.bits, why); });
        memory_left_ = left;  // the id is gone
        take_memory(sizeof(PickleStorage) + kLeafCost);
        return shared_[id] = std::move(storage);
      }
    }
  }

  Value::List list(std::span<const NodeId> ids, int depth) {
    Value::List items;
    if (!ids.empty()) take_memory(ids.size() * sizeof(Value) + kHeapBlock);
    items.reserve(ids.size());
    for (const auto id : ids) items.push_back(build(id, depth));
    return items;
  }

  PickleCall::Entries entries(std::span<const NodeId> ids, int depth) {
    PickleCall::Entries result;
    // The table of a dict has about as much for each key again.
    if (!ids.empty()) take_memory(ids.size() * (sizeof(Value) + sizeof(void*)) + kHeapBlock);
    result.reserve(ids.size() / 2);
    for (std::size_t i = 0; i + 1 < ids.size(); i += 2) {
      Value key = build(ids[i], depth);
      result.emplace_back(std::move(key), build(ids[i + 1], depth));
    }
    return result;
  }

  Value dict(std::span<const NodeId> ids, int depth) {
    auto pairs = entries(ids, depth);
    if (!has_plain_keys(pairs)) {
      take_memory(sizeof(PickleDict) + kLeafCost);
      return Value(std::make_shared<PickleDict>(std::move(pairs)));
    }
    return Value(
        to_dict(std::move(pairs), [&](std::string_view reason) { refuse(graph_.end, reason); }));
  }

  Value called(NodeId id, int depth) {
    const auto& node = graph_.calls[graph_.nodes[id].bits];
    spend(kCallCost);
    const auto left = memory_left_;
    take_memory(sizeof(PickleCall) + kLeafCost);
    auto call = std::make_shared<PickleCall>();
    std::tie(call->module, call->name) = name_of(node.function);
    call->args = list(graph_.items(graph_.nodes[node.args]), depth);
    call->by_new = node.by_new;
    if (node.kwargs != kNoNode) call->kwargs = build(node.kwargs, depth);
    if (node.state != kNoNode) call->state = build(node.state, depth);
    call->items = list(node.items, depth);
    call->entries = entries(node.entries, depth);
    auto value = resolve_call(*call, [&](std::string_view why) { refuse(node.offset, why); });
    if (!value) return Value(Value::Leaf(std::move(call)));
    // Tensors stay one object wherever they occur, all else is copied.
    if (const auto* tensor = leaf_as<PickleTensor>(*value)) {
      shared_[id] = *value;
      memory_left_ = left;  // the call is gone
      take_memory(sizeof(PickleTensor) + kLeafCost + 16 * tensor->sizes.size());
    }
    return *std::move(value);
  }

  const PickleGraph& graph_;
  const PickleSource& source_;
  std::vector<bool> open_;  // nodes that are being built
  std::uint64_t budget_;    // bounds the time: what was made and is gone counts, too
  std::uint64_t memory_left_;
  std::unordered_map<NodeId, Value> shared_;
};

}  // namespace

Value pickle_load_first(std::string_view& bytes, const PickleSource& source) {
  const auto graph = read_pickle_graph(bytes, source);
  Value value = TreeBuilder(graph, source).build(graph.root);
  bytes.remove_prefix(graph.end);
  return value;
}

Value pickle_loads(std::string_view bytes, const PickleSource& source) {
  const auto size = bytes.size();
  Value value = pickle_load_first(bytes, source);
  if (!bytes.empty()) {
    throw format_error(source.name, source.origin + size - bytes.size(),
                       str("pickle: ", bytes.size(), " bytes follow its end"));
  }
  return value;
}

}  // namespace accelerate::detail::formats
