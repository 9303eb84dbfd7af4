// A job that Slurm ends and starts again goes on where it was.
#include <gtest/gtest.h>

#include <chrono>
#include <iterator>
#include <memory>
#include <thread>

#include "resume/resuming.h"
#include "support/hosts.h"
#include "support/slurm.h"

namespace accelerate::test {
namespace {

constexpr int kBatches = 40;
const Case kTraining = {.processes = 2, .settings = {"rows=160"}};

class PreemptionBySlurm : public WithSlurm {
 protected:
  /// A launcher on each of two nodes.
  static Words launchers(const Folder& folder, const Words& more) {
    return Words{"-N2",
                 "-n2",
                 "--ntasks-per-node=1",
                 built("bin/accelerate"),
                 "launch",
                 "--cpu",
                 "--num_processes",
                 "2",
                 "--num_cpu_threads_per_process",
                 "1"} +
           kTraining.program(folder.path(), more);
  }
  /// Submits a job that runs `launchers`, slowly the first time, and then `last`. Returns its id
  /// when it has computed some batches.
  std::string submit(const std::string& last) {
    std::ofstream script(folder_ / "job");
    script << "#!/bin/sh\n#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append\nsrun";
    for (const auto& word : launchers(folder_, {"preemption=1"})) script << " '" << word << "'";
    script << " pause_us=${SLURM_RESTART_COUNT:-200000}\n" << last << "\n";
    script.close();
    const auto outcome = command({"sbatch", "--parsable", "--output", folder_ / "out",  //
                                  folder_ / "job"});
    EXPECT_TRUE(eventually([&] { return batches_in(folder_.path()) >= 3; }, Seconds(60)))
        << outcome.text() << output();
    return outcome.output.substr(0, outcome.output.find('\n'));
  }
  static Outcome command(Words words) {
    words[0] = "/usr/bin/" + words[0];
    return run(slurm->command(words));
  }
  [[nodiscard]] std::string output() const {
    std::ifstream file(folder_ / "out");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void expect_to_go_on_after_requeue(const std::string& id) const {
    const auto is_queued = [&] {
      return contains(command({"scontrol", "show", "job", id}).output, "JobState=PENDING");
    };
    ASSERT_TRUE(eventually(is_queued, Seconds(30))) << output();
    const int saved_at = batches_in(folder_.path());
    EXPECT_LT(saved_at, kBatches);
    EXPECT_EQ(count_of(output(), "the state is saved in"), 1) << output();
    EXPECT_EQ(count_of(output(), "accelerate: preempted: the workers saved their state"), 2)
        << output();
    // Slurm would wait until the credential of the first start is no longer valid, two minutes. It
    // tells credentials apart by whole seconds: one of the second in which the first was revoked
    // counts as revoked, and the job fails.
    std::this_thread::sleep_for(std::chrono::seconds(2));
    (void)command({"scontrol", "update", "JobId=" + id, "StartTime=now"});
    // A busy controller may not answer, which is no end of the job.
    const auto is_over = [&] {
      const auto queue = command({"squeue", "--noheader"});
      return queue.code == 0 && queue.output.empty();
    };
    ASSERT_TRUE(eventually(is_over, Seconds(60))) << output();
    EXPECT_EQ(batches_in(folder_.path()), kBatches)
        << output() << command({"scontrol", "show", "job", id}).text() << slurm->logs();
    const Folder unbroken;
    const auto outcome =
        run(slurm->srun(launchers(unbroken, {"every=1000"})), patient(Seconds(60)));
    expect_clean_end(outcome, 0);
    expect_same_traces(2, unbroken.path(), folder_.path());
  }

  Folder folder_;
};

TEST_F(PreemptionBySlurm, SavesWhenTheJobIsRequeued) {
  const auto id = submit("");
  // SIGTERM, and SIGKILL after KillWait.
  EXPECT_EQ(command({"scontrol", "requeue", id}).code, 0);
  expect_to_go_on_after_requeue(id);
}

TEST_F(PreemptionBySlurm, SavesOnSigusr1AndTheJobRequeuesItself) {
  const auto id = submit("[ $? != 75 ] || scontrol requeue $SLURM_JOB_ID");
  // What --signal=USR1@60 does a minute before the time is up.
  EXPECT_EQ(command({"scancel", "--signal=USR1", id}).code, 0);
  expect_to_go_on_after_requeue(id);
}

}  // namespace
}  // namespace accelerate::test
