// tests/support/hosts.h - several machines on one: network namespaces on a switch.
//
//     ACCELERATE_SKIP_WITHOUT_HOSTS();
//     Hosts hosts(2);
//     Command first({.argv = hosts.on(0, {"accelerate", "launch", ...})});
//     hosts.cut(1);
//
// Each host has its own name, loopback, IPv4 and IPv6 address, and reaches nothing but the others.
// Bridge and cables live in a namespace as well, so that nothing of it shows on the real machine,
// and tests that run side by side may use the same addresses.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace accelerate::test {

class Hosts {
 public:
  /// Throws `std::runtime_error` with the words of `ip` where it fails.
  explicit Hosts(int count);
  /// Ends the processes that still run there and removes everything.
  ~Hosts();
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  /// Why there can be no hosts here (not root, no iproute2, a kernel without); nothing when there
  /// can.
  [[nodiscard]] static std::optional<std::string> why_not();

  [[nodiscard]] int count() const { return count_; }
  /// "n1" for host 0, and what `hostname` says there. It resolves nowhere.
  [[nodiscard]] static std::string name(int host);
  /// "10.77.0.1" for host 0. 10.77.0.200 is nobody.
  [[nodiscard]] static std::string address(int host);
  /// "fd77::1" for host 0.
  [[nodiscard]] static std::string address6(int host);

  /// The command that runs `argv` on a host; it replaces itself, so that signals reach `argv`.
  [[nodiscard]] std::vector<std::string> on(int host, const std::vector<std::string>& argv) const;

  /// Pulls the cable of a host, and puts it back.
  void cut(int host) const;
  void restore(int host) const;

  /// Those that run on a host now.
  [[nodiscard]] std::vector<pid_t> processes(int host) const;
  /// The ports at which somebody listens on a host.
  [[nodiscard]] std::vector<int> listening_ports(int host) const;

 private:
  [[nodiscard]] std::string space(int host) const;  // -1: the switch
  void build() const;
  void remove() const noexcept;

  int count_;
  std::string prefix_;
};

}  // namespace accelerate::test

/// Ends the test as skipped, and says why, where there can be no hosts.
#define ACCELERATE_SKIP_WITHOUT_HOSTS()                                   \
  if (const auto reason = ::accelerate::test::Hosts::why_not(); reason) { \
    GTEST_SKIP() << "no network namespaces here: " << *reason;            \
  }                                                                       \
  static_assert(true)
