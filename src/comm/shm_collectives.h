// src/comm/shm_collectives.h - collectives as rounds through the slots of a shared segment.
//
// Internal, without Torch. In every round each rank fills its slot, all ranks meet, and each reads
// what it needs from the slots of the others. More data than fits into a slot takes more rounds.
// The memory passed in here belongs to the caller and must live until the last round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm_reduce.h"
#include "comm/shm_segment.h"

namespace accelerate::detail::comm {

class ShmRounds {
 public:
  virtual ~ShmRounds() = default;
  /// Before the ranks meet: writes the own slot.
  virtual void fill(std::int64_t round, const ShmSlots& slots) = 0;
  /// After they have met: reads the slots. May throw `ShmDisagreement`, then on all ranks.
  virtual void drain(std::int64_t round, const ShmSlots& slots) = 0;
  /// Whether no other round follows. Before `drain` of that round, false if that is not known yet.
  [[nodiscard]] virtual bool last(std::int64_t round) const = 0;
};

/// The arguments of the ranks do not fit together.
struct ShmDisagreement {
  std::string what;
  int rank = -1;
};

struct ShmInput {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct ShmOutput {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

[[nodiscard]] inline ShmInput as_input(const ShmOutput& memory) {
  return {memory.data, memory.bytes};
}

struct ShmArithmetic {
  Element element = Element::kFloat32;
  ShmReduction reduction = ShmReduction::kSum;
};

using ShmCollective = std::unique_ptr<ShmRounds>;

/// Ends when all ranks have arrived.
[[nodiscard]] ShmCollective shm_barrier();

/// `out` becomes the reduction of `in` over all ranks; they may be the same memory.
[[nodiscard]] ShmCollective shm_all_reduce(ShmInput in, ShmOutput out, ShmArithmetic arithmetic,
                                           const ShmSegment& segment);
/// As `shm_all_reduce`, but only on rank `root`; the data of the others stays as it is.
[[nodiscard]] ShmCollective shm_reduce(ShmOutput data, ShmArithmetic arithmetic, int root,
                                       const ShmSegment& segment);
/// `in` holds a part for each rank; `out` becomes the reduction of the own parts.
[[nodiscard]] ShmCollective shm_reduce_scatter(std::vector<ShmInput> in, ShmOutput out,
                                               ShmArithmetic arithmetic, const ShmSegment& segment);

[[nodiscard]] ShmCollective shm_broadcast(ShmOutput data, int root, const ShmSegment& segment);
/// `out` gets the `in` of each rank; it is empty on ranks that need no result.
[[nodiscard]] ShmCollective shm_gather(ShmInput in, std::vector<ShmOutput> out,
                                       const ShmSegment& segment);
/// `in` holds a part for each rank and is empty on all but `root`.
[[nodiscard]] ShmCollective shm_scatter(std::vector<ShmInput> in, ShmOutput out, int root,
                                        const ShmSegment& segment);
/// `in` holds a part for each rank, `out` gets one from each; the parts may differ in size.
[[nodiscard]] ShmCollective shm_all_to_all(std::vector<ShmInput> in, std::vector<ShmOutput> out,
                                           const ShmSegment& segment);

/// Several collectives as one, one after the other.
[[nodiscard]] ShmCollective shm_in_turn(std::vector<ShmCollective> parts);

}  // namespace accelerate::detail::comm
