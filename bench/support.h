// bench/support.h - what the benchmarks between processes share: timing in turns, and Gloo as it
// comes with LibTorch.
#pragma once

#include <accelerate/accelerate.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

namespace bench {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Clock = std::chrono::steady_clock;

inline void report(const std::string& name, double value, const char* unit) {
  if (accelerate::PartialState().is_main_process()) {
    std::cout << name << '\t' << value << '\t' << unit << std::endl;
  }
}

inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

inline double microseconds(int repeats, const std::function<void()>& f) {
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) f();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / repeats;
}

/// Collective. How often `f` fits into `round` microseconds; the same number on all processes.
inline int repeats_of(const std::function<void()>& f, double round) {
  for (int i = 0; i < 3; ++i) f();
  const double once = std::max(microseconds(3, f), 0.1);
  const std::vector<int> own{static_cast<int>(std::clamp(round / once, 1.0, 5000.0))};
  return accelerate::gather_object(own).front();
}

/// Collective. Until the system has found a place for each process.
inline void settle() {
  const auto end = Clock::now() + std::chrono::milliseconds(500);
  while (accelerate::gather_object(std::vector<bool>{Clock::now() < end}).front()) {
  }
}

/// Collective. The time of each round is that of the process which took longest.
inline std::vector<double> slowest(const std::vector<double>& own) {
  auto all = own;
  for (const auto& one : accelerate::gather_object(std::vector<std::vector<double>>{own})) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], one[i]);
  }
  return all;
}

/// Collective. Microseconds per call, round by round, of each of `variants`. They take turns, so
/// that a slow moment of the machine hits all of them.
inline std::vector<std::vector<double>> in_turns(const std::vector<std::function<void()>>& variants,
                                                 int rounds = 5, double round = 20'000) {
  std::vector<int> repeats;
  for (const auto& f : variants) repeats.push_back(repeats_of(f, round));
  std::vector<std::vector<double>> times(variants.size());
  for (int i = 0; i < rounds; ++i) {
    for (std::size_t which = 0; which < variants.size(); ++which) {
      accelerate::wait_for_everyone();
      times[which].push_back(microseconds(repeats[which], variants[which]));
    }
  }
  for (auto& rounds : times) rounds = slowest(rounds);
  return times;
}

/// Collective. A group whose backend is c10d's Gloo, without our guard.
inline Group raw_gloo() {
  const accelerate::PartialState state;
  const auto store = c10::make_intrusive<c10d::PrefixStore>("raw_gloo", state.store());
  const int rank = state.process_index();
  const int size = state.num_processes();
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  options->threads = 2;
  const auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  group->setGroupName("raw_gloo");
  return group;
}

}  // namespace bench
