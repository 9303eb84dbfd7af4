// A run that is killed and started again computes what the unbroken one does, bit for bit.
//
// ACCELERATE_RESUME_KILLS says how often each case is killed (2), ACCELERATE_RESUME_SEED when.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "launch/launching.h"

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;

int number_from_variable(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

std::mt19937& random_engine() {
  static const int seed = number_from_variable("ACCELERATE_RESUME_SEED",
                                               static_cast<int>(std::random_device{}() % 1000000));
  static std::mt19937 engine = [] {
    std::printf("ACCELERATE_RESUME_SEED=%d\n", seed);
    return std::mt19937(static_cast<unsigned>(seed));
  }();
  return engine;
}

int between(int least, int most) {
  return std::uniform_int_distribution<int>(least, most)(random_engine());
}

/// The lines of a process by the number of the batch. A batch that was computed twice, because the
/// first time came after the last checkpoint, must have the same line both times.
using Lines = std::map<int, std::string>;
Lines lines_of_process(const fs::path& folder, int rank) {
  Lines lines;
  std::ifstream file(folder / ("trace." + std::to_string(rank)));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    int batch = 0;
    words >> word >> batch;
    const auto [found, is_new] = lines.emplace(batch, line);
    if (is_new || found->second == line) continue;
    ADD_FAILURE() << "process " << rank << " computed a batch twice:\n"
                  << found->second << "\n"
                  << line;
    break;
  }
  return lines;
}

struct Case {
  int processes = 1;
  Words settings = {};

  [[nodiscard]] CommandOptions command(const fs::path& folder, const Words& more = {}) const {
    return launch(
        processes, {},
        Words{built("tests/resume_program"), "folder=" + folder.string()} + settings + more);
  }
};

void run_unbroken(const Case& one, const fs::path& folder) {
  expect_clean_end(run(one.command(folder), patient(Seconds(120))), 0);
}

int batches_in(const fs::path& folder) {
  std::ifstream file(folder / "trace.0");
  int lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

/// Kills the whole run a few times, when it has computed some more batches and then some
/// microseconds, and at last lets it end.
void run_with_kills(const Case& one, const fs::path& folder, int kills) {
  for (int i = 0; i < kills; ++i) {
    const int until = batches_in(folder) + between(1, 7);
    Command command(one.command(folder, {"pause_us=" + std::to_string(between(0, 3000))}));
    (void)eventually([&] { return batches_in(folder) >= until || !command.running(); },
                     Seconds(60));
    ::usleep(static_cast<useconds_t>(between(0, 5000)));
    command.kill_all();
    (void)command.wait();
  }
  expect_clean_end(run(one.command(folder), patient(Seconds(120))), 0);
}

void expect_same_run(const Case& one) {
  SCOPED_TRACE(std::to_string(one.processes) + " processes, " +
               testing::PrintToString(one.settings));
  const Folder unbroken;
  const Folder broken;
  run_unbroken(one, unbroken.path());
  run_with_kills(one, broken.path(), number_from_variable("ACCELERATE_RESUME_KILLS", 2));
  for (int rank = 0; rank < one.processes; ++rank) {
    const auto expected = lines_of_process(unbroken.path(), rank);
    EXPECT_GT(expected.size(), 10U);
    const auto lines = lines_of_process(broken.path(), rank);
    EXPECT_EQ(lines.size(), expected.size()) << "process " << rank;
    for (const auto& [batch, line] : expected) {
      const auto found = lines.find(batch);
      ASSERT_NE(found, lines.end()) << "batch " << batch << " of process " << rank;
      ASSERT_EQ(found->second, line) << "process " << rank;
    }
  }
}

TEST(Resume, IsExactOnOneProcess) { expect_same_run({.processes = 1}); }
TEST(Resume, IsExactWithinAnAccumulatedStep) {
  expect_same_run({.processes = 1, .settings = {"accumulate=4", "every=3", "workers=2"}});
}
TEST(Resume, IsExactOnTwoProcesses) {
  expect_same_run({.processes = 2, .settings = {"accumulate=4", "every=3", "workers=1"}});
}
TEST(Resume, IsExactWithAsynchronousSaves) {
  expect_same_run({.processes = 2, .settings = {"async=1", "every=2", "seedable=1"}});
}
TEST(Resume, IsExactOnFourProcessesWithDispatchedBatches) {
  expect_same_run({.processes = 4, .settings = {"dispatch=1", "rows=90"}});
}

/// The rows that all processes had in an epoch, in the order of batches.
std::vector<int> rows_of_epoch(const fs::path& folder, int processes, int epoch) {
  std::vector<int> rows;
  for (int rank = 0; rank < processes; ++rank) {
    for (const auto& [batch, line] : lines_of_process(folder, rank)) {
      const auto begin = line.find(" epoch ");
      if (std::atoi(line.c_str() + begin + 7) != epoch) continue;
      std::istringstream ids(line.substr(line.find(" ids") + 4));
      for (int id = 0; ids >> id;) rows.push_back(id);
    }
  }
  return rows;
}

// Every row once in the epoch that begins with some processes and ends with others.
void expect_every_row_once(int before, int after) {
  SCOPED_TRACE(std::to_string(before) + " processes, then " + std::to_string(after));
  const Folder folder;
  const Words settings = {"rows=96", "epochs=1", "every=2", "limit=99"};
  // Ends by itself after its last batch; the newest checkpoints are taken away, as if it had been
  // killed before.
  run_unbroken({before, settings}, folder.path());
  const int batches = 96 / 4 / before;
  const int kept = batches / 2 / 2;  // checkpoints, each after 2 batches
  for (const auto& entry : fs::directory_iterator(folder.path() / "checkpoints")) {
    const auto name = entry.path().filename().string();
    if (std::atoi(name.substr(name.rfind('_') + 1).c_str()) >= kept) fs::remove_all(entry.path());
  }
  std::vector<int> rows;
  for (int rank = 0; rank < before; ++rank) {
    const auto lines = lines_of_process(folder.path(), rank);
    const Folder part;
    std::ofstream file(part.path() / "trace.0");
    for (const auto& [batch, line] : lines) {
      if (batch <= kept * 2) file << line << '\n';
    }
    file.close();
    for (const int row : rows_of_epoch(part.path(), 1, 0)) rows.push_back(row);
    fs::remove(folder.path() / ("trace." + std::to_string(rank)));
  }
  ASSERT_EQ(rows.size(), static_cast<std::size_t>(kept * 2 * before * 4));
  run_unbroken({after, settings}, folder.path());
  for (const int row : rows_of_epoch(folder.path(), after, 0)) rows.push_back(row);
  EXPECT_EQ(rows.size(), 96U);
  EXPECT_EQ(std::set<int>(rows.begin(), rows.end()).size(), 96U);
}

TEST(Resume, LosesNoRowWithAnotherNumberOfProcesses) {
  expect_every_row_once(4, 2);
  expect_every_row_once(2, 4);
  expect_every_row_once(2, 1);
}

}  // namespace
}  // namespace accelerate::test
