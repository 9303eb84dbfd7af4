// Recordings of operators: what Python's profiler makes of the same ones, schedules, tables, files.
#include <ATen/record_function.h>
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/captured_log.h"
#include "profiler/event_tree.h"
#include "profiler/profile_schedule.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using detail::profiler::average_events;
using detail::profiler::ProfileEvent;
using nlohmann::json;
using test::message_of;

json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  return json::parse(file);
}

const json& reference() {
  static const auto stored = read_json(test::reference_path("profiler/profiler.json"));
  return stored;
}

AcceleratorOptions on_cpu(std::vector<KwargsHandler> handlers = {}) {
  AcceleratorState::_reset_state();
  AcceleratorOptions options;
  options.cpu = true;
  options.kwargs_handlers = std::move(handlers);
  return options;
}

/// What tests/reference/profiler/write_profiler.py runs.
struct Work {
  torch::Tensor x = torch::ones({4, 8});
  torch::Tensor w = torch::ones({8, 3}).requires_grad_();
  torch::Tensor b = torch::ones({3}).requires_grad_();
  torch::Tensor one = torch::ones({});  // LibTorch and Python would make it by other operators

  Work() { run(); }
  void run() const {
    torch::Tensor loss;
    {
      RECORD_USER_SCOPE("forward");
      loss = torch::addmm(b, x, w).relu().sum();
    }
    loss.backward(one);
  }
};

Profiler profile_of(const Work& work) {
  Accelerator accelerator(on_cpu());
  const ProfileKwargs options{.record_shapes = true, .profile_memory = true, .with_flops = true};
  return accelerator.profile(options, [&] {
    work.run();
    work.run();
  });
}

class ProfilerTest : public ::testing::Test {};

TEST_F(ProfilerTest, CountsWhatPythonCounts) {
  const Work work;
  const auto profile = profile_of(work);
  for (const bool grouped : {false, true}) {
    using Row = std::tuple<std::int64_t, std::int64_t>;
    std::map<std::string, Row> expected, found;
    for (const auto& row : reference()["operators"]) {
      const std::string key = row["key"];
      // The memory of results is freed inside of other scopes here than there.
      if (row["grouped"] != grouped || key == "[memory]") continue;
      expected[key + (grouped ? row["shapes"].dump() : "")] = {row["count"], row["flops"]};
    }
    for (const auto& row : profile.key_averages(grouped)) {
      if (row.key == "[memory]") continue;
      found[row.key + (grouped ? json(row.input_shapes).dump() : "")] = {row.count, row.flops};
    }
    EXPECT_EQ(found, expected);
  }
}

TEST_F(ProfilerTest, CountsTheMemoryThatPythonCounts) {
  const Work work;
  const auto averages = profile_of(work).key_averages();
  int compared = 0;
  for (const auto& row : reference()["operators"]) {
    if (row["grouped"] || !row.contains("self_cpu_memory")) continue;
    const auto* const found = averages.find(row["key"].get<std::string>());
    ASSERT_NE(found, nullptr) << row;
    EXPECT_EQ(found->self_cpu_memory_usage, row["self_cpu_memory"]) << row;
    ++compared;
  }
  EXPECT_EQ(compared, 3);
}

TEST_F(ProfilerTest, WritesTheTraceThatPythonWrites) {
  const Work work;
  auto profile = profile_of(work);
  const test::Folder scratch;
  const auto& folder = scratch.path();
  profile.add_metadata_json("later", "{}");  // for the next recording
  profile.export_chrome_trace(folder / "one.json");
  profile.export_chrome_trace(folder / "two.json");  // LibTorch itself can write once
  std::map<std::pair<std::string, std::string>, int> found, expected;
  const auto trace = read_json(folder / "two.json");
  for (const auto& event : trace["traceEvents"]) {
    const std::string category = event.value("cat", "");
    if (category != "cpu_op" && category != "user_annotation") continue;
    ++found[{category, event["name"]}];
  }
  for (const auto& row : reference()["trace"]) expected[{row[0], row[1]}] = row[2];
  EXPECT_EQ(found, expected);
  EXPECT_EQ(trace["record_shapes"], 1);
  EXPECT_EQ(trace["with_flops"], 1);
  EXPECT_EQ(read_json(folder / "one.json"), trace);
}

TEST_F(ProfilerTest, FollowsTheSchedulesOfPython) {
  for (const auto& one : reference()["schedules"]) {
    const ProfileSchedule plan{one["wait"], one["warmup"], one["active"], one["repeat"],
                               one["skip_first"]};
    std::vector<int> actions;
    for (std::int64_t step = 0; step <= one["steps"]; ++step) {
      actions.push_back(static_cast<int>(detail::profiler::action_at(plan, step)));
    }
    EXPECT_EQ(actions, one["actions"].get<std::vector<int>>()) << one;

    const test::CapturedLog quiet;
    std::vector<std::int64_t> ready;
    bool done = false;
    Accelerator accelerator(
        on_cpu({ProfileKwargs{.schedule_option = plan, .on_trace_ready = [&](Profiler& profiler) {
                                ready.push_back(done ? -1 : profiler.step_num());
                              }}}));
    accelerator.profile([&](Profiler& profiler) {
      for (std::int64_t step = 0; step < one["steps"]; ++step) {
        (void)torch::ones(1);
        profiler.step();
      }
      done = true;
    });
    EXPECT_EQ(ready, one["ready"].get<std::vector<std::int64_t>>()) << one;
  }
}

TEST_F(ProfilerTest, NamesTheStepsOfASchedule) {
  Accelerator accelerator(on_cpu());
  std::vector<std::int64_t> steps, ones;
  const ProfileKwargs options{
      .schedule_option = ProfileSchedule{.wait = 1, .warmup = 1, .active = 3},
      .on_trace_ready = [&](Profiler& profiler) {
        const auto averages = profiler.key_averages();
        steps.push_back(averages.find("ProfilerStep*")->count);
        ones.push_back(averages.find("aten::ones")->count);
      }};
  accelerator.profile(options, [](Profiler& profiler) {
    for (int step = 0; step < 10; ++step) {
      (void)torch::ones(1);
      profiler.step();
    }
  });
  EXPECT_EQ(steps, (std::vector<std::int64_t>{3, 3}));
  EXPECT_EQ(ones, (std::vector<std::int64_t>{3, 3}));
}

TEST_F(ProfilerTest, WritesOneFilePerProcess) {
  const test::Folder scratch;
  const auto folder = scratch.path() / "below";
  Accelerator accelerator(on_cpu({ProfileKwargs{.output_trace_dir = folder}}));
  accelerator.profile([] { (void)torch::ones(1); });
  EXPECT_TRUE(read_json(folder / "profile_0.json")["traceEvents"].is_array());
}

TEST_F(ProfilerTest, KeepsTheTraceOfWhatThrew) {
  const test::Folder scratch;
  const auto& folder = scratch.path();
  Accelerator accelerator(on_cpu());
  EXPECT_THROW(accelerator.profile({.output_trace_dir = folder},
                                   [] {
                                     (void)torch::ones(1);
                                     throw std::runtime_error("out of data");
                                   }),
               std::runtime_error);
  EXPECT_NE(read_json(folder / "profile_0.json").dump().find("aten::ones"), std::string::npos);
  accelerator.profile([] {});  // nothing runs any more
}

TEST_F(ProfilerTest, CannotBeNested) {
  Accelerator accelerator(on_cpu());
  EXPECT_NE(message_of<StateError>([&] {
              accelerator.profile([&] { accelerator.profile([] {}); });
            }).find("profiles cannot be nested"),
            std::string::npos);
  const Profiler none;
  EXPECT_NE(message_of<StateError>([&] { (void)none.key_averages(); }).find("nothing is recorded"),
            std::string::npos);
}

TEST_F(ProfilerTest, RefusesWhatThisMachineDoesNotHave) {
  EXPECT_NE(message_of<UnsupportedError>([] {
              const Profiler profiler({.activities = {{ProfilerActivity::kXpu}}});
            }).find("'xpu' is not available on this machine. Choose from: cpu"),
            std::string::npos);
  const test::CapturedLog log;
  const Profiler profiler({.with_stack = true});
  ASSERT_EQ(log.messages().size(), 1u);
  EXPECT_NE(log.messages()[0].find("TorchScript only"), std::string::npos);
}

TEST_F(ProfilerTest, PrintsATable) {
  const Work work;
  const auto averages = profile_of(work).key_averages();
  const auto table = averages.table({.sort_by = "self_cpu_time_total", .row_limit = 3});
  const auto line = [&](int index) {
    std::istringstream lines(table);
    std::string text;
    for (int i = 0; i <= index; ++i) std::getline(lines, text);
    return text;
  };
  EXPECT_EQ(line(0).find_first_not_of("- "), std::string::npos);
  for (const auto* title : {"Name", "Self CPU %", "Self CPU", "CPU total %", "CPU total",
                            "CPU time avg", "CPU Mem", "Self CPU Mem", "# of Calls", "FLOPs"}) {
    EXPECT_NE(line(1).find(title), std::string::npos) << title;
  }
  EXPECT_EQ(line(6), line(0));
  EXPECT_TRUE(line(7).starts_with("Self CPU time total: ")) << table;
  EXPECT_EQ(table.find("Input Shapes"), std::string::npos);
  EXPECT_NE(profile_of(work).key_averages(true).table().find("[[3], [4, 8], [8, 3], [], []]"),
            std::string::npos);
  const auto message =
      message_of<ArgumentError>([&] { (void)averages.table({.sort_by = "cpu_time_totl"}); });
  EXPECT_NE(message.find("Did you mean 'cpu_time_total'?"), std::string::npos) << message;
}

TEST_F(ProfilerTest, WritesTimesAndSizesAsPythonDoes) {
  for (const auto& stored : reference()["texts"]) {
    const std::string number = stored[0], text = stored[1];
    KeyAverage row{.key = "one", .count = 1};
    if (text.ends_with("B")) {
      row.self_cpu_memory_usage = std::stoll(number);
    } else {
      row.self_cpu_time_total = std::stod(number);
    }
    const auto table = KeyAverages({row}, {}, "", /*with_memory=*/true).table();
    EXPECT_NE(table.find("  " + text), std::string::npos) << text << "\n" << table;
  }
}

TEST_F(ProfilerTest, CutsLongNamesAndSorts) {
  const KeyAverages averages({{.key = "aten::first", .count = 1, .flops = 2'000'000},
                              {.key = std::string(60, 'x'), .count = 3, .flops = 5'000'000}});
  const auto table = averages.table({.sort_by = "count"});
  const auto name = std::string(52, 'x') + "...";
  ASSERT_NE(table.find(name), std::string::npos) << table;
  EXPECT_LT(table.find(name), table.find("aten::first"));
  EXPECT_NE(table.find("Total MFLOPs"), std::string::npos);
  EXPECT_NE(table.find("2.000"), std::string::npos);
}

/// How often the operators of three steps run.
std::map<std::string, std::int64_t> operators_of(const std::function<void()>& step) {
  for (int i = 0; i < 3; ++i) step();
  Profiler profiler({.profile_memory = true});
  profiler.start();
  for (int i = 0; i < 3; ++i) step();
  profiler.stop();
  std::map<std::string, std::int64_t> counts;
  for (const auto& row : profiler.key_averages()) counts[row.key] += row.count;
  return counts;
}

torch::nn::Sequential small_net() {
  using namespace torch::nn;
  return Sequential(Linear(8, 8), Tanh(), Linear(8, 1));
}

/// The operators, and the memory outside of them, of a loop without an accelerator.
std::map<std::string, std::int64_t> operators_of_the_loop(const torch::Tensor& x) {
  auto net = small_net();
  AdamW adamw(net->parameters(), {.lr = 1e-3});
  return operators_of([&] {
    net->forward(x).pow(2).mean().backward();
    adamw.step();
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
  });
}

TEST(PreparedStep, RunsTheOperatorsOfThePlainLoopAndNoOthers) {
  const auto x = torch::ones({4, 8});
  const auto expected = operators_of_the_loop(x);
  const auto prepared = [&](auto make_optimizer) {
    Accelerator accelerator(on_cpu());
    auto net = small_net();
    auto [model, optimizer] = accelerator.prepare(net, make_optimizer(net->parameters()));
    return operators_of([&, &model = model, &optimizer = optimizer] {
      const auto accumulating = accelerator.accumulate(model);
      accelerator.backward(model(x).pow(2).mean());
      optimizer.step();
      optimizer.zero_grad();
    });
  };
  EXPECT_EQ(prepared([](auto parameters) { return AdamW(parameters, {.lr = 1e-3}); }), expected);
  EXPECT_EQ(prepared([](auto parameters) {
              return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(1e-3));
            }),
            expected);
}

TEST(EventTree, TakesTheTimeOfCalledOperatorsOff) {
  // [0, 100) has [10, 30) and [40, 60); another thread and an asynchronous event count by
  // themselves.
  const auto rows =
      average_events({{.name = "outer", .start = 0, .end = 100'000},
                      {.name = "inner", .start = 10'000, .end = 30'000},
                      {.name = "inner", .start = 40'000, .end = 60'000},
                      {.name = "other", .thread = 7, .start = 20'000, .end = 50'000},
                      {.name = "later", .start = 5'000, .end = 95'000, .async = true}},
                     {{.time = 15'000, .bytes = 64}, {.time = 200'000, .bytes = -64}}, false);
  ASSERT_EQ(rows.size(), 5u);
  EXPECT_EQ(rows[0].key, "outer");
  EXPECT_EQ(rows[0].self_cpu_time_total, 60);
  EXPECT_EQ(rows[0].cpu_memory_usage, 64);
  EXPECT_EQ(rows[0].self_cpu_memory_usage, 0);
  EXPECT_EQ(rows[1].key, "later");
  EXPECT_EQ(rows[1].self_cpu_time_total, 0);
  EXPECT_EQ(rows[2].key, "inner");
  EXPECT_EQ(rows[2].count, 2);
  EXPECT_EQ(rows[2].cpu_time_total, 40);
  EXPECT_EQ(rows[2].self_cpu_memory_usage, 64);
  EXPECT_EQ(rows[3].self_cpu_time_total, 30);
  EXPECT_EQ(rows[4].key, "[memory]");
  EXPECT_EQ(rows[4].cpu_memory_usage, -64);
}

TEST(EventTree, GivesKernelsToTheOperatorsThatLaunchThem) {
  const auto rows = average_events({{.name = "outer", .start = 0, .end = 100'000, .id = 1},
                                    {.name = "launch", .start = 10'000, .end = 20'000, .id = 2},
                                    {.name = "cudaLaunchKernel",
                                     .thread = 9,
                                     .start = 12'000,
                                     .end = 14'000,
                                     .id = 5,
                                     .launched_by = 2},
                                    {.name = "kernel",
                                     .start = 50'000,
                                     .end = 80'000,
                                     .on_device = true,
                                     .id = 6,
                                     .launched_by = 2}},
                                   {}, false);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].device_time_total, 30);
  EXPECT_EQ(rows[0].self_device_time_total, 0);
  EXPECT_EQ(rows[1].self_device_time_total, 30);
  EXPECT_EQ(rows[1].self_cpu_time_total, 8) << "the call of the driver is in it";
  EXPECT_TRUE(rows[3].on_device);
  EXPECT_EQ(rows[3].self_device_time_total, 30);
  EXPECT_EQ(rows[3].cpu_time_total, 0);
}

}  // namespace
}  // namespace accelerate
