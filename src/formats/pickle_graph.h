// src/formats/pickle_graph.h - the objects of a pickle and their references, before they are
// values.
//
// Opcodes refer to objects that are still being filled, and to one object several times. So they
// build a graph of small nodes; its memory is bounded by the length of the pickle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "formats/pickle.h"

namespace accelerate::detail::formats {

using NodeId = std::uint32_t;
inline constexpr NodeId kNoNode = 0xFFFFFFFF;

/// How many bytes the graph of a pickle of `size` bytes may take, and again the values that are
/// made of it. Files that torch.save writes take less than half.
[[nodiscard]] constexpr std::uint64_t memory_for_pickle(std::uint64_t size) {
  return 16 * size + (std::uint64_t{64} << 20);
}
inline constexpr std::size_t kHeapBlock = 32;  // the least that the heap gives

enum class NodeKind : std::uint8_t {
  kNone,
  kTrue,
  kFalse,
  kInt,        // bits
  kDouble,     // bits
  kText,       // `size` bytes of the input at `bits`
  kBytes,      // likewise
  kBigInt,     // likewise
  kTuple,      // `size` nodes at fixed[bits]
  kFrozenSet,  // likewise
  kList,       // lists[bits], or empty if `size` is 0
  kSet,        // likewise
  kDict,       // likewise: key, value, key, value
  kGlobal,     // globals[bits]
  kCall,       // calls[bits]
  kPersistent  // the id is node `size`; the opcode is at `bits`
};

struct PickleNode {
  NodeKind kind = NodeKind::kNone;
  std::uint32_t size = 0;
  std::uint64_t bits = 0;
};

struct PickleGraph {
  struct Global {
    std::string_view module;
    std::string_view name;
  };
  struct Call {
    NodeId function = kNoNode;
    NodeId args = kNoNode;
    bool by_new = false;
    NodeId kwargs = kNoNode;
    NodeId state = kNoNode;
    std::vector<NodeId> items = {};
    std::vector<NodeId> entries = {};  // key, value, key, value
    std::uint64_t offset = 0;          // of the opcode
  };

  std::string_view input;
  std::vector<PickleNode> nodes;
  std::vector<NodeId> fixed;
  std::vector<std::vector<NodeId>> lists;
  std::vector<Global> globals;
  std::vector<Call> calls;
  NodeId root = kNoNode;
  std::size_t end = 0;  // behind the STOP opcode

  /// The items of a container.
  [[nodiscard]] std::span<const NodeId> items(const PickleNode& node) const {
    if (node.size == 0) return {};
    if (node.kind == NodeKind::kTuple || node.kind == NodeKind::kFrozenSet) {
      return std::span(fixed).subspan(node.bits, node.size);
    }
    return lists[node.bits];
  }
};

/// Runs the opcodes of the pickle at the start of `input`. Throws `FormatError`.
[[nodiscard]] PickleGraph read_pickle_graph(std::string_view input, const PickleSource& source);

}  // namespace accelerate::detail::formats
