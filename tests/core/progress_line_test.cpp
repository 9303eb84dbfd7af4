#include "core/progress_line.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <list>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "accelerate/progress.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using detail::Meter;

nlohmann::json reference() {
  std::ifstream file(test::reference_path("progress/meters.json"));
  return nlohmann::json::parse(file);
}

Meter meter_from(const nlohmann::json& arguments) {
  Meter meter;
  meter.n = arguments.at("n");
  if (!arguments.at("total").is_null()) meter.total = arguments.at("total");
  meter.elapsed_seconds = arguments.at("elapsed");
  if (arguments.contains("ncols")) meter.ncols = arguments.at("ncols");
  meter.prefix = arguments.value("prefix", "");
  meter.ascii = arguments.value("ascii", false);
  meter.unit = arguments.value("unit", "it");
  meter.unit_scale = arguments.value("unit_scale", false);
  if (arguments.contains("rate")) meter.rate = arguments.at("rate");
  meter.postfix = arguments.value("postfix", "");
  meter.unit_divisor = arguments.value("unit_divisor", 1000.0);
  meter.initial = arguments.value("initial", 0);
  return meter;
}

// What a bar has written, cut where it returns to the start of the line.
struct Screen {
  std::string bytes;

  std::function<void(std::string_view)> sink() {
    return [this](std::string_view text) { bytes += text; };
  }
  [[nodiscard]] std::string last_line() const {
    const auto end = bytes.find_last_not_of("\n");
    const auto text = bytes.substr(0, end + 1);
    const auto start = text.rfind('\r');
    return start == std::string::npos ? text : text.substr(start + 1);
  }
};

// Draws at every step: no test waits for a clock.
TqdmOptions always(Screen& screen, TqdmOptions options = {}) {
  options.mininterval = 0;
  options.ascii = true;
  options.sink = screen.sink();
  return options;
}

// "00:00<00:00,  123.45it/s" depends on the clock.
std::string without_times(std::string line) {
  const auto start = line.find(" [");
  return line.substr(0, start);
}

TEST(FormatMeter, WritesWhatPythonsTqdmWrites) {
  const auto stored = reference();
  ASSERT_GT(stored.at("meters").size(), 30u);
  for (const auto& entry : stored.at("meters")) {
    EXPECT_EQ(detail::format_meter(meter_from(entry.at("arguments"))),
              entry.at("line").get<std::string>())
        << entry.at("arguments").dump();
  }
}

TEST(FormatNumber, ShortensAsPythonsTqdmDoes) {
  const auto stored = reference();
  ASSERT_GT(stored.at("numbers").size(), 20u);
  for (const auto& entry : stored.at("numbers")) {
    const auto text = entry.at("value").get<std::string>();
    const bool integer = text.find_first_not_of("-0123456789") == std::string::npos;
    const PostfixValue value =
        integer ? PostfixValue(std::int64_t{std::stoll(text)}) : PostfixValue(std::stod(text));
    EXPECT_EQ(detail::format_number(value), entry.at("text").get<std::string>()) << text;
  }
}

TEST(DisplayWidth, CountsWideCharactersTwiceAndColoursNotAtAll) {
  EXPECT_EQ(detail::display_width("abc"), 3);
  EXPECT_EQ(detail::display_width("数据"), 4);
  EXPECT_EQ(detail::display_width("\x1b[31mred\x1b[0m"), 3);
  EXPECT_EQ(detail::display_trim("\x1b[31mreddish\x1b[0m", 3), "\x1b[31mred\x1b[0m");
  EXPECT_EQ(detail::display_trim("数据", 3), "数");
}

TEST(ProgressBar, CountsAndDraws) {
  Screen screen;
  ProgressBar bar(always(screen, {.desc = "load", .total = 4}));
  EXPECT_EQ(without_times(screen.last_line()), "load:   0%|          | 0/4");
  bar.update();
  bar.update(2);
  EXPECT_EQ(bar.n(), 3);
  EXPECT_EQ(without_times(screen.last_line()), "load:  75%|#######5  | 3/4");
}

TEST(ProgressBar, LeavesItsLastLineOrRemovesIt) {
  Screen left;
  ProgressBar(always(left, {.total = 1})).update();
  EXPECT_TRUE(left.bytes.ends_with("\n"));
  EXPECT_EQ(without_times(left.last_line()), "100%|##########| 1/1");

  Screen removed;
  ProgressBar(always(removed, {.total = 1, .leave = false})).update();
  EXPECT_EQ(removed.bytes.find('\n'), std::string::npos);
  // Blanks over the line, and back to its start.
  EXPECT_TRUE(removed.bytes.ends_with(" \r"));
  EXPECT_EQ(removed.last_line(), "");
}

TEST(ProgressBar, ShowsDescriptionAndPostfixAtOnce) {
  Screen screen;
  ProgressBar bar(always(screen, {.total = 2}));
  bar.set_description("epoch 2");
  EXPECT_EQ(without_times(screen.last_line()), "epoch 2:   0%|          | 0/2");
  bar.set_postfix({{"loss", 0.123456}, {"step", std::int64_t{12}}, {"phase", "warm up "}});
  EXPECT_TRUE(screen.last_line().ends_with(", loss=0.123, step=12, phase=warm up]"))
      << screen.last_line();
  bar.set_postfix_str("done");
  EXPECT_NE(screen.last_line().find(", done]"), std::string::npos) << screen.last_line();
}

TEST(ProgressBar, OverwritesAllOfALongerLine) {
  Screen screen;
  ProgressBar bar(always(screen, {.total = 2}));
  bar.set_description("a long description");
  const auto before = detail::display_width(screen.last_line());
  bar.set_description("x");
  EXPECT_EQ(detail::display_width(screen.last_line()), before);
}

TEST(ProgressBar, ShowsNothingWhenDisabledButStillCounts) {
  Screen screen;
  ProgressBar bar(always(screen, {.disable = true, .total = 2}));
  bar.update(2);
  bar.set_description("unseen");
  bar.close();
  EXPECT_TRUE(bar.disabled());
  EXPECT_EQ(bar.n(), 2);
  EXPECT_EQ(bar.total(), 2);
  EXPECT_EQ(screen.bytes, "");
}

TEST(ProgressBar, ContinuesFromWhereARunWasResumed) {
  Screen screen;
  ProgressBar bar(always(screen, {.total = 10, .initial = 4}));
  EXPECT_EQ(bar.n(), 4);
  bar.update();
  EXPECT_EQ(without_times(screen.last_line()), " 50%|#####     | 5/10");
}

TEST(ProgressBar, StartsAgainAfterAReset) {
  Screen screen;
  ProgressBar bar(always(screen, {.total = 10}));
  bar.update(7);
  bar.reset(20);
  EXPECT_EQ(without_times(screen.last_line()), "  0%|          | 0/20");
}

TEST(ProgressBar, ClosesOnce) {
  Screen screen;
  ProgressBar bar(always(screen, {.total = 1}));
  bar.close();
  const auto size = screen.bytes.size();
  bar.close();
  bar.update();
  bar.refresh();
  EXPECT_EQ(screen.bytes.size(), size);
}

TEST(ProgressBar, DrawsNotMoreOftenThanItIsTold) {
  Screen screen;
  TqdmOptions options = always(screen, {.total = 100000});
  options.mininterval = 3600;
  ProgressBar bar(options);
  const auto size = screen.bytes.size();
  for (int i = 0; i < 100000; ++i) bar.update();
  EXPECT_EQ(screen.bytes.size(), size);
}

TEST(ProgressBar, StandsBelowTheBarsThatAreOpen) {
  Screen screen;
  ProgressBar outer(always(screen, {.total = 2}));
  screen.bytes.clear();
  {
    ProgressBar inner(always(screen, {.total = 3, .leave = false}));
    EXPECT_TRUE(screen.bytes.starts_with("\n\r")) << screen.bytes;
    EXPECT_TRUE(screen.bytes.ends_with("\x1b[A")) << screen.bytes;
  }
  screen.bytes.clear();
  outer.update();
  EXPECT_TRUE(screen.bytes.starts_with("\r 50%")) << screen.bytes;
}

TEST(ProgressBar, SurvivesASinkThatThrowsAtTheEnd) {
  auto options = TqdmOptions{.total = 1, .mininterval = 3600};
  bool armed = false;
  options.sink = [&](std::string_view) {
    if (armed) throw std::runtime_error("disk full");
  };
  ProgressBar bar(options);
  armed = true;
  bar.close();
  EXPECT_TRUE(bar.disabled());
}

TEST(Tqdm, WalksTheRangeAndKnowsItsSize) {
  Screen screen;
  const std::vector<int> numbers = {3, 1, 2};
  std::vector<int> seen;
  for (const int number : tqdm(numbers, always(screen))) seen.push_back(number);
  EXPECT_EQ(seen, numbers);
  EXPECT_EQ(without_times(screen.last_line()), "100%|##########| 3/3");
}

TEST(Tqdm, HandsOutReferencesIntoTheRange) {
  Screen screen;
  std::list<int> numbers = {1, 2};
  for (int& number : tqdm(numbers, always(screen))) number *= 10;
  EXPECT_EQ(numbers, (std::list<int>{10, 20}));
}

TEST(Tqdm, KeepsATemporaryRange) {
  Screen screen;
  int sum = 0;
  for (const int number : tqdm(std::vector<int>{1, 2, 3}, always(screen))) sum += number;
  EXPECT_EQ(sum, 6);
}

TEST(Tqdm, BelievesAGivenTotal) {
  Screen screen;
  for (const int number : tqdm(std::vector<int>{1}, always(screen, {.total = 4})))
    EXPECT_EQ(number, 1);
  EXPECT_EQ(without_times(screen.last_line()), " 25%|##5       | 1/4");
}

TEST(Tqdm, CountsARangeWithoutASize) {
  // A range of somebody else's: begin and end of different types, and no size.
  struct Countdown {
    struct End {};
    struct Iterator {
      int value;
      int operator*() const { return value; }
      Iterator& operator++() {
        --value;
        return *this;
      }
      bool operator!=(End) const { return value > 0; }
    };
    [[nodiscard]] Iterator begin() const { return {3}; }
    [[nodiscard]] End end() const { return {}; }
  };
  Screen screen;
  int sum = 0;
  for (const int value : tqdm(Countdown{}, always(screen))) sum += value;
  EXPECT_EQ(sum, 6);
  EXPECT_EQ(without_times(screen.last_line()), "3it");
}

TEST(Tqdm, DoesNotCountTheStepThatWasLeft) {
  Screen screen;
  for (const int number : tqdm(std::vector<int>{1, 2, 3}, always(screen))) {
    if (number == 2) break;
  }
  EXPECT_EQ(without_times(screen.last_line()), " 33%|###3      | 1/3");
}

TEST(Tqdm, ClosesTheBarWhenAnExceptionLeavesTheLoop) {
  Screen screen;
  const auto loop = [&] {
    for (const int number : tqdm(std::vector<int>{1, 2}, always(screen))) {
      if (number == 2) throw std::runtime_error("out");
    }
  };
  EXPECT_THROW(loop(), std::runtime_error);
  EXPECT_TRUE(screen.bytes.ends_with("\n"));
}

}  // namespace
}  // namespace accelerate
