// What several processes write: who speaks, and in which order.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/logging.h"
#include "accelerate/progress.h"
#include "accelerate/state.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

// Lines of all ranks in the order in which they were written: O_APPEND writes do not mix.
class SharedFile {
 public:
  SharedFile()
      : path_(std::filesystem::path(std::getenv("ACCELERATE_DEBUG_RDV_FILE")).parent_path() /
              "log") {}

  void listen(LogLevel level = LogLevel::kInfo) const {
    const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    basic_config({.level = level, .sink = [fd](const LogEntry& record) {
                    const std::string line = record.line + "\n";
                    EXPECT_EQ(::write(fd, line.data(), line.size()),
                              static_cast<ssize_t>(line.size()));
                  }});
  }

  [[nodiscard]] std::vector<std::string> lines() const {
    std::ifstream file(path_);
    std::vector<std::string> result;
    for (std::string line; std::getline(file, line);) result.push_back(line);
    return result;
  }

 private:
  std::filesystem::path path_;
};

using Lines = std::vector<std::string>;

TEST(LoggingOnProcesses, TheMainProcessSpeaksForAll) {
  on_processes(2, [](PartialState& state) {
    const SharedFile file;
    file.listen();
    get_logger("run").info("hello");
    state.wait_for_everyone();
    EXPECT_EQ(file.lines(), (Lines{"INFO:run:[RANK 0] hello"}));
  });
}

TEST(LoggingOnProcesses, EveryProcessSpeaksWhenAsked) {
  on_processes(2, [](PartialState& state) {
    const SharedFile file;
    file.listen();
    get_logger("run").info("hello", {.main_process_only = false});
    state.wait_for_everyone();
    auto lines = file.lines();
    std::sort(lines.begin(), lines.end());
    EXPECT_EQ(lines, (Lines{"INFO:run:[RANK 0] hello", "INFO:run:[RANK 1] hello"}));
  });
}

TEST(LoggingOnProcesses, InOrderTheRanksSpeakOneAfterTheOther) {
  on_processes(3, [](PartialState& state) {
    const SharedFile file;
    file.listen();
    const auto logger = get_logger("run");
    for (int round = 0; round < 5; ++round) {
      logger.info(std::to_string(round), {.in_order = true});
    }
    state.wait_for_everyone();
    Lines expected;
    for (int round = 0; round < 5; ++round) {
      for (int rank = 0; rank < 3; ++rank) {
        expected.push_back("INFO:run:[RANK " + std::to_string(rank) + "] " + std::to_string(round));
      }
    }
    EXPECT_EQ(file.lines(), expected);
  });
}

TEST(LoggingOnProcesses, InOrderHoldsWhenSomeRanksHaveNothingToSayAtTheirLevel) {
  on_processes(3, [](PartialState& state) {
    const SharedFile file;
    file.listen(state.process_index() == 1 ? LogLevel::kError : LogLevel::kInfo);
    get_logger("run").info("hello", {.in_order = true});
    state.wait_for_everyone();
    EXPECT_EQ(file.lines(), (Lines{"INFO:run:[RANK 0] hello", "INFO:run:[RANK 2] hello"}));
  });
}

TEST(LoggingOnProcesses, InOrderGoesOnWhenTheSinkOfOneRankFails) {
  on_processes(2, [](PartialState& state) {
    const SharedFile file;
    file.listen();
    if (state.process_index() == 0) {
      basic_config({.level = LogLevel::kInfo,
                    .sink = [](const LogEntry&) { throw std::runtime_error("disk full"); }});
      EXPECT_THROW(get_logger("run").info("hello", {.in_order = true}), std::runtime_error);
    } else {
      get_logger("run").info("hello", {.in_order = true});
    }
    state.wait_for_everyone();
    EXPECT_EQ(file.lines(), (Lines{"INFO:run:[RANK 1] hello"}));
  });
}

TEST(LoggingOnProcesses, InOrderGoesOnWithoutAStoreWhenTheSinkOfOneRankFails) {
  on_processes(3, [](PartialState& own) {
    using Group = c10d::ProcessGroup;
    auto group = c10::make_intrusive<Group>(own.process_index(), own.num_processes());
    group->setBackend(c10::kCPU, Group::BackendType::GLOO,
                      own.process_group()->getBackend(c10::kCPU));
    group->setDefaultBackend(Group::BackendType::GLOO);
    PartialState::_reset_state();
    const PartialState state({.process_group = group});
    ASSERT_FALSE(state.store());
    const SharedFile file;
    file.listen();
    if (state.process_index() == 0) {
      basic_config({.level = LogLevel::kInfo,
                    .sink = [](const LogEntry&) { throw std::runtime_error("disk full"); }});
      EXPECT_THROW(get_logger("run").info("hello", {.in_order = true}), std::runtime_error);
    } else {
      get_logger("run").info("hello", {.in_order = true});
    }
    state.wait_for_everyone();
    EXPECT_EQ(file.lines(), (Lines{"INFO:run:[RANK 1] hello", "INFO:run:[RANK 2] hello"}));
  });
}

TEST(LoggingOnProcesses, TheLibraryWarnsOnTheMainProcessOnly) {
  on_processes(2, [](PartialState& state) {
    const SharedFile file;
    file.listen();
    static_cast<void>(convert_dict_to_env_variables({{"BROKEN", "a b"}}));
    state.wait_for_everyone();
    const auto lines = file.lines();
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_TRUE(lines[0].starts_with("WARNING:accelerate:[RANK 0] ")) << lines[0];
  });
}

TEST(LoggingOnProcesses, TheVariableForTheLevelCountsForTheLibraryFromTheStart) {
  on_processes(1, {.environment = {{"ACCELERATE_LOG_LEVEL", "error"}}}, [] {
    int records = 0;
    basic_config({.sink = [&](const LogEntry&) { ++records; }});
    static_cast<void>(convert_dict_to_env_variables({{"BROKEN", "a b"}}));
    EXPECT_EQ(records, 0);
    basic_config({.level = LogLevel::kWarning, .sink = [&](const LogEntry&) { ++records; }});
    static_cast<void>(convert_dict_to_env_variables({{"BROKEN", "a b"}}));
    EXPECT_EQ(records, 1);
    basic_config();
  });
}

TEST(ProgressOnProcesses, OneProcessOfEachHostShowsTheBar) {
  // Three processes on hosts of two: 0 and 1 share one, 2 is alone on the next.
  on_processes(3, {.processes_per_host = 2}, [](PartialState& state) {
    const auto nowhere = [](std::string_view) {};
    EXPECT_EQ(ProgressBar({.total = 1, .sink = nowhere}).disabled(), state.process_index() == 1);
    EXPECT_FALSE(ProgressBar({.main_process_only = false, .sink = nowhere}).disabled());
  });
}

}  // namespace
}  // namespace accelerate
