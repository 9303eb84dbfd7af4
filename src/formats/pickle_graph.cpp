#include "formats/pickle_graph.h"

#include <algorithm>
#include <array>
#include <span>

#include "core/python_text.h"
#include "core/text.h"
#include "formats/format_error.h"
#include "formats/little_endian.h"
#include "formats/pickle_opcodes.h"
#include "formats/utf8.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::size_t kMaxGlobalName = 4096;
constexpr std::size_t kMaxIntBytes = 255;

/// Nodes that every graph begins with: what cannot change is there once.
enum SharedNode : NodeId { kNone, kTrue, kFalse, kEmptyTuple };

class PickleMachine {
 public:
  PickleMachine(std::string_view input, const PickleSource& source)
      : source_(source), memory_left_(memory_for_pickle(input.size())) {
    graph_.input = input;
    for (const auto kind : {NodeKind::kNone, NodeKind::kTrue, NodeKind::kFalse, NodeKind::kTuple}) {
      add(kind);
    }
  }

  PickleGraph run() {
    static const auto actions = actions_by_opcode();
    while (graph_.root == kNoNode) {
      opcode_at_ = at_;
      const auto opcode = number<std::uint8_t>();
      const auto action = actions.at(opcode);
      if (action == nullptr) {
        std::string hex;
        append_hex(hex, opcode, 2);
        refuse(str("the opcode 0x", hex, " is not one that is read"));
      }
      action(*this);
    }
    graph_.end = at_;
    return std::move(graph_);
  }

 private:
  using Action = void (*)(PickleMachine&);

  static std::array<Action, 256> actions_by_opcode() {
    std::array<Action, 256> actions{};
    const auto on = [&](Opcode opcode, Action action) {
      actions.at(static_cast<std::size_t>(opcode)) = action;
    };
    on(Opcode::kNone, [](PickleMachine& m) { m.push(kNone); });
    on(Opcode::kNewTrue, [](PickleMachine& m) { m.push(kTrue); });
    on(Opcode::kNewFalse, [](PickleMachine& m) { m.push(kFalse); });
    on(Opcode::kBinInt1, [](PickleMachine& m) { m.push_int(m.number<std::uint8_t>()); });
    on(Opcode::kBinInt2, [](PickleMachine& m) { m.push_int(m.number<std::uint16_t>()); });
    on(Opcode::kBinInt, [](PickleMachine& m) { m.push_int(m.number<std::int32_t>()); });
    on(Opcode::kLong1, [](PickleMachine& m) { m.push_long(m.number<std::uint8_t>()); });
    on(Opcode::kLong4, [](PickleMachine& m) { m.push_long(m.number<std::uint32_t>()); });
    on(Opcode::kBinFloat, [](PickleMachine& m) { m.push_float(); });
    on(Opcode::kBinUnicode, [](PickleMachine& m) { m.push_text(m.number<std::uint32_t>()); });
    on(Opcode::kShortBinUnicode, [](PickleMachine& m) { m.push_text(m.number<std::uint8_t>()); });
    on(Opcode::kBinUnicode8, [](PickleMachine& m) { m.push_text(m.number<std::uint64_t>()); });
    on(Opcode::kShortBinString, [](PickleMachine& m) { m.push_text(m.number<std::uint8_t>()); });
    on(Opcode::kBinBytes, [](PickleMachine& m) { m.push_bytes(m.number<std::uint32_t>()); });
    on(Opcode::kShortBinBytes, [](PickleMachine& m) { m.push_bytes(m.number<std::uint8_t>()); });
    on(Opcode::kBinBytes8, [](PickleMachine& m) { m.push_bytes(m.number<std::uint64_t>()); });
    on(Opcode::kByteArray8, [](PickleMachine& m) { m.push_bytes(m.number<std::uint64_t>()); });
    on(Opcode::kEmptyDict, [](PickleMachine& m) { m.push_new(NodeKind::kDict); });
    on(Opcode::kEmptyList, [](PickleMachine& m) { m.push_new(NodeKind::kList); });
    on(Opcode::kEmptyTuple, [](PickleMachine& m) { m.push(kEmptyTuple); });
    on(Opcode::kEmptySet, [](PickleMachine& m) { m.push_new(NodeKind::kSet); });
    on(Opcode::kMark, [](PickleMachine& m) { m.marks_.push_back(m.stack_.size()); });
    on(Opcode::kTuple, [](PickleMachine& m) { m.push_fixed(NodeKind::kTuple, m.pop_mark()); });
    on(Opcode::kTuple1, [](PickleMachine& m) { m.push_fixed(NodeKind::kTuple, m.pop_last(1)); });
    on(Opcode::kTuple2, [](PickleMachine& m) { m.push_fixed(NodeKind::kTuple, m.pop_last(2)); });
    on(Opcode::kTuple3, [](PickleMachine& m) { m.push_fixed(NodeKind::kTuple, m.pop_last(3)); });
    on(Opcode::kFrozenSet,
       [](PickleMachine& m) { m.push_fixed(NodeKind::kFrozenSet, m.pop_mark()); });
    on(Opcode::kAppend, [](PickleMachine& m) { m.append(m.pop_last(1)); });
    on(Opcode::kAppends, [](PickleMachine& m) { m.append(m.pop_mark()); });
    on(Opcode::kAddItems, [](PickleMachine& m) { m.add_to_set(m.pop_mark()); });
    on(Opcode::kSetItem, [](PickleMachine& m) { m.insert(m.pop_last(2)); });
    on(Opcode::kSetItems, [](PickleMachine& m) { m.insert(m.pop_mark()); });
    on(Opcode::kBinPut, [](PickleMachine& m) { m.put(m.number<std::uint8_t>()); });
    on(Opcode::kLongBinPut, [](PickleMachine& m) { m.put(m.number<std::uint32_t>()); });
    on(Opcode::kMemoize, [](PickleMachine& m) { m.put(m.memoized_); });
    on(Opcode::kBinGet, [](PickleMachine& m) { m.push(m.get(m.number<std::uint8_t>())); });
    on(Opcode::kLongBinGet, [](PickleMachine& m) { m.push(m.get(m.number<std::uint32_t>())); });
    on(Opcode::kProto, [](PickleMachine& m) { m.check_protocol(m.number<std::uint8_t>()); });
    on(Opcode::kFrame, [](PickleMachine& m) { m.check_frame(m.number<std::uint64_t>()); });
    on(Opcode::kGlobal, [](PickleMachine& m) { m.push_global(); });
    on(Opcode::kStackGlobal, [](PickleMachine& m) { m.push_stack_global(); });
    on(Opcode::kReduce, [](PickleMachine& m) { m.push_call(kNoNode, /*by_new=*/false); });
    on(Opcode::kNewObj, [](PickleMachine& m) { m.push_call(kNoNode, /*by_new=*/true); });
    on(Opcode::kNewObjEx, [](PickleMachine& m) { m.push_call(m.pop(), /*by_new=*/true); });
    on(Opcode::kBuild, [](PickleMachine& m) { m.build(); });
    on(Opcode::kBinPersId,
       [](PickleMachine& m) { m.push_new(NodeKind::kPersistent, m.opcode_at_, m.pop()); });
    on(Opcode::kStop, [](PickleMachine& m) { m.stop(); });
    return actions;
  }

  [[noreturn]] void refuse(std::string_view reason) const {
    throw format_error(source_.name, source_.origin + opcode_at_, "pickle: " + std::string(reason));
  }

  std::string_view take(std::uint64_t size) {
    if (size > graph_.input.size() - at_) refuse("it ends in the middle of an opcode");
    const auto piece = graph_.input.substr(at_, size);
    at_ += size;
    return piece;
  }
  template <class T>
  T number() {
    return read_little<T>(take(sizeof(T)), 0);
  }
  std::string_view line() {
    const auto end = graph_.input.find('\n', at_);
    if (end == std::string_view::npos) refuse("it ends in the middle of a name");
    const auto text = take(end - at_);
    ++at_;
    return text;
  }

  void charge(std::size_t bytes) {
    if (bytes > memory_left_) refuse("its objects would take too much memory");
    memory_left_ -= bytes;
  }
  NodeId add(NodeKind kind, std::uint64_t bits = 0, std::uint32_t size = 0) {
    charge(sizeof(PickleNode));
    graph_.nodes.push_back({.kind = kind, .size = size, .bits = bits});
    return static_cast<NodeId>(graph_.nodes.size() - 1);
  }
  void push(NodeId node) { stack_.push_back(node); }
  void push_new(NodeKind kind, std::uint64_t bits = 0, std::uint32_t size = 0) {
    push(add(kind, bits, size));
  }

  /// Objects above the last mark belong to the opcode that ends it, no opcode reaches below it.
  [[nodiscard]] std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  NodeId top() const {
    if (stack_.size() <= floor()) refuse("an opcode takes more objects than there are");
    return stack_.back();
  }
  NodeId pop() {
    const auto node = top();
    stack_.pop_back();
    return node;
  }
  std::vector<NodeId> pop_last(std::size_t count) {
    if (stack_.size() - floor() < count) refuse("an opcode takes more objects than there are");
    std::vector<NodeId> nodes(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return nodes;
  }
  std::vector<NodeId> pop_mark() {
    if (marks_.empty()) refuse("an opcode needs a mark and there is none");
    auto nodes = pop_last(stack_.size() - marks_.back());
    marks_.pop_back();
    return nodes;
  }

  PickleNode& node(NodeId id) { return graph_.nodes[id]; }
  PickleGraph::Call& call(NodeId id) { return graph_.calls[node(id).bits]; }

  void push_fixed(NodeKind kind, std::span<const NodeId> items) {
    push_new(kind, graph_.fixed.size(), static_cast<std::uint32_t>(items.size()));
    extend(graph_.fixed, items);
  }
  std::vector<NodeId>& list_of(NodeId id) {
    if (node(id).size == 0) {
      charge(sizeof(std::vector<NodeId>) + kHeapBlock);
      graph_.lists.emplace_back();
      node(id).bits = graph_.lists.size() - 1;
      node(id).size = 1;
    }
    return graph_.lists[node(id).bits];
  }

  void push_float() { push_new(NodeKind::kDouble, __builtin_bswap64(number<std::uint64_t>())); }
  void push_int(std::int64_t value) { push_new(NodeKind::kInt, static_cast<std::uint64_t>(value)); }

  void push_long(std::uint64_t size) {
    if (size > kMaxIntBytes) {
      refuse(str("an integer has ", size, " bytes; at most ", kMaxIntBytes, " are read"));
    }
    const auto start = at_;
    const auto bytes = take(size);
    if (size > 8) return push_new(NodeKind::kBigInt, start, static_cast<std::uint32_t>(size));
    std::uint64_t value = size > 0 && static_cast<std::int8_t>(bytes.back()) < 0 ? ~0ULL : 0ULL;
    for (std::size_t i = size; i > 0; --i) {
      value = (value << 8) | static_cast<std::uint8_t>(bytes[i - 1]);
    }
    push_new(NodeKind::kInt, value);
  }

  void push_text(std::uint64_t size) {
    const auto start = at_;
    if (!is_utf8(take(size))) refuse("a text is not UTF-8");
    push_new(NodeKind::kText, start, static_cast<std::uint32_t>(size));
  }
  void push_bytes(std::uint64_t size) {
    const auto start = at_;
    take(size);
    push_new(NodeKind::kBytes, start, static_cast<std::uint32_t>(size));
  }

  static void extend(std::vector<NodeId>& items, std::span<const NodeId> more) {
    items.insert(items.end(), more.begin(), more.end());
  }
  void append(const std::vector<NodeId>& items) {
    const NodeId to = top();
    if (node(to).kind == NodeKind::kCall) return extend(call(to).items, items);
    if (node(to).kind != NodeKind::kList) refuse("items are appended to what is no list");
    extend(list_of(to), items);
  }
  void add_to_set(const std::vector<NodeId>& items) {
    if (node(top()).kind != NodeKind::kSet) refuse("items are added to what is no set");
    extend(list_of(top()), items);
  }
  void insert(const std::vector<NodeId>& entries) {
    if (entries.size() % 2 != 0) refuse("a key has no value");
    const NodeId to = top();
    if (node(to).kind == NodeKind::kCall) return extend(call(to).entries, entries);
    if (node(to).kind != NodeKind::kDict) refuse("entries are set in what is no dict");
    extend(list_of(to), entries);
  }

  void check_protocol(int protocol) {
    if (opcode_at_ != 0 || protocol < 2 || protocol > 5) {
      refuse(str("protocol ", protocol, " is not one of 2 to 5 at the start of a pickle"));
    }
  }

  /// Frames only help to read ahead.
  void check_frame(std::uint64_t size) {
    if (size > graph_.input.size() - at_) refuse("a frame is longer than the pickle");
  }

  void put(std::uint32_t index) {
    // Python counts its objects, so no index is larger than the bytes read; a larger one would only
    // serve to allocate memory.
    if (index > at_) refuse(str("the memo has no place ", index));
    if (index >= memo_.size()) memo_.resize(index + 1, kNoNode);
    if (memo_[index] == kNoNode) ++memoized_;
    memo_[index] = top();
  }
  NodeId get(std::uint32_t index) const {
    if (index >= memo_.size() || memo_[index] == kNoNode) {
      refuse(str("the memo has nothing at ", index));
    }
    return memo_[index];
  }

  std::string_view pop_name() {
    const auto& name = node(pop());
    if (name.kind != NodeKind::kText) refuse("a name is no text");
    return graph_.input.substr(name.bits, name.size);
  }

  void push_global() {
    const auto module = line();
    push_global(module, line());
  }
  void push_stack_global() {
    const auto name = pop_name();
    push_global(pop_name(), name);
  }
  void push_global(std::string_view module, std::string_view name) {
    if (module.empty() || name.empty() || module.size() + name.size() > kMaxGlobalName ||
        !is_utf8(module) || !is_utf8(name)) {
      refuse(str("a name has ", module.size() + name.size(), " bytes or is not UTF-8; at most ",
                 kMaxGlobalName, " are read"));
    }
    charge(sizeof(PickleGraph::Global));
    graph_.globals.push_back({.module = module, .name = name});
    push_new(NodeKind::kGlobal, graph_.globals.size() - 1);
  }

  void push_call(NodeId kwargs, bool by_new) {
    const NodeId args = pop();
    if (kwargs != kNoNode && node(kwargs).kind != NodeKind::kDict) {
      refuse("keyword arguments are no dict");
    }
    const NodeId function = pop();
    if (node(function).kind != NodeKind::kGlobal) refuse("what is called has no name");
    if (node(args).kind != NodeKind::kTuple) refuse("the arguments of a call are no tuple");
    charge(sizeof(PickleGraph::Call));
    graph_.calls.push_back({.function = function,
                            .args = args,
                            .by_new = by_new,
                            .kwargs = kwargs,
                            .offset = opcode_at_});
    push_new(NodeKind::kCall, graph_.calls.size() - 1);
  }

  void build() {
    const NodeId state = pop();
    if (node(top()).kind != NodeKind::kCall) refuse("a state is set on what is no object");
    auto& object = call(top());
    if (object.state != kNoNode) refuse("the state of an object is set twice");
    object.state = state;
  }

  void stop() {
    graph_.root = pop();
    if (!stack_.empty() || !marks_.empty()) refuse("it ends with objects left over");
  }

  const PickleSource& source_;
  std::uint64_t memory_left_;
  PickleGraph graph_;
  std::size_t at_ = 0;
  std::size_t opcode_at_ = 0;
  std::vector<NodeId> stack_;
  std::vector<std::size_t> marks_;
  std::vector<NodeId> memo_;
  std::uint32_t memoized_ = 0;
};

}  // namespace

PickleGraph read_pickle_graph(std::string_view input, const PickleSource& source) {
  // Offsets are kept in 32 bits.
  const auto limit = std::min<std::uint64_t>(source.max_bytes, 0xFFFFFFFE);
  if (input.size() > limit) {
    throw format_error(
        source.name, source.origin,
        str("pickle: it has ", input.size(), " bytes; at most ", limit, " are read"));
  }
  return PickleMachine(input, source).run();
}

}  // namespace accelerate::detail::formats
