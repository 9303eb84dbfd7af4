#include "comm/shm_collectives.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/copy_past_cache.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

// Parts of a slot begin where every element and a cache line may begin.
constexpr std::size_t kAlignment = 64;

void move_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

// Writes results, of which all ranks together write `of_all` bytes at the same time.
void put_bytes(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t of_all) {
  if (exceeds_cache(of_all)) return copy_past_cache(to, from, bytes);
  move_bytes(to, from, bytes);
}

std::size_t down_to(std::size_t value, std::size_t multiple) { return value / multiple * multiple; }

// The piece of `total` bytes that a round carries.
struct Piece {
  Piece(std::int64_t round, std::size_t most, std::size_t total)
      : begin(static_cast<std::size_t>(round) * most),
        bytes(begin < total ? std::min(most, total - begin) : 0),
        last(begin + bytes >= total) {}

  std::size_t begin;
  std::size_t bytes;
  bool last;
};

// The slots of all ranks as sources of a reduction, the same place in each.
class Sources {
 public:
  template <class Where>
  Sources(int size, Where&& where) : size_(size) {
    for (int rank = 0; rank < size; ++rank) pointers_[rank] = where(rank);
  }
  operator std::span<const std::byte* const>() const {  // NOLINT: that is what it is for
    return {pointers_.data(), static_cast<std::size_t>(size_)};
  }

 private:
  std::array<const std::byte*, ShmSegment::kMaxRanks> pointers_;
  int size_;
};

class Barrier final : public ShmRounds {
 public:
  void fill(std::int64_t, const ShmSlots&) override {}
  void drain(std::int64_t, const ShmSlots&) override {}
  [[nodiscard]] bool last(std::int64_t) const override { return true; }
};

// Every rank, or one, reduces all of the data.
class Reduce final : public ShmRounds {
 public:
  Reduce(ShmInput in, ShmOutput out, ShmArithmetic arithmetic, bool wanted, std::size_t slot)
      : in_(in), out_(out), arithmetic_(arithmetic), wanted_(wanted), slot_(slot) {}

  void fill(std::int64_t round, const ShmSlots& slots) override {
    const auto piece = this->piece(round);
    move_bytes(slots.own(), in_.data + piece.begin, piece.bytes);
  }

  void drain(std::int64_t round, const ShmSlots& slots) override {
    if (!wanted_) return;
    const auto piece = this->piece(round);
    const Sources sources(slots.size(), [&](int rank) { return slots.of(rank); });
    reduce_elements(arithmetic_.element, arithmetic_.reduction, sources, out_.data + piece.begin,
                    nullptr, piece.bytes / bytes_of(arithmetic_.element));
  }

  [[nodiscard]] bool last(std::int64_t round) const override { return piece(round).last; }

 private:
  [[nodiscard]] Piece piece(std::int64_t round) const { return {round, slot_, in_.bytes}; }

  ShmInput in_;
  ShmOutput out_;
  ShmArithmetic arithmetic_;
  bool wanted_;
  std::size_t slot_;
};

// Each rank reduces its share of the data and passes the result to the others: two rounds for what
// a slot holds, but no rank reads all data of all ranks.
class LongAllReduce final : public ShmRounds {
 public:
  LongAllReduce(ShmInput in, ShmOutput out, ShmArithmetic arithmetic, std::size_t slot)
      : in_(in), out_(out), arithmetic_(arithmetic), slot_(slot) {}

  void fill(std::int64_t round, const ShmSlots& slots) override {
    const auto piece = this->piece(round);
    const std::byte* data = in_.data + piece.begin;
    const auto begin = share(slots.rank(), slots.size(), piece.bytes);
    const auto end = share(slots.rank() + 1, slots.size(), piece.bytes);
    if (round % 2 == 0) {
      // The own share is read by this rank only.
      move_bytes(slots.own(), data, begin);
      move_bytes(slots.own() + end, data + end, piece.bytes - end);
      return;
    }
    const Sources sources(slots.size(), [&](int rank) {
      return (rank == slots.rank() ? data : slots.before(rank)) + begin;
    });
    reduce_elements(arithmetic_.element, arithmetic_.reduction, sources, slots.own() + begin,
                    out_.data + piece.begin + begin, (end - begin) / bytes_of(arithmetic_.element));
  }

  void drain(std::int64_t round, const ShmSlots& slots) override {
    if (round % 2 == 0) return;
    const auto piece = this->piece(round);
    // Each rank starts at another one, so that they do not wait for the same memory.
    for (int i = 1; i < slots.size(); ++i) {
      const int rank = (slots.rank() + i) % slots.size();
      const auto begin = share(rank, slots.size(), piece.bytes);
      const auto end = share(rank + 1, slots.size(), piece.bytes);
      move_bytes(out_.data + piece.begin + begin, slots.of(rank) + begin, end - begin);
    }
  }

  [[nodiscard]] bool last(std::int64_t round) const override {
    return round % 2 == 1 && piece(round).last;
  }

 private:
  [[nodiscard]] Piece piece(std::int64_t round) const { return {round / 2, slot_, in_.bytes}; }
  // Where the share of a rank begins.
  [[nodiscard]] static std::size_t share(int rank, int size, std::size_t bytes) {
    if (rank == size) return bytes;
    return down_to(bytes * static_cast<std::size_t>(rank) / static_cast<std::size_t>(size),
                   kAlignment);
  }

  ShmInput in_;
  ShmOutput out_;
  ShmArithmetic arithmetic_;
  std::size_t slot_;
};

class ReduceScatter final : public ShmRounds {
 public:
  ReduceScatter(std::vector<ShmInput> in, ShmOutput out, ShmArithmetic arithmetic, std::size_t part)
      : in_(std::move(in)), out_(out), arithmetic_(arithmetic), part_(part) {}

  void fill(std::int64_t round, const ShmSlots& slots) override {
    const auto piece = this->piece(round);
    for (int rank = 0; rank < slots.size(); ++rank) {
      if (rank == slots.rank()) continue;
      move_bytes(slots.own() + part_ * static_cast<std::size_t>(rank), in_[rank].data + piece.begin,
                 piece.bytes);
    }
  }

  void drain(std::int64_t round, const ShmSlots& slots) override {
    const auto piece = this->piece(round);
    const auto own = static_cast<std::size_t>(slots.rank());
    const Sources sources(slots.size(), [&](int rank) -> const std::byte* {
      return rank == slots.rank() ? in_[own].data + piece.begin : slots.of(rank) + part_ * own;
    });
    reduce_elements(arithmetic_.element, arithmetic_.reduction, sources, out_.data + piece.begin,
                    nullptr, piece.bytes / bytes_of(arithmetic_.element));
  }

  [[nodiscard]] bool last(std::int64_t round) const override { return piece(round).last; }

 private:
  [[nodiscard]] Piece piece(std::int64_t round) const { return {round, part_, out_.bytes}; }

  std::vector<ShmInput> in_;
  ShmOutput out_;
  ShmArithmetic arithmetic_;
  std::size_t part_;
};

// What the root holds: one part for all other ranks (broadcast), or one for each rank (scatter).
class FromRoot final : public ShmRounds {
 public:
  FromRoot(std::vector<ShmInput> in, ShmOutput out, int root, bool each, std::size_t part)
      : in_(std::move(in)), out_(out), root_(root), each_(each), part_(part) {}

  void fill(std::int64_t round, const ShmSlots& slots) override {
    if (slots.rank() != root_) return;
    const auto piece = this->piece(round);
    auto* to = slots.own();
    for (const auto& part : in_) {
      move_bytes(to, part.data + piece.begin, piece.bytes);
      to += part_;
    }
  }

  void drain(std::int64_t round, const ShmSlots& slots) override {
    if (slots.rank() == root_ && !each_) return;
    const auto piece = this->piece(round);
    const auto offset = each_ ? part_ * static_cast<std::size_t>(slots.rank()) : 0;
    const auto readers = static_cast<std::size_t>(slots.size() - 1);
    put_bytes(out_.data + piece.begin, slots.of(root_) + offset, piece.bytes, readers * out_.bytes);
  }

  [[nodiscard]] bool last(std::int64_t round) const override { return piece(round).last; }

 private:
  [[nodiscard]] Piece piece(std::int64_t round) const { return {round, part_, out_.bytes}; }

  std::vector<ShmInput> in_;  // empty on all ranks but the root
  ShmOutput out_;
  int root_;
  bool each_;
  std::size_t part_;
};

class Gather final : public ShmRounds {
 public:
  Gather(ShmInput in, std::vector<ShmOutput> out, std::size_t slot)
      : in_(in), out_(std::move(out)), slot_(slot) {}

  void fill(std::int64_t round, const ShmSlots& slots) override {
    const auto piece = this->piece(round);
    move_bytes(slots.own(), in_.data + piece.begin, piece.bytes);
  }

  void drain(std::int64_t round, const ShmSlots& slots) override {
    if (out_.empty()) return;
    const auto piece = this->piece(round);
    const auto ranks = static_cast<std::size_t>(slots.size());
    for (int i = 0; i < slots.size(); ++i) {
      const int rank = (slots.rank() + i) % slots.size();
      const std::byte* from = rank == slots.rank() ? in_.data + piece.begin : slots.of(rank);
      std::byte* to = out_[rank].data + piece.begin;
      if (to != from) put_bytes(to, from, piece.bytes, in_.bytes * ranks * ranks);
    }
  }

  [[nodiscard]] bool last(std::int64_t round) const override { return piece(round).last; }

 private:
  [[nodiscard]] Piece piece(std::int64_t round) const { return {round, slot_, in_.bytes}; }

  ShmInput in_;
  std::vector<ShmOutput> out_;
  std::size_t slot_;
};

// In the first round each rank also writes how many bytes it sends to and expects from each other
// one: all ranks read the same table, so they agree on the number of rounds, or all throw.
class AllToAll final : public ShmRounds {
 public:
  AllToAll(std::vector<ShmInput> in, std::vector<ShmOutput> out, std::size_t slot)
      : in_(std::move(in)),
        out_(std::move(out)),
        table_bytes_(2 * in_.size() * sizeof(std::uint64_t)),
        part_(down_to((slot - table_bytes_) / in_.size(), kLargestElement)) {}

  void fill(std::int64_t round, const ShmSlots& slots) override {
    if (round == 0) {
      auto* table = reinterpret_cast<std::uint64_t*>(slots.own());
      for (const auto& part : in_) *table++ = part.bytes;
      for (const auto& part : out_) *table++ = part.bytes;
    }
    for (int rank = 0; rank < slots.size(); ++rank) {
      const Piece piece(round, part_, in_[rank].bytes);
      move_bytes(place(slots.own(), rank), in_[rank].data + piece.begin, piece.bytes);
    }
  }

  void drain(std::int64_t round, const ShmSlots& slots) override {
    if (round == 0) read_tables(slots);
    for (int i = 0; i < slots.size(); ++i) {
      const int rank = (slots.rank() + i) % slots.size();
      const Piece piece(round, part_, out_[rank].bytes);
      move_bytes(out_[rank].data + piece.begin, place(slots.of(rank), slots.rank()), piece.bytes);
    }
    drained_ = true;
  }

  [[nodiscard]] bool last(std::int64_t round) const override {
    return drained_ && Piece(round, part_, most_).last;
  }

 private:
  static constexpr std::size_t kLargestElement = 16;

  [[nodiscard]] std::byte* place(std::byte* slot, int rank) const {
    return slot + table_bytes_ + part_ * static_cast<std::size_t>(rank);
  }

  void read_tables(const ShmSlots& slots) {
    const auto size = slots.size();
    const auto entry = [&](int rank, int i) {
      return reinterpret_cast<const std::uint64_t*>(slots.of(rank))[i];
    };
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        const auto sent = entry(from, to);
        const auto expected = entry(to, size + from);
        if (sent != expected) {
          throw ShmDisagreement{str("rank ", from, " sends ", sent, " bytes to rank ", to,
                                    ", which expects ", expected),
                                to};
        }
        most_ = std::max<std::size_t>(most_, sent);
      }
    }
  }

  std::vector<ShmInput> in_;
  std::vector<ShmOutput> out_;
  std::size_t table_bytes_;
  std::size_t part_;
  std::size_t most_ = 0;
  bool drained_ = false;
};

class InTurn final : public ShmRounds {
 public:
  explicit InTurn(std::vector<ShmCollective> parts) : parts_(std::move(parts)) {}

  void fill(std::int64_t round, const ShmSlots& slots) override {
    parts_[current_]->fill(round - first_round_, slots);
  }

  void drain(std::int64_t round, const ShmSlots& slots) override {
    parts_[current_]->drain(round - first_round_, slots);
    if (current_ + 1 == parts_.size() || !parts_[current_]->last(round - first_round_)) return;
    ++current_;
    first_round_ = round + 1;
  }

  [[nodiscard]] bool last(std::int64_t round) const override {
    return round >= first_round_ && current_ + 1 == parts_.size() &&
           parts_[current_]->last(round - first_round_);
  }

 private:
  std::vector<ShmCollective> parts_;
  std::size_t current_ = 0;
  std::int64_t first_round_ = 0;
};

std::size_t part_of(const ShmSegment& segment) {
  return down_to(segment.chunk_bytes() / static_cast<std::size_t>(segment.size()), kAlignment);
}

}  // namespace

ShmCollective shm_barrier() { return std::make_unique<Barrier>(); }

ShmCollective shm_all_reduce(ShmInput in, ShmOutput out, ShmArithmetic arithmetic,
                             const ShmSegment& segment) {
  if (in.bytes <= static_cast<std::size_t>(segment.direct_bytes())) {
    return std::make_unique<Reduce>(in, out, arithmetic, true, segment.chunk_bytes());
  }
  return std::make_unique<LongAllReduce>(in, out, arithmetic, segment.slot_bytes());
}

ShmCollective shm_reduce(ShmOutput data, ShmArithmetic arithmetic, int root,
                         const ShmSegment& segment) {
  const bool wanted = segment.rank() == root;
  return std::make_unique<Reduce>(as_input(data), data, arithmetic, wanted, segment.chunk_bytes());
}

ShmCollective shm_reduce_scatter(std::vector<ShmInput> in, ShmOutput out, ShmArithmetic arithmetic,
                                 const ShmSegment& segment) {
  return std::make_unique<ReduceScatter>(std::move(in), out, arithmetic, part_of(segment));
}

ShmCollective shm_broadcast(ShmOutput data, int root, const ShmSegment& segment) {
  return std::make_unique<FromRoot>(std::vector{as_input(data)}, data, root, false,
                                    segment.chunk_bytes());
}

ShmCollective shm_gather(ShmInput in, std::vector<ShmOutput> out, const ShmSegment& segment) {
  return std::make_unique<Gather>(in, std::move(out), segment.chunk_bytes());
}

ShmCollective shm_scatter(std::vector<ShmInput> in, ShmOutput out, int root,
                          const ShmSegment& segment) {
  return std::make_unique<FromRoot>(std::move(in), out, root, true, part_of(segment));
}

ShmCollective shm_all_to_all(std::vector<ShmInput> in, std::vector<ShmOutput> out,
                             const ShmSegment& segment) {
  return std::make_unique<AllToAll>(std::move(in), std::move(out), segment.chunk_bytes());
}

ShmCollective shm_in_turn(std::vector<ShmCollective> parts) {
  if (parts.empty()) return shm_barrier();
  if (parts.size() == 1) return std::move(parts.front());
  return std::make_unique<InTurn>(std::move(parts));
}

}  // namespace accelerate::detail::comm
