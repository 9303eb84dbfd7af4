#include "comm/side_channel.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "core/call_site.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "core/world.h"
#include "support/patience.h"

namespace accelerate::detail::comm {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A folder in the place of a store, in memory: other tests flush files at the same time.
class Board {
 public:
  Board() {
    std::string pattern = "/dev/shm/watch_test_XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Board() { fs::remove_all(folder_); }

  [[nodiscard]] Blackboard blackboard() const {
    return {[this](const auto& key, const auto& value) { set(key, value); },
            [this](const auto& key) { return get(key); }};
  }
  void set(const std::string& key, const std::string& value) const {
    const auto half = folder_ / (key + ".half" + std::to_string(::getpid()));
    std::ofstream(half) << value;
    fs::rename(half, folder_ / key);
  }
  [[nodiscard]] std::string get(const std::string& key) const {
    const auto until = Clock::now() + 20s;
    while (!fs::exists(folder_ / key) && Clock::now() < until) std::this_thread::sleep_for(1ms);
    return peek(key);
  }
  [[nodiscard]] std::string peek(const std::string& key) const {
    std::ifstream file(folder_ / key);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  fs::path folder_;
};

constexpr int kFound = 70;

// What a rank of a test works with.
struct Rank {
  int rank;
  SideChannel& channel;
  const Board& board;

  // A collective that completes when all have entered it; false when a finding comes first.
  [[nodiscard]] bool collective(int number, const char* kind = "gather", std::int64_t size = 4,
                                std::uint32_t line = 10) const {
    const std::array<std::int64_t, 1> sizes{size};
    const CallSite site{.file = "train.cpp", .line = line};
    const auto ticket =
        channel.log().enter({.kind = kind, .dtype = "float32", .sizes = sizes}, site);
    board.set("in" + std::to_string(number) + "_" + std::to_string(rank),
              std::to_string(ticket.signature));
    while (!channel.failed()) {
      if (all_are_in(number)) {
        channel.log().leave(ticket);
        return true;
      }
      std::this_thread::sleep_for(1ms);
    }
    return false;
  }

  [[nodiscard]] bool all_are_in(int number) const {
    const auto own = board.peek("in" + std::to_string(number) + "_" + std::to_string(rank));
    for (int other = 0; other < size; ++other) {
      if (board.peek("in" + std::to_string(number) + "_" + std::to_string(other)) != own)
        return false;
    }
    return true;
  }

  int size = 0;
};

struct Ranks {
  std::map<int, int> codes;            // exit codes; 128 + n for signals
  std::map<int, std::string> finding;  // what each survivor was told
  std::string notice;
  std::chrono::duration<double> time{};
};

/// To those who read it, rank 0 is on another host.
Blackboard of_another_host(Blackboard board) {
  board.get = [get = board.get](const std::string& key) {
    auto words = split(get(key), ' ');
    words.at(3) = "elsewhere";
    return join(words, " ");
  };
  return board;
}

// Runs `body` in `size` processes. It returns whether all went well.
Ranks run(int size, const std::function<bool(const Rank&)>& body,
          std::chrono::milliseconds silence = 10s, bool several_hosts = false) {
  Board board;
  ProcessSet processes;
  for (int rank = 0; rank < size; ++rank) {
    processes.fork({}, [&, rank] {
      SideChannelOptions options{.rank = rank, .size = size};
      options.times.silence = silence;
      options.times.notice = 1s;
      const auto blackboard = board.blackboard();
      SideChannel channel(
          options, several_hosts ? of_another_host(blackboard) : blackboard,
          [&](const Finding& finding) {
            board.set("finding" + std::to_string(rank), finding.text);
          },
          [&](const std::string& text) { board.set("notice", text); });
      board.set("ready" + std::to_string(rank), "");
      for (int other = 0; other < size; ++other) (void)board.get("ready" + std::to_string(other));
      const Rank facts{.rank = rank, .channel = channel, .board = board, .size = size};
      return body(facts) ? 0 : kFound;
    });
  }
  const auto start = Clock::now();
  EXPECT_TRUE(processes.wait_all(Clock::now() + 30s));
  Ranks result;
  result.time = Clock::now() - start;
  for (int rank = 0; rank < size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (!processes.running(index)) result.codes[rank] = processes.status(index).shell_code();
    const auto text = board.peek("finding" + std::to_string(rank));
    if (!text.empty()) result.finding[rank] = text;
  }
  result.notice = board.peek("notice");
  return result;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(SideChannel, IsSilentWhileAllIsWell) {
  const auto ranks = run(3, [](const Rank& rank) {
    for (int i = 0; i < 20; ++i) {
      if (rank.rank == i % 3) std::this_thread::sleep_for(20ms);
      if (!rank.collective(i)) return false;
    }
    return true;
  });
  EXPECT_EQ(ranks.codes, (std::map<int, int>{{0, 0}, {1, 0}, {2, 0}}));
  EXPECT_TRUE(ranks.finding.empty());
}

TEST(SideChannel, NamesTheRankWithAnotherShapeOnAllRanks) {
  const auto ranks = run(3, [](const Rank& rank) {
    return rank.collective(0) && rank.collective(1, "gather", rank.rank == 1 ? 5 : 4);
  });
  ASSERT_EQ(ranks.finding.size(), 3U);
  for (const auto& [rank, text] : ranks.finding) {
    EXPECT_TRUE(contains(text, "rank 1 is in another collective than the others")) << text;
    EXPECT_TRUE(contains(text, "gather float32[5] at train.cpp:10")) << text;
    EXPECT_EQ(text, ranks.finding.at(0));
  }
  EXPECT_LT(ranks.time, test::patient(1s));
}

TEST(SideChannel, NamesTheRankThatIsKilledWithItsLastCall) {
  const auto ranks = run(3, [](const Rank& rank) {
    if (!rank.collective(0)) return false;
    std::this_thread::sleep_for(100ms);  // by now rank 0 knows the page of rank 2
    if (rank.rank == 2) ::kill(::getpid(), SIGKILL);
    return rank.collective(1);
  });
  for (const int survivor : {0, 1}) {
    EXPECT_TRUE(contains(ranks.finding.at(survivor), "rank 2 (")) << ranks.finding.at(survivor);
    EXPECT_TRUE(
        contains(ranks.finding.at(survivor), "died after gather float32[4] at train.cpp:10"))
        << ranks.finding.at(survivor);
  }
  EXPECT_LT(ranks.time, test::patient(1s));
}

TEST(SideChannel, NamesRank0ThatIsKilledToo) {
  const auto ranks = run(3, [](const Rank& rank) {
    if (!rank.collective(0)) return false;
    if (rank.rank == 0) ::kill(::getpid(), SIGKILL);
    return rank.collective(1);
  });
  EXPECT_EQ(ranks.finding.at(1),
            "rank 0 (" + this_host_name() + ") died after gather float32[4] at train.cpp:10");
  EXPECT_EQ(ranks.finding.at(2), ranks.finding.at(1));
}

TEST(SideChannel, NamesTheLastCallOfRank0OnAnotherHost) {
  for (const bool has_told : {false, true}) {
    const auto ranks = run(
        3,
        [=](const Rank& rank) {
          if (!rank.collective(0)) return false;
          if (has_told) std::this_thread::sleep_for(1500ms);  // a beat, and that it is passed on
          if (rank.rank == 0) ::kill(::getpid(), SIGKILL);
          return rank.collective(1, "reduce");
        },
        10s, true);
    const auto text = "rank 0 (" + this_host_name() + ") died " +
                      (has_told ? "after" : "in or after") + " gather float32[4] at train.cpp:10";
    EXPECT_EQ(ranks.finding.at(1), text);
    EXPECT_EQ(ranks.finding.at(2), text);
  }
}

TEST(SideChannel, NamesAStoppedRank) {
  const auto ranks = run(
      3,
      [](const Rank& rank) {
        if (!rank.collective(0)) return false;
        if (rank.rank == 1) {
          // Somebody must end it again.
          rank.board.set("stopped", std::to_string(::getpid()));
          ::kill(::getpid(), SIGSTOP);
          return true;
        }
        const bool well = rank.collective(1);
        if (rank.rank == 0) ::kill(std::stoi(rank.board.get("stopped")), SIGKILL);
        return well;
      },
      3s);
  for (const int survivor : {0, 2}) {
    EXPECT_TRUE(contains(ranks.finding.at(survivor), "no sign of life"))
        << ranks.finding.at(survivor);
    EXPECT_TRUE(contains(ranks.finding.at(survivor), "the process is stopped"))
        << ranks.finding.at(survivor);
  }
}

TEST(SideChannel, NamesTheRankThatLeftTheLoopEarly) {
  const auto ranks = run(3, [](const Rank& rank) {
    for (int i = 0; i < 3; ++i) {
      if (rank.rank == 1 && i == 2) return true;
      if (!rank.collective(i)) return false;
    }
    return true;
  });
  EXPECT_EQ(ranks.codes, (std::map<int, int>{{0, kFound}, {1, 0}, {2, kFound}}));
  EXPECT_TRUE(contains(ranks.finding.at(0), "has ended after gather")) << ranks.finding.at(0);
}

TEST(SideChannel, NamesRank0ThatLeftTheLoopEarly) {
  const auto ranks = run(3, [](const Rank& rank) {
    for (int i = 0; i < 3; ++i) {
      if (rank.rank == 0 && i == 2) return true;
      if (!rank.collective(i)) return false;
    }
    return true;
  });
  const auto host = " (" + this_host_name() + ")";
  for (const int survivor : {1, 2}) {
    const auto& text = ranks.finding.at(survivor);
    EXPECT_TRUE(contains(text, "rank 0" + host + " has ended after gather")) << text;
    EXPECT_TRUE(contains(text, "rank " + std::to_string(survivor) + host + " waits in gather"))
        << text;
  }
}

TEST(SideChannel, ShowsTheExceptionOfOneRankOnAll) {
  const auto ranks = run(3, [](const Rank& rank) {
    if (!rank.collective(0)) return false;
    if (rank.rank == 1) {
      rank.channel.threw("disk full");
      return true;
    }
    return rank.collective(1);
  });
  for (const int survivor : {0, 2}) {
    EXPECT_TRUE(contains(ranks.finding.at(survivor), "disk full")) << ranks.finding.at(survivor);
  }
  EXPECT_LT(ranks.time, test::patient(1s));
}

TEST(SideChannel, NamesALateRankWithoutBlame) {
  const auto ranks = run(2, [](const Rank& rank) {
    if (!rank.collective(0)) return false;
    if (rank.rank == 1) std::this_thread::sleep_for(1500ms);
    return rank.collective(1);
  });
  EXPECT_TRUE(ranks.finding.empty());
  EXPECT_TRUE(contains(ranks.notice, "has waited for 1 s in gather")) << ranks.notice;
  EXPECT_TRUE(contains(ranks.notice, "for rank 1 (")) << ranks.notice;
}

}  // namespace
}  // namespace accelerate::detail::comm
