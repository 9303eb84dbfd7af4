// tests/comm/several_hosts.h - ranks on several hosts, each a network namespace.
//
//     on_processes(4, on_hosts({0, 0, 1, 1}), [](PartialState& state) { ... });
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/hosts.h"
#include "support/on_processes.h"

namespace accelerate {

using Words = std::vector<std::string>;

/// Hosts that are made when the first rank is started: only the parent of the ranks has them.
class LazyHosts {
 public:
  explicit LazyHosts(int count) : count_(count) {}
  [[nodiscard]] test::Hosts& get() {
    std::call_once(once_, [&] { hosts_ = std::make_unique<test::Hosts>(count_); });
    return *hosts_;
  }

 private:
  int count_;
  std::once_flag once_;
  std::unique_ptr<test::Hosts> hosts_;
};

/// Rank i runs on host `host_of[i]`.
inline OnProcessesOptions on_hosts(const std::vector<int>& host_of, OnProcessesOptions options = {},
                                   std::shared_ptr<LazyHosts> hosts = nullptr) {
  if (!hosts) hosts = std::make_shared<LazyHosts>(*std::ranges::max_element(host_of) + 1);
  options.rendezvous = false;
  options.environment.emplace_back("MASTER_ADDR", test::Hosts::address(0));
  options.environment.emplace_back("MASTER_PORT", "29500");
  options.started_by = [host_of, hosts, inner = options.started_by](int rank, const Words& argv) {
    const auto at = host_of.begin() + rank;
    Words words = {"env", "LOCAL_RANK=" + std::to_string(std::count(host_of.begin(), at, *at)),
                   "LOCAL_WORLD_SIZE=" + std::to_string(std::ranges::count(host_of, *at))};
    const auto rest = inner ? inner(rank, argv) : argv;
    words.insert(words.end(), rest.begin(), rest.end());
    return hosts->get().on(*at, words);
  };
  return options;
}

}  // namespace accelerate
