// Programs that save all the time and are killed: the newest complete checkpoint is never lost.
//
// ACCELERATE_KILLS says how often (4), ACCELERATE_KILL_SEED when (each run draws its own and names
// it).
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <sstream>

#include "launch/launching.h"

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;

int kills() { return number_from_variable("ACCELERATE_KILLS", 4); }

int between(int least, int most) {
  static std::mt19937 engine = [] {
    const int seed = number_from_variable("ACCELERATE_KILL_SEED",
                                          static_cast<int>(std::random_device{}() % 1000000));
    std::printf("ACCELERATE_KILL_SEED=%d\n", seed);
    return std::mt19937(static_cast<unsigned>(seed));
  }();
  return std::uniform_int_distribution<int>(least, most)(engine);
}

/// What the program has reported, as (what, rest of the line).
std::vector<std::pair<std::string, std::string>> report_in(const fs::path& folder) {
  std::vector<std::pair<std::string, std::string>> lines;
  std::ifstream file(folder / "report");
  for (std::string line; std::getline(file, line);) {
    const auto space = line.find(' ');
    lines.emplace_back(line.substr(0, space), line.substr(space + 1));
  }
  return lines;
}

fs::path newest_checkpoint(const fs::path& checkpoints) {
  std::map<int, fs::path> by_number;
  for (const auto& entry : fs::directory_iterator(checkpoints)) {
    const auto name = entry.path().filename().string();
    by_number[std::atoi(name.substr(name.find('_') + 1).c_str())] = entry.path();
  }
  return by_number.empty() ? fs::path() : by_number.rbegin()->second;
}

/// One program that is started, killed and started again in the same folder.
class Victim {
 public:
  Victim(int processes, Words settings) : processes_(processes), settings_(std::move(settings)) {}

  [[nodiscard]] bool by_name() const { return contains(settings_, "explicit=1"); }
  [[nodiscard]] std::string description() const {
    return std::to_string(processes_) + " processes, " + testing::PrintToString(settings_);
  }

  /// Starts it, lets it load and save at least once, and kills all of it or one rank.
  void kill_once() {
    SCOPED_TRACE(description());
    const auto before = report_in(folder_.path()).size();
    Command command(launching({}));
    const auto has_published = [&] {
      const auto lines = report_in(folder_.path());
      return lines.size() > before && lines.back().first == "published";
    };
    ASSERT_TRUE(eventually([&] { return has_published() || !command.running(); }, Seconds(90)));
    ASSERT_TRUE(has_published()) << command.output() << command.error();
    ::usleep(static_cast<useconds_t>(between(0, 150'000)));
    if (processes_ > 1 && between(0, 1) == 0) {
      const auto rank = std::to_string(between(0, processes_ - 1));
      const auto pid = rest_of_line(command.output(), "rank " + rank + " is process ");
      ASSERT_EQ(::kill(std::atoi(pid.c_str()), SIGKILL), 0);
    } else {
      command.kill_all();
    }
    const auto outcome = command.wait(patient(Seconds(60)));
    EXPECT_FALSE(outcome.timed_out) << outcome.text();
    look_at_reports(before);
    if (!by_name()) expect_newest_verifies();
  }

  /// The last kill had no consequences either.
  void end() {
    SCOPED_TRACE(description());
    const auto before = report_in(folder_.path()).size();
    expect_clean_end(run(launching({"saves=2"}), patient(Seconds(90))), 0);
    look_at_reports(before);
    if (!by_name()) expect_newest_verifies();
  }

 private:
  [[nodiscard]] CommandOptions launching(const Words& more) const {
    return launch(processes_, {},
                  Words{built("tests/saving_program"), "folder=" + folder_.path().string(),
                        "kilobytes=4000", "number=" + std::to_string(published_)} +
                      settings_ + more);
  }

  void look_at_reports(std::size_t from) {
    const auto lines = report_in(folder_.path());
    for (std::size_t i = from; i < lines.size(); ++i) {
      const auto& [what, text] = lines[i];
      if (what == "published") published_ = std::atoi(text.c_str());
      if (what == "loaded") {
        EXPECT_GE(std::atoi(text.c_str()), published_) << "older than published";
      }
      EXPECT_NE(what, "leftover") << text;
      if (what != "damaged") continue;
      // Only where files are replaced one by one, and a file is named.
      ++damaged;
      EXPECT_TRUE(by_name() && contains(text, "' is damaged: '")) << text;
    }
  }

  void expect_newest_verifies() const {
    const auto newest = newest_checkpoint(folder_.path() / "saved" / "checkpoints");
    const auto outcome = run(
        {.argv = {built("bin/accelerate"), "checkpoint", "verify", newest.string()}}, Seconds(30));
    EXPECT_EQ(outcome.code, 0) << outcome.text();
  }

  int processes_;
  Words settings_;
  Folder folder_;
  int published_ = 0;

 public:
  /// How often the folder was found to be a mixture.
  int damaged = 0;
};

void kill_in_turns(const std::vector<std::pair<int, Words>>& programs, int times) {
  std::vector<std::unique_ptr<Victim>> victims;
  for (const auto& [processes, settings] : programs) {
    victims.push_back(std::make_unique<Victim>(processes, settings));
  }
  for (int i = 0; i < times && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE("kill " + std::to_string(i));
    victims[static_cast<std::size_t>(i) % victims.size()]->kill_once();
  }
  int damaged = 0;
  for (std::size_t i = 0; i < victims.size() && i < static_cast<std::size_t>(times); ++i) {
    victims[i]->end();
    damaged += victims[i]->damaged;
  }
  std::printf("%d kills, %d mixtures detected\n", times, damaged);
}

TEST(SaveKills, NeverLoseTheNewestCheckpointWithAutomaticNames) {
  kill_in_turns({{1, {}}, {2, {}}, {1, {"async=1"}}, {2, {"async=1"}}}, kills());
}

TEST(SaveKills, LeaveAFolderThatTheCallerNamedWholeOrDetectedAsAMixture) {
  kill_in_turns({{2, {"explicit=1"}},
                 {1, {"explicit=1"}},
                 {2, {"explicit=1", "async=1"}},
                 {1, {"explicit=1", "async=1"}}},
                (kills() + 3) / 4);
}

}  // namespace
}  // namespace accelerate::test
