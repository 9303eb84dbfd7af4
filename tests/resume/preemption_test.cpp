// A run that is asked to stop saves its state, ends with 75 and goes on exactly there.
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>
#include <optional>

#include "resume/resuming.h"
#include "support/hosts.h"

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;

const std::string kPreempted = "accelerate: preempted: the workers saved their state, exit code 75";

enum class Moment { kBeforeTheFirstBatch, kInTheMiddle, kWhileItSaves };

// The pid of a worker that can be preempted; 0 if there is none yet.
pid_t worker_pid(const fs::path& folder, int rank) {
  pid_t pid = 0;
  std::ifstream(folder / ("pid." + std::to_string(rank))) >> pid;
  return pid;
}

[[nodiscard]] bool is_at(Moment moment, const fs::path& folder, int processes) {
  for (int rank = 0; rank < processes; ++rank) {
    if (worker_pid(folder, rank) == 0) return false;
  }
  switch (moment) {
    case Moment::kBeforeTheFirstBatch:
      return true;
    case Moment::kInTheMiddle:
      return batches_in(folder) >= 5;
    case Moment::kWhileItSaves:
      // On a busy machine a save may come and go unseen: then between two of them.
      return (batches_in(folder) >= 3 && fs::exists(folder / ".accelerate_staging")) ||
             batches_in(folder) >= 10;
  }
  return false;
}

// Slow enough for a signal to come in time. All processes know of it within 0.2 s.
const Words kSlow = {"preemption=1", "pause_us=20000"};
// Saving takes most of the time, and changes nothing.
const Words kWithoutSaves = {"every=1000"};
constexpr int kBatches = 40;

/// A run in which each process has kBatches batches.
Case training(int processes, const Words& settings = {}) {
  return {processes, Words{"rows=" + std::to_string(kBatches / 2 * 4 * processes)} + settings};
}

struct Interruption {
  Case run;
  int signal = SIGTERM;
  /// Who gets it: a worker, or the launcher for nullopt.
  std::optional<int> rank = std::nullopt;
  Moment moment = Moment::kInTheMiddle;
  Words flags = {};
};

/// Starts the run, sends the signal at its moment and waits for the end.
Outcome interrupted(const Interruption& one, const fs::path& folder) {
  Command command(launch(one.run.processes, one.flags, one.run.program(folder, kSlow)));
  const bool there =
      eventually([&] { return is_at(one.moment, folder, one.run.processes); }, Seconds(60));
  EXPECT_TRUE(there) << command.output() << command.error();
  if (one.rank) {
    ::kill(worker_pid(folder, *one.rank), one.signal);
  } else {
    command.signal(one.signal);
  }
  return command.wait(patient(Seconds(60)));
}

void expect_preempted(const Outcome& outcome, int processes) {
  expect_clean_end(outcome, 75);
  EXPECT_EQ(count_of(outcome.error, "the state is saved in"), 1) << outcome.text();
  // With one process the launcher has become the program.
  EXPECT_EQ(count_of(outcome.error, kPreempted), processes > 1 ? 1 : 0) << outcome.text();
  EXPECT_FALSE(contains(outcome.text(), "FAILED")) << outcome.text();
  EXPECT_FALSE(contains(outcome.text(), "terminated by launcher")) << outcome.text();
}

void run_to_its_end(const Case& run, const fs::path& folder) {
  run_unbroken({run.processes, run.settings + kWithoutSaves, run.name}, folder);
}

/// The run went on where it had stopped: no batch is missing, none was computed twice.
void expect_went_on(int processes, const fs::path& folder, const fs::path& unbroken) {
  EXPECT_EQ(batches_in(folder), kBatches);
  expect_same_traces(processes, unbroken, folder);
  EXPECT_FALSE(fs::exists(folder / ".accelerate_staging"));
}

void expect_exact_resume(const Interruption& one) {
  const Folder unbroken;
  const Folder folder;
  run_to_its_end(one.run, unbroken.path());
  expect_preempted(interrupted(one, folder.path()), one.run.processes);
  EXPECT_GT(batches_in(folder.path()), 0);
  EXPECT_LT(batches_in(folder.path()), kBatches);
  run_to_its_end(one.run, folder.path());
  expect_went_on(one.run.processes, folder.path(), unbroken.path());
}

TEST(Preemption, OfOneProcessInTheMiddle) { expect_exact_resume({.run = training(1)}); }
TEST(Preemption, OfOneProcessBeforeItsFirstBatch) {
  expect_exact_resume({.run = training(1, {"accumulate=4", "workers=2"}),
                       .signal = SIGUSR1,
                       .moment = Moment::kBeforeTheFirstBatch});
}
TEST(Preemption, OfOneProcessWhileItSavesAsynchronously) {
  expect_exact_resume(
      {.run = training(1, {"async=1", "every=1"}), .moment = Moment::kWhileItSaves});
}
TEST(Preemption, OfTwoProcessesBySigtermToTheLauncher) {
  expect_exact_resume({.run = training(2, {"accumulate=4", "workers=2"})});
}
TEST(Preemption, OfTwoProcessesBySigusr1ToTheLauncher) {
  expect_exact_resume({.run = training(2, {"workers=2"}), .signal = SIGUSR1});
}
TEST(Preemption, OfTwoProcessesBySigusr1ToOneOfThemBeforeTheFirstBatch) {
  expect_exact_resume({.run = training(2, {"accumulate=4", "workers=2"}),
                       .signal = SIGUSR1,
                       .rank = 1,
                       .moment = Moment::kBeforeTheFirstBatch});
}
// Both processes have all batches.
TEST(Preemption, OfAModelThatIsCutOverTwoProcesses) {
  for (const std::string mode : {"tp", "pp", "cp", "sp"}) {
    SCOPED_TRACE(mode);
    expect_exact_resume({.run = {2, {"rows=80", "mode=" + mode}, "cut_program"}});
  }
}
TEST(Preemption, OfTwoProcessesWhileTheySaveAsynchronously) {
  expect_exact_resume({.run = training(2, {"async=1", "every=1"}),
                       .signal = SIGUSR1,
                       .rank = 1,
                       .moment = Moment::kWhileItSaves});
}

TEST(Preemption, SavesThoughTheLastAsynchronousSaveHasFailed) {
  const Folder folder;
  Command command(training(1, {"async=1", "every=20"}).command(folder.path(), kSlow));
  ASSERT_TRUE(eventually([&] { return batches_in(folder.path()) > 0; }, Seconds(60)));
  // In the way of the checkpoint of batch 20.
  std::ofstream(folder / "checkpoints") << "a file";
  ASSERT_TRUE(eventually([&] { return batches_in(folder.path()) >= 30; }, Seconds(60)));
  fs::remove(folder / "checkpoints");
  command.signal(SIGTERM);
  const auto outcome = command.wait(patient(Seconds(60)));
  expect_preempted(outcome, 1);
  EXPECT_EQ(count_of(outcome.error, "The last asynchronous save_state failed"), 1)
      << outcome.text();
}

TEST(Preemption, WaitsForTheAsynchronousSaveOfAnotherAccelerator) {
  const Folder folder;
  const Folder beside;
  const auto outcome =
      run(training(1, {"preemption=1", "every=1000"})
              .command(folder.path(), {"signal_at=5", "beside=" + beside.path().string()}),
          patient(Seconds(60)));
  expect_preempted(outcome, 1);
  EXPECT_TRUE(fs::exists(beside / "checkpoints/checkpoint_0/accelerate_state.json"));
  EXPECT_FALSE(fs::exists(beside / ".accelerate_staging"));
}

// What a process had in each batch, without what it computed.
std::vector<std::string> samples_of_process(const fs::path& folder, int rank) {
  std::vector<std::string> samples;
  for (const auto& [batch, line] : lines_of_process(folder, rank)) {
    samples.push_back(line.substr(0, line.find(" loss")));
  }
  return samples;
}

TEST(Preemption, OfProcessesWithUnevenInputsComesAfterTheJoin) {
  // 5 batches for process 0 and 4 for process 1 in each of 12 epochs. Their optimizers have taken
  // different numbers of steps, and those of process 0 are saved: what they compute differs.
  const Case joined{2, {"uneven=1", "rows=18", "batch=2", "epochs=12", "every=1000"}};
  const Folder unbroken;
  const Folder folder;
  run_unbroken(joined, unbroken.path());
  const auto outcome =
      run(joined.command(folder.path(), {"preemption=1", "signal_at=6", "pause_us=20000"}),
          patient(Seconds(60)));
  expect_preempted(outcome, 2);
  EXPECT_GT(batches_in(folder.path()), 5);
  EXPECT_LT(batches_in(folder.path()), 12 * 5);
  EXPECT_EQ(batches_in(folder.path()) % 5, 0) << "it stopped inside of a join";
  run_unbroken(joined, folder.path());
  EXPECT_EQ(batches_in(folder.path()), 12 * 5);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(samples_of_process(folder.path(), rank), samples_of_process(unbroken.path(), rank));
  }
}

TEST(Preemption, AtTheEndOfARunStopsTheNextOne) {
  // The signal comes in the last of 8 batches, and process 0 names a step that never comes. The
  // next run in the same processes agrees for itself.
  const Folder first;
  const Folder second;
  const Case run_twice{2, {"rows=32", "every=1000", "preemption=1", "pause_us=250000"}};
  const auto outcome =
      run(run_twice.command(first.path(), {"signal_at=8", "then=" + second.path().string()}),
          patient(Seconds(60)));
  expect_preempted(outcome, 2);
  EXPECT_EQ(batches_in(first.path()), 8);
  EXPECT_EQ(batches_in(second.path()), 2);
}

TEST(Preemption, LeavesItToTheOthersToSayThatAProcessDied) {
  // Process 0 has the store. It is killed while process 1 rests at the end of a batch.
  const Folder folder;
  Command command(
      training(2).command(folder.path(), {"preemption=1", "pause_us=250000", "every=1000"}));
  ASSERT_TRUE(eventually([&] { return batches_in(folder.path()) >= 2; }, Seconds(60)));
  ::kill(worker_pid(folder.path(), 0), SIGKILL);
  const auto outcome = command.wait(patient(Seconds(60)));
  expect_clean_end(outcome, 128 + SIGKILL);
  EXPECT_TRUE(contains(rest_of_line(outcome.error, "[default1]:rank 0 ("), ") died "))
      << outcome.text();
}

TEST(Preemption, OfAWorkerIsFollowedByARestartThatResumes) {
  const Folder unbroken;
  const Folder folder;
  const auto run = training(2, {"accumulate=4"});
  run_to_its_end(run, unbroken.path());
  const auto outcome = interrupted(
      {.run = run, .signal = SIGUSR1, .rank = 0, .flags = {"--max_restarts", "1"}}, folder.path());
  expect_clean_end(outcome, 0);
  EXPECT_TRUE(contains(outcome.error, "ended with exit code 75 (preempted); restart 1 of 1"))
      << outcome.text();
  EXPECT_FALSE(contains(outcome.error, kPreempted)) << outcome.text();
  expect_went_on(2, folder.path(), unbroken.path());
}

TEST(Preemption, OfTheLauncherIsNotFollowedByARestart) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const Folder folder;
    const auto outcome = interrupted(
        {.run = training(2), .signal = signal, .flags = {"--max_restarts", "3"}}, folder.path());
    expect_preempted(outcome, 2);
    EXPECT_FALSE(contains(outcome.error, "restart")) << outcome.text();
  }
}

/// One launcher with one worker on each of two hosts.
struct TwoLaunchers {
  TwoLaunchers(const Hosts& hosts, const fs::path& folder, const Words& more)
      : first(on(hosts, 0, folder, more)), second(on(hosts, 1, folder, more)) {}

  static CommandOptions on(const Hosts& hosts, int host, const fs::path& folder,
                           const Words& more) {
    const Words flags = {"--num_machines",      "2",
                         "--machine_rank",      std::to_string(host),
                         "--main_process_ip",   Hosts::address(0),
                         "--main_process_port", "29511"};
    return {.argv = hosts.on(host, launch_words(2, flags, training(2).program(folder, more)))};
  }
  void expect_success() {
    expect_clean_end(first.wait(patient(Seconds(60))), 0);
    expect_clean_end(second.wait(patient(Seconds(60))), 0);
  }

  Command first;
  Command second;
};

TEST(Preemption, OfAWorkerOrALauncherReachesTheOtherHost) {
  ACCELERATE_SKIP_WITHOUT_HOSTS();
  const Hosts hosts(2);
  const Folder unbroken;
  TwoLaunchers(hosts, unbroken.path(), kWithoutSaves).expect_success();
  const Folder folder;
  const auto expect_both_saved = [&](const std::function<void(TwoLaunchers&)>& interrupt) {
    for (const int rank : {0, 1}) fs::remove(folder.path() / ("pid." + std::to_string(rank)));
    const int before = batches_in(folder.path());
    TwoLaunchers job(hosts, folder.path(), kSlow);
    ASSERT_TRUE(eventually(
        [&] { return worker_pid(folder.path(), 1) != 0 && batches_in(folder.path()) > before; },
        Seconds(60)))
        << job.first.error() << job.second.error();
    interrupt(job);
    expect_preempted(job.first.wait(patient(Seconds(60))), 2);
    const auto outcome = job.second.wait(patient(Seconds(60)));
    expect_clean_end(outcome, 75);
    EXPECT_EQ(count_of(outcome.error, kPreempted), 1) << outcome.text();
  };
  expect_both_saved([&](auto&) { ::kill(worker_pid(folder.path(), 1), SIGUSR1); });
  expect_both_saved([&](auto& job) { job.second.signal(SIGUSR1); });
  expect_both_saved([&](auto& job) { job.second.signal(SIGTERM); });
  TwoLaunchers(hosts, folder.path(), kWithoutSaves).expect_success();
  expect_went_on(2, folder.path(), unbroken.path());
}

}  // namespace
}  // namespace accelerate::test
