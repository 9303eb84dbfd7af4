// What one process loads of whole and sharded files: names, sizes, dtypes, and folders of
// DeepSpeed.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/safetensors.h"
#include "accelerate/torch_archive.h"
#include "checkpoint/models.h"
#include "checkpoint/sharded_models.h"
#include "checkpoint/stored_state.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate::detail::checkpoint {
namespace {

namespace fs = std::filesystem;
using test::FlatModel;
using test::FlatOptimizer;
using test::message_of;
using test::reference_path;
using test::ShardedTensor;
using Names = std::vector<std::string>;

/// Leaves no state of the process to other tests.
class LoadShards : public ::testing::Test {
 protected:
  void TearDown() override { PartialState::_reset_state(); }
};
class DeepSpeedFolders : public LoadShards {};

/// This process as one of several: the elements [begin, end) of each tensor.
std::shared_ptr<FlatModel> part_of(const std::vector<ShardedTensor>& tensors, double begin,
                                   double end) {
  auto model = std::make_shared<FlatModel>(-1, 0, tensors);
  model->buffers = StateDict("Tensor");
  for (auto& shard : model->shards) {
    const auto count = static_cast<double>(shard.end);
    shard.begin = static_cast<std::int64_t>(count * begin);
    shard.end = static_cast<std::int64_t>(count * end);
    shard.values = torch::full({shard.end - shard.begin}, -1, shard.values.options());
  }
  return model;
}

void save(const std::shared_ptr<FlatModel>& model, const fs::path& folder) {
  save_sharded_files(*sharded_state(model), folder, {}, "test", std::source_location::current());
}

TEST_F(LoadShards, ReadsRangesOfWhatPythonHasSharded) {
  for (const double border : {0.0, 0.3, 0.5, 1.0}) {
    for (const auto& [from, to] : {std::pair(0.0, border), std::pair(border, 1.0)}) {
      const auto model = part_of({{"rows", {5, 3}},
                                  {"columns", {2, 4, 3}, torch::kFloat},  // bfloat16 in the file
                                  {"deep", {2, 3, 4}, torch::kDouble},
                                  {"replicated", {3}},
                                  {"empty", {0, 2}},
                                  {"plain", {2, 2}, torch::kLong}},
                                 from, to);
      const test::CapturedLog log;
      sharded_state(model)->load(open_stored_state(reference_path("dcp/model")));
      for (const auto& shard : model->shards) {
        EXPECT_TRUE(torch::equal(
            shard.values, torch::arange(shard.begin, shard.end).to(shard.values.scalar_type())))
            << shard.name;
      }
      EXPECT_EQ(log.messages(), Names{"[RANK 0] The checkpoint has tensors that are not needed: "
                                      "one, scalar, float8."});
    }
  }
}

TEST_F(LoadShards, ReadsRangesOfWholeFiles) {
  const test::Folder folder;
  StateDict state("Tensor");
  state.insert("module.a", torch::arange(12).view({3, 4}).to(torch::kFloat));
  state.insert("_fsdp_wrapped_module.b._checkpoint_wrapped_module.w", torch::arange(5.0));
  // Not contiguous.
  state.insert("c", torch::arange(6).view({3, 2}).t());
  torch_save(state, folder.path() / "pytorch_model.bin");
  StateDict contiguous("Tensor");
  for (const auto& entry : state) contiguous.insert(entry.key(), entry.value().contiguous());
  safetensors::save_file(contiguous, folder.path() / "model.safetensors");
  for (const auto* name : {"pytorch_model.bin", "model.safetensors"}) {
    const auto model =
        part_of({{"a", {3, 4}}, {"b.w", {5}}, {"c", {2, 3}, torch::kLong}}, 0.25, 0.8);
    sharded_state(model)->load(open_stored_state(folder.path() / name));
    EXPECT_TRUE(torch::equal(model->shards[0].values, torch::arange(3, 9).to(torch::kFloat)));
    EXPECT_TRUE(torch::equal(model->shards[1].values, torch::arange(1, 4).to(torch::kFloat)));
    EXPECT_TRUE(torch::equal(model->shards[2].values, torch::tensor({2, 4, 1})));
  }
}

TEST_F(LoadShards, NamesUpToTenThatAreMissing) {
  const test::Folder folder;
  save(part_of({{"extra", {2}}}, 0, 1), folder.path());
  std::vector<ShardedTensor> tensors;
  for (int i = 0; i < 12; ++i) tensors.push_back({"w" + std::to_string(i), {2}});
  const auto model = part_of(tensors, 0, 1);
  EXPECT_EQ(message_of<StateDictMismatch>(
                [&] { load_sharded_files(*sharded_state(model), folder.path(), {}); }),
            "Missing key(s) in the checkpoint: w0, w1, w2, w3, w4, w5, w6, w7, w8, w9 and 2 more. "
            "Load the checkpoint of the same model.");
  EXPECT_EQ(model->loads, 0);

  const auto some = part_of({{"extra", {2}}, {"other", {2}}}, 0, 1);
  const test::CapturedLog log;
  load_sharded_files(*sharded_state(some, /*strict=*/false), folder.path(), {});
  EXPECT_EQ(log.messages(), Names{"[RANK 0] Missing key(s) in the checkpoint: other. They keep "
                                  "their values."});
  EXPECT_EQ(some->loads, 1);
}

TEST_F(LoadShards, RefusesOtherSizes) {
  const test::Folder folder;
  save(part_of({{"w", {2, 3}}}, 0, 1), folder.path());
  EXPECT_EQ(message_of<StateDictMismatch>([&] {
              load_sharded_files(*sharded_state(part_of({{"w", {3, 2}}}, 0, 1)), folder.path(), {});
            }),
            "size mismatch for w: copying a param with shape (2, 3) from checkpoint, the shape in "
            "current model is (3, 2).");
}

TEST_F(LoadShards, TakesAnyNameOfATiedParameter) {
  for (const auto* stored : {"head", "embedding"}) {
    const test::Folder folder;
    auto saved = part_of({{stored, {4}}}, 0, 1);
    saved->shards[0].values.copy_(torch::arange(4.0));
    save(saved, folder.path());
    const auto model = part_of({{"embedding", {4}}, {"head", {4}}}, 0.5, 1);
    model->shards[1].tied_to = "embedding";
    model->shards[1].values = model->shards[0].values;
    load_sharded_files(*sharded_state(model), folder.path(), {});
    EXPECT_TRUE(torch::equal(model->shards[0].values, torch::arange(2.0, 4.0))) << stored;
  }
}

TEST_F(LoadShards, LooksAtTheLastNameOfAFolderOnly) {
  const test::Folder folder;
  const auto below =
      folder.path() / "optimizer_pytorch_model_fsdp_0_path" / "pytorch_model_fsdp_0x";
  const auto model = std::make_shared<FlatModel>(3);
  save(model, below);
  for (const auto& path :
       {below, below / "pytorch_model_fsdp_0", below / "pytorch_model_fsdp_0/"}) {
    const auto other = std::make_shared<FlatModel>(-1);
    load_sharded_files(*sharded_state(other), path, {});
    EXPECT_TRUE(other->has_values(3)) << path;
  }
  EXPECT_EQ(message_of<CheckpointError>(
                [&] { load_sharded_files(*sharded_state(model), folder.path(), {.index = 1}); }),
            "'" + folder.path().string() +
                "' has no model 1: none of pytorch_model_fsdp_1, pytorch_model_fsdp_1.bin, "
                "model_1.safetensors, pytorch_model_1.bin, pytorch_model_1 is there.");
}

TEST_F(LoadShards, TakesStatesByNumberFromARunThatDidNotShard) {
  const test::Folder folder;
  const auto model = part_of({{"a", {4}}, {"b", {2}}}, 0.5, 1);
  const auto state = [](const torch::Tensor& average) {
    return Value::Dict{{"step", torch::tensor(2.0F)}, {"exp_avg", average}};
  };
  const Value::List groups{Value::Dict{{"lr", 0.5}, {"params", Value::List{0, 1}}}};
  torch_save(Value(Value::Dict{{"state", Value::Dict{{0, state(torch::arange(4.0))}}},
                               {"param_groups", groups}}),
             folder.path() / "optimizer.bin");
  const auto optimizer = std::make_shared<FlatOptimizer>(*model, 0);
  load_sharded_files(*test::optimizer_state(model, optimizer), folder.path(), {});
  EXPECT_EQ(optimizer->state,
            Value(Value::Dict{{"state", Value::Dict{{0, state(torch::arange(2.0, 4.0))}}},
                              {"param_groups", groups}}));
}

TEST_F(LoadShards, ReadsTheOptimizerThatPythonHasSharded) {
  const auto model = part_of({{"rows", {5, 3}}}, 0.4, 1);
  const auto optimizer = std::make_shared<FlatOptimizer>(*model, 0);
  // Of the two groups of the checkpoint the second has no parameters.
  const auto groups =
      Value::List{Value::Dict{{"params", Value::List{0}}}, Value::Dict{{"params", Value::List{}}}};
  optimizer->state.as_dict().set("param_groups", Value(groups));
  test::optimizer_state(model, optimizer)->load(open_stored_state(reference_path("dcp/optimizer")));
  EXPECT_TRUE(torch::equal(optimizer->state.at("state").at(0).at("exp_avg").as_tensor(),
                           torch::arange(6.0, 15.0)));
  EXPECT_EQ(optimizer->state.at("param_groups").as_list()[0].at("betas").repr(), "(0.9, 0.999)");
  EXPECT_EQ(optimizer->state.at("param_groups").as_list()[1].at("lr").as_double(), 0.2);

  optimizer->state.as_dict().set("param_groups", Value(Value::List{groups[0]}));
  EXPECT_EQ(message_of<StateDictMismatch>([&] {
              test::optimizer_state(model, optimizer)
                  ->load(open_stored_state(reference_path("dcp/optimizer")));
            }),
            "loaded state dict has a different number of parameter groups: 2 in the checkpoint "
            "and 1 in the optimizer.");
}

// ---- DeepSpeed ----------------------------------------------------------------------------------

struct ZeroNet : torch::nn::Module {
  ZeroNet() {
    for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<std::int64_t>>>{
             {"scale", {}}, {"frozen", {3, 2}}}) {
      register_parameter(name, torch::zeros(sizes));
    }
    register_buffer("mean", torch::zeros(2));
    register_buffer("count", torch::tensor(0));
    first->bias.data().zero_();
    second->register_parameter("weight", torch::zeros({2, 5}));
    tied = register_parameter("tied", first->weight);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(3, 5));
  std::shared_ptr<torch::nn::Module> second =
      register_module("second", std::make_shared<torch::nn::Module>("second"));
  torch::Tensor tied;
};

TEST_F(DeepSpeedFolders, HaveTheWeightsOfAllStages) {
  const Names weights{"first.weight", "first.bias", "second.weight", "scale", "frozen"};
  for (const auto* name : {"stage0_2", "stage1_2", "stage2_3", "stage3_1", "stage3_4"}) {
    const auto folder = reference_path("zero") / name;
    for (const auto& path : {folder, folder / "pytorch_model"}) {
      const auto state = open_stored_state(path);
      EXPECT_EQ(state.as_dict().size(), 8U) << name;
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const auto whole = stored_whole(state.at(weights[i])).to(torch::kFloat);
        const auto expected = torch::arange(whole.numel()).to(torch::kFloat) + 100.0 * i;
        // Bfloat16 holds these numbers in part.
        const bool rounded = name == std::string("stage0_2") || weights[i] == "frozen";
        const auto flat = rounded ? expected.to(torch::kBFloat16).to(torch::kFloat) : expected;
        EXPECT_TRUE(torch::equal(whole.reshape({-1}), flat)) << name << " " << weights[i];
        for (std::int64_t begin = 0; begin < whole.numel(); ++begin) {
          EXPECT_TRUE(torch::equal(
              stored_range(state.at(weights[i]), {begin, whole.numel()}).to(torch::kFloat),
              flat.slice(0, begin)));
        }
      }
      EXPECT_TRUE(
          torch::equal(stored_whole(state.at("tied")), stored_whole(state.at("first.weight"))));
      EXPECT_EQ(stored_whole(state.at("count")).item<std::int64_t>(), 7);
      EXPECT_EQ(stored_whole(state.at("mean"))[1].item<float>(), 1.5F);
    }
    ZeroNet net;
    const auto report = load_checkpoint_in_model(net, folder, {.strict = true});
    EXPECT_TRUE(report.missing_keys.empty() && report.unexpected_keys.empty());
    EXPECT_EQ(net.first->weight[4][2].item<float>(), 14);
  }
}

TEST_F(DeepSpeedFolders, AreLoadedIntoShards) {
  const auto model = part_of({{"first.weight", {5, 3}}, {"second.weight", {2, 5}}}, 0.4, 0.9);
  const test::CapturedLog log;
  load_sharded_files(*sharded_state(model), reference_path("zero/stage3_4"), {});
  EXPECT_TRUE(torch::equal(model->shards[0].values, torch::arange(6.0, 13.0)));
  EXPECT_TRUE(torch::equal(model->shards[1].values, torch::arange(204.0, 209.0)));
  const auto optimizer = std::make_shared<FlatOptimizer>(*model, 0);
  const auto before = optimizer->state;
  load_sharded_files(*test::optimizer_state(model, optimizer), reference_path("zero/stage3_4"), {});
  EXPECT_EQ(optimizer->state, before);
  EXPECT_EQ(log.messages().size(), 2U);
  EXPECT_EQ(log.messages()[1], "[RANK 0] The state of optimizer 0 is not read from '" +
                                   reference_path("zero/stage3_4").string() +
                                   "', a checkpoint of DeepSpeed. It begins anew.");
}

/// A copy of a folder of DeepSpeed with something wrong in it.
class BrokenZero {
 public:
  explicit BrokenZero(const std::string& name) {
    fs::copy(reference_path("zero/" + name), folder_.path(), fs::copy_options::recursive);
  }
  [[nodiscard]] fs::path tag() const { return folder_.path() / "pytorch_model"; }
  [[nodiscard]] fs::path file(const std::string& name) const { return tag() / name; }
  /// Changes the dict in a file.
  template <class F>
  void change(const std::string& name, const F& f) const {
    auto value = torch_load(file(name));
    // Objects of DeepSpeed's classes are no tensors, and not needed.
    if (auto* state = value.as_dict().get("optimizer_state_dict")) {
      state->as_dict().erase("loss_scaler");
    }
    f(value.as_dict());
    torch_save(value, file(name));
  }
  [[nodiscard]] std::string error() const {
    return message_of<Error>([&] { (void)open_stored_state(tag()); });
  }

 private:
  test::Folder folder_;
};

TEST_F(DeepSpeedFolders, AreRefusedIfFilesAreMissing) {
  const BrokenZero folder("stage2_3");
  fs::remove(folder.file("zero_pp_rank_1_mp_rank_00_optim_states.pt"));
  EXPECT_EQ(folder.error(), "Expected 3 files that end in _optim_states.pt in '" +
                                folder.tag().string() +
                                "' but found 2. Copy those of all processes.");
  const BrokenZero frozen("stage3_4");
  fs::remove(frozen.file("zero_pp_rank_3_mp_rank_00_model_states.pt"));
  EXPECT_EQ(frozen.error(), "Expected 4 files that end in _model_states.pt in '" +
                                frozen.tag().string() +
                                "' but found 3. Copy those of all processes.");
}

TEST_F(DeepSpeedFolders, AreRefusedIfTheModelIsSplitByTensors) {
  const BrokenZero folder("stage2_3");
  fs::copy_file(folder.file("mp_rank_00_model_states.pt"),
                folder.file("mp_rank_01_model_states.pt"));
  EXPECT_NE(folder.error().find("'mp_rank_01_model_states.pt' of a model that tensor parallelism"),
            std::string::npos);
}

TEST_F(DeepSpeedFolders, AreRefusedIfNumbersDoNotFit) {
  const auto error_of = [](const std::string& name, const std::string& file, const auto& change) {
    const BrokenZero folder(name);
    folder.change(file, change);
    const auto begin = "'" + folder.file(file).string() + "', byte 0: the file of DeepSpeed: ";
    const auto message = folder.error();
    return message.starts_with(begin) ? message.substr(begin.size()) : message;
  };
  const std::string model = "mp_rank_00_model_states.pt";
  const std::string optimizer = "zero_pp_rank_0_mp_rank_00_optim_states.pt";
  const auto shape = [](Value sizes) {
    return [sizes](Value::Dict& state) {
      state.at("param_shapes").as_list()[0].as_dict().set("first.weight", sizes);
    };
  };
  EXPECT_EQ(error_of("stage2_3", model, shape(Value::tuple({1000, 1000}))),
            "its parameters have 1000000 elements and the flat weights of all processes 30.");
  EXPECT_EQ(error_of("stage2_3", model, shape(Value::tuple({1}))),
            "its parameters have 11 elements and the flat weights of all processes 30.");
  EXPECT_EQ(error_of("stage2_3", model, shape(Value::tuple({INT64_MAX, 4}))),
            "the shape of 'first.weight' is (9223372036854775807, 4).");
  EXPECT_EQ(error_of("stage2_3", model, shape(Value::tuple({-1}))),
            "the shape of 'first.weight' is (-1,).");
  EXPECT_EQ(error_of("stage2_3", model, shape(Value("x"))), "the shape of 'first.weight' is 'x'.");
  EXPECT_EQ(error_of("stage2_3", model, [](Value::Dict& state) { state.erase("param_shapes"); }),
            "the field 'param_shapes' is missing.");
  EXPECT_EQ(error_of("stage2_3", optimizer,
                     [](Value::Dict& state) {
                       state.at("optimizer_state_dict").as_dict().set("zero_stage", 4);
                     }),
            "the stage is 4; 1, 2 and 3 are read.");
  EXPECT_EQ(error_of("stage2_3", optimizer,
                     [](Value::Dict& state) {
                       state.at("optimizer_state_dict")
                           .as_dict()
                           .set("single_partition_of_fp32_groups", Value::List{3});
                     }),
            "'single_partition_of_fp32_groups' is no tensor but int.");
}

TEST_F(DeepSpeedFolders, AreNotLookedForOutsideOfTheirFolder) {
  const test::Folder folder;
  fs::copy(reference_path("zero/stage2_3/pytorch_model"), folder.path() / "tag");
  fs::create_directory(folder.path() / "inner");
  std::ofstream(folder.path() / "inner/latest") << "../tag";
  EXPECT_THROW((void)open_stored_state(folder.path() / "inner"), CheckpointError);
  std::ofstream(folder.path() / "latest") << "tag\n";
  EXPECT_EQ(open_stored_state(folder.path()).as_dict().size(), 8U);
}

}  // namespace
}  // namespace accelerate::detail::checkpoint
