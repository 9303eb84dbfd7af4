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

class TreeBuilder {
 public:
  TreeBuilder(const PickleGraph& graph, const PickleSource& source)
      : graph_(graph),
        source_(source),
        open_(graph.nodes.size(), false),
        // Every node once, and some copies of what is shared; a text counts by its length.
        budget_(4 * graph.end + 65536) {}

  Value build(NodeId id, int depth = 0) {
    const auto& node = graph_.nodes[id];
    spend(1 + (is_text(node.kind) ? node.size / 16 : 0));
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
        return Value(std::make_shared<PickleInt>(std::string(text(node))));
      case NodeKind::kGlobal: {
        const auto [module, name] = name_of(id);
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
      default:
        return shared_[id] = resolve_persistent_id(
                   build(node.size, depth), [&](std::string_view why) { refuse(node.bits, why); });
    }
  }

  Value::List list(std::span<const NodeId> ids, int depth) {
    Value::List items;
    items.reserve(ids.size());
    for (const auto id : ids) items.push_back(build(id, depth));
    return items;
  }

  PickleCall::Entries entries(std::span<const NodeId> ids, int depth) {
    PickleCall::Entries result;
    result.reserve(ids.size() / 2);
    for (std::size_t i = 0; i + 1 < ids.size(); i += 2) {
      Value key = build(ids[i], depth);
      result.emplace_back(std::move(key), build(ids[i + 1], depth));
    }
    return result;
  }

  Value dict(std::span<const NodeId> ids, int depth) {
    auto pairs = entries(ids, depth);
    if (!has_plain_keys(pairs)) return Value(std::make_shared<PickleDict>(std::move(pairs)));
    return Value(
        to_dict(std::move(pairs), [&](std::string_view reason) { refuse(graph_.end, reason); }));
  }

  Value called(NodeId id, int depth) {
    const auto& node = graph_.calls[graph_.nodes[id].bits];
    spend(kCallCost);
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
    if (leaf_as<PickleTensor>(*value) != nullptr) shared_[id] = *value;
    return *std::move(value);
  }

  const PickleGraph& graph_;
  const PickleSource& source_;
  std::vector<bool> open_;  // nodes that are being built
  std::uint64_t budget_;
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
