// What recording for `accelerate monitor` takes from a step of one millisecond: the calls in the
// training thread, with cold caches as after real work, and the recorder's own thread.
#include <sys/resource.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <vector>

#include "tracking/recorder.h"

namespace {

using Clock = std::chrono::steady_clock;
using accelerate::detail::tracking::Recorder;

void report(const char* name, double value, const char* unit) {
  std::cout << name << '\t' << value << '\t' << unit << std::endl;
}

double cpu_seconds(int who) {
  rusage usage{};
  ::getrusage(who, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// A millisecond of work that leaves nothing of us in the caches next to the core.
void work(std::vector<std::uint64_t>& memory) {
  const auto end = Clock::now() + std::chrono::milliseconds(1);
  while (Clock::now() < end) {
    for (auto& each : memory) each = each * 3 + 1;
  }
}

}  // namespace

int main() {
  const auto folder = std::filesystem::temp_directory_path() / "accelerate_bench_monitor";
  constexpr int kSteps = 5000;
  {
    Recorder recorder({.folder = folder, .nanoseconds_waited = [] { return std::int64_t{0}; }});
    std::vector<std::uint64_t> memory((std::size_t{4} << 20) / sizeof(std::uint64_t));
    std::chrono::duration<double, std::micro> steps{0};
    std::chrono::duration<double, std::micro> logs{0};
    const double others = cpu_seconds(RUSAGE_SELF) - cpu_seconds(RUSAGE_THREAD);
    const auto start = Clock::now();
    for (int i = 0; i < kSteps; ++i) {
      work(memory);
      const auto before = Clock::now();
      if (recorder.count_step()) recorder.write_steps({.learning_rate = 0.1, .samples = 64});
      const auto between = Clock::now();
      recorder.log({{"loss", 0.1 * i}, {"accuracy", 0.5}}, i);
      steps += between - before;
      logs += Clock::now() - between;
    }
    const std::chrono::duration<double> took = Clock::now() - start;
    const double thread = cpu_seconds(RUSAGE_SELF) - cpu_seconds(RUSAGE_THREAD) - others;
    report("recording a step of 1 ms", steps.count() / kSteps, "us");
    report("recording log() of two values", logs.count() / kSteps, "us");
    report("the recorder's thread, per step of 1 ms", thread * 1e6 / kSteps, "us");
    report("the recorder's thread, of a core", thread / took.count() * 100, "%");
  }
  std::filesystem::remove_all(folder);
}
