// Any text is a line of the feed of `accelerate monitor`, a row of the tracker csv, or neither;
// what is read has finite times and names of a bounded length.
#include <cmath>

#include "commands/monitor/feed.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail::commands;
  const auto text = fuzz::text(data, size);
  for (const auto& entry : {parse_feed_line(text), parse_csv_row(text)}) {
    if (!entry) continue;
    fuzz::check(std::isfinite(entry->time), "times are finite");
    if (const auto* values = std::get_if<FeedValues>(&entry->what)) {
      fuzz::check(!values->step || std::isfinite(*values->step), "steps are finite");
      for (const auto& [name, value] : values->values) {
        fuzz::check(name.size() <= 200, "names are bounded");
      }
    }
    if (const auto* steps = std::get_if<FeedSteps>(&entry->what)) {
      fuzz::check(std::isfinite(steps->time) && steps->count >= 1, "steps are counted");
    }
    if (const auto* start = std::get_if<FeedStart>(&entry->what)) {
      fuzz::check(start->rank >= 0 && start->world >= 0, "ranks are not negative");
    }
  }
  return 0;
}
