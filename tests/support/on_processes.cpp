#include "support/on_processes.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string_view>

#include "accelerate/state.h"
#include "core/exception_text.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using Clock = detail::ProcessSet::Clock;
using detail::str;

// "<rank>:<ordinal>": which call of the test this process shall run, and as which rank.
constexpr const char* kMarker = "ACCELERATE_TEST_RANK_OF_CALL";
constexpr int kNeverReached = 86;
// gtest_main says it whatever the flags are.
constexpr std::string_view kGreetingOfGtest = "Running main() from ";

struct Assignment {
  int rank = 0;
  int ordinal = 0;
};

std::optional<Assignment> assignment() {
  static const auto value = []() -> std::optional<Assignment> {
    const char* text = std::getenv(kMarker);
    if (text == nullptr) return std::nullopt;
    const auto parts = detail::split(text, ':');
    return Assignment{std::stoi(parts.at(0)), std::stoi(parts.at(1))};
  }();
  return value;
}

// A rank whose test ends before the call it was started for must not look like a success.
const bool kWatchesForTheEnd = [] {
  if (assignment()) {
    std::atexit([] {
      std::fputs("The test ended before it reached its call of on_processes.\n", stderr);
      std::fflush(nullptr);
      ::_exit(kNeverReached);
    });
  }
  return true;
}();

// Numbers the calls within one test, also when gtest repeats it.
int next_ordinal() {
  static int ordinal = 0;
  struct Restart : ::testing::EmptyTestEventListener {
    void OnTestStart(const ::testing::TestInfo&) override { ordinal = 0; }
  };
  static const bool installed = [] {
    ::testing::UnitTest::GetInstance()->listeners().Append(new Restart);
    return true;
  }();
  static_cast<void>(installed);
  return ordinal++;
}

const ::testing::TestInfo& running_test() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  if (info == nullptr) throw std::logic_error("on_processes must be called inside a test.");
  return *info;
}

int count_failures() {
  const auto& result = *running_test().result();
  int failures = 0;
  for (int i = 0; i < result.total_part_count(); ++i) {
    if (result.GetTestPartResult(i).failed()) ++failures;
  }
  return failures;
}

[[noreturn]] void run_rank(const std::function<void()>& f) {
  // Failures before the call are the parent's to report.
  const int failures_before = count_failures();
  bool threw = false;
  try {
    f();
    // The others may still talk to us: say goodbye before the connection closes.
    if (PartialState::initialized()) PartialState().destroy_process_group();
  } catch (...) {
    threw = true;
    std::cerr << "left by an exception: " << detail::current_exception_text().text() << std::endl;
  }
  const bool failed = threw || count_failures() > failures_before;
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  ::_exit(failed ? 1 : 0);
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "accelerate-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

using Changes = std::vector<std::pair<std::string, std::optional<std::string>>>;

Changes variables_of(int rank, int n, int ordinal, const OnProcessesOptions& options,
                     const std::filesystem::path& store_file) {
  const int per_host = options.processes_per_host.value_or(n);
  const int host = rank / per_host;
  const int on_this_host = std::min(per_host, n - host * per_host);
  Changes changes = {
      {kMarker, str(rank, ":", ordinal)},
      {"RANK", str(rank)},
      {"WORLD_SIZE", str(n)},
      {"LOCAL_RANK", str(rank % per_host)},
      {"LOCAL_WORLD_SIZE", str(on_this_host)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"ACCELERATE_USE_CPU", "1"},
      {"OMP_NUM_THREADS", "1"},
      // What the caller of the test binary asked gtest for is not meant for the ranks.
      {"GTEST_TOTAL_SHARDS", std::nullopt},
      {"GTEST_SHARD_INDEX", std::nullopt},
      {"GTEST_SHARD_STATUS_FILE", std::nullopt},
      {"GTEST_OUTPUT", std::nullopt},
      {"GTEST_REPEAT", std::nullopt},
      {"GTEST_FILTER", std::nullopt},
      {"XML_OUTPUT_FILE", std::nullopt},
      {"TESTBRIDGE_TEST_ONLY", std::nullopt},
      {"ACCELERATE_DEBUG_RDV_FILE", std::nullopt},
      {"ACCELERATE_MASTER_LISTEN_FD", std::nullopt},
  };
  if (options.rendezvous) changes.emplace_back("ACCELERATE_DEBUG_RDV_FILE", store_file.string());
  if (options.listen_fd && rank == 0) {
    changes.emplace_back("ACCELERATE_MASTER_LISTEN_FD", str(*options.listen_fd));
  }
  changes.insert(changes.end(), options.environment.begin(), options.environment.end());
  return changes;
}

std::vector<std::string> command_for_ranks() {
  const auto& test = running_test();
  return {std::filesystem::read_symlink("/proc/self/exe").string(),
          str("--gtest_filter=", test.test_suite_name(), ".", test.name()),
          "--gtest_brief=1",
          "--gtest_also_run_disabled_tests",
          "--gtest_color=no",
          "--gtest_repeat=1",
          "--gtest_catch_exceptions=1"};
}

std::string report(std::size_t rank, const RankOutcome& outcome) {
  const detail::ExitStatus status{outcome.exit_code, outcome.signal};
  std::string how = str("ended with ", status.text());
  if (outcome.timed_out) {
    how = "was killed at the time limit";
  }
  std::string text = str("rank ", rank, " ", how, " after ", outcome.seconds, " s");
  if (outcome.output.empty()) return text + "; it wrote nothing.";
  text += "; it wrote:\n";
  for (const auto& line : detail::split(outcome.output, '\n')) {
    if (!line.empty()) text += str("  [rank ", rank, "] ", line, "\n");
  }
  return text;
}

/// They do not end by themselves, and nobody is left who could continue them.
bool only_stopped_ones_run(const detail::ProcessSet& processes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (!processes.running(i)) continue;
    std::ifstream file(str("/proc/", processes.pid(i), "/stat"));
    std::string stat;
    std::getline(file, stat);
    const auto name_ends = stat.rfind(") ");
    if (name_ends == std::string::npos || stat[name_ends + 2] != 'T') return false;
  }
  return true;
}

}  // namespace

namespace harness {

std::vector<RankOutcome> run_processes(int n, const OnProcessesOptions& options,
                                       const std::function<void()>& f) {
  const int ordinal = next_ordinal();
  std::vector<RankOutcome> outcomes(static_cast<std::size_t>(n));
  if (const auto mine = assignment()) {
    if (mine->ordinal == ordinal) run_rank(f);
    return outcomes;  // an earlier call, which other processes have run
  }

  const TemporaryFolder folder;
  detail::ProcessSet processes(
      [&](std::size_t rank, detail::ProcessSet::Stream, std::string_view line) {
        if (!line.starts_with(kGreetingOfGtest)) outcomes[rank].output.append(line).append("\n");
      });
  const auto command = command_for_ranks();
  for (int rank = 0; rank < n; ++rank) {
    const auto changes = variables_of(rank, n, ordinal, options, folder.path() / "store");
    std::vector<int> inherit;
    if (options.listen_fd && rank == 0) inherit.push_back(*options.listen_fd);
    const bool wrapped = options.started_by != nullptr;
    processes.spawn({.argv = wrapped ? options.started_by(rank, command) : command,
                     .program = wrapped ? "" : "/proc/self/exe",
                     .environment = detail::environment_with(changes),
                     .output = detail::StreamTarget::kPipe,
                     .error = detail::StreamTarget::kWithOutput,
                     .inherit = std::move(inherit)});
  }
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(test::patient(options.timeout));
  while (!processes.wait_all(std::min(deadline, Clock::now() + std::chrono::milliseconds(250)))) {
    if (Clock::now() < deadline && !only_stopped_ones_run(processes, outcomes.size())) continue;
    for (std::size_t i = 0; i < outcomes.size(); ++i) outcomes[i].timed_out = processes.running(i);
    processes.signal_all(SIGKILL);
    static_cast<void>(processes.wait_all(Clock::time_point::max()));
  }
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    outcomes[i].exit_code = processes.status(i).code;
    outcomes[i].signal = processes.status(i).signal;
    outcomes[i].seconds = processes.elapsed(i).count();
  }
  return outcomes;
}

void expect_success(const std::vector<RankOutcome>& outcomes) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank].ok()) ADD_FAILURE() << report(rank, outcomes[rank]);
  }
}

}  // namespace harness

bool in_child_process() { return assignment().has_value(); }

}  // namespace accelerate
