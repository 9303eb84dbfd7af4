#include "support/slurm.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <stdexcept>

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;

std::string log_of(const fs::path& path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return "--- " + path.filename().string() + "\n" +
         text.substr(text.size() > 3000 ? text.size() - 3000 : 0);
}

void write_key(const std::string& path) {
  std::random_device random;
  std::ofstream file(path, std::ios::binary);
  for (int i = 0; i < 256; ++i) {
    const unsigned word = random();
    file.write(reinterpret_cast<const char*>(&word), sizeof word);
  }
  file.close();
  fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
}

}  // namespace

std::optional<std::string> Slurm::why_not() {
  for (const std::string program :
       {"/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged", "/usr/bin/srun"}) {
    if (::access(program.c_str(), X_OK) != 0) {
      return program + " is missing (Debian packages slurm-wlm and munge)";
    }
  }
  return Hosts::why_not();
}

Slurm::Slurm(const Hosts& hosts) : hosts_(hosts) {
  // munge insists on a folder that everybody may pass through and nobody else may write to.
  fs::permissions(folder_.path(),
                  fs::perms::owner_all | fs::perms::group_exec | fs::perms::others_exec);
  write_key(folder_ / "munge.key");
  write_configuration();
  start(0, {"/usr/sbin/munged", "--force", "--foreground", "--key-file=" + folder_ / "munge.key",
            "--socket=" + folder_ / "munge.socket", "--pid-file=" + folder_ / "munge.pid",
            "--log-file=" + folder_ / "munge.log", "--seed-file=" + folder_ / "munge.seed"});
  const bool munge_answers =
      eventually([&] { return fs::exists(folder_ / "munge.socket"); }, Seconds(10));
  if (!munge_answers) throw std::runtime_error("munged does not start\n" + logs());
  start(0, {"/usr/sbin/slurmctld", "-D", "-c", "-f", folder_ / "slurm.conf"});
  for (int host = 0; host < hosts_.count(); ++host) {
    start(host, {"/usr/sbin/slurmd", "-D", "-N", Hosts::name(host), "-f", folder_ / "slurm.conf"});
  }
  if (!eventually([&] { return is_ready(); }, Seconds(30))) {
    throw std::runtime_error("the nodes of Slurm do not become ready\n" + logs());
  }
}

Slurm::~Slurm() {
  // The other way round: slurmd says goodbye to the controller, all of them need munge.
  for (auto daemon = daemons_.rbegin(); daemon != daemons_.rend(); ++daemon) {
    daemon->signal(SIGTERM);
    static_cast<void>(daemon->wait(Seconds(5)));
  }
}

void Slurm::start(int host, const std::vector<std::string>& argv) {
  daemons_.emplace_back(CommandOptions{.argv = hosts_.on(host, argv),
                                       .environment = {{"SLURM_CONF", folder_ / "slurm.conf"}}});
}

void Slurm::write_configuration() const {
  std::ofstream file(folder_ / "slurm.conf");
  file << "ClusterName=test\n"
       << "SlurmctldHost=" << Hosts::name(0) << "(" << Hosts::address(0) << ")\n"
       << "SlurmUser=root\nSlurmdUser=root\n"
       << "AuthType=auth/munge\nCredType=cred/munge\n"
       << "AuthInfo=socket=" << folder_ / "munge.socket" << "\n"
       << "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n"
       << "SchedulerType=sched/builtin\nSelectType=select/cons_tres\n"
       << "JobAcctGatherType=jobacct_gather/none\n"
       << "AccountingStorageType=accounting_storage/none\n"
       // The nodes are as large as we say, whatever this machine has.
       << "SlurmdParameters=config_overrides\nReturnToService=2\nKillWait=10\n"
       << "StateSaveLocation=" << folder_ / "state" << "\n"
       << "SlurmdSpoolDir=" << folder_ / "spool-%n" << "\n"
       << "SlurmctldPidFile=" << folder_ / "slurmctld.pid" << "\n"
       << "SlurmdPidFile=" << folder_ / "slurmd-%n.pid" << "\n"
       << "SlurmctldLogFile=" << folder_ / "slurmctld.log" << "\n"
       << "SlurmdLogFile=" << folder_ / "slurmd-%n.log" << "\n";
  for (int host = 0; host < hosts_.count(); ++host) {
    file << "NodeName=" << Hosts::name(host) << " NodeHostname=" << Hosts::name(host)
         << " NodeAddr=" << Hosts::address(host) << " CPUs=8 RealMemory=1000\n";
    fs::create_directory(folder_ / ("spool-" + Hosts::name(host)));
  }
  file << "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n";
  fs::create_directory(folder_ / "state");
}

bool Slurm::is_ready() const {
  const auto outcome =
      run({.argv = hosts_.on(0, {"/usr/bin/sinfo", "--noheader", "--format=%T %D"}),
           .environment = {{"SLURM_CONF", folder_ / "slurm.conf"}}});
  return outcome.output == "idle " + std::to_string(hosts_.count()) + "\n";
}

std::string Slurm::logs() const {
  std::ostringstream all;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_.path(), error)) {
    if (entry.path().extension() == ".log") all << log_of(entry.path());
  }
  for (const auto& daemon : daemons_) all << daemon.error();
  return std::move(all).str();
}

CommandOptions Slurm::command(const std::vector<std::string>& argv) const {
  return {.argv = hosts_.on(0, argv), .environment = {{"SLURM_CONF", folder_ / "slurm.conf"}}};
}

CommandOptions Slurm::srun(const std::vector<std::string>& arguments) const {
  std::vector<std::string> argv = {"/usr/bin/srun"};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return command(argv);
}

}  // namespace accelerate::test
