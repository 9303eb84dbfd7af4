// Every collective through shared memory gives what arithmetic gives, to the bit, and what Gloo
// gives, where Gloo has it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <thread>

#include "comm/shm_numbers.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using c10d::Backend;
using Lists = std::vector<Tensors>;
using Counts = std::vector<std::int64_t>;

/// One collective on tensors of one kind, as one rank sees it.
struct Case {
  int rank = 0;
  int world = 1;
  torch::ScalarType dtype = torch::kFloat;
  std::int64_t size = 0;
  ReduceOp::RedOpType reduction = ReduceOp::SUM;
  int root = 0;
  bool asynchronous = true;

  [[nodiscard]] bool at_root() const { return rank == root; }
  [[nodiscard]] Tensor of(int from) const { return sample(from, dtype, size); }
  [[nodiscard]] Tensor mine() const { return of(rank); }
  [[nodiscard]] Tensor blank(std::int64_t count) const { return torch::zeros({count}, dtype); }
  [[nodiscard]] Tensors blanks() const {
    Tensors all;
    for (int i = 0; i < world; ++i) all.push_back(blank(size));
    return all;
  }
  [[nodiscard]] Tensors of_all() const { return of_all_ranks(world, dtype, size); }

  /// What rank `from` has for rank `to`; for the last operations of the table in different sizes.
  [[nodiscard]] Tensor part(int from, int to, bool uneven = false) const {
    return sample(from * world + to, dtype, uneven ? size * ((from + 2 * to) % 3) : size);
  }
  [[nodiscard]] Tensors sent(bool uneven = false) const {
    Tensors parts;
    for (int to = 0; to < world; ++to) parts.push_back(part(rank, to, uneven));
    return parts;
  }
  [[nodiscard]] Tensors received(bool uneven = false) const {
    Tensors parts;
    for (int from = 0; from < world; ++from) parts.push_back(part(from, rank, uneven));
    return parts;
  }

  template <class Options>
  [[nodiscard]] Options options() const {
    Options result;
    result.asyncOp = asynchronous;
    if constexpr (requires { result.reduceOp; }) result.reduceOp = reduction;
    if constexpr (requires { result.rootRank; }) result.rootRank = root;
    return result;
  }
};

Counts sizes(const Tensors& tensors) {
  Counts counts;
  for (const auto& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

/// What a rank holds afterwards; nothing where it gets no result.
using Run = Tensors (*)(Backend&, const Case&);
using Expected = Tensors (*)(const Case&);
/// How many bytes of a tensor go in one step, between `world` ranks with `small_chunks`.
using Chunk = std::int64_t (*)(int world);

struct Operation {
  const char* name;
  Chunk chunk;
  Run run;
  Expected expected;
  bool in_gloo = true;
};

std::int64_t a_slot(int /*world*/) { return small_chunks().chunk_bytes; }
std::int64_t a_part(int world) { return a_slot(world) / world / 64 * 64; }
/// The slot begins with a table of what goes where.
std::int64_t a_part_beside_the_table(int world) {
  return (a_slot(world) - 16 * world) / world / 16 * 16;
}
std::int64_t a_message(int /*world*/) { return small_chunks().mailbox_bytes; }
std::int64_t one_step(int /*world*/) { return small_chunks().direct_bytes; }

// -- Reductions ---------------------------------------------------------------------------------

Tensors all_reduce(Backend& backend, const Case& c) {
  Tensors tensors{c.mine()};
  backend.allreduce(tensors, c.options<c10d::AllreduceOptions>())->wait();
  return tensors;
}

Tensors reduction(const Case& c) { return {reduced(c.of_all(), c.reduction)}; }

Tensors all_reduce_of_several(Backend& backend, const Case& c) {
  Tensors tensors{c.mine(), c.mine()};
  backend.allreduce_coalesced(tensors, c.options<c10d::AllreduceCoalescedOptions>())->wait();
  return tensors;
}

Tensors two_reductions(const Case& c) { return {reduction(c)[0], reduction(c)[0]}; }

Tensors reduce_to_root(Backend& backend, const Case& c) {
  Tensors tensors{c.mine()};
  backend.reduce(tensors, c.options<c10d::ReduceOptions>())->wait();
  return c.at_root() ? tensors : Tensors{};
}

Tensors reduction_at_root(const Case& c) { return c.at_root() ? reduction(c) : Tensors{}; }

Tensors reduce_scatter(Backend& backend, const Case& c) {
  Lists in{c.sent()};
  Tensors out{c.blank(c.size)};
  backend.reduce_scatter(out, in, c.options<c10d::ReduceScatterOptions>())->wait();
  return out;
}

Tensors reduction_of_parts(const Case& c) { return {reduced(c.received(), c.reduction)}; }

Tensors reduce_scatter_of_one_tensor(Backend& backend, const Case& c) {
  auto in = torch::cat(c.sent());
  auto out = c.blank(c.size);
  backend._reduce_scatter_base(out, in, c.options<c10d::ReduceScatterOptions>())->wait();
  return {out};
}

Tensors reduce_scatter_of_several(Backend& backend, const Case& c) {
  Tensors in{torch::cat(c.sent()), torch::cat(c.sent())};
  Tensors out{c.blank(c.size), c.blank(c.size)};
  backend.reduce_scatter_tensor_coalesced(out, in, c.options<c10d::ReduceScatterOptions>())->wait();
  return out;
}

Tensors two_reductions_of_parts(const Case& c) {
  return {reduction_of_parts(c)[0], reduction_of_parts(c)[0]};
}

const std::vector<Operation> kReductions = {
    {"all_reduce in one step", one_step, all_reduce, reduction},
    {"all_reduce", a_slot, all_reduce, reduction},
    {"all_reduce of several", a_slot, all_reduce_of_several, two_reductions},
    {"reduce", a_slot, reduce_to_root, reduction_at_root},
    {"reduce_scatter of lists", a_part, reduce_scatter, reduction_of_parts},
    {"reduce_scatter", a_part, reduce_scatter_of_one_tensor, reduction_of_parts},
    {"reduce_scatter of several", a_part, reduce_scatter_of_several, two_reductions_of_parts},
};

// -- Moves --------------------------------------------------------------------------------------

Tensors broadcast_from_root(Backend& backend, const Case& c) {
  Tensors tensors{c.at_root() ? c.mine() : c.blank(c.size)};
  backend.broadcast(tensors, c.options<c10d::BroadcastOptions>())->wait();
  return tensors;
}

Tensors all_gather_to_lists(Backend& backend, const Case& c) {
  Tensors in{c.mine()};
  Lists out{c.blanks()};
  backend.allgather(out, in, c.options<c10d::AllgatherOptions>())->wait();
  return out[0];
}

Tensors of_all(const Case& c) { return c.of_all(); }

Tensors all_gather(Backend& backend, const Case& c) {
  auto in = c.mine();
  auto out = c.blank(c.size * c.world);
  backend._allgather_base(out, in, c.options<c10d::AllgatherOptions>())->wait();
  return {out};
}

Tensors all_in_one(const Case& c) { return {torch::cat(c.of_all())}; }

Tensors all_gather_of_several_to_lists(Backend& backend, const Case& c) {
  Tensors in{c.mine(), c.mine()};
  Lists out;
  for (int rank = 0; rank < c.world; ++rank) out.push_back({c.blank(c.size), c.blank(c.size)});
  backend.allgather_coalesced(out, in, c.options<c10d::AllgatherOptions>())->wait();
  Tensors all;
  for (const auto& list : out) all.insert(all.end(), list.begin(), list.end());
  return all;
}

Tensors of_all_twice(const Case& c) {
  Tensors all;
  for (const auto& tensor : c.of_all()) all.insert(all.end(), {tensor, tensor});
  return all;
}

Tensors all_gather_of_several(Backend& backend, const Case& c) {
  Tensors in{c.mine(), c.mine()};
  Tensors out{c.blank(c.size * c.world), c.blank(c.size * c.world)};
  backend.allgather_into_tensor_coalesced(out, in, c.options<c10d::AllgatherOptions>())->wait();
  return out;
}

Tensors all_in_one_twice(const Case& c) { return {all_in_one(c)[0], all_in_one(c)[0]}; }

Tensors gather_to_root(Backend& backend, const Case& c) {
  Tensors in{c.mine()};
  Lists out;
  if (c.at_root()) out.push_back(c.blanks());
  backend.gather(out, in, c.options<c10d::GatherOptions>())->wait();
  return c.at_root() ? out[0] : Tensors{};
}

Tensors of_all_at_root(const Case& c) { return c.at_root() ? c.of_all() : Tensors{}; }

Tensors scatter_from_root(Backend& backend, const Case& c) {
  Lists in;
  if (c.at_root()) in.push_back(c.of_all());
  Tensors out{c.blank(c.size)};
  backend.scatter(out, in, c.options<c10d::ScatterOptions>())->wait();
  return out;
}

Tensors own(const Case& c) { return {c.mine()}; }

Tensors all_to_all(Backend& backend, const Case& c) {
  auto in = torch::cat(c.sent());
  auto out = c.blank(c.size * c.world);
  Counts evenly;
  backend.alltoall_base(out, in, evenly, evenly, c.options<c10d::AllToAllOptions>())->wait();
  return {out};
}

Tensors received_in_one(const Case& c) { return {torch::cat(c.received())}; }

Tensors all_to_all_of_different_sizes(Backend& backend, const Case& c) {
  auto in = torch::cat(c.sent(true));
  auto in_sizes = sizes(c.sent(true));
  auto out_sizes = sizes(c.received(true));
  auto out = torch::zeros_like(torch::cat(c.received(true)));
  backend.alltoall_base(out, in, out_sizes, in_sizes, c.options<c10d::AllToAllOptions>())->wait();
  return {out};
}

Tensors received_of_different_sizes_in_one(const Case& c) { return {torch::cat(c.received(true))}; }

Tensors all_to_all_of_lists(Backend& backend, const Case& c) {
  auto in = c.sent(true);
  Tensors out;
  for (const auto& tensor : c.received(true)) out.push_back(torch::zeros_like(tensor));
  backend.alltoall(out, in, c.options<c10d::AllToAllOptions>())->wait();
  return out;
}

Tensors received_of_different_sizes(const Case& c) { return c.received(true); }

/// Every rank sends to the next one.
Tensors send_and_receive(Backend& backend, const Case& c) {
  if (c.world == 1) return {};  // Gloo does not send to itself
  constexpr int kTag = 5;
  Tensors leaves{c.mine()};
  Tensors arrives{c.blank(c.size)};
  const auto sent = backend.send(leaves, (c.rank + 1) % c.world, kTag);
  backend.recv(arrives, (c.rank + c.world - 1) % c.world, kTag)->wait();
  sent->wait();
  return arrives;
}

Tensors of_the_one_before(const Case& c) {
  return c.world == 1 ? Tensors{} : Tensors{c.of((c.rank + c.world - 1) % c.world)};
}

const std::vector<Operation> kMoves = {
    {"broadcast", a_slot, broadcast_from_root,
     [](const Case& c) -> Tensors { return {c.of(c.root)}; }},
    {"all_gather to lists", a_slot, all_gather_to_lists, of_all},
    {"all_gather", a_slot, all_gather, all_in_one},
    {"all_gather of several to lists", a_slot, all_gather_of_several_to_lists, of_all_twice},
    {"all_gather of several", a_slot, all_gather_of_several, all_in_one_twice},
    {"gather", a_slot, gather_to_root, of_all_at_root},
    {"scatter", a_part, scatter_from_root, own},
    {"all_to_all", a_part_beside_the_table, all_to_all, received_in_one},
    {"all_to_all of different sizes", a_part_beside_the_table, all_to_all_of_different_sizes,
     received_of_different_sizes_in_one},
    {"all_to_all of lists", a_part_beside_the_table, all_to_all_of_lists,
     received_of_different_sizes, /*in_gloo=*/false},
    {"send and receive", a_message, send_and_receive, of_the_one_before},
};

// -- The comparison -----------------------------------------------------------------------------

bool gloo_has(torch::ScalarType dtype) {
  static const std::vector<torch::ScalarType> all = {
      torch::kBool, torch::kByte,     torch::kChar,  torch::kInt,   torch::kLong,
      torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble};
  return std::find(all.begin(), all.end(), dtype) != all.end();
}

/// Gloo divides by the number of ranks, which whole numbers do not survive.
bool gloo_has(torch::ScalarType dtype, ReduceOp::RedOpType reduction) {
  return gloo_has(dtype) && !(reduction == ReduceOp::AVG && is_whole(dtype));
}

/// How far Gloo may be away: it adds in another order, and rounds half kinds after every rank.
double rounding(const Case& c) {
  if (is_whole(c.dtype) || c.reduction == ReduceOp::MIN || c.reduction == ReduceOp::MAX) return 0;
  const double unit = c.dtype == torch::kHalf       ? 0x1p-10
                      : c.dtype == torch::kBFloat16 ? 0x1p-7
                      : c.dtype == torch::kFloat    ? 0x1p-23
                                                    : 0x1p-52;
  return unit * c.world;
}

// Our sum of truth values is "or". Gloo adds the bytes and leaves a 2 in a tensor of bool, which no
// bool may hold: the program that reads it as one is undefined. Read as a byte it is true whenever
// ours is, which is all that can be compared.
Tensor as_truth(const Tensor& tensor) { return tensor.view(torch::kByte).ne(0); }

void expect_as_gloo(const Tensor& ours, const Tensor& theirs, const Case& c,
                    const std::string& what) {
  if (c.dtype == torch::kBool) {
    EXPECT_TRUE(torch::equal(as_truth(ours), as_truth(theirs))) << what;
    return;
  }
  const double relative = rounding(c);
  if (relative == 0) {
    EXPECT_EQ(bits(ours), bits(theirs)) << what;
    return;
  }
  // Samples are less than 4, so no partial sum is more than this.
  const double largest = 4.0 * c.world;
  EXPECT_TRUE(torch::allclose(ours.to(torch::kDouble), theirs.to(torch::kDouble), relative,
                              relative * largest))
      << what << "\n"
      << (ours.to(torch::kDouble) - theirs.to(torch::kDouble)).abs().max();
}

enum class Effort { kSample, kEverything };

class Comparison {
 public:
  Comparison(ShmRank& self, Effort effort)
      : self_(self), effort_(effort), shm_(self.backend()), gloo_(gloo(self)) {}
  ~Comparison() { self_.meet("end"); }
  Comparison(const Comparison&) = delete;
  Comparison& operator=(const Comparison&) = delete;

  void of_reductions() {
    for (const auto& operation : kReductions) {
      for (const auto dtype : kReduced) {
        for (const auto reduction : reductions_of(dtype)) of(operation, dtype, reduction);
      }
    }
  }

  void of_moves() {
    for (const auto& operation : kMoves) {
      for (const auto dtype : kMoved) of(operation, dtype, ReduceOp::MAX);
    }
  }

 private:
  void of(const Operation& operation, torch::ScalarType dtype, ReduceOp::RedOpType reduction) {
    const auto chunk =
        operation.chunk(self_.size) / static_cast<std::int64_t>(c10::elementSize(dtype));
    const Counts all = {0, 1, 37, chunk - 1, chunk, chunk + 1, 2 * chunk + 3};
    const auto step = static_cast<std::size_t>(5 * self_.size - 2);
    for (const auto size : all) {
      ++number_;
      // Every size with some dtypes and reductions, and those with some size: no step has a common
      // factor with the number of sizes. Gloo is slow between many ranks, so they do less.
      if (effort_ == Effort::kSample && number_ % step != 0) continue;
      const Case c{.rank = self_.rank,
                   .world = self_.size,
                   .dtype = dtype,
                   .size = size,
                   .reduction = reduction,
                   .root = static_cast<int>(number_ / step) % self_.size,
                   .asynchronous = number_ / step % 2 == 0};
      compare(operation, c);
    }
  }

  void compare(const Operation& operation, const Case& c) {
    const auto what = detail::str(operation.name, " ", c.dtype, "[", c.size, "] reduction ",
                                  static_cast<int>(c.reduction), " root ", c.root);
    const auto ours = operation.run(*shm_, c);
    const auto expected = operation.expected(c);
    ASSERT_EQ(ours.size(), expected.size()) << what;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(bits(ours[i]) == bits(expected[i])) << what;
    }
    if (!operation.in_gloo || !gloo_has(c.dtype, c.reduction)) return;
    const auto theirs = operation.run(*gloo_, c);
    ASSERT_EQ(ours.size(), theirs.size()) << what;
    for (std::size_t i = 0; i < ours.size(); ++i) expect_as_gloo(ours[i], theirs[i], c, what);
  }

  ShmRank& self_;
  Effort effort_;
  c10::intrusive_ptr<Backend> shm_;
  c10::intrusive_ptr<Backend> gloo_;
  std::size_t number_ = 0;
};

class ShmAgainstGloo : public testing::TestWithParam<int> {};

TEST_P(ShmAgainstGloo, ReducesTheSame) {
  on_processes(GetParam(),
               [](ShmRank& self) { Comparison(self, Effort::kSample).of_reductions(); });
}

TEST_P(ShmAgainstGloo, MovesTheSame) {
  on_processes(GetParam(), [](ShmRank& self) { Comparison(self, Effort::kSample).of_moves(); });
}

TEST_P(ShmAgainstGloo, NobodyLeavesABarrierBeforeAllHaveComeToIt) {
  on_processes(GetParam(), [](ShmRank& self) {
    const auto shm = self.backend();
    const auto other = gloo(self);
    for (int round = 0; round < 6; ++round) {
      for (auto* backend : {static_cast<Backend*>(shm.get()), other.get()}) {
        const auto key = detail::str(backend->getBackendName(), round);
        if (round % self.size == self.rank)
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
        self.store->add(key, 1);
        backend->barrier(c10d::BarrierOptions())->wait();
        EXPECT_EQ(self.store->add(key, 0), self.size) << key;
      }
    }
    self.meet("end");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmAgainstGloo, testing::Range(1, 6));

// For `make test LABELS=slow`.
class ShmAgainstGlooAll : public testing::TestWithParam<int> {};

TEST_P(ShmAgainstGlooAll, ReducesTheSame) {
  on_processes(GetParam(), {.timeout = std::chrono::minutes(5)},
               [](ShmRank& self) { Comparison(self, Effort::kEverything).of_reductions(); });
}

TEST_P(ShmAgainstGlooAll, MovesTheSame) {
  on_processes(GetParam(), {.timeout = std::chrono::minutes(5)},
               [](ShmRank& self) { Comparison(self, Effort::kEverything).of_moves(); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmAgainstGlooAll, testing::Range(1, 6));

}  // namespace
}  // namespace accelerate
