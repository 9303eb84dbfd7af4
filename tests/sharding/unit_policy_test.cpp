#include "sharding/unit_policy.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "accelerate/errors.h"
#include "nets.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using detail::sharding::UnitNames;
using nlohmann::json;
using test::message_of;
using testing::NetImpl;
using testing::sized;
namespace sharding = detail::sharding;

/// A module of tests/reference/sharding/units.json.
std::shared_ptr<torch::nn::Module> build(const json& tree) {
  const std::string kind = tree["class"];
  if (kind == "MultiheadAttention") {
    return std::make_shared<torch::nn::MultiheadAttentionImpl>(
        torch::nn::MultiheadAttentionOptions(tree["width"].get<std::int64_t>(), 1));
  }
  std::vector<std::shared_ptr<torch::nn::Module>> children;
  for (const auto& child : tree.value("children", json::array())) children.push_back(build(child));
  if (kind == "ModuleList") {
    auto list = std::make_shared<torch::nn::ModuleListImpl>();
    for (const auto& child : children) list->push_back(child);
    return list;
  }
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> named;
  for (std::size_t i = 0; i < children.size(); ++i) {
    named.emplace_back("c" + std::to_string(i), children[i]);
  }
  if (kind == "ModuleDict") return std::make_shared<torch::nn::ModuleDictImpl>(named);
  auto module = std::make_shared<torch::nn::Module>(kind);
  int index = 0;
  for (const auto& size : tree["params"]) {
    module->register_parameter("p" + std::to_string(index++),
                               torch::zeros({size.get<std::int64_t>()}));
  }
  for (const auto& [name, child] : named) module->register_module(name, child);
  return module;
}

UnitNames sorted(UnitNames names) {
  std::ranges::sort(names);
  return names;
}

TEST(UnitPolicy, ChoosesTheUnitsThatPythonChooses) {
  const auto cases = json::parse(std::ifstream(test::reference_path("sharding/units.json")));
  ASSERT_GE(cases.size(), 30U);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const auto model = build(cases[i]["tree"]);
    for (const auto& by_size : cases[i]["by_size"]) {
      SCOPED_TRACE(by_size["min"].dump());
      const auto least = by_size["min"].get<std::int64_t>();
      EXPECT_EQ(sorted(sharding::units_by_remaining_size(*model, least,
                                                         by_size["ignored"].get<UnitNames>())),
                by_size["v1"].get<UnitNames>());
      EXPECT_EQ(sharding::units_by_total_size(*model, least), by_size["v2"].get<UnitNames>());
    }
    const auto& by_class = cases[i]["by_class"];
    const auto units = sharding::units_by_class(*model, {by_class["name"].get<std::string>()});
    EXPECT_EQ(units, by_class["v2"].get<UnitNames>());
    EXPECT_EQ(sorted(units), by_class["v1"].get<UnitNames>());
  }
}

TEST(UnitPolicy, TheVersionsCountBySizeDifferently) {
  torch::nn::Module root("Root");
  root.register_module("e", sized(300));
  auto block = std::make_shared<torch::nn::Module>("Block");
  block->register_module("x", sized(700));
  block->register_module("y", sized(100));
  root.register_module("blk", block);
  EXPECT_EQ(sharding::units_by_remaining_size(root, 500), (UnitNames{"blk.x"}));
  EXPECT_EQ(sharding::units_by_total_size(root, 500), (UnitNames{"blk.x", "blk"}));
}

TEST(UnitPolicy, ClassesAreFoundWithoutNamespaceAndImpl) {
  const NetImpl net;
  const UnitNames blocks{"layers.0", "layers.1"};
  EXPECT_EQ(sharding::units_by_class(net, {"Block"}), blocks);
  EXPECT_EQ(sharding::units_by_class(net, {"accelerate::testing::BlockImpl"}), blocks);
  EXPECT_EQ(message_of<ConfigError>(
                [&] { static_cast<void>(sharding::units_by_class(net, {"Block", "Blok"})); }),
            "Could not find the transformer layer class Blok in the model. Did you mean 'Block'?");
}

TEST(UnitPolicy, BucketsKeepModulesTogetherThatFit) {
  const NetImpl net;
  EXPECT_EQ(sharding::units_by_bucket(net, 1000), UnitNames{});
  EXPECT_EQ(sharding::units_by_bucket(net, 130), (UnitNames{"embed", "layers", "head"}));
  EXPECT_EQ(sharding::units_by_bucket(net, 70),
            (UnitNames{"embed", "layers.0", "layers.1", "head"}));
  EXPECT_EQ(sharding::units_by_bucket(net, 45, {"layers.1"}),
            (UnitNames{"embed", "layers.0.q_proj", "layers.0.mlp", "layers.1", "head"}));
}

TEST(UnitPolicy, IgnoresModulesByObjectOrByTheirWholeName) {
  const NetImpl net;
  EXPECT_EQ(sharding::ignored_modules(net, ".*\\.q_proj"),
            (UnitNames{"layers.0.q_proj", "layers.1.q_proj"}));
  EXPECT_EQ(sharding::ignored_modules(net, "layers|layers\\.0.*"), (UnitNames{"layers"}));
  EXPECT_EQ(sharding::ignored_modules(net, "q_proj"), UnitNames{});
  EXPECT_EQ(sharding::ignored_modules(
                net, std::vector<std::shared_ptr<torch::nn::Module>>{net.children()[2]}),
            (UnitNames{"head"}));
  EXPECT_NE(message_of<ConfigError>([&] {
              static_cast<void>(sharding::ignored_modules(
                  net, std::vector<std::shared_ptr<torch::nn::Module>>{sized(1)}));
            }).find("a module of class Sized, which is not in the model"),
            std::string::npos);
  EXPECT_NE(message_of<ConfigError>([&] {
              static_cast<void>(sharding::ignored_modules(net, ".*"));
            }).find("matches the model itself"),
            std::string::npos);
  EXPECT_EQ(sharding::outside_of({"layers.0"}, {"layers.0", "layers.0.mlp", "layers.01", "head"}),
            (UnitNames{"layers.01", "head"}));
}

}  // namespace
}  // namespace accelerate
