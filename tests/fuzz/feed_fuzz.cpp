// Any text is taken as lines of a file for `accelerate monitor`; curves of what was read are finite
// and have as many columns as were asked for, at most.
#include <algorithm>
#include <cmath>

#include "commands/monitor/runs.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail::commands;
  Run run;
  auto text = fuzz::text(data, size);
  for (int rank = 0; !text.empty(); rank = 1 - rank) {
    const auto line = text.substr(0, text.find('\n'));
    run.add_line(rank, line);
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  for (const auto axis : {Axis::kStep, Axis::kTime}) {
    for (const auto& [name, series] : run.metrics) {
      fuzz::check(name.size() <= 200, "names are bounded");
      const auto curve = curve_of(series.points, {.axis = axis, .columns = 7});
      fuzz::check(curve.size() <= 7, "curves are bounded");
      for (const auto& bucket : curve) {
        fuzz::check(std::isfinite(bucket.x) && bucket.low <= bucket.high, "curves are finite");
      }
    }
  }
  static_cast<void>(run.state(0));
  static_cast<void>(run.name());
  static_cast<void>(run.straggler_text());
  return 0;
}
