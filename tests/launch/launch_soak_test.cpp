// Launch after launch, each disturbed in some way; nothing may be left of any.
//
// ACCELERATE_SOAK_LAUNCHES says how many (12), ACCELERATE_SOAK_SEED which ones (each run draws its
// own and names it).
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <random>

#include "launch/launching.h"
#include "support/hosts.h"

namespace accelerate::test {
namespace {

enum class Trouble {
  kNone,
  kWorkerFails,
  kWorkerKilled,
  kLauncherKilled,
  kLauncherKilledWithAStoppedWorker,
  kTerminated,
  kInterruptedTwice,
  kWorkerPaused,
  kLauncherPaused,
  kTerminatedWithAStoppedWorker,
  kCount,
};

// One launch: what it runs and what happens to it.
class Launch {
 public:
  Launch(std::mt19937& random, const Hosts* hosts) : random_(random), hosts_(hosts) {
    workers_ = between(2, 8);
    trouble_ = static_cast<Trouble>(between(0, static_cast<int>(Trouble::kCount) - 1));
    native_ = one_in(8);
    if (native_) workers_ = between(2, 3);
    Words flags = {"--shutdown_timeout", "20"};
    if (one_in(2)) flags = flags + Words{"--tee", "3", "--log_dir", folder_ / "logs"};
    if (one_in(4)) flags = flags + Words{"--max_restarts", "1"};
    auto options = launch(workers_, flags, program());
    if (hosts_ != nullptr) options.argv = hosts_->on(0, options.argv);
    for (const auto& word : options.argv) words_ += word + " ";
    command_ = std::make_unique<Command>(options);
  }

  [[nodiscard]] std::string description() const {
    return "trouble " + std::to_string(static_cast<int>(trouble_)) + " after " +
           std::to_string(delay_ms_) + " ms, " + std::to_string(workers_) + " workers: " + words_;
  }

  void run() {
    delay_ms_ = between(0, native_ ? 800 : 250);
    ::usleep(static_cast<useconds_t>(delay_ms_) * 1000);
    disturb();
    std::ofstream(folder_ / "go") << "";
    const auto outcome = command_->wait(Seconds(40));
    EXPECT_FALSE(outcome.timed_out) << description() << "\n" << outcome.text();
    EXPECT_EQ(outcome.left_behind, kNothing) << description() << "\n" << outcome.text();
    const auto& allowed = codes_.at(trouble_);
    EXPECT_TRUE(std::find(allowed.begin(), allowed.end(), outcome.shell_code()) != allowed.end())
        << description() << "\n"
        << outcome.text();
    if (hosts_ != nullptr) {
      // The last thread of a killed process closes its sockets, a moment after it looks dead.
      EXPECT_TRUE(eventually([&] { return hosts_->listening_ports(0).empty(); })) << description();
      EXPECT_TRUE(eventually([&] { return hosts_->processes(0).empty(); })) << description();
    }
  }

 private:
  int between(int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random_);
  }
  bool one_in(int n) { return between(1, n) == 1; }

  Words program() {
    Words actions;
    if (one_in(2)) actions.push_back("grandchild");
    if (one_in(3)) actions.push_back("chatter=300");
    if (one_in(4)) actions.push_back("ignore=SIGTERM");
    actions.push_back("ready=" + folder_ / "ready");
    if (native_) actions = actions + Words{"join", "sum"};
    actions.push_back("until=" + folder_ / "go");
    if (trouble_ == Trouble::kWorkerFails) {
      actions.push_back(std::to_string(between(0, workers_ - 1)) + ":exit=3");
    }
    // Who ignores SIGTERM ends by itself, long before the launcher would kill it.
    return native_ ? worker(actions) : probe(actions);
  }

  // A worker that has said it is there; 0 when none has yet.
  pid_t some_worker() {
    pid_t pid = 0;
    const int rank = between(0, workers_ - 1);
    std::ifstream(folder_ / ("ready." + std::to_string(rank))) >> pid;
    return pid;
  }

  // Only what belongs to this launch; the number may be somebody else's by now.
  void signal_worker(pid_t pid, int signal) const {
    const auto own = command_->processes();
    if (pid > 0 && std::find(own.begin(), own.end(), pid) != own.end()) ::kill(pid, signal);
  }

  void pause(int milliseconds) { ::usleep(static_cast<useconds_t>(milliseconds) * 1000); }

  void disturb() {
    const pid_t victim = some_worker();
    switch (trouble_) {
      case Trouble::kNone:
      case Trouble::kWorkerFails:
      case Trouble::kCount:
        return;
      case Trouble::kWorkerKilled:
        return signal_worker(victim, SIGKILL);
      case Trouble::kLauncherKilledWithAStoppedWorker:
        signal_worker(victim, SIGSTOP);
        return command_->signal(SIGKILL);
      case Trouble::kLauncherKilled:
        return command_->signal(SIGKILL);
      case Trouble::kTerminatedWithAStoppedWorker:
        signal_worker(victim, SIGSTOP);
        return command_->signal(SIGTERM);
      case Trouble::kTerminated:
        return command_->signal(SIGTERM);
      case Trouble::kInterruptedTwice:
        command_->signal(SIGINT);
        pause(between(0, 30));
        return command_->signal(SIGINT);
      case Trouble::kWorkerPaused:
        signal_worker(victim, SIGSTOP);
        pause(between(0, 200));
        return signal_worker(victim, SIGCONT);
      case Trouble::kLauncherPaused:
        command_->signal(SIGSTOP);
        pause(between(0, 200));
        return command_->signal(SIGCONT);
    }
  }

  std::mt19937& random_;
  const Hosts* hosts_;
  Folder folder_;
  int workers_ = 2;
  int delay_ms_ = 0;
  bool native_ = false;
  Trouble trouble_ = Trouble::kNone;
  std::string words_;
  std::unique_ptr<Command> command_;

  // What the launcher may end with. A signal that comes before the launcher is ready ends it by
  // itself; a worker that is gone before it could be killed, or after it ended, does no harm; peers
  // of a killed one may lose it first (70), and a worker may be started anew.
  const std::map<Trouble, std::vector<int>> codes_ = {
      {Trouble::kNone, {0}},
      {Trouble::kWorkerFails, {3}},
      {Trouble::kWorkerKilled, {137, 0}},
      {Trouble::kLauncherKilled, {137}},
      {Trouble::kLauncherKilledWithAStoppedWorker, {137}},
      {Trouble::kTerminated, {143, 0}},
      {Trouble::kInterruptedTwice, {130, 0}},
      {Trouble::kWorkerPaused, {0}},
      {Trouble::kLauncherPaused, {0}},
      {Trouble::kTerminatedWithAStoppedWorker, {143, 0}},
  };
};

TEST(LaunchSoak, LeavesNothingWhateverHappens) {
  const int launches = number_from_variable("ACCELERATE_SOAK_LAUNCHES", 12);
  const int seed = number_from_variable("ACCELERATE_SOAK_SEED",
                                        static_cast<int>(std::random_device{}() % 1000000));
  std::mt19937 random(static_cast<unsigned>(seed));
  // A network of its own, where there can be one: then every port that is left is ours.
  std::unique_ptr<Hosts> hosts;
  if (!Hosts::why_not()) hosts = std::make_unique<Hosts>(1);
  std::printf("%d launches, ACCELERATE_SOAK_SEED=%d\n", launches, seed);
  for (int i = 0; i < launches && !HasFailure(); ++i) {
    SCOPED_TRACE("launch " + std::to_string(i) +
                 " of ACCELERATE_SOAK_SEED=" + std::to_string(seed));
    Launch(random, hosts.get()).run();
  }
}

}  // namespace
}  // namespace accelerate::test
