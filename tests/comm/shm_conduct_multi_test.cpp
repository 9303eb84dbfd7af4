// How the shared-memory backend behaves between real processes: works, messages, failures.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <random>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "comm/samples.h"
#include "comm/shm_ranks.h"
#include "support/on_processes.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using namespace std::chrono_literals;

double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double patience(double seconds) { return test::patient(test::Seconds(seconds)).count(); }

TEST(ShmWork, ManyAreUnderWayAtOnceAndEndInAnyOrder) {
  on_processes(3, [](ShmRank& self) {
    for (const std::int64_t inline_bytes : {0, 600, 1 << 20}) {
      auto options = small_chunks();
      options.inline_bytes = inline_bytes;
      const auto backend = self.backend(detail::str("works", inline_bytes), options);
      std::vector<Tensors> tensors;
      std::vector<WorkPtr> works;
      for (int i = 0; i < 60; ++i) {
        tensors.push_back({torch::full({i * 41 + 1}, double(self.rank + i))});
        c10d::AllreduceOptions how;
        how.asyncOp = i % 7 != 3;
        works.push_back(backend->allreduce(tensors.back(), how));
        EXPECT_EQ(works.back()->getSequencenumber(), i + 1U);
      }
      for (int i = 59; i >= 0; i -= 2) works[i]->wait();
      for (int i = 0; i < 60; ++i) {
        works[i]->wait();  // its data has moved, but another thread may be about to say so
        EXPECT_TRUE(works[i]->isCompleted());
        EXPECT_TRUE(works[i]->isSuccess());
        EXPECT_TRUE(torch::equal(tensors[i][0], torch::full({i * 41 + 1}, 3.0 * i + 3)));
      }
      EXPECT_EQ(backend->getSequenceNumberForGroup(), 60U);
    }
    EXPECT_EQ(self.guard->entered, 180);
    EXPECT_EQ(self.guard->left, 180);
  });
}

TEST(ShmWork, HasAFutureWithTheListOfTensorsAndMayBePolled) {
  on_processes(2, [](ShmRank& self) {
    const auto backend = self.backend();
    Tensors tensors{torch::ones({3})};
    const auto future = backend->allreduce(tensors, {})->getFuture();
    future->wait();
    const auto value = future->value().toTensorVector();
    ASSERT_EQ(value.size(), 1U);
    EXPECT_TRUE(value[0].is_same(tensors[0]));
    EXPECT_EQ(tensors[0][2].item<double>(), 2);

    // A callback may call the next collective, on whichever thread it runs.
    std::atomic<int> sum{0};
    Tensors large{torch::ones({200'000})};
    const auto chained = backend->allreduce(large, {})->getFuture()->then(
        [&](c10::ivalue::Future&) {
          Tensors next{torch::full({1}, 5)};
          backend->allreduce(next, {})->wait();
          sum = next[0].item<int>();
          return c10::IValue();
        },
        c10::NoneType::get());
    chained->wait();
    EXPECT_EQ(sum, 10);

    Tensors polled{torch::ones({1})};
    const auto work = backend->allreduce(polled, {});
    while (!work->isCompleted()) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(polled[0].item<double>(), 2);
  });
}

TEST(ShmWork, DoesNotKeepItsCallerFromWhatTheOthersWaitFor) {
  on_processes(2, [](ShmRank& self) {
    const auto first = self.backend("first");
    const auto second = self.backend("second");
    // Rank 1 takes part only when a message has come that rank 0 sends after its calls.
    Tensors a{torch::full({4}, self.rank + 1)};
    Tensors b{torch::full({4000}, self.rank + 1)};
    Tensors c{torch::full({4}, self.rank + 1)};
    Tensors message{torch::full({1}, 7)};
    if (self.rank == 0) {
      const auto works =
          std::vector{first->allreduce(a, {}), first->allreduce(b, {}), second->allreduce(c, {})};
      first->send(message, 1, 0)->wait();
      for (const auto& work : works) work->wait();
    } else {
      message[0].zero_();
      first->recv(message, 0, 0)->wait();
      second->allreduce(c, {})->wait();  // another order of groups
      first->allreduce(a, {})->wait();
      first->allreduce(b, {})->wait();
    }
    EXPECT_EQ(message[0].item<int>(), 7);
    for (const auto& tensors : {a, b, c}) EXPECT_EQ(tensors[0][3].item<int>(), 3);
  });
}

TEST(ShmWork, ThatIsNotCompleteInTimeSaysSoAndGoesOn) {
  on_processes(2, [](ShmRank& self) {
    const auto backend = self.backend();
    Tensors tensors{torch::ones({4})};
    if (self.rank == 1) std::this_thread::sleep_for(700ms);
    const auto work = backend->allreduce(tensors, {});
    if (self.rank == 0) {
      EXPECT_EQ(message_of<CommError>([&] { work->wait(50ms); }),
                "all_reduce is not complete after 50 ms. It continues; wait for it again.");
    }
    work->wait();
    EXPECT_EQ(tensors[0][0].item<double>(), 2);
  });
}

TEST(ShmWork, ThatNobodyWaitsForCompletesAllTheSame) {
  on_processes(2, [](ShmRank& self) {
    auto options = small_chunks();
    options.inline_bytes = 1 << 20;
    const auto backend = self.backend("shm", options);
    WorkPtr kept;
    const auto call = [&](std::int64_t numel, bool keep) {
      self.meet(detail::str("call", self.guard->entered));
      if (self.rank == 1) std::this_thread::sleep_for(30ms);
      Tensors tensors{torch::ones({numel})};
      const auto work = backend->allreduce(tensors, {});
      if (keep) kept = work;
      return tensors[0];
    };
    int calls = 0;
    for (const bool keep : {false, true}) {
      for (const std::int64_t numel : {4, 400, 4000}) {  // one round, two, many
        const auto tensor = call(numel, keep);
        ++calls;
        const auto until = std::chrono::steady_clock::now() + 10s;
        while (self.guard->left < calls && std::chrono::steady_clock::now() < until) {
          std::this_thread::sleep_for(1ms);
        }
        ASSERT_EQ(self.guard->left, calls) << numel;
        EXPECT_EQ(tensor[numel - 1].item<double>(), 2) << numel;
      }
    }
  });
}

TEST(ShmMessages, OfAnySizeArriveInOrderByTag) {
  on_processes(3, [](ShmRank& self) {
    const auto backend = self.backend();
    const int next = (self.rank + 1) % 3;
    const int previous = (self.rank + 2) % 3;
    for (const std::int64_t size : {0, 1, 100, 2048, 100'000}) {
      std::vector<WorkPtr> works;
      std::vector<Tensors> out;
      for (int i = 0; i < 6; ++i) {
        out.push_back({torch::full({size + i}, self.rank * 10 + i, torch::kInt)});
        works.push_back(backend->send(out.back(), next, i % 2));
      }
      // The odd ones first: the even ones are put aside.
      for (const int i : {1, 3, 5, 0, 2, 4}) {
        Tensors in{torch::zeros({size + i}, torch::kInt)};
        backend->recv(in, previous, i % 2)->wait();
        EXPECT_TRUE(torch::equal(in[0], torch::full({size + i}, previous * 10 + i, torch::kInt)));
      }
      for (const auto& work : works) work->wait();
    }
  });
}

TEST(ShmMessages, LargerThanTheMailboxPassEachOtherWhenBothSidesSendFirst) {
  on_processes(2, [](ShmRank& self) {
    const auto backend = self.backend();
    // Up to the size of the mailbox even blocking ones do.
    Tensors small{torch::full({400}, self.rank, torch::kFloat)};
    backend->send(small, 1 - self.rank, 1)->wait();
    backend->recv(small, 1 - self.rank, 1)->wait();
    EXPECT_EQ(small[0][399].item<int>(), 1 - self.rank);

    Tensors large{torch::full({300'000}, self.rank, torch::kFloat)};
    Tensors arrives{torch::zeros({300'000})};
    const auto sent = backend->send(large, 1 - self.rank, 1);
    backend->recv(arrives, 1 - self.rank, 1)->wait();
    sent->wait();
    EXPECT_TRUE(torch::equal(arrives[0], torch::full({300'000}, 1.0 - self.rank)));
  });
}

TEST(ShmMessages, MoveWhileACollectiveIsUnderWay) {
  on_processes(2, [](ShmRank& self) {
    const auto backend = self.backend();
    Tensors large{torch::full({300'000}, 3.0)};
    Tensors arrives{torch::zeros({300'000})};
    Tensors sum{torch::ones({1})};
    c10d::AllreduceOptions blocking;
    blocking.asyncOp = false;
    if (self.rank == 0) {
      const auto sent = backend->send(large, 1, 0);  // nobody waits for it
      backend->allreduce(sum, blocking)->wait();
      sent->wait();
    } else {
      backend->recv(arrives, 0, 0)->wait();
      backend->allreduce(sum, blocking)->wait();
      EXPECT_TRUE(torch::equal(arrives[0], large[0]));
    }
    EXPECT_EQ(sum[0].item<double>(), 2);

    std::thread other([&] {
      for (int i = 0; i < 200; ++i) {
        Tensors ping{torch::full({10}, i)};
        if (self.rank == 0) {
          backend->send(ping, 1, 5)->wait();
        } else {
          backend->recv(ping, 0, 5)->wait();
          EXPECT_EQ(ping[0][9].item<int>(), i);
        }
      }
    });
    for (int i = 0; i < 200; ++i) backend->allreduce(sum, blocking)->wait();
    other.join();
  });
}

TEST(ShmMessages, FromAnybodySayWhoSentThem) {
  on_processes(3, [](ShmRank& self) {
    const auto backend = self.backend();
    Tensors message{torch::full({2}, self.rank)};
    if (self.rank != 1) {
      backend->send(message, 1, 9)->wait();
    } else {
      std::set<int> senders;
      for (int i = 0; i < 2; ++i) {
        const auto work = backend->recvAnysource(message, 9);
        work->wait();
        EXPECT_EQ(message[0][1].item<int>(), work->sourceRank());
        senders.insert(work->sourceRank());
      }
      EXPECT_EQ(senders, (std::set<int>{0, 2}));
    }
    backend->barrier({})->wait();
  });
}

TEST(ShmMessages, ThatDoNotFitSayWhatCameAndLeaveTheNextOneWhole) {
  on_processes(2, [](ShmRank& self) {
    const auto backend = self.backend();
    Tensors ten{torch::arange(10)};
    if (self.rank == 0) {
      for (int i = 0; i < 3; ++i) backend->send(ten, 1, 4)->wait();
    } else {
      Tensors five{torch::zeros({5}, torch::kLong)};
      EXPECT_EQ(message_of<CommError>([&] { backend->recv(five, 0, 4)->wait(); }),
                "recv: rank 0 sent 80 bytes with tag 4, but the tensor to receive them has 40.");
      Tensors doubles{torch::zeros({10}, torch::kDouble)};
      EXPECT_EQ(message_of<CommError>([&] { backend->recv(doubles, 0, 4)->wait(); }),
                "recv: rank 0 sent a tensor with tag 4 of another dtype than the one to receive "
                "it.");
      Tensors right{torch::zeros({10}, torch::kLong)};
      backend->recv(right, 0, 4)->wait();
      EXPECT_TRUE(torch::equal(right[0], ten[0]));
    }
    backend->barrier({})->wait();
  });
}

TEST(ShmWork, OfAllKindsAndSizesMayBeMixed) {
  on_processes(4, [](ShmRank& self) {
    auto options = small_chunks();
    options.inline_bytes = 4096;
    const auto backend = self.backend("mixed", options);
    std::mt19937 same(7);                       // draws the same on all ranks
    std::mt19937 own(self.rank);                // and another on each
    std::vector<std::function<void()>> checks;  // each waits for its work
    for (int i = 0; i < 400; ++i) {
      const auto count = static_cast<std::int64_t>(same() % 3000);
      const int root = static_cast<int>(same() % 4);
      const auto mine = torch::full({count}, self.rank + i);
      if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
      switch (same() % 4) {
        case 0: {
          Tensors tensors{mine};
          c10d::AllreduceOptions how;
          how.asyncOp = own() % 2 == 0;  // need not be the same on all ranks
          const auto work = backend->allreduce(tensors, how);
          checks.emplace_back([=] {
            work->wait();
            EXPECT_TRUE(torch::equal(mine, torch::full({count}, 6 + 4 * i))) << i;
          });
          break;
        }
        case 1: {
          Tensors tensors{mine};
          c10d::BroadcastOptions how;
          how.rootRank = root;
          const auto work = backend->broadcast(tensors, how);
          checks.emplace_back([=] {
            work->wait();
            EXPECT_TRUE(torch::equal(mine, torch::full({count}, root + i))) << i;
          });
          break;
        }
        case 2: {
          auto in = mine;
          auto out = torch::zeros({4 * count}, torch::kLong);
          const auto work = backend->_allgather_base(out, in, {});
          checks.emplace_back([=] {
            work->wait();
            const auto ranks = torch::arange(4).repeat_interleave(count);
            EXPECT_TRUE(torch::equal(out, ranks + i)) << i;
          });
          break;
        }
        default: {
          const int tag = static_cast<int>(same() % 3);
          Tensors out{mine};
          Tensors in{torch::zeros({count}, torch::kLong)};
          const int previous = (self.rank + 3) % 4;
          const auto arrives = backend->recv(in, previous, tag);
          const auto leaves = backend->send(out, (self.rank + 1) % 4, tag);
          checks.emplace_back([=] {
            arrives->wait();
            leaves->wait();
            EXPECT_TRUE(torch::equal(in[0], torch::full({count}, previous + i))) << i;
          });
        }
      }
      // Some are left to the end.
      if (own() % 3 == 0) {
        std::swap(checks[own() % checks.size()], checks.back());
        checks.back()();
        checks.pop_back();
      }
    }
    std::shuffle(checks.begin(), checks.end(), own);
    for (const auto& check : checks) check();
    backend->barrier({})->wait();
    EXPECT_EQ(self.guard->entered, self.guard->left);
  });
}

TEST(ShmFailures, AKilledRankIsNamedWithinASecond) {
  const auto outcomes = run_processes(3, {}, [](ShmRank& self) {
    const auto backend = self.backend();
    backend->barrier({})->wait();
    if (self.rank == 1) std::raise(SIGKILL);
    std::string message;
    Tensors tensors{torch::ones({300'000})};
    EXPECT_LT(seconds_of([&] {
                message = message_of<CommError>([&] { backend->allreduce(tensors, {})->wait(); });
              }),
              patience(1));
    EXPECT_TRUE(message.starts_with("all_reduce: rank 1 (process ")) << message;
    EXPECT_TRUE(message.ends_with(") has ended.")) << message;
    // And so for every later call.
    EXPECT_EQ(message_of<CommError>([&] { backend->allreduce(tensors, {})->wait(); }), message);
    EXPECT_EQ(self.guard->entered, self.guard->left);
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_TRUE(outcomes[2].ok()) << outcomes[2].output;
}

TEST(ShmFailures, ASenderThatDiesIsNamed) {
  const auto outcomes = run_processes(2, {}, [](ShmRank& self) {
    const auto backend = self.backend();
    Tensors message{torch::ones({1})};
    if (self.rank == 1) {
      backend->send(message, 0, 0)->wait();
      std::raise(SIGKILL);
    }
    backend->recv(message, 1, 0)->wait();  // what was sent before counts
    std::string text;
    EXPECT_LT(seconds_of([&] {
                text = message_of<CommError>([&] { backend->recv(message, 1, 0)->wait(); });
              }),
              patience(1));
    EXPECT_TRUE(text.starts_with("recv float32[1] from rank 1: rank 1 (process ")) << text;
    EXPECT_TRUE(text.ends_with(") has ended.")) << text;
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
}

TEST(ShmFailures, ARankThatLeavesIsNamedAndNobodyWaitsForTheDestructor) {
  on_processes(3, [](ShmRank& self) {
    auto backend = self.backend();
    Tensors tensors{torch::ones({300'000})};
    if (self.rank == 2) {
      const auto never = backend->allreduce(tensors, {});
      EXPECT_LT(seconds_of([&] { backend.reset(); }), patience(0.5));
      self.meet("left");
      EXPECT_EQ(message_of<CommError>([&] { never->wait(); }),
                "all_reduce: rank 2 closed the group while the call was under way.");
    } else {
      self.meet("left");
      for (int i = 0; i < 2; ++i) {
        const auto text = message_of<CommError>([&] { backend->allreduce(tensors, {})->wait(); });
        EXPECT_TRUE(text.find("rank 2 (process ") != std::string::npos) << text;
        EXPECT_TRUE(text.find(") has left the group.") != std::string::npos) << text;
      }
    }
    self.meet("end");
  });
}

TEST(ShmFailures, ARankInAnotherCallIsNamedBeforeDataMoves) {
  on_processes(3, [](ShmRank& self) {
    const auto stray = [&](const std::string& name, auto&& right, auto&& wrong) {
      self.guard->verdict = false;
      const auto backend = self.backend(name);
      Tensors tensors{torch::full({6}, self.rank)};
      std::string text;
      EXPECT_LT(seconds_of([&] {
                  text = message_of<CommError>([&] {
                    self.rank == 1 ? wrong(*backend, tensors) : right(*backend, tensors);
                  });
                }),
                patience(0.5))
          << name;
      EXPECT_TRUE(text.find("rank 1 (process ") != std::string::npos) << name << text;
      EXPECT_TRUE(text.find(" is in another call than ") != std::string::npos) << name << text;
      EXPECT_TRUE(torch::equal(tensors[0], torch::full({6}, self.rank))) << name;
      self.meet(name);
    };
    using Backend = detail::comm::ShmBackend;
    const auto reduce = [](Backend& b, Tensors& t) { b.allreduce(t, {})->wait(); };
    stray("shape", reduce, [](Backend& b, Tensors& t) {
      Tensors other{t[0].reshape({2, 3})};
      b.allreduce(other, {})->wait();
    });
    stray("dtype", reduce, [](Backend& b, Tensors& t) {
      Tensors other{t[0].to(torch::kDouble)};
      b.allreduce(other, {})->wait();
    });
    stray("kind", reduce, [](Backend& b, Tensors& t) { b.broadcast(t, {})->wait(); });
    stray("reduction", reduce, [](Backend& b, Tensors& t) {
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::MAX;
      b.allreduce(t, options)->wait();
    });
  });
}

TEST(ShmFailures, ARankThatDoesNotComeIsNamedAfterTheTimeout) {
  on_processes(2, [](ShmRank& self) {
    const auto backend = self.backend();
    if (self.rank == 0) {
      c10d::BarrierOptions options;
      options.timeout = 300ms;
      std::string text;
      const auto seconds = seconds_of(
          [&] { text = message_of<CommError>([&] { backend->barrier(options)->wait(); }); });
      EXPECT_GT(seconds, 0.25);
      EXPECT_LT(seconds, patience(1.5));
      EXPECT_TRUE(text.ends_with(") did not come in time.")) << text;
    }
    self.meet("end");
  });
}

TEST(ShmGroups, LeaveNothingBehind) {
  const auto shm_files = [] {
    std::set<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
      if (file.is_regular_file()) names.insert(file.path().string());
    }
    return names;
  };
  on_processes(2, [&](ShmRank& self) {
    const auto descriptors = [] {
      const auto all = std::filesystem::directory_iterator("/proc/self/fd");
      return std::distance(begin(all), end(all));
    };
    const auto before = descriptors();
    const auto files = shm_files();
    for (int i = 0; i < 5; ++i) {
      const auto one = self.backend(detail::str("one", i));
      const auto two = self.backend(detail::str("two", i));
      Tensors tensors{torch::ones({100'000})};
      Tensors message{torch::ones({100'000})};
      const auto work = two->allreduce(tensors, {});
      one->barrier({})->wait();
      if (self.rank == 0) {
        one->send(message, 1, 0)->wait();
      } else {
        one->recv(message, 0, 0)->wait();
      }
      work->wait();
      EXPECT_EQ(shm_files(), files);
    }
    EXPECT_EQ(descriptors(), before);
  });
}

c10::intrusive_ptr<c10d::ProcessGroup> group_of(ShmRank& self,
                                                const detail::comm::ShmOptions& options) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(self.store, self.rank, self.size);
  const auto type = c10d::ProcessGroup::BackendType::CUSTOM;
  group->setBackend(c10::kCPU, type, self.backend("ddp", options));
  group->setDefaultBackend(type);
  return group;
}

torch::nn::Sequential model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(40, 300), torch::nn::ReLU(),
                               torch::nn::Linear(300, 10));
}

Tensor loss_of(torch::nn::Sequential& net, int rank, int step) {
  torch::manual_seed(100 * step + rank);
  return torch::nn::functional::cross_entropy(net->forward(torch::randn({16, 40})),
                                              torch::randint(10, {16}));
}

TEST(ShmReducer, AveragesGradientsOfDataParallelTraining) {
  on_processes(3, [](ShmRank& self) {
    auto options = small_chunks();
    options.inline_bytes = 4096;  // some buckets on the caller's thread, some on the lane's
    const auto group = group_of(self, options);
    auto net = model();
    const auto parameters = net->parameters();
    {
      torch::NoGradGuard no_grad;
      if (self.rank != 0) {
        for (const auto& parameter : parameters) parameter.zero_();
      }
      c10d::verify_params_across_processes(group, parameters, std::nullopt);
      c10d::broadcast_coalesced(group, parameters, 1 << 20, 0);
    }
    auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, {2048, 65536});
    std::reverse(buckets.begin(), buckets.end());
    std::reverse(limits.begin(), limits.end());
    const auto reducer = std::make_shared<c10d::Reducer>(
        parameters, buckets, group, std::vector<bool>(parameters.size(), false), 65536, false, true,
        std::unordered_map<std::size_t, std::string>{}, 2048, false, false,
        std::vector<std::int64_t>(limits.begin(), limits.end()));
    for (int step = 0; step < 4; ++step) {
      Tensors expected;
      for (int rank = 0; rank < self.size; ++rank) {
        auto other = model();
        const auto gradients =
            torch::autograd::grad({loss_of(other, rank, step)}, other->parameters());
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          const auto part = gradients[i] / self.size;
          if (rank == 0) expected.push_back(torch::zeros_like(part));
          expected[i] += part;
        }
      }
      for (const auto& parameter : parameters) parameter.mutable_grad() = Tensor();
      reducer->prepare_for_forward();
      const auto loss = loss_of(net, self.rank, step);
      reducer->rebuild_buckets();
      reducer->prepare_for_backward({loss});
      loss.backward();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto gradient = parameters[i].grad();
        EXPECT_TRUE(torch::allclose(gradient, expected[i], 1e-4, 1e-6)) << step << " " << i;
        std::vector<Tensors> all{{torch::empty_like(gradient), torch::empty_like(gradient),
                                  torch::empty_like(gradient)}};
        Tensors mine{gradient};
        group->allgather(all, mine)->wait();
        for (const auto& other : all[0]) EXPECT_EQ(bits(other), bits(gradient));
      }
    }
    group->barrier()->wait();
  });
}

}  // namespace
}  // namespace accelerate
