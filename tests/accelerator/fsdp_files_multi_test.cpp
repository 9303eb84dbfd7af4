// save_state, load_state and the functions of FSDP for a model whose engine shards it.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "accelerator/runs.h"
#include "checkpoint/models.h"
#include "checkpoint/sharded_state.h"
#include "parallel/engine.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::checkpoint::LocalShard;
using test::anew;
using test::automatic;
using test::message_of;
using test::names_in;
using test::SharedFolder;
using Names = std::vector<std::string>;

/// Gives each process a part of each parameter, which its optimizer steps.
class SlicingEngine final : public detail::parallel::Engine,
                            public detail::checkpoint::ShardedModel {
 public:
  explicit SlicingEngine(const std::shared_ptr<torch::nn::Module>& module) : module_(module) {
    const PartialState state;
    for (const auto& entry : module->named_parameters()) {
      const auto flat = entry.value().detach().view({-1});
      const auto begin = flat.numel() * state.process_index() / state.num_processes();
      const auto end = flat.numel() * (state.process_index() + 1) / state.num_processes();
      shards_.push_back({.name = entry.key(),
                         .sizes = entry.value().sizes().vec(),
                         .begin = begin,
                         .end = end,
                         .values = flat.slice(0, begin, end)});
    }
  }

  bool reached_by(const detail::parallel::ReachedLeaves&) const override { return false; }
  void before_backward(const detail::parallel::BackwardPass&) override {}
  void after_backward() override {}
  bool is_sharded() const override { return true; }
  void attach(torch::optim::Optimizer& optimizer) override {
    for (auto& group : optimizer.param_groups()) {
      for (std::size_t i = 0; i < shards_.size(); ++i) group.params()[i] = shards_[i].values;
    }
  }

  std::vector<LocalShard> local_shards() override { return shards_; }
  StateDict whole_tensors() override { return StateDict("Tensor"); }
  void loaded() override {}
  std::vector<std::string> names_in(const torch::optim::Optimizer&) override {
    Names names;
    for (const auto& shard : shards_) names.push_back(shard.name);
    return names;
  }
  StateDictType state_dict_type() const override { return StateDictType::kShardedStateDict; }
  bool has_deepspeed_names() const override { return deepspeed; }

  bool deepspeed = false;

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<LocalShard> shards_;
};

/// A model with parts that all processes have stepped with gradients of `gradient`.
struct ShardedRun {
  explicit ShardedRun(const AcceleratorOptions& options = anew()) : run(options) {
    engine = std::make_shared<SlicingEngine>(run.net.ptr());
    run.model._core()->use(engine);
    optimizer = run.accelerator.prepare(AdamW(run.net->parameters(), {.lr = 0.5}));
  }
  void step(double gradient) {
    for (auto& shard : engine->local_shards()) {
      shard.values.mutable_grad() = torch::full_like(shard.values, gradient);
    }
    optimizer.step();
  }
  /// What this process has of weights and averages.
  [[nodiscard]] std::vector<torch::Tensor> parts() const {
    std::vector<torch::Tensor> parts;
    const auto state = optimizer.state_dict();
    for (const auto& shard : engine->local_shards()) {
      parts.push_back(shard.values.clone());
      const auto id = static_cast<std::int64_t>(parts.size() / 2);
      parts.push_back(state.at("state").at(id).at("exp_avg").as_tensor().clone());
    }
    return parts;
  }
  [[nodiscard]] bool has(const std::vector<torch::Tensor>& expected) const {
    const auto now = parts();
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (!torch::equal(now[i], expected[i])) return false;
    }
    return true;
  }

  test::SavedRun run;
  std::shared_ptr<SlicingEngine> engine;
  AcceleratedOptimizer optimizer;
};

FullyShardedDataParallelPlugin plugin_of(StateDictType type) {
  FullyShardedDataParallelPlugin plugin;
  plugin.state_dict_type = type;
  return plugin;
}

TEST(FsdpFiles, AreWrittenAndLoadedByTheStateOfARun) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&](PartialState&) {
    for (const bool asynchronous : {false, true}) {
      ShardedRun sharded(automatic(folder.path() / (asynchronous ? "later" : "now")));
      sharded.step(1);
      const auto expected = sharded.parts();
      const auto saved = sharded.run.accelerator.save_state({}, {.asynchronous = asynchronous});
      sharded.step(2);
      sharded.run.accelerator.wait_for_save_state();
      sharded.run.accelerator.wait_for_everyone();
      EXPECT_EQ(names_in(saved),
                (Names{"accelerate_state.json", "optimizer_0", "pytorch_model_fsdp_0",
                       "random_states_0.pkl", "random_states_1.pkl"}));
      EXPECT_FALSE(sharded.has(expected));
      sharded.run.accelerator.load_state();
      EXPECT_TRUE(sharded.has(expected));
    }
  });
}

TEST(FsdpFiles, HaveTheNamesOfDeepSpeedIfTheEngineSaysSo) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&](PartialState&) {
    ShardedRun sharded;
    sharded.engine->deepspeed = true;
    sharded.run.fill(3);
    sharded.step(1);
    const auto expected = sharded.parts();
    for (int i = 0; i < 2; ++i) sharded.run.accelerator.save_state(folder.path());
    EXPECT_EQ(names_in(folder.path()), (Names{"accelerate_state.json", "latest", "pytorch_model",
                                              "random_states_0.pkl", "random_states_1.pkl"}));
    EXPECT_EQ(names_in(folder.path() / "pytorch_model"),
              (Names{".metadata", "__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp"}));
    std::string latest;
    std::getline(std::ifstream(folder.path() / "latest"), latest);
    EXPECT_EQ(latest, "pytorch_model");
    sharded.step(2);
    sharded.run.accelerator.load_state(folder.path());
    EXPECT_TRUE(sharded.has(expected));
    test::SavedRun other;
    load_checkpoint_in_model(*other.net, folder.path() / "pytorch_model", {.strict = true});
  });
}

TEST(FsdpFiles, OfAllTypesAreLoadedAgain) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&](PartialState&) {
    for (const auto type : {StateDictType::kFullStateDict, StateDictType::kLocalStateDict,
                            StateDictType::kShardedStateDict}) {
      ShardedRun sharded;
      sharded.step(1);
      const auto expected = sharded.parts();
      const auto plugin = plugin_of(type);
      const auto place = folder.path() / std::string(to_string(type));
      save_fsdp_model(plugin, sharded.run.model, place);
      save_fsdp_optimizer(plugin, sharded.optimizer, place);
      sharded.step(2);
      load_fsdp_model(plugin, sharded.run.model, place);
      load_fsdp_optimizer(plugin, sharded.optimizer, place);
      EXPECT_TRUE(sharded.has(expected)) << to_string(type);
    }
  });
}

TEST(FsdpFiles, NeedAShardedModel) {
  const test::Folder folder;
  test::SavedRun run;
  const auto plugin = plugin_of(StateDictType::kShardedStateDict);
  EXPECT_EQ(message_of<ArgumentError>([&] { save_fsdp_model(plugin, run.model, folder.path()); }),
            "The model is not sharded: it was not prepared with a plugin that shards models. Call "
            "save_state and load_state, which save it whole.");
  auto optimizer = run.accelerator.prepare(SGD(run.net->parameters(), {.lr = 0.1}));
  EXPECT_THROW(load_fsdp_optimizer(plugin, optimizer, folder.path()), ArgumentError);
}

TEST(FsdpFiles, AreLoadedByARunThatDoesNotShard) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&](PartialState&) {
    ShardedRun sharded;
    sharded.run.fill(3);
    save_fsdp_model(plugin_of(StateDictType::kShardedStateDict), sharded.run.model, folder.path());
    test::SavedRun other;
    load_checkpoint_in_model(*other.net, folder.path() / "pytorch_model_fsdp_0", {.strict = true});
    EXPECT_EQ(other.value(), 3);
    other.fill(0);
    load_accelerator_state(folder.path(), std::vector{other.accelerator._state_entries()[0]});
    EXPECT_EQ(other.value(), 3);
  });
}

}  // namespace
}  // namespace accelerate
