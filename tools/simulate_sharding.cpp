// Prints what a training step sends and how much of it compute hides, for 8 to 512 processes:
// `make simulate`, or with other numbers
//
//     build/dev/tools/simulate_sharding parameters=70e9 units=80 micro_batches=4 prefetch=2
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include "shard_schedule.h"

namespace {

using accelerate::tools::Outcome;
using accelerate::tools::Setting;
using accelerate::tools::Sharding;
using accelerate::tools::simulate;

/// What can be given on the command line, with numbers of machines with 8 H100.
std::map<std::string, double> numbers{
    {"parameters", 7e9},   {"units", 32},           {"micro_batches", 1}, {"tokens", 4096},
    {"flops", 400e12},     {"prefetch", 1},         {"param_bytes", 2},   {"reduce_bytes", 4},
    {"ranks_per_host", 8}, {"host_gigabytes", 300}, {"gigabytes", 40},    {"microseconds", 5},
    {"checkpoint", 1},     {"kept_units", 1},
};

Setting setting(Sharding sharding, bool reshard, std::int64_t ranks, bool hybrid) {
  const auto whole = [](const char* name) { return static_cast<std::int64_t>(numbers[name]); };
  const auto host = whole("ranks_per_host");
  const auto link = [&](bool on_a_host) {
    return accelerate::tools::Link{
        .bytes_per_second = 1e9 * numbers[on_a_host ? "host_gigabytes" : "gigabytes"],
        .latency_seconds = 1e-6 * numbers["microseconds"]};
  };
  // Two operations for each parameter and token in forward, twice as many in backward.
  const double forward =
      2 * numbers["parameters"] / numbers["units"] * numbers["tokens"] / numbers["flops"];
  return {.sharding = sharding,
          .reshard = reshard,
          .kept_units = whole("kept_units"),
          .prefetch = whole("prefetch"),
          .shard_ranks = hybrid ? host : ranks,
          .replicas = hybrid ? ranks / host : 1,
          .micro_batches = whole("micro_batches"),
          .units = whole("units"),
          .parameters = numbers["parameters"],
          .param_bytes = numbers["param_bytes"],
          .reduce_bytes = numbers["reduce_bytes"],
          .shard_link = link(hybrid || ranks <= host),
          .replica_link = link(false),
          .forward_seconds = forward,
          .backward_seconds = (numbers["checkpoint"] != 0 ? 3 : 2) * forward};
}

void print_rows(std::int64_t ranks) {
  struct Row {
    const char* name;
    Sharding sharding;
    bool reshard = true;
    bool hybrid = false;
  };
  for (const auto& row :
       {Row{"data parallel", Sharding::kNone}, Row{"optimizer (stage 1)", Sharding::kOptimizer},
        Row{"gradients (stage 2)", Sharding::kGradients},
        Row{"parameters, reshard", Sharding::kParameters},
        Row{"parameters, no reshard", Sharding::kParameters, false},
        Row{"hybrid, reshard", Sharding::kParameters, true, true}}) {
    if (row.hybrid && ranks <= static_cast<std::int64_t>(numbers["ranks_per_host"])) continue;
    const Outcome step = simulate(setting(row.sharding, row.reshard, ranks, row.hybrid));
    const double total = step.compute_seconds + step.exposed_seconds;
    std::printf("%5lld  %-24s%10.2f%8lld%10.1f%12.1f%10.1f%10.1f\n", static_cast<long long>(ranks),
                row.name, step.bytes_sent / 1e9, static_cast<long long>(step.calls), 1e3 * total,
                1e3 * step.exposed_seconds, 100 * step.compute_seconds / total,
                step.memory_bytes / 1e9);
  }
}

}  // namespace

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    const std::string text = arguments[i];
    const auto equals = text.find('=');
    const auto found = numbers.find(text.substr(0, equals));
    char* end = nullptr;
    const double value =
        equals == std::string::npos ? 0 : std::strtod(text.c_str() + equals + 1, &end);
    if (found == numbers.end() || end == nullptr || *end != '\0' || value < 0) {
      std::cerr << "simulate_sharding: '" << text << "' is no setting. Give name=number, of:";
      for (const auto& [name, fallback] : numbers) std::cerr << ' ' << name << '=' << fallback;
      std::cerr << '\n';
      return 2;
    }
    found->second = value;
  }
  std::printf("%5s  %-24s%10s%8s%10s%12s%10s%10s\n", "ranks", "sharding", "sent GB", "calls",
              "step ms", "exposed ms", "compute %", "memory GB");
  for (std::int64_t ranks = 8; ranks <= 512; ranks *= 2) print_rows(ranks);
}
