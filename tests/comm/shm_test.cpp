// The parts of the shared-memory backend, and groups whose ranks are threads of one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "accelerate/errors.h"
#include "comm/shm_ranks.h"
#include "comm/shm_reduce.h"
#include "comm/shm_segment.h"
#include "core/copy_past_cache.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using detail::comm::Element;
using detail::comm::ShmBackend;
using detail::comm::ShmReduction;
using detail::comm::ShmSegment;
using test::message_of;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using namespace std::chrono_literals;

Tensor reduce(Element element, ShmReduction reduction, const Tensors& sources) {
  auto out = torch::empty_like(sources.front());
  std::vector<const std::byte*> memory;
  for (const auto& source : sources) {
    memory.push_back(static_cast<const std::byte*>(source.const_data_ptr()));
  }
  detail::comm::reduce_elements(element, reduction, memory,
                                static_cast<std::byte*>(out.mutable_data_ptr()), nullptr,
                                static_cast<std::size_t>(out.numel()));
  return out;
}

TEST(ShmCopy, PastTheCacheMovesAllBytesAndNoOthers) {
  std::vector<std::byte> from(1000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
  for (const std::size_t begin : {0, 1, 15, 63, 64}) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 127, 128, 700}) {
      std::vector<std::byte> to(1000);
      auto expected = to;
      std::copy_n(from.begin() + 3, bytes, expected.begin() + static_cast<std::ptrdiff_t>(begin));
      detail::copy_past_cache(to.data() + begin, from.data() + 3, bytes);
      EXPECT_EQ(to, expected) << begin << " " << bytes;
    }
  }
}

/// Every number that 16 bits can be.
Tensor every(torch::ScalarType dtype) {
  return torch::arange(65536, torch::kInt).to(torch::kShort).view(dtype);
}

TEST(ShmReduce, KeepsEveryNumberOf16Bits) {
  for (const auto& [element, dtype] : {std::pair{Element::kFloat16, torch::kHalf},
                                       std::pair{Element::kBFloat16, torch::kBFloat16}}) {
    const auto all = every(dtype);
    const auto kept = reduce(element, ShmReduction::kSum, {all});
    EXPECT_TRUE(torch::equal(all.isnan(), kept.isnan())) << dtype;
    const auto numbers = all.isnan().logical_not();
    EXPECT_EQ(bits(all.index({numbers})), bits(kept.index({numbers}))) << dtype;
  }
}

TEST(ShmReduce, RoundsSumsOf16BitsOnceAndAsTorchDoes) {
  torch::manual_seed(3);
  for (const auto& [element, dtype] : {std::pair{Element::kFloat16, torch::kHalf},
                                       std::pair{Element::kBFloat16, torch::kBFloat16}}) {
    const auto all = every(dtype);
    const auto other = all.index({torch::randperm(65536)});
    const auto third = all.index({torch::randperm(65536)});
    const auto expected =
        (all.to(torch::kFloat) + other.to(torch::kFloat) + third.to(torch::kFloat)).to(dtype);
    const auto sum = reduce(element, ShmReduction::kSum, {all, other, third});
    EXPECT_TRUE(torch::allclose(sum, expected, 0, 0, /*equal_nan=*/true)) << dtype;
  }
}

TEST(ShmReduce, PassesNaNOnFromEitherSide) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto a = torch::tensor({nan, 1.0, 2.0});
  const auto b = torch::tensor({1.0, nan, 3.0});
  for (const auto reduction : {ShmReduction::kMinimum, ShmReduction::kMaximum}) {
    const auto result =
        reduce(Element::kFloat32, reduction, {a.to(torch::kFloat), b.to(torch::kFloat)});
    EXPECT_TRUE(std::isnan(result[0].item<double>()));
    EXPECT_TRUE(std::isnan(result[1].item<double>()));
    EXPECT_EQ(result[2].item<double>(), reduction == ShmReduction::kMinimum ? 2 : 3);
  }
}

TEST(ShmReduce, WrapsIntegersButNotTheirAverage) {
  const auto a = torch::tensor({100, -100, -7}, torch::kChar);
  const auto b = torch::tensor({100, -100, 2}, torch::kChar);
  EXPECT_TRUE(torch::equal(reduce(Element::kInt8, ShmReduction::kSum, {a, b}), a + b));
  EXPECT_TRUE(torch::equal(reduce(Element::kInt8, ShmReduction::kProduct, {a, b}), a * b));
  EXPECT_TRUE(torch::equal(reduce(Element::kInt8, ShmReduction::kAverage, {a, b}),
                           torch::tensor({100, -100, -2}, torch::kChar)));
  const auto most = torch::full({1}, std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(reduce(Element::kInt64, ShmReduction::kSum, {most, most}).item<std::int64_t>(), -2);
}

TEST(ShmReduce, KnowsWhatMakesNoSense) {
  EXPECT_FALSE(can_reduce(Element::kFloat32, ShmReduction::kAnd));
  EXPECT_FALSE(can_reduce(Element::kBFloat16, ShmReduction::kXor));
  EXPECT_FALSE(can_reduce(Element::kBool, ShmReduction::kAverage));
  EXPECT_TRUE(can_reduce(Element::kBool, ShmReduction::kSum));
}

// ---- groups of threads

/// Runs `f(rank)` on as many threads.
void on_threads(int size, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(f, rank);
  for (auto& thread : threads) thread.join();
}

struct Made {
  c10::intrusive_ptr<ShmBackend> backend;
  std::string why_not;
};

Made make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
          const detail::comm::ShmOptions& options = small_chunks()) {
  Made made;
  made.backend = ShmBackend::try_make(store, rank, size, options, std::make_shared<CountingGuard>(),
                                      made.why_not);
  return made;
}

TEST(ShmBackend, ServesOneTo64Threads) {
  for (const int size : {1, 2, 3, 4, 5, 64}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    on_threads(size, [&](int rank) {
      const auto made = make(store, rank, size);
      ASSERT_TRUE(made.backend) << made.why_not;
      for (const std::int64_t count : {1, 5000}) {
        for (int i = 0; i < 20; ++i) {
          Tensors tensors{torch::full({count}, rank + i)};
          made.backend->allreduce(tensors, {})->wait();
          EXPECT_EQ(tensors[0][count - 1].item<int>(), size * i + size * (size - 1) / 2);
        }
        Tensors message{torch::full({count}, rank)};
        const auto sent = made.backend->send(message, (rank + 1) % size, 0);
        Tensors received{torch::zeros({count}, torch::kLong)};
        made.backend->recv(received, (rank + size - 1) % size, 0)->wait();
        sent->wait();
        EXPECT_EQ(received[0][count - 1].item<int>(), (rank + size - 1) % size);
      }
      made.backend->barrier({})->wait();
    });
  }
}

TEST(ShmBackend, TakesCollectivesAndMessagesFromManyThreads) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_threads(2, [&](int rank) {
    auto options = small_chunks();
    options.inline_bytes = 512;
    const auto made = make(store, rank, 2, options);
    ASSERT_TRUE(made.backend) << made.why_not;
    const auto talk = [&](int tag) {
      for (int i = 0; i < 60; ++i) {
        Tensors message{torch::full({i * 20}, i)};
        Tensors received{torch::zeros({i * 20}, torch::kLong)};
        const auto sent = made.backend->send(message, 1 - rank, tag);
        made.backend->recv(received, 1 - rank, tag)->wait();
        sent->wait();
        EXPECT_TRUE(torch::equal(message[0], received[0]));
      }
    };
    std::thread one(talk, 1);
    std::thread two(talk, 2);
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<Tensors> tensors;
    for (int i = 0; i < 60; ++i) {
      tensors.push_back({torch::full({i * 10 + 1}, 1.0)});
      works.push_back(made.backend->allreduce(tensors.back(), {}));
    }
    // Several threads wait for the works of one.
    std::thread other([&] {
      for (int i = 59; i >= 0; --i) works[i]->wait();
    });
    for (const auto& work : works) work->wait();
    other.join();
    for (const auto& each : tensors) EXPECT_EQ(each[0][0].item<double>(), 2);
    one.join();
    two.join();
    made.backend->barrier({})->wait();
  });
}

TEST(ShmBackend, IsNotMadeForMoreThan64Ranks) {
  const auto made = make(c10::make_intrusive<c10d::HashStore>(), 3, 65);
  EXPECT_FALSE(made.backend);
  EXPECT_EQ(made.why_not, "there are 65 ranks, and shared memory serves at most 64");
}

TEST(ShmBackend, IsNotMadeWhenARankDoesNotCome) {
  auto options = small_chunks();
  options.meeting_timeout = 200ms;
  const auto first = make(c10::make_intrusive<c10d::HashStore>(), 0, 2, options);
  EXPECT_FALSE(first.backend);
  EXPECT_EQ(first.why_not, "rank 1 did not come within 200 ms");

  // One who comes too late hears of it at once.
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(make(store, 1, 2, options).why_not, "rank 0 did not come within 200 ms");
  options.meeting_timeout = 60s;
  EXPECT_EQ(make(store, 0, 2, options).why_not, "rank 0 did not come within 200 ms");
}

/// Rank 0 seems to be where its processes are not ours.
class Elsewhere : public c10d::PrefixStore {
 public:
  Elsewhere(c10::intrusive_ptr<c10d::Store> store, std::string offer)
      : c10d::PrefixStore("", std::move(store)), offer_(std::move(offer)) {}
  std::vector<std::uint8_t> get(const std::string& key) override {
    if (key != "shm/offer") return c10d::PrefixStore::get(key);
    return {offer_.begin(), offer_.end()};
  }

 private:
  std::string offer_;
};

TEST(ShmBackend, IsMadeOnAllRanksOrOnNone) {
  // No such process, another file, a segment of another group.
  std::string ignored;
  const auto other = ShmSegment::make(2, small_chunks(), ignored);
  for (const auto& [offer, reason] :
       {std::pair<std::string, std::string>{"/proc/999999999/fd/3 1", "No such file or directory"},
        {"/proc/self/exe 1", "it is another file"},
        {other->address(), "it belongs to another group"}}) {
    const auto base = c10::make_intrusive<c10d::HashStore>();
    on_threads(3, [&, offer = offer, reason = reason](int rank) {
      c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::PrefixStore>("", base);
      if (rank == 1) store = c10::make_intrusive<Elsewhere>(base, offer);
      const auto made = make(store, rank, 3);
      EXPECT_FALSE(made.backend);
      EXPECT_EQ(made.why_not,
                detail::str("rank 1 cannot open ", offer.substr(0, offer.find(' ')), " of rank 0 (",
                            reason, "); it may be on another host or in another container"));
    });
  }
}

TEST(ShmBackend, RefusesWhatItCannotCarryAndSaysWhy) {
  const auto made = make(c10::make_intrusive<c10d::HashStore>(), 0, 1);
  ASSERT_TRUE(made.backend);
  auto& backend = *made.backend;
  const auto refused = [&](Tensors tensors, c10d::ReduceOp::RedOpType reduction) {
    c10d::AllreduceOptions options;
    options.reduceOp = reduction;
    return message_of<Error>([&] { backend.allreduce(tensors, options); });
  };
  EXPECT_EQ(refused({torch::eye(2).to_sparse()}, c10d::ReduceOp::SUM),
            "all_reduce: the tensor is of layout Sparse, and only dense tensors can be sent. "
            "Convert it first.");
  EXPECT_EQ(refused({torch::ones(2)}, c10d::ReduceOp::BAND),
            "all_reduce: there is no bitwise and of float32. Convert the tensor, or gather it and "
            "compute the result.");
  EXPECT_EQ(refused({torch::ones(2, torch::kComplexFloat)}, c10d::ReduceOp::MAX),
            "all_reduce: there is no maximum of complex64. Convert the tensor, or gather it and "
            "compute the result.");
  EXPECT_EQ(refused({torch::ones(2).to(torch::kFloat8_e4m3fn)}, c10d::ReduceOp::SUM),
            "all_reduce: there is no sum of float8_e4m3fn. Convert the tensor, or gather it and "
            "compute the result.");
  EXPECT_EQ(refused({torch::ones(2, torch::kMeta)}, c10d::ReduceOp::SUM),
            "all_reduce: the tensor is on meta, but shared memory serves the CPU. Move it there "
            "first.");
  EXPECT_EQ(refused({torch::ones(1), torch::ones(1)}, c10d::ReduceOp::SUM),
            "all_reduce: one tensor was expected, not 2.");
  auto out = torch::ones(3);
  auto in = torch::ones(2);
  EXPECT_EQ(message_of<ArgumentError>([&] { backend._allgather_base(out, in, {}); }),
            "all_gather: a tensor of float32 and shape [3] cannot hold 1 parts of float32 and "
            "shape [2].");
  Tensors one{in};
  EXPECT_EQ(message_of<ArgumentError>([&] { backend.send(one, 7, 0); }),
            "send: the receiver is 7, but there are ranks 0 to 0.");
  std::vector<std::int64_t> splits{1};
  EXPECT_EQ(message_of<ArgumentError>([&] { backend.alltoall_base(in, in, splits, splits, {}); }),
            "all_to_all: the split sizes 1 do not add up to the 2 rows of the tensor.");
}

TEST(ShmBackend, EndsItsWorksWhenItIsClosedAndTakesNoMore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_threads(2, [&](int rank) {
    const auto made = make(store, rank, 2);
    ASSERT_TRUE(made.backend);
    if (rank == 1) {
      std::this_thread::sleep_for(100ms);
      return;
    }
    Tensors tensors{torch::ones({100'000})};
    Tensors small{torch::ones({1})};
    const auto large = made.backend->allreduce(tensors, {});
    const auto next = made.backend->allreduce(small, {});
    const auto message = made.backend->recv(small, 1, 0);
    made.backend->shutdown();
    const std::string why = "rank 0 closed the group while the call was under way.";
    EXPECT_EQ(message_of<CommError>([&] { large->wait(); }), "all_reduce: " + why);
    EXPECT_EQ(message_of<CommError>([&] { next->wait(); }), "all_reduce: " + why);
    EXPECT_EQ(message_of<CommError>([&] { message->wait(); }), "recv: " + why);
    EXPECT_EQ(message_of<StateError>([&] { made.backend->barrier({}); }),
              "barrier: the process group was destroyed. Make a new one.");
    EXPECT_EQ(message_of<UnsupportedError>([&] { next->abort(); }),
              "all_reduce cannot be aborted on its own: the other ranks wait for this one. "
              "Destroy the process group instead.");
  });
}

}  // namespace
}  // namespace accelerate
