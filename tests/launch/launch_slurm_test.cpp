// Worlds under a real Slurm of two nodes, with and without our launcher.
#include <gtest/gtest.h>

#include <fstream>
#include <memory>

#include "launch/launching.h"
#include "support/hosts.h"
#include "support/slurm.h"

namespace accelerate::test {
namespace {

const std::string kWorker = built("tests/launch_worker");
const std::string kAccelerate = built("bin/accelerate");

class SlurmTest : public WithSlurm {
 protected:
  static Outcome srun(const Words& arguments) {
    auto options = slurm->srun(arguments);
    options.environment.emplace_back("ACCELERATE_USE_CPU", "1");
    options.environment.emplace_back("OMP_NUM_THREADS", "1");
    return run(options, Seconds(60));
  }
};

TEST_F(SlurmTest, StartsAWorldWithoutOurLauncherAndWithoutAnySetting) {
  const auto outcome =
      srun({"-N2", "-n4", "--ntasks-per-node=2", kWorker, "join", "facts", "gather"});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  const std::string met = ", master 10.77.0.1";
  EXPECT_EQ(sorted_lines(outcome.output),
            (Words{"gathered 0 1 2 3", "gathered 0 1 2 3", "gathered 0 1 2 3", "gathered 0 1 2 3",
                   "rank 0 of 4, local 0, host n1" + met, "rank 1 of 4, local 1, host n1" + met,
                   "rank 2 of 4, local 0, host n2" + met, "rank 3 of 4, local 1, host n2" + met}))
      << outcome.text();
}

TEST_F(SlurmTest, StartsOneLauncherPerNodeWhichFindsItsPlaceByItself) {
  const auto outcome =
      srun(Words{"-N2", "-n2", "--ntasks-per-node=1", kAccelerate, "launch", "--cpu",
                 "--num_processes", "4", kWorker, "join", "facts", "gather"});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "gathered 0 1 2 3"), 4) << outcome.text();
  for (const std::string fact :
       {"rank 0 of 4, local 0, host n1", "[default1]:rank 1 of 4, local 1, host n1",
        "[default0]:rank 2 of 4, local 0, host n2", "[default1]:rank 3 of 4, local 1, host n2"}) {
    EXPECT_EQ(count_of(outcome.output, fact + ", master 10.77.0.1"), 1) << outcome.text();
  }
}

TEST_F(SlurmTest, StartsOneLauncherPerNodeWithEverythingSaid) {
  const auto outcome =
      srun({"-N2", "-n2", "--ntasks-per-node=1", "sh", "-c",
            "exec \"$0\" launch --cpu --num_processes 4 --num_machines 2 --machine_rank "
            "$SLURM_NODEID --main_process_ip 10.77.0.1 --main_process_port 29513 \"$@\"",
            kAccelerate, kWorker, "join", "gather"});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "gathered 0 1 2 3"), 4) << outcome.text();
}

TEST_F(SlurmTest, MayStartOurLauncherInEachOfItsTasks) {
  const auto outcome = srun({"-N2", "-n4", "--ntasks-per-node=2", kAccelerate, "launch", "--cpu",
                             "--mixed_precision", "bf16", kWorker, "join", "gather",
                             "env=ACCELERATE_MIXED_PRECISION"});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "gathered 0 1 2 3"), 4) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "ACCELERATE_MIXED_PRECISION=bf16"), 4) << outcome.text();
}

TEST_F(SlurmTest, StartsFromABatchScript) {
  // In the script itself nobody has started tasks; srun in it does.
  Folder folder;
  std::ofstream(folder / "job") << "#!/bin/sh\n#SBATCH --nodes=2 --ntasks-per-node=1\nsrun '"
                                << kAccelerate << "' launch --cpu --num_processes 4 '" << kWorker
                                << "' join gather\n";
  const auto outcome = run(slurm->command(
      {"/usr/bin/sbatch", "--output", folder / "out", "--export=ALL", folder / "job"}));
  ASSERT_EQ(outcome.code, 0) << outcome.text();
  const auto output = [&] {
    std::ifstream file(folder / "out");
    return std::string{std::istreambuf_iterator<char>(file), {}};
  };
  EXPECT_TRUE(eventually([&] { return count_of(output(), "gathered 0 1 2 3") == 4; }, Seconds(30)))
      << output();
  // The folder must outlive the job.
  EXPECT_TRUE(eventually(
      [&] { return run(slurm->command({"/usr/bin/squeue", "--noheader"})).output.empty(); }));
}

TEST_F(SlurmTest, PassesTheCodeOfAFailedRankOn) {
  const auto outcome = srun({"-N2", "-n2", "--ntasks-per-node=1", kAccelerate, "launch", "--cpu",
                             "--num_processes", "4", kWorker, "join", "3:exit=9", "sum"});
  EXPECT_EQ(outcome.code, 9) << outcome.text();
  EXPECT_TRUE(contains(outcome.error, "host      : n2")) << outcome.text();
  EXPECT_EQ(outcome.left_behind, kNothing) << outcome.text();
}

}  // namespace
}  // namespace accelerate::test
