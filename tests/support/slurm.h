// tests/support/slurm.h - a real Slurm: a controller and one slurmd per host of a `Hosts`.
//
// Everything lives in a temporary folder and ends with the object; no other Slurm of this machine
// is touched. The nodes are called as the hosts are, n1, n2, ..., and these names resolve nowhere,
// as on many a cluster.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/command.h"
#include "support/hosts.h"

namespace accelerate::test {

class Slurm {
 public:
  /// Returns when all nodes are ready. Throws `std::runtime_error` with the end of the logs.
  explicit Slurm(const Hosts& hosts);
  ~Slurm();
  Slurm(const Slurm&) = delete;
  Slurm& operator=(const Slurm&) = delete;

  /// Why there can be none here: not installed, or no hosts.
  [[nodiscard]] static std::optional<std::string> why_not();

  /// `srun` with these arguments, typed on host 0.
  [[nodiscard]] CommandOptions srun(const std::vector<std::string>& arguments) const;
  /// Another command there.
  [[nodiscard]] CommandOptions command(const std::vector<std::string>& argv) const;
  /// The ends of the daemons' logs, for failures.
  [[nodiscard]] std::string logs() const;

 private:
  void write_configuration() const;
  void start(int host, const std::vector<std::string>& argv);
  [[nodiscard]] bool is_ready() const;

  const Hosts& hosts_;
  Folder folder_;
  std::vector<Command> daemons_;
};

/// One Slurm with two nodes for all tests of a suite: it takes a second to come up.
class WithSlurm : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (Slurm::why_not()) return;
    hosts = std::make_unique<Hosts>(2);
    slurm = std::make_unique<Slurm>(*hosts);
  }
  static void TearDownTestSuite() {
    slurm.reset();
    hosts.reset();
  }
  void SetUp() override {
    if (const auto reason = Slurm::why_not()) GTEST_SKIP() << "no Slurm here: " << *reason;
  }

  static inline std::unique_ptr<Hosts> hosts = nullptr;
  static inline std::unique_ptr<Slurm> slurm = nullptr;
};

}  // namespace accelerate::test

/// Ends the test as skipped, and says why, where there can be no Slurm.
#define ACCELERATE_SKIP_WITHOUT_SLURM()                                   \
  if (const auto reason = ::accelerate::test::Slurm::why_not(); reason) { \
    GTEST_SKIP() << "no Slurm here: " << *reason;                         \
  }                                                                       \
  static_assert(true)
