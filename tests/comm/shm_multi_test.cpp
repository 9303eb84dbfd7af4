// Collectives through shared memory, between real processes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "comm/shm_numbers.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

/// Around the 4096 bytes of a slot and the 1024 up to which one step does.
std::vector<std::int64_t> sizes_of(torch::ScalarType dtype) {
  const auto slot = static_cast<std::int64_t>(4096 / c10::elementSize(dtype));
  return {0, 1, 37, slot / 4, slot / 4 + 1, slot - 1, slot, slot + 1, 3 * slot + 5};
}

template <class Options>
Options with(ReduceOp::RedOpType reduction) {
  Options options;
  options.reduceOp = reduction;
  return options;
}

Tensor all_reduce(c10d::Backend& backend, const Tensor& tensor, ReduceOp::RedOpType reduction) {
  Tensors tensors{tensor.clone()};
  backend.allreduce(tensors, with<c10d::AllreduceOptions>(reduction))->wait();
  return tensors.front();
}

void reduces_every_dtype(ShmRank& self) {
  const auto backend = self.backend();
  for (const auto dtype : kReduced) {
    for (const auto size : sizes_of(dtype)) {
      const auto parts = of_all_ranks(self.size, dtype, size);
      for (const auto reduction : reductions_of(dtype)) {
        const auto expected = reduced(parts, reduction);
        const auto what = detail::str(dtype, " ", size, " ", int(reduction));
        EXPECT_TRUE(bits(all_reduce(*backend, parts[self.rank], reduction)) == bits(expected))
            << what;

        Tensors one{parts[self.rank].clone()};
        auto options = with<c10d::ReduceOptions>(reduction);
        options.rootRank = self.size - 1;
        backend->reduce(one, options)->wait();
        const bool root = self.rank == self.size - 1;
        EXPECT_TRUE(bits(one[0]) == bits(root ? expected : parts[self.rank])) << what;
      }
    }
  }
}

TEST(ShmAllReduce, IsExactForEveryDtypeReductionAndSizeOnTwoRanks) {
  on_processes(2, reduces_every_dtype);
}

TEST(ShmAllReduce, IsExactForEveryDtypeReductionAndSizeOnThreeRanks) {
  on_processes(3, reduces_every_dtype);
}

TEST(ShmAllReduce, IsExactForEveryDtypeReductionAndSizeOnOneAndFiveRanks) {
  on_processes(1, reduces_every_dtype);
  on_processes(5, reduces_every_dtype);
}

TEST(ShmAllReduce, TakesTensorsThatAreNotContiguousAndListsOfTensors) {
  on_processes(3, [](ShmRank& self) {
    const auto backend = self.backend();
    const auto parts = of_all_ranks(3, torch::kFloat, 1200);
    const auto sum = reduced(parts, ReduceOp::SUM).reshape({30, 40});
    // Other strides on every rank.
    auto mine = parts[self.rank].reshape({30, 40});
    if (self.rank == 1) mine = mine.t().contiguous().t();
    if (self.rank == 2) mine = torch::stack({mine, mine}, 2).select(2, 1);
    EXPECT_TRUE(torch::equal(all_reduce(*backend, mine, ReduceOp::SUM), sum));

    Tensors sliced{mine};
    backend->allreduce(sliced, c10d::AllreduceOptions())->wait();
    EXPECT_TRUE(torch::equal(mine, sum));

    const auto imaginary = torch::full({3}, c10::complex<double>(1, self.rank + 1)).conj();
    Tensors conjugate{imaginary};
    backend->allreduce(conjugate, c10d::AllreduceOptions())->wait();
    EXPECT_EQ(imaginary[0].item().toComplexDouble(), c10::complex<double>(3, -6));

    Tensors leaf{torch::ones({2}).requires_grad_()};
    backend->allreduce(leaf, c10d::AllreduceOptions())->wait();
    EXPECT_EQ(leaf[0][1].item<double>(), 3);

    Tensors list{torch::full({5}, self.rank), torch::full({3000}, 1.5), torch::zeros({0})};
    c10d::AllreduceCoalescedOptions options;
    const auto work = backend->allreduce_coalesced(list, options);
    work->wait();
    EXPECT_EQ(list[0][4].item<int>(), 3);
    EXPECT_EQ(list[1][2999].item<double>(), 4.5);
    EXPECT_EQ(work->result().size(), 3U);
  });
}

void moves_every_dtype(ShmRank& self) {
  const auto backend = self.backend();
  const int world = self.size;
  for (const auto dtype : kMoved) {
    for (const auto size : sizes_of(dtype)) {
      const auto parts = of_all_ranks(world, dtype, size);
      const auto whole = torch::cat(parts);
      const auto& mine = parts[self.rank];
      const auto what = detail::str(dtype, " ", size);
      const auto blank = [&] { return torch::zeros({size}, mine.options()); };

      const int root = static_cast<int>(size) % world;
      Tensors sent{self.rank == root ? mine.clone() : blank()};
      c10d::BroadcastOptions from_root;
      from_root.rootRank = root;
      backend->broadcast(sent, from_root)->wait();
      EXPECT_EQ(bits(sent[0]), bits(parts[root])) << what;

      Tensors in{mine};
      std::vector<Tensors> lists(1);
      for (int rank = 0; rank < world; ++rank) lists[0].push_back(blank());
      backend->allgather(lists, in, c10d::AllgatherOptions())->wait();
      EXPECT_EQ(bits(torch::cat(lists[0])), bits(whole)) << what;

      auto out = torch::zeros_like(whole);
      auto own = mine;
      backend->_allgather_base(out, own, c10d::AllgatherOptions())->wait();
      EXPECT_EQ(bits(out), bits(whole)) << what;

      std::vector<Tensors> gathered;
      if (self.rank == root) {
        gathered.resize(1);
        for (int rank = 0; rank < world; ++rank) gathered[0].push_back(blank());
      }
      c10d::GatherOptions to_root;
      to_root.rootRank = root;
      backend->gather(gathered, in, to_root)->wait();
      if (self.rank == root) {
        EXPECT_EQ(bits(torch::cat(gathered[0])), bits(whole)) << what;
      }

      std::vector<Tensors> dealt;
      if (self.rank == root) dealt.push_back(parts);
      Tensors received{blank()};
      c10d::ScatterOptions of_root;
      of_root.rootRank = root;
      backend->scatter(received, dealt, of_root)->wait();
      EXPECT_EQ(bits(received[0]), bits(mine)) << what;
    }
  }
}

TEST(ShmMoves, EveryDtypeAndSizeOnTwoRanks) { on_processes(2, moves_every_dtype); }

TEST(ShmMoves, EveryDtypeAndSizeOnThreeRanks) { on_processes(3, moves_every_dtype); }

TEST(ShmMoves, EveryDtypeAndSizeOnOneAndFiveRanks) {
  on_processes(1, moves_every_dtype);
  on_processes(5, moves_every_dtype);
}

TEST(ShmReduceScatter, GivesEachRankItsPartOfTheReduction) {
  on_processes(3, [](ShmRank& self) {
    const auto backend = self.backend();
    for (const auto dtype : {torch::kFloat, torch::kLong, torch::kBFloat16}) {
      for (const std::int64_t size : {0, 1, 341, 342, 5000}) {
        // The part of rank `to` in the input of rank `from`.
        const auto part = [&](int from, int to) { return sample(from * 3 + to, dtype, size); };
        Tensors own;
        Tensors of_mine;
        for (int rank = 0; rank < 3; ++rank) {
          own.push_back(part(self.rank, rank));
          of_mine.push_back(part(rank, self.rank));
        }
        const auto expected = bits(reduced(of_mine, ReduceOp::SUM));
        std::vector<Tensors> lists{own};
        Tensors out{torch::zeros({size}, dtype)};
        backend->reduce_scatter(out, lists, c10d::ReduceScatterOptions())->wait();
        EXPECT_EQ(bits(out[0]), expected) << dtype << " " << size;

        auto whole = torch::cat(own);
        auto result = torch::zeros({size}, dtype);
        backend->_reduce_scatter_base(result, whole, c10d::ReduceScatterOptions())->wait();
        EXPECT_EQ(bits(result), expected) << dtype << " " << size;

        Tensors results{torch::zeros({size}, dtype), torch::zeros({size}, dtype)};
        Tensors wholes{whole, whole};
        backend->reduce_scatter_tensor_coalesced(results, wholes, c10d::ReduceScatterOptions())
            ->wait();
        EXPECT_EQ(bits(results[1]), expected) << dtype << " " << size;
      }
    }
  });
}

TEST(ShmAllToAll, ExchangesPartsOfAnySizes) {
  on_processes(3, [](ShmRank& self) {
    const auto backend = self.backend();
    for (const auto dtype : {torch::kFloat, torch::kBool, torch::kComplexDouble}) {
      for (const std::int64_t scale : {0, 1, 3, 1000}) {
        const auto rows = [&](int from, int to) { return scale * (from + 2 * to + 1); };
        const auto part = [&](int from, int to) {
          return sample(from * 3 + to, dtype, rows(from, to) * 2).reshape({-1, 2});
        };
        Tensors in;
        Tensors out;
        Tensors expected;
        std::vector<std::int64_t> in_rows;
        std::vector<std::int64_t> out_rows;
        for (int rank = 0; rank < 3; ++rank) {
          in.push_back(part(self.rank, rank));
          expected.push_back(part(rank, self.rank));
          out.push_back(torch::zeros_like(expected.back()));
          in_rows.push_back(rows(self.rank, rank));
          out_rows.push_back(rows(rank, self.rank));
        }
        backend->alltoall(out, in, c10d::AllToAllOptions())->wait();
        EXPECT_EQ(bits(torch::cat(out)), bits(torch::cat(expected))) << dtype << " " << scale;

        auto from = torch::cat(in);
        auto to = torch::zeros_like(torch::cat(expected));
        backend->alltoall_base(to, from, out_rows, in_rows, c10d::AllToAllOptions())->wait();
        EXPECT_EQ(bits(to), bits(torch::cat(expected))) << dtype << " " << scale;
      }
    }
    auto from = torch::arange(6) + 10 * self.rank;
    auto to = torch::zeros({6}, torch::kLong);
    std::vector<std::int64_t> evenly;
    backend->alltoall_base(to, from, evenly, evenly, c10d::AllToAllOptions())->wait();
    EXPECT_EQ(to[2].item<int>(), 10 + 2 * self.rank);
  });
}

TEST(ShmAllToAll, NamesTheRankThatExpectsAnotherSize) {
  on_processes(3, [](ShmRank& self) {
    const auto backend = self.backend();
    Tensors in{torch::ones(2), torch::ones(2), torch::ones(2)};
    Tensors out{torch::ones(2), torch::ones(self.rank == 1 ? 3 : 2), torch::ones(2)};
    const auto message = message_of<CommError>([&] { backend->alltoall(out, in, {})->wait(); });
    EXPECT_EQ(message, "all_to_all: rank 1 sends 8 bytes to rank 1, which expects 12.");
    self.meet("end");
  });
}

TEST(ShmAllGather, TakesManyTensorsAtOnceAndResultsThatAreNotContiguous) {
  on_processes(2, [](ShmRank& self) {
    const auto backend = self.backend();
    Tensors in{torch::full({2}, self.rank), torch::full({3000}, 0.5 + self.rank)};
    Tensors out{torch::zeros({4}, torch::kLong), torch::zeros({6000})};
    backend->allgather_into_tensor_coalesced(out, in, c10d::AllgatherOptions())->wait();
    EXPECT_EQ(numbers(out[0]), (std::vector<double>{0, 0, 1, 1}));
    EXPECT_EQ(out[1][5999].item<double>(), 1.5);

    std::vector<Tensors> lists{{torch::zeros({2}, torch::kLong), torch::zeros({3000})},
                               {torch::zeros({2}, torch::kLong), torch::zeros({3000})}};
    backend->allgather_coalesced(lists, in, c10d::AllgatherOptions())->wait();
    EXPECT_EQ(lists[1][0][1].item<int>(), 1);
    EXPECT_EQ(lists[1][1][2999].item<double>(), 1.5);

    auto column = torch::zeros({4, 3}).select(1, 1);
    auto mine = torch::full({2}, 1.0 + self.rank);
    backend->_allgather_base(column, mine, c10d::AllgatherOptions())->wait();
    EXPECT_EQ(numbers(column), (std::vector<double>{1, 1, 2, 2}));
  });
}

// For `make test LABELS=slow`.
TEST(ShmLarge, MovesAndReduces100MegabytesAtOnce) {
  on_processes(2, [](ShmRank& self) {
    const auto backend = self.backend("large", {});
    const std::int64_t count = 25 << 20;
    Tensors tensors{torch::arange(count, torch::kFloat).remainder_(1000).add_(self.rank)};
    const auto expected = torch::arange(count, torch::kFloat).remainder_(1000).mul_(2).add_(1);
    backend->allreduce(tensors, {})->wait();
    EXPECT_TRUE(torch::equal(tensors[0], expected));
    auto all = torch::zeros({2 * count});
    backend->_allgather_base(all, tensors[0], {})->wait();
    EXPECT_TRUE(torch::equal(all.narrow(0, count, count), expected));
    Tensors message{self.rank == 0 ? expected : torch::zeros({count})};
    if (self.rank == 0) {
      backend->send(message, 1, 0)->wait();
    } else {
      backend->recv(message, 0, 0)->wait();
    }
    EXPECT_TRUE(torch::equal(message[0], expected));
    backend->barrier({})->wait();
  });
}

}  // namespace
}  // namespace accelerate
