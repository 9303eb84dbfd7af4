// Collectives of two processes on one host; collectives.py does the same work with Python
// Accelerate.
//
//     bench/run.sh starts both under the same launcher and prints the ratios
#include <accelerate/accelerate.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <string>
#include <vector>

namespace {

struct Record {
  std::int64_t id = 0;
  std::string name;
  std::vector<double> score;
};

accelerate::Value to_value(const Record& record) {
  return accelerate::Value::Dict{
      {"id", record.id}, {"name", record.name}, {"score", accelerate::to_value(record.score)}};
}

Record from_value(std::type_identity<Record>, const accelerate::Value& value) {
  const auto& fields = value.as_dict();
  return {fields.at("id").as_int(), fields.at("name").as_string(),
          accelerate::from_value<std::vector<double>>(fields.at("score"))};
}

double resident_megabytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stod(line.substr(6)) / 1024;
  }
  return 0;
}

/// Microseconds per call: the median of five rounds after a warm-up, as collectives.py takes it.
template <class F>
double microseconds(const accelerate::PartialState& state, int repeats, F&& f) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 20; ++i) f();
  state.wait_for_everyone();
  std::array<double, 5> rounds = {};
  for (double& round : rounds) {
    const auto start = Clock::now();
    for (int i = 0; i < repeats; ++i) f();
    round = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / repeats;
  }
  std::ranges::sort(rounds);
  return rounds[2];
}

}  // namespace

int main() {
  accelerate::PartialState state({.cpu = true});
  const double resident = resident_megabytes();
  at::set_num_threads(1);

  const auto report = state.on_main_process([](const char* name, double value, const char* unit) {
    std::cout << name << '\t' << value << '\t' << unit << std::endl;
  });
  report("resident memory, state up", resident, "MB");

  const auto small = torch::ones({256});
  const auto large = torch::ones({1 << 20});
  report("gather 1 KB", microseconds(state, 300, [&] { return accelerate::gather(small); }), "us");
  report("gather 4 MB", microseconds(state, 30, [&] { return accelerate::gather(large); }), "us");
  report("reduce 1 KB", microseconds(state, 300, [&] { return accelerate::reduce(small); }), "us");
  report("reduce 4 MB", microseconds(state, 30, [&] { return accelerate::reduce(large); }), "us");
  report("gather tree of 8 tensors",
         microseconds(state, 100,
                      [&] {
                        std::map<int, torch::Tensor> tree;
                        for (int i = 0; i < 8; ++i) tree[i] = torch::ones({16});
                        return accelerate::gather(tree);
                      }),
         "us");
  const std::vector<Record> records(8, Record{3, "sample", {0.5, 0.25}});
  report("gather_object of 8 records",
         microseconds(state, 200, [&] { return accelerate::gather_object(records); }), "us");
  report("barrier", microseconds(state, 300, [&] { state.wait_for_everyone(); }), "us");
}
