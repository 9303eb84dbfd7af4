// Training runs number by number as Python Accelerate's, whose numbers are stored.
// tests/interop/traces.sh makes all runs of both, live.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "accelerator/trace_runs.h"
#include "support/on_processes.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::Json;

Json stored_trace(const Json& traces, const Json& name, int ranks) {
  for (const auto& trace : traces) {
    if (trace.at("name") == name && trace.at("ranks") == ranks) return trace;
  }
  return {};
}

TEST(Traces, AreThoseOfPython) {
  for (const int ranks : {1, 2}) {
    on_processes(ranks, {.timeout = std::chrono::seconds(120)}, [ranks] {
      const auto grid = test::read_json(test::reference_path("traces/cases.json"));
      const auto traces = test::read_json(test::reference_path("traces/traces.json"));
      const test::TraceData data(grid);
      int count = 0;
      for (const auto& one : test::cases_for(grid, ranks)) {
        if (!one.value("test", false)) continue;
        const auto what = one.at("name").get<std::string>();
        const auto stored = stored_trace(traces, one.at("name"), ranks);
        ASSERT_TRUE(stored.is_object()) << what << " is not stored; run write_traces.py";
        const auto difference = test::compare(test::run_trace(grid, one, data), stored);
        EXPECT_LE(difference.loss, test::tolerance_of(one)) << what;
        EXPECT_LE(difference.norm, test::norm_tolerance_of(one)) << what;
        EXPECT_LE(difference.rate, 1e-12) << what;
        EXPECT_FALSE(difference.course) << what;
        ++count;
      }
      EXPECT_GE(count, 5);
    });
  }
}

}  // namespace
}  // namespace accelerate
