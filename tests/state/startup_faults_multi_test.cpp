// Processes that come late, or never, or end while a group is made; and the time that a group lets
// its ranks wait.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "accelerate/operations/objects.h"
#include "accelerate/state.h"
#include "comm/rank_groups.h"
#include "support/line_up.h"
#include "support/on_processes.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kRanksDisagree = 70;

// As in a program whose main catches nothing; the harness would.
void uncaught(const std::function<void()>& f) noexcept { f(); }

/// `f` throws after so many seconds, on a machine that does nothing else.
void throws_after(double least, double most, const std::function<void()>& f) {
  const auto start = Clock::now();
  try {
    f();
    ADD_FAILURE() << "it did not throw";
  } catch (const CommError&) {
    const auto seconds = std::chrono::duration<double>(Clock::now() - start).count();
    EXPECT_GE(seconds, least);
    EXPECT_LT(seconds, test::patient(test::Seconds(most)).count());
    throw;
  }
}

/// Several jobs at once, since they mostly wait: the processes of the harness, dealt out in order.
class Jobs {
 public:
  struct Place {
    int job;
    int rank;
    int size;

    /// The meeting point of the job: a port that is free, or a file that is not there.
    [[nodiscard]] std::string port() const {
      return "tcp://127.0.0.1:" + std::string(std::getenv(port_variable(job).c_str()));
    }
    [[nodiscard]] std::string file() const {
      return std::string(std::getenv("ACCELERATE_DEBUG_RDV_FILE")) + "_" + std::to_string(job);
    }
    [[nodiscard]] PartialStateOptions options(const std::string& init_method,
                                              std::chrono::milliseconds timeout) const {
      return {.init_method = init_method,
              .timeout = timeout,
              .rank = rank,
              .world_size = size,
              .local_rank = rank,
              .local_world_size = size};
    }
  };

  Jobs(int jobs, int ranks, const std::function<void(const Place&)>& main) : ranks_(ranks) {
    OnProcessesOptions options{.timeout = 60s};
    for (int job = 0; job < jobs; ++job) {
      options.environment.emplace_back(port_variable(job), std::to_string(unused_port(job)));
    }
    outcomes_ = run_processes(jobs * ranks, options, [&] {
      const auto process = static_cast<int>(get_int_from_env({"RANK"}, -1));
      const Place place{process / ranks, process % ranks, ranks};
      test::line_up(std::string(std::getenv("ACCELERATE_DEBUG_RDV_FILE")) + "_line",
                    static_cast<std::uintmax_t>(jobs * ranks));
      uncaught([&] { main(place); });
    });
  }

  [[nodiscard]] const RankOutcome& of(int job, int rank) const {
    return outcomes_[static_cast<std::size_t>(job * ranks_ + rank)];
  }

  void expect_end(int job, const std::vector<int>& ranks, const std::string& text) const {
    for (const int rank : ranks) {
      const auto& outcome = of(job, rank);
      EXPECT_TRUE(outcome.output_contains(text))
          << "rank " << rank << " of job " << job << " does not say '" << text << "' but:\n"
          << outcome.output;
      EXPECT_EQ(outcome.exit_code, kRanksDisagree) << outcome.output;
      EXPECT_FALSE(outcome.output_contains("Failure")) << outcome.output;
    }
  }

  /// Which ranks of a job say it.
  [[nodiscard]] std::vector<int> who_says(int job, const std::string& text) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (of(job, rank).output_contains(text)) ranks.push_back(rank);
    }
    return ranks;
  }

 private:
  /// A free port below those that the system chooses by itself: another test, to which the system
  /// gave the same port meanwhile, would answer in place of a rank that never comes.
  static int unused_port(int job) {
    constexpr int kFirst = 12000;
    constexpr int kCount = 16000;
    int port = kFirst + (::getpid() * 16 + job) % kCount;
    while (is_port_in_use(port)) port = kFirst + (port + 16 - kFirst) % kCount;
    return port;
  }
  static std::string port_variable(int job) { return "TEST_PORT_" + std::to_string(job); }

  int ranks_;
  std::vector<RankOutcome> outcomes_;
};

void work_once(const PartialState& state) {
  EXPECT_EQ(gather(torch::ones({1})).numel(), state.num_processes());
}

TEST(Startup, SaysWhoIsMissingWithACountdownAndGivesUpAtTheTimeout) {
  const Jobs jobs(4, 4, [](const Jobs::Place& place) {
    const auto [job, rank, size] = place;
    // Rank 2 of the first job never comes, and rank 0 of the next two.
    if (rank == (job == 0 ? 2 : 0) && job < 3) return;
    // In the last one rank 3 is late, but not too late.
    if (job == 3 && rank == 3) std::this_thread::sleep_for(5500ms);
    const auto options =
        place.options(job == 2 ? "file://" + place.file() : place.port(), job == 3 ? 20s : 6s);
    if (job == 3) return work_once(PartialState(options));
    throws_after(5.5, 7.5, [&] { (void)PartialState(options); });
  });
  if (in_child_process()) return;

  jobs.expect_end(0, {0, 1, 3}, "1 of 4 processes did not arrive within 6 s: missing rank 2.");
  EXPECT_EQ(jobs.who_says(0, "3 of 4 processes are here, missing rank 2; "), std::vector<int>{0});
  EXPECT_EQ(jobs.who_says(0, " s left of 6 s"), std::vector<int>{0});

  jobs.expect_end(1, {1, 2, 3}, "no answer from 127.0.0.1:");
  EXPECT_EQ(jobs.who_says(1, "no answer yet from 127.0.0.1:").size(), 1U);
  EXPECT_EQ(jobs.who_says(1, " s left of 6 s").size(), 1U);

  jobs.expect_end(2, {1, 2, 3}, "1 of 4 processes did not arrive within 6 s: missing rank 0.");
  EXPECT_EQ(jobs.who_says(2, "3 of 4 processes are here, missing rank 0; "), std::vector<int>{1});
  EXPECT_EQ(jobs.who_says(2, " s left of 6 s"), std::vector<int>{1});

  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(jobs.of(3, rank).ok()) << jobs.of(3, rank).output;
  }
  EXPECT_EQ(jobs.who_says(3, "3 of 4 processes are here, missing rank 3; "), std::vector<int>{0});
  EXPECT_EQ(jobs.who_says(3, " s left of 20 s"), std::vector<int>{0});
}

// The store of a job as a stranger sees it, as soon as it is there.
c10::intrusive_ptr<c10d::TCPStore> store_at(const Jobs::Place& place) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(std::stoi(place.port().substr(16)));
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

std::string presence_of(int rank) {
  return "accelerate/attempt_0/world_0/here/" + std::to_string(rank);
}

TEST(Startup, NamesRanksThatEndAfterTheyArrived) {
  const Jobs jobs(4, 3, [](const Jobs::Place& place) {
    const auto [job, rank, size] = place;
    switch (job) {
      case 0:  // one dies while another is still missing
        if (rank == 2) return;
        if (rank == 1) {
          std::thread([place = place] {
            store_at(place)->wait({presence_of(1)});
            ::_exit(0);
          }).detach();
        }
        throws_after(0, 3, [&] { (void)PartialState(place.options(place.port(), 20s)); });
        break;
      case 1:  // one dies while the others make the group
        if (rank == 1) ::setenv("ACCELERATE_HOST_BACKEND", "nonsense", 1);
        throws_after(0, 3, [&] { (void)PartialState(place.options(place.port(), 20s)); });
        break;
      case 2:  // one says that it is here, and no more
        if (rank == 1) {
          store_at(place)->set(presence_of(1), std::vector<std::uint8_t>{'x'});
          std::this_thread::sleep_for(5s);
        } else {
          throws_after(2, 4, [&] { (void)PartialState(place.options(place.port(), 2s)); });
        }
        break;
      default: {  // a store of the program's own
        if (rank == 1) return;
        auto options = place.options("", 2s);
        options.init_method.reset();
        options.store = c10::intrusive_ptr<c10d::Store>(
            c10::make_intrusive<c10d::FileStore>(place.file(), size));
        throws_after(1.5, 4, [&] { (void)PartialState(options); });
      }
    }
  });
  if (in_child_process()) return;

  jobs.expect_end(0, {0}, "rank 1 (");
  jobs.expect_end(0, {0}, ") has ended before all processes had started");
  EXPECT_TRUE(jobs.of(1, 1).output_contains("ACCELERATE_HOST_BACKEND is 'nonsense'"));
  jobs.expect_end(1, {0, 2}, "rank 1 (");
  jobs.expect_end(1, {0, 2}, ") has ended before all processes had started");
  jobs.expect_end(2, {0, 2}, "rank 1 arrived, but did not go on to make the group within 2 s.");
  jobs.expect_end(3, {0, 2}, "1 of 3 processes did not arrive within 2 s: missing rank 1.");
}

TEST(Startup, IsSilentWhenAllAreThereInTime) {
  const auto outcomes = run_processes(2, {}, [](PartialState& state) { work_once(state); });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok());
    EXPECT_EQ(outcome.output, "");
  }
}

TEST(Startup, RefusesATimeoutThatIsNone) {
  EXPECT_THROW(PartialState({.timeout = 0ms, .rank = 0, .world_size = 1}), ConfigError);
  EXPECT_THROW(PartialState({.timeout = -1ms, .rank = 0, .world_size = 1}), ConfigError);
}

// Rank 1 is busy, and rank 0 waits for it.
constexpr auto kBusy = 6s;

struct Wait {
  const char* backend;
  std::function<void(PartialState&)> call;
  std::string said;
};

std::vector<Wait> waits_on(const char* backend) {
  const auto gathers = [](PartialState&) { (void)gather(torch::ones({4})); };
  const auto waits = [](PartialState& state) { state.wait_for_everyone(); };
  const auto objects = [](PartialState&) { (void)all_gather_object(std::string(100, 'x')); };
  const auto large = [](PartialState&) { (void)reduce(torch::ones({1 << 20}), Reduction::kSum); };
  const auto splits = [](PartialState& state) {
    const auto group = state.process_group()->splitGroup({0, 1}, {}, {}, {}, {});
    if (state.process_index() == 1) std::this_thread::sleep_for(kBusy);
    std::vector<torch::Tensor> tensors{torch::ones({1024})};
    group->allreduce(tensors)->wait();
  };
  return {{backend, gathers, "gather float32[4] at startup_faults_multi_test.cpp:"},
          {backend, waits, "barrier at startup_faults_multi_test.cpp:"},
          {backend, objects, "all_gather_object"},
          {backend, large, "reduce sum float32[1048576]"},
          {backend, splits, "all_reduce sum float32[1024]"}};
}

class Timeout : public testing::TestWithParam<const char*> {};

TEST_P(Timeout, EndsEveryCollectiveOfEveryGroupAndNamesWhoDidNotCome) {
  const auto all = waits_on(GetParam());
  const Jobs jobs(static_cast<int>(all.size()), 2, [&](const Jobs::Place& place) {
    const auto& wait = all[static_cast<std::size_t>(place.job)];
    ::setenv("ACCELERATE_HOST_BACKEND", wait.backend, 1);
    PartialState state(place.options(place.port(), 3s));
    state.wait_for_everyone();
    const bool busy_inside = wait.said.starts_with("all_reduce ");
    if (place.rank == 1 && !busy_inside) std::this_thread::sleep_for(kBusy);
    try {
      if (place.rank == 0) return throws_after(3, 4.4, [&] { wait.call(state); });
      throws_after(0, busy_inside ? 7.5 : 1, [&] { wait.call(state); });
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), 1) << error.what();
      throw;
    }
  });
  if (in_child_process()) return;
  for (int job = 0; job < static_cast<int>(all.size()); ++job) {
    jobs.expect_end(job, {0, 1}, all[static_cast<std::size_t>(job)].said);
    jobs.expect_end(job, {0, 1}, "has waited for 3 s, which is the timeout, in ");
    jobs.expect_end(job, {0, 1}, " for rank 1 (");
    jobs.expect_end(job, {0, 1}, ". It is alive, but did not come.");
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Timeout, testing::Values("gloo", "shm"),
                         [](const auto& info) { return std::string(info.param); });

/// Stops its process inside of the start, when it publishes something at a place in the store.
class StoppingStore : public c10d::PrefixStore {
 public:
  using At = std::function<bool(const std::string& key)>;

  StoppingStore(At at, c10::intrusive_ptr<c10d::Store> store)
      : PrefixStore("", std::move(store)), at_(std::move(at)) {}
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    if (at_(key)) ::kill(::getpid(), SIGSTOP);
    PrefixStore::set(key, value);
  }

 private:
  At at_;
};

void start_with_store(bool stops, const StoppingStore::At& at) {
  const auto number = [](const char* name) {
    return static_cast<int>(get_int_from_env({name}, 0));
  };
  PartialStateOptions options{.rank = number("RANK"), .world_size = number("WORLD_SIZE")};
  const auto file = c10::make_intrusive<c10d::FileStore>(std::getenv("ACCELERATE_DEBUG_RDV_FILE"),
                                                         number("WORLD_SIZE"));
  // Also where nothing stops: a store with an empty prefix has other keys than one without.
  const StoppingStore::At never = [](const std::string&) { return false; };
  options.store =
      c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<StoppingStore>(stops ? at : never, file));
  const PartialState state(options);
}

struct Stop {
  std::string name;
  int rank;
  /// What a rank does; the one with `stops` is stopped meanwhile.
  std::function<void(bool stops)> start;
};

std::vector<Stop> stops() {
  const auto has = [](const std::string& key, const char* part) {
    return key.find(part) != std::string::npos;
  };
  return {
      {"before it comes", 1,
       [](bool stops) {
         if (stops) ::kill(::getpid(), SIGSTOP);
         const PartialState state;
       }},
      {"before the group is made", 1,
       [has](bool stops) {
         start_with_store(stops, [=](const auto& key) { return has(key, "gloo/host/"); });
       }},
      // The waits of c10d cannot be interrupted.
      {"inside of Gloo", 1,
       [has](bool stops) {
         start_with_store(
             stops, [=](const auto& key) { return has(key, "gloo/") && !has(key, "gloo/host/"); });
       }},
      {"while it serves the store", 0,
       [](bool stops) {
         const auto port = static_cast<std::uint16_t>(get_int_from_env({"MASTER_PORT"}, 0));
         if (stops) {
           c10d::TCPStoreOptions options;
           options.port = port;
           options.isServer = true;
           options.waitWorkers = false;
           const c10d::TCPStore store("127.0.0.1", options);
           ::kill(::getpid(), SIGSTOP);
         }
         const PartialState state({.init_method = "tcp://127.0.0.1:" + std::to_string(port)});
       }},
  };
}

TEST(StoppedAtStart, IsNamedWhereverItIsStopped) {
  const auto all = stops();
  const RankGroups groups(std::vector<int>(all.size(), 3));
  std::vector<std::string> variables;
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Groups of one host are told apart by the port at which they meet.
    variables.push_back("MASTER_PORT=" + std::to_string(12000 + (::getpid() * 8 + i) % 16000));
  }
  const auto outcomes =
      run_processes(groups.processes(), groups.options({.timeout = 30s}, variables), [&] {
        const auto& stop = all[static_cast<std::size_t>(RankGroups::own())];
        const bool stops = get_int_from_env({"RANK"}, -1) == stop.rank;
        uncaught([&] { stop.start(stops); });
      });
  if (in_child_process()) return;
  for (int group = 0; group < groups.count(); ++group) {
    const auto& stop = all[static_cast<std::size_t>(group)];
    const auto ranks = groups.of(group, outcomes);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == stop.rank) continue;
      const auto& outcome = ranks[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(outcome.output_contains("rank " + std::to_string(stop.rank) + " (") &&
                  outcome.output_contains(") has been stopped for 10 s, before all processes had "
                                          "started: by SIGSTOP, Ctrl-Z or a debugger."))
          << "rank " << rank << ", stopped " << stop.name << "\n"
          << outcome.output;
      EXPECT_EQ(outcome.exit_code, kRanksDisagree) << stop.name << "\n" << outcome.output;
      EXPECT_GE(outcome.seconds, 10) << stop.name;
    }
  }
}

}  // namespace
}  // namespace accelerate
