#include "sharding/units.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "sharding/sharded_nets.h"
#include "support/message_of.h"

namespace accelerate::detail::sharding {
namespace {

using test::message_of;
using test::TinyGpt;
using Names = std::vector<std::string>;

std::map<std::string, Names> names_of(const UnitPlan& plan) {
  std::map<std::string, Names> names;
  for (const auto& unit : plan.units) {
    for (const auto& parameter : unit.parameters) {
      names[unit.name].push_back(parameter.names.front());
    }
  }
  return names;
}

TEST(Units, TakeEachParameterIntoTheDeepestUnit) {
  const TinyGpt net;
  const auto plan = plan_units(*net, {.units = {"blocks", "blocks.1"}});
  ASSERT_EQ(plan.units.size(), 3);
  EXPECT_EQ(plan.units[0].name, "") << "the root comes first";
  const auto names = names_of(plan);
  EXPECT_EQ(names.at(""), (Names{"tokens.weight", "norm.weight", "norm.bias", "head.weight"}));
  EXPECT_EQ(names.at("blocks.1").front(), "blocks.1.norm.weight");
  EXPECT_EQ(names.at("blocks").back(), "blocks.2.down.bias");
}

TEST(Units, PutTiedParametersIntoTheUnitThatHasAllTheirNames) {
  TinyGpt net;
  tie_parameters(*net, {"blocks.0.up.weight", "blocks.1.up.weight"});
  const auto plan = plan_units(*net, {.units = {"blocks", "blocks.0", "blocks.1"}});
  const auto names = names_of(plan);
  EXPECT_EQ(names.at("blocks").front(), "blocks.0.up.weight");
  for (const auto& unit : plan.units) {
    if (unit.name != "blocks") continue;
    EXPECT_EQ(unit.parameters.front().names, (Names{"blocks.0.up.weight", "blocks.1.up.weight"}));
    EXPECT_EQ(unit.parameters.front().leaves.size(), 1);
  }
}

TEST(Units, LeaveIgnoredAndEmptyParametersWhole) {
  TinyGpt net;
  net->register_parameter("nothing", torch::zeros({0, 3}));
  const auto plan = plan_units(*net, {.units = {"blocks.0"}, .ignored = {"head"}});
  ASSERT_EQ(plan.whole.size(), 2);
  EXPECT_EQ(plan.whole[0].names, Names{"nothing"});
  EXPECT_EQ(plan.whole[1].names, Names{"head.weight"});
}

TEST(Units, NameAModuleThatIsNotThereAndABufferThatSharesMemory) {
  TinyGpt net;
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)plan_units(*net, {.units = {"block.0"}});
            }).find("the model has no module 'block.0', which is to be sharded as a unit"),
            std::string::npos);
  net->register_buffer("copy", net->head->weight.detach());
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)plan_units(*net, {});
            }).find("the buffer 'copy' shares its memory with the parameter 'head.weight'"),
            std::string::npos);
}

}  // namespace
}  // namespace accelerate::detail::sharding
