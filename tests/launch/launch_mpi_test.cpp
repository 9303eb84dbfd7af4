// Worlds under a real Open MPI, with and without our launcher, on one machine and on two hosts.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "launch/launching.h"
#include "support/hosts.h"

namespace accelerate::test {
namespace {

const std::string kWorker = built("tests/launch_worker");
const std::string kAccelerate = built("bin/accelerate");

// mpirun refuses root, and more processes than cores, unless told twice.
const Variables kAllowed = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                            {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                            {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                            // It asks for ssh even where all processes are here.
                            {"OMPI_MCA_plm_rsh_agent", "sh"},
                            {"OMPI_MCA_hwloc_base_binding_policy", "none"},
                            {"ACCELERATE_USE_CPU", "1"},
                            {"OMP_NUM_THREADS", "1"}};

bool has_open_mpi() { return ::access("/usr/bin/mpirun", X_OK) == 0; }

#define SKIP_WITHOUT_OPEN_MPI() \
  if (!has_open_mpi()) GTEST_SKIP() << "no mpirun here (Debian package openmpi-bin)"

Variables with(Variables variables, const Variables& more) {
  variables.insert(variables.end(), more.begin(), more.end());
  return variables;
}

// A port for each run of a test: nobody binds it beforehand under mpirun.
std::string some_port() { return std::to_string(20000 + ::getpid() % 10000); }

// Two hosts between which mpirun starts its daemons by entering the namespace, in place of ssh.
class MpiHosts {
 public:
  MpiHosts() : hosts(2) {
    std::ofstream agent(folder / "enter");
    agent << "#!/bin/sh\nhost=$1\nshift\ncase $host in\n";
    for (int host = 0; host < hosts.count(); ++host) {
      agent << Hosts::address(host) << ")";
      for (const auto& word : hosts.on(host, {"sh", "-c"})) agent << " '" << word << "'";
      agent << " \"$*\" ;;\n";
    }
    agent << "esac\n";
    agent.close();
    std::filesystem::permissions(folder / "enter", std::filesystem::perms::owner_all);
    std::ofstream hostfile(folder / "hostfile");
    for (int host = 0; host < hosts.count(); ++host) {
      hostfile << Hosts::address(host) << " slots=4\n";
    }
  }

  [[nodiscard]] Variables variables() const {
    return with(kAllowed, {{"OMPI_MCA_plm_rsh_agent", folder / "enter"},
                           {"OMPI_MCA_orte_keep_fqdn_hostnames", "1"}});
  }

  Hosts hosts;
  Folder folder;
};

TEST(OpenMpi, StartsAWorldWithoutOurLauncher) {
  SKIP_WITHOUT_OPEN_MPI();
  const auto outcome = run({.argv = {"mpirun", "-n", "3", kWorker, "join", "gather"},
                            .environment = with(kAllowed, {{"MASTER_PORT", some_port()}})},
                           Seconds(60));
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(lines_of(outcome.output), (Words(3, "gathered 0 1 2"))) << outcome.text();
}

TEST(OpenMpi, StartsAWorldOnTwoHostsWithoutOurLauncher) {
  SKIP_WITHOUT_OPEN_MPI();
  ACCELERATE_SKIP_WITHOUT_HOSTS();
  const MpiHosts mpi;
  const auto outcome =
      run({.argv = mpi.hosts.on(0, {"mpirun", "--hostfile", mpi.folder / "hostfile", "--npernode",
                                    "2", "-x", "MASTER_ADDR=" + Hosts::address(0), "-x",
                                    "ACCELERATE_USE_CPU", kWorker, "join", "facts", "gather"}),
           .environment = mpi.variables()},
          Seconds(60));
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  const std::string met = ", master 10.77.0.1";
  EXPECT_EQ(sorted_lines(outcome.output),
            (Words{"gathered 0 1 2 3", "gathered 0 1 2 3", "gathered 0 1 2 3", "gathered 0 1 2 3",
                   "rank 0 of 4, local 0, host n1" + met, "rank 1 of 4, local 1, host n1" + met,
                   "rank 2 of 4, local 0, host n2" + met, "rank 3 of 4, local 1, host n2" + met}))
      << outcome.text();
}

TEST(OpenMpi, MayStartOurLauncherInEachOfItsProcesses) {
  SKIP_WITHOUT_OPEN_MPI();
  // Inside of an MPI job the launcher starts no ranks of its own: it sets variables and becomes the
  // program.
  const auto outcome =
      run({.argv = {"mpirun", "-n", "2", kAccelerate, "launch", "--cpu", "--num_processes", "2",
                    "--mixed_precision", "bf16", "--main_process_port", some_port(), kWorker,
                    "join", "gather", "env=ACCELERATE_MIXED_PRECISION"},
           .environment = kAllowed},
          Seconds(60));
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(sorted_lines(outcome.output),
            (Words{"ACCELERATE_MIXED_PRECISION=bf16", "ACCELERATE_MIXED_PRECISION=bf16",
                   "gathered 0 1", "gathered 0 1"}))
      << outcome.text();
}

TEST(OpenMpi, IsStartedByOurLauncherWithAHostfile) {
  SKIP_WITHOUT_OPEN_MPI();
  ACCELERATE_SKIP_WITHOUT_HOSTS();
  const MpiHosts mpi;
  const auto outcome = run({.argv = mpi.hosts.on(0, {kAccelerate,
                                                     "launch",
                                                     "--cpu",
                                                     "--num_processes",
                                                     "4",
                                                     "--num_machines",
                                                     "2",
                                                     "--main_process_ip",
                                                     Hosts::address(0),
                                                     "--main_process_port",
                                                     "29512",
                                                     "--mpirun_hostfile",
                                                     mpi.folder / "hostfile",
                                                     "--mixed_precision",
                                                     "bf16",
                                                     kWorker,
                                                     "join",
                                                     "facts",
                                                     "gather",
                                                     "3:env=ACCELERATE_MIXED_PRECISION"}),
                            .environment = mpi.variables()},
                           Seconds(60));
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  const std::string met = ", master 10.77.0.1";
  EXPECT_EQ(sorted_lines(outcome.output),
            (Words{"ACCELERATE_MIXED_PRECISION=bf16", "gathered 0 1 2 3", "gathered 0 1 2 3",
                   "gathered 0 1 2 3", "gathered 0 1 2 3", "rank 0 of 4, local 0, host n1" + met,
                   "rank 1 of 4, local 1, host n1" + met, "rank 2 of 4, local 0, host n2" + met,
                   "rank 3 of 4, local 1, host n2" + met}))
      << outcome.text();
}

}  // namespace
}  // namespace accelerate::test
