#include "sharding/tape.h"

#include <gtest/gtest.h>

#include <vector>

namespace accelerate::detail::sharding {
namespace {

using Kind = TapeEvent::Kind;
using Events = std::vector<TapeEvent>;

TapeEvent gather(std::size_t unit) { return {.kind = Kind::kGather, .index = unit}; }
TapeEvent reduce(std::size_t buffer) { return {.kind = Kind::kReduce, .index = buffer}; }

Tape learned(const Events& events, std::int64_t ahead) {
  Tape tape(ahead);
  tape.begin();
  for (const auto& event : events) tape.record(event);
  tape.learn();
  tape.begin();
  return tape;
}

Events taken_until(Tape& tape, std::size_t position) {
  Events events;
  while (tape.position() < position) events.push_back(tape.take());
  return events;
}

/// What touching a unit carries out.
Events touch(Tape& tape, std::size_t unit) {
  const auto ordinal = tape.reach(unit);
  return ordinal ? taken_until(tape, tape.gather(*ordinal).until) : Events{};
}

const Events kBackward{gather(2), reduce(2), gather(1), reduce(1), gather(0), reduce(0)};

TEST(Tape, GathersAheadOfUseAndBeforeReductions) {
  auto tape = learned(kBackward, 1);
  EXPECT_EQ(taken_until(tape, tape.start()), Events{gather(2)});
  EXPECT_EQ(touch(tape, 2), Events{gather(1)});
  EXPECT_EQ(touch(tape, 1), (Events{reduce(2), gather(0)}));
  EXPECT_EQ(touch(tape, 0), (Events{reduce(1)}));
  EXPECT_EQ(taken_until(tape, tape.end()), Events{reduce(0)});
}

TEST(Tape, GathersAheadWhereGradientsAreReducedIfThatIsWanted) {
  Tape tape(1, /*after_reductions=*/true);
  tape.begin();
  for (const auto& event : kBackward) tape.record(event);
  tape.learn();
  tape.begin();
  EXPECT_EQ(tape.start(), 0);
  EXPECT_EQ(touch(tape, 2), Events{gather(2)});
  EXPECT_EQ(taken_until(tape, tape.end()),
            (Events{reduce(2), gather(1), reduce(1), gather(0), reduce(0)}));
}

TEST(Tape, KeepsTheOrderWhereAUnitIsSkipped) {
  for (const int ahead : {0, 1, 2}) {
    auto all = learned(kBackward, ahead);
    const auto order = taken_until(all, all.end());
    auto tape = learned(kBackward, ahead);
    auto skipping = touch(tape, 2);
    const auto later = touch(tape, 0);
    skipping.insert(skipping.end(), later.begin(), later.end());
    const auto rest = taken_until(tape, tape.end());
    skipping.insert(skipping.end(), rest.begin(), rest.end());
    EXPECT_EQ(skipping, order) << "ahead " << ahead;
  }
}

TEST(Tape, IsRecordedAnewAfterAUseThatItDoesNotHave) {
  auto tape = learned({gather(0), gather(1)}, 1);
  EXPECT_FALSE(tape.reach(5));
  EXPECT_TRUE(tape.is_learned()) << "until the pass is over";
  tape.begin();
  EXPECT_FALSE(tape.is_learned());
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(tape.is_given_up());
    tape.learn();
    tape.begin();
    EXPECT_FALSE(tape.reach(5));
    tape.begin();
  }
  EXPECT_TRUE(tape.is_given_up()) << "passes are too different";
}

TEST(Tape, TellsOrdersApart) {
  Tape one, other;
  for (auto* tape : {&one, &other}) tape->begin();
  one.record(gather(1));
  one.record(reduce(2));
  other.record(reduce(2));
  other.record(gather(1));
  EXPECT_NE(one.hash(), other.hash());
}

TEST(Tape, KnowsWhetherABufferIsReducedLater) {
  auto tape = learned(kBackward, 0);
  (void)touch(tape, 1);
  EXPECT_FALSE(tape.reduces_later(2));
  EXPECT_TRUE(tape.reduces_later(1));
}

}  // namespace
}  // namespace accelerate::detail::sharding
