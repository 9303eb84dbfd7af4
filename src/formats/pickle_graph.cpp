#include "formats/pickle_graph.h"

#include <algorithm>
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

class Machine {
 public:
  Machine(std::string_view input, const PickleSource& source) : source_(source) {
    graph_.input = input;
    for (const auto kind : {NodeKind::kNone, NodeKind::kTrue, NodeKind::kFalse, NodeKind::kTuple}) {
      add(kind);
    }
  }

  PickleGraph run() {
    while (graph_.root == kNoNode) {
      opcode_at_ = at_;
      const auto opcode = static_cast<Opcode>(take(1)[0]);
      if (!constant(opcode) && !text(opcode) && !container(opcode) && !memo(opcode) &&
          !object(opcode)) {
        refuse(str("the opcode ", opcode_text(opcode), " is not one that is read"));
      }
    }
    graph_.end = at_;
    return std::move(graph_);
  }

 private:
  [[noreturn]] void refuse(std::string_view reason) const {
    throw format_error(source_.name, source_.origin + opcode_at_, "pickle: " + std::string(reason));
  }

  static std::string opcode_text(Opcode opcode) {
    std::string hex;
    append_hex(hex, static_cast<std::uint8_t>(opcode), 2);
    return "0x" + hex;
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

  NodeId add(NodeKind kind, std::uint64_t bits = 0, std::uint32_t size = 0) {
    graph_.nodes.push_back({.kind = kind, .size = size, .bits = bits});
    return static_cast<NodeId>(graph_.nodes.size() - 1);
  }
  void push(NodeId node) { stack_.push_back(node); }
  void push_new(NodeKind kind, std::uint64_t bits = 0, std::uint32_t size = 0) {
    push(add(kind, bits, size));
  }

  /// Objects above the last mark belong to the opcode that ends it, no opcode reaches below it.
  [[nodiscard]] std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  NodeId pop() {
    if (stack_.size() <= floor()) refuse("an opcode takes more objects than there are");
    const auto node = stack_.back();
    stack_.pop_back();
    return node;
  }
  NodeId top() const {
    if (stack_.size() <= floor()) refuse("an opcode takes more objects than there are");
    return stack_.back();
  }
  std::vector<NodeId> pop_mark() {
    if (marks_.empty()) refuse("an opcode needs a mark and there is none");
    std::vector<NodeId> nodes(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                              stack_.end());
    stack_.resize(marks_.back());
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
      graph_.lists.emplace_back();
      node(id).bits = graph_.lists.size() - 1;
      node(id).size = 1;
    }
    return graph_.lists[node(id).bits];
  }

  bool constant(Opcode opcode) {
    switch (opcode) {
      case Opcode::kNone:
        return push(kNone), true;
      case Opcode::kNewTrue:
        return push(kTrue), true;
      case Opcode::kNewFalse:
        return push(kFalse), true;
      case Opcode::kBinInt1:
        return push_int(number<std::uint8_t>()), true;
      case Opcode::kBinInt2:
        return push_int(number<std::uint16_t>()), true;
      case Opcode::kBinInt:
        return push_int(number<std::int32_t>()), true;
      case Opcode::kLong1:
        return push_long(number<std::uint8_t>()), true;
      case Opcode::kLong4:
        return push_long(number<std::uint32_t>()), true;
      case Opcode::kBinFloat:
        return push_new(NodeKind::kDouble, __builtin_bswap64(number<std::uint64_t>())), true;
      default:
        return false;
    }
  }

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

  bool text(Opcode opcode) {
    switch (opcode) {
      case Opcode::kBinUnicode:
        return push_text(number<std::uint32_t>()), true;
      case Opcode::kShortBinUnicode:
        return push_text(number<std::uint8_t>()), true;
      case Opcode::kBinUnicode8:
        return push_text(number<std::uint64_t>()), true;
      case Opcode::kShortBinString:
        return push_text(number<std::uint8_t>()), true;
      case Opcode::kBinBytes:
        return push_bytes(number<std::uint32_t>()), true;
      case Opcode::kShortBinBytes:
        return push_bytes(number<std::uint8_t>()), true;
      case Opcode::kBinBytes8:
      case Opcode::kByteArray8:
        return push_bytes(number<std::uint64_t>()), true;
      default:
        return false;
    }
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

  bool container(Opcode opcode) {
    switch (opcode) {
      case Opcode::kEmptyDict:
        return push_new(NodeKind::kDict), true;
      case Opcode::kEmptyList:
        return push_new(NodeKind::kList), true;
      case Opcode::kEmptyTuple:
        return push(kEmptyTuple), true;
      case Opcode::kEmptySet:
        return push_new(NodeKind::kSet), true;
      case Opcode::kMark:
        return marks_.push_back(stack_.size()), true;
      case Opcode::kTuple:
        return push_fixed(NodeKind::kTuple, pop_mark()), true;
      case Opcode::kTuple1:
        return push_tuple(1), true;
      case Opcode::kTuple2:
        return push_tuple(2), true;
      case Opcode::kTuple3:
        return push_tuple(3), true;
      case Opcode::kFrozenSet:
        return push_fixed(NodeKind::kFrozenSet, pop_mark()), true;
      case Opcode::kAppend: {
        const NodeId item = pop();
        return append(top(), {&item, 1}), true;
      }
      case Opcode::kAppends: {
        const auto items = pop_mark();
        return append(top(), items), true;
      }
      case Opcode::kAddItems: {
        const auto items = pop_mark();
        if (node(top()).kind != NodeKind::kSet) refuse("items are added to what is no set");
        return extend(list_of(top()), items), true;
      }
      case Opcode::kSetItem: {
        const NodeId value = pop();
        const NodeId key = pop();
        const NodeId pair[] = {key, value};
        return insert(top(), pair), true;
      }
      case Opcode::kSetItems: {
        const auto entries = pop_mark();
        if (entries.size() % 2 != 0) refuse("a key has no value");
        return insert(top(), entries), true;
      }
      default:
        return false;
    }
  }

  void push_tuple(std::size_t size) {
    if (stack_.size() - floor() < size) refuse("an opcode takes more objects than there are");
    const std::vector<NodeId> items(stack_.end() - static_cast<std::ptrdiff_t>(size), stack_.end());
    stack_.resize(stack_.size() - size);
    push_fixed(NodeKind::kTuple, items);
  }

  static void extend(std::vector<NodeId>& items, std::span<const NodeId> more) {
    items.insert(items.end(), more.begin(), more.end());
  }
  void append(NodeId to, std::span<const NodeId> items) {
    if (node(to).kind == NodeKind::kCall) return extend(call(to).items, items);
    if (node(to).kind != NodeKind::kList) refuse("items are appended to what is no list");
    extend(list_of(to), items);
  }
  void insert(NodeId to, std::span<const NodeId> entries) {
    if (node(to).kind == NodeKind::kCall) return extend(call(to).entries, entries);
    if (node(to).kind != NodeKind::kDict) refuse("entries are set in what is no dict");
    extend(list_of(to), entries);
  }

  bool memo(Opcode opcode) {
    switch (opcode) {
      case Opcode::kBinPut:
        return put(number<std::uint8_t>()), true;
      case Opcode::kLongBinPut:
        return put(number<std::uint32_t>()), true;
      case Opcode::kMemoize:
        return put(memoized_), true;
      case Opcode::kBinGet:
        return push(get(number<std::uint8_t>())), true;
      case Opcode::kLongBinGet:
        return push(get(number<std::uint32_t>())), true;
      case Opcode::kProto:
        check_protocol(number<std::uint8_t>());
        return true;
      case Opcode::kFrame:
        // Frames only help to read ahead.
        if (number<std::uint64_t>() > graph_.input.size() - at_) {
          refuse("a frame is longer than the pickle");
        }
        return true;
      default:
        return false;
    }
  }

  void check_protocol(int protocol) {
    if (opcode_at_ != 0 || protocol < 2 || protocol > 5) {
      refuse(str("protocol ", protocol, " is not one of 2 to 5 at the start of a pickle"));
    }
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

  bool object(Opcode opcode) {
    switch (opcode) {
      case Opcode::kGlobal: {
        const auto module = line();
        return push_global(module, line()), true;
      }
      case Opcode::kStackGlobal: {
        const auto name = pop_name();
        return push_global(pop_name(), name), true;
      }
      case Opcode::kReduce:
      case Opcode::kNewObj: {
        const NodeId args = pop();
        return push_call(pop(), args, kNoNode), true;
      }
      case Opcode::kNewObjEx: {
        const NodeId kwargs = pop();
        const NodeId args = pop();
        if (node(kwargs).kind != NodeKind::kDict) refuse("keyword arguments are no dict");
        return push_call(pop(), args, kwargs), true;
      }
      case Opcode::kBuild:
        return build(), true;
      case Opcode::kBinPersId: {
        const NodeId id = pop();
        return push_new(NodeKind::kPersistent, opcode_at_, id), true;
      }
      case Opcode::kStop:
        graph_.root = pop();
        if (!stack_.empty() || !marks_.empty()) refuse("it ends with objects left over");
        return true;
      default:
        return false;
    }
  }

  std::string_view pop_name() {
    const auto& name = node(pop());
    if (name.kind != NodeKind::kText) refuse("a name is no text");
    return graph_.input.substr(name.bits, name.size);
  }

  void push_global(std::string_view module, std::string_view name) {
    if (module.empty() || name.empty() || module.size() + name.size() > kMaxGlobalName ||
        !is_utf8(module) || !is_utf8(name)) {
      refuse(str("a name has ", module.size() + name.size(), " bytes or is not UTF-8; at most ",
                 kMaxGlobalName, " are read"));
    }
    graph_.globals.push_back({.module = module, .name = name});
    push_new(NodeKind::kGlobal, graph_.globals.size() - 1);
  }

  void push_call(NodeId function, NodeId args, NodeId kwargs) {
    if (node(function).kind != NodeKind::kGlobal) refuse("what is called has no name");
    if (node(args).kind != NodeKind::kTuple) refuse("the arguments of a call are no tuple");
    graph_.calls.push_back(
        {.function = function, .args = args, .kwargs = kwargs, .offset = opcode_at_});
    push_new(NodeKind::kCall, graph_.calls.size() - 1);
  }

  void build() {
    const NodeId state = pop();
    if (node(top()).kind != NodeKind::kCall) refuse("a state is set on what is no object");
    auto& object = call(top());
    if (object.state != kNoNode) refuse("the state of an object is set twice");
    object.state = state;
  }

  const PickleSource& source_;
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
  return Machine(input, source).run();
}

}  // namespace accelerate::detail::formats
