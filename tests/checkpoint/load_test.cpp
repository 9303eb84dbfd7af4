#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <string>
#include <vector>

#include "accelerate/checkpoint.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/safetensors.h"
#include "checkpoint/models.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::filled;
using test::Folder;
using test::has;
using test::message_of;
using test::reference_path;
using Names = std::vector<std::string>;
using Pairs = test::Tied::Pairs;

StateDict dict_of(const Pairs& tensors) {
  StateDict state("Tensor");
  for (const auto& [name, tensor] : tensors) state.insert(name, tensor);
  return state;
}

class LoadCheckpointTest : public testing::Test {
 protected:
  /// Saves tensors as the folder's model.safetensors.
  void write(const Pairs& tensors, const std::string& name = "model.safetensors") {
    safetensors::save_file(dict_of(tensors), path_ / name);
  }
  Folder folder_;
  const std::filesystem::path& path_ = folder_.path();
};

template <class Net>
void expect_the_model_of(const std::filesystem::path& checkpoint) {
  Net net;
  const auto report = load_checkpoint_in_model(net, checkpoint, {.strict = true});
  test::expect_equal(net, *filled<Net>());
  EXPECT_TRUE(report.missing_keys.empty());
  EXPECT_TRUE(report.unexpected_keys.empty());
}

TEST_F(LoadCheckpointTest, LoadsTheFoldersOfPython) {
  for (const std::string kind :
       {"_10GB_safetensors", "_100_safetensors", "_32_safetensors", "_10GB_bin", "_100_bin"}) {
    SCOPED_TRACE(kind);
    expect_the_model_of<test::Small>(reference_path("models/small" + kind));
    expect_the_model_of<test::Tied>(reference_path("models/tied" + kind));
    expect_the_model_of<test::Mixed>(reference_path("models/mixed" + kind));
  }
}

TEST_F(LoadCheckpointTest, LoadsSingleFilesAndIndices) {
  expect_the_model_of<test::Small>(
      reference_path("models/small_10GB_safetensors/model.safetensors"));
  expect_the_model_of<test::Small>(reference_path("models/small_10GB_bin/pytorch_model.bin"));
  expect_the_model_of<test::Small>(
      reference_path("models/small_100_safetensors/model.safetensors.index.json"));
  expect_the_model_of<test::Tied>(
      reference_path("models/tied_100_bin/pytorch_model.bin.index.json"));
}

TEST_F(LoadCheckpointTest, PrefersTheArchiveThenSafetensorsThenTheIndex) {
  const auto net = filled<test::Small>();
  write({{"w", torch::full({1}, 2.0)}});
  std::ofstream(path_ / "x.index.json") << R"({"weight_map": {"w": "none.bin"}})";
  test::Leaf leaf(Pairs{{"w", torch::zeros(1)}});
  load_checkpoint_in_model(leaf, path_);
  EXPECT_EQ(state_dict(leaf)["w"].item<float>(), 2);
  torch_save(dict_of({{"w", torch::full({1}, 3.0)}}), path_ / "pytorch_model.bin");
  load_checkpoint_in_model(leaf, path_);
  EXPECT_EQ(state_dict(leaf)["w"].item<float>(), 3);
}

/// The tensors of the reference dcp/model: two processes of Python sharded them.
Pairs sharded_model() {
  const auto counted = [](at::IntArrayRef sizes, torch::ScalarType dtype = torch::kFloat) {
    return torch::arange(c10::multiply_integers(sizes), torch::kFloat).to(dtype).view(sizes);
  };
  return {{"rows", counted({5, 3})},
          {"columns", counted({2, 4, 3}, torch::kBFloat16)},
          {"deep", counted({2, 3, 4}, torch::kDouble)},
          {"one", counted({1, 2})},
          {"replicated", counted({3})},
          {"plain", counted({2, 2}, torch::kLong)},
          {"scalar", torch::tensor(7.0)},
          {"empty", torch::empty({0, 2})},
          {"float8", counted({4}, torch::kFloat8_e4m3fn)}};
}

TEST_F(LoadCheckpointTest, LoadsTheFoldersOfTorchDistributedCheckpoint) {
  Pairs zeros;
  for (const auto& [name, tensor] : sharded_model()) {
    zeros.emplace_back(name, torch::zeros_like(tensor));
  }
  test::Leaf leaf(zeros);
  load_checkpoint_in_model(leaf, reference_path("dcp/model"), {.strict = true});
  const auto loaded = state_dict(leaf);
  const auto alone = load_state_dict(reference_path("dcp/model"));
  EXPECT_EQ(alone.size(), sharded_model().size());
  for (const auto& [name, tensor] : sharded_model()) {
    for (const auto& found : {loaded[name], alone[name]}) {
      EXPECT_EQ(found.scalar_type(), tensor.scalar_type()) << name;
      EXPECT_EQ(found.sizes(), tensor.sizes()) << name;
      EXPECT_TRUE(found.to(torch::kFloat).equal(tensor.to(torch::kFloat))) << name << found;
    }
  }
  test::Leaf half(Pairs{{"rows", torch::zeros({5, 3}, torch::kHalf)}});
  const auto report = load_checkpoint_in_model(half, reference_path("dcp/model"));
  EXPECT_EQ(state_dict(half)["rows"][4][2].item<float>(), 14);
  EXPECT_EQ(report.unexpected_keys.size(), 8U);
}

TEST_F(LoadCheckpointTest, ComparesDistributedCheckpointsBeforeItReadsThem) {
  std::filesystem::copy_file(reference_path("dcp/model/.metadata"), path_ / ".metadata");
  test::Leaf wrong(Pairs{{"rows", torch::zeros({5, 4})}});
  EXPECT_TRUE(message_of<StateDictMismatch>([&] { load_checkpoint_in_model(wrong, path_); })
                  .ends_with("size mismatch for rows: the checkpoint has shape [5, 3], the model "
                             "[5, 4]."));
  test::Leaf right(Pairs{{"rows", torch::zeros({5, 3})}});
  EXPECT_NE(message_of<CheckpointError>([&] {
              load_checkpoint_in_model(right, path_);
            }).find((path_ / "__0_0.distcp").string()),
            std::string::npos);
}

TEST_F(LoadCheckpointTest, RefusesDistributedCheckpointsThatHoldNoModel) {
  test::Leaf leaf(Pairs{{"w", torch::zeros(1)}});
  const auto refusal = [&](const std::filesystem::path& path) {
    return message_of<FormatError>([&] { load_checkpoint_in_model(leaf, path); });
  };
  const auto optimizer = reference_path("dcp/optimizer");
  EXPECT_EQ(refusal(optimizer),
            "'" + optimizer.string() +
                "' is not the state dict of a model: its entry 'state' is of kind dict "
                "and not a tensor.");
  std::ofstream(path_ / ".metadata") << "x";
  EXPECT_TRUE(refusal(path_).starts_with("'" + (path_ / ".metadata").string() + "'"));
}

TEST_F(LoadCheckpointTest, SaysWhatIsNoCheckpoint) {
  test::Leaf leaf(Pairs{{"w", torch::zeros(1)}});
  const auto refusal = [&](const std::filesystem::path& path) {
    return message_of<ArgumentError>([&] { load_checkpoint_in_model(leaf, path); });
  };
  EXPECT_EQ(refusal(path_), path_.string() +
                                " is not a folder containing a `.index.json` file or a "
                                "pytorch_model.bin or a model.safetensors file");
  EXPECT_EQ(refusal(path_ / "no"),
            "`checkpoint` should be the path to a file containing a whole state dict, or the index "
            "of a sharded checkpoint, or a folder containing a sharded checkpoint or the whole "
            "state dict, but got " +
                (path_ / "no").string() + ".");
  std::ofstream(path_ / "a.index.json") << "{}";
  std::ofstream(path_ / "b.index.json") << "{}";
  EXPECT_EQ(refusal(path_), path_.string() +
                                " containing more than one `.index.json` file, delete "
                                "the irrelevant ones.");
  std::filesystem::remove(path_ / "b.index.json");
  std::ofstream(path_ / "a.index.json") << R"({"weight_map": {"w": "gone.safetensors"}})";
  EXPECT_EQ(message_of<CheckpointError>([&] { load_checkpoint_in_model(leaf, path_); }),
            "The index '" + (path_ / "a.index.json").string() +
                "' names the file 'gone.safetensors', which is not there. Copy all files of the "
                "checkpoint.");
}

TEST_F(LoadCheckpointTest, ReportsWhatDoesNotFitAndLoadsTheRest) {
  const test::CapturedLog log;
  write({{"a", torch::full({2}, 5.0)}, {"extra", torch::zeros(1)}, {"shape", torch::ones({3})}});
  test::Leaf leaf(
      Pairs{{"a", torch::zeros(2)}, {"b", torch::full({1}, 7.0)}, {"shape", torch::zeros({2})}});
  const auto report = load_checkpoint_in_model(leaf, path_, {.ignore_mismatched_sizes = true});
  EXPECT_EQ(report.missing_keys, Names{"b"});
  EXPECT_EQ(report.unexpected_keys, Names{"extra"});
  EXPECT_EQ(report.mismatched_keys, (std::vector<MismatchedKey>{{"shape", {3}, {2}}}));
  EXPECT_EQ(state_dict(leaf)["a"][1].item<float>(), 5);
  EXPECT_EQ(state_dict(leaf)["b"].item<float>(), 7);
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_TRUE(log.messages()[0].starts_with("Some weights of the model checkpoint at " +
                                            path_.string() +
                                            " were not used when initializing Leaf: {'extra'}."))
      << log.messages()[0];
}

TEST_F(LoadCheckpointTest, ChangesNothingWhereItIsStrict) {
  write({{"a", torch::ones(2)}, {"extra", torch::zeros(1)}, {"shape", torch::ones({3})}});
  test::Leaf leaf(
      Pairs{{"a", torch::zeros(2)}, {"b", torch::zeros(1)}, {"shape", torch::zeros(2)}});
  EXPECT_EQ(message_of<StateDictMismatch>(
                [&] { load_checkpoint_in_model(leaf, path_, {.strict = true}); }),
            "Error(s) in loading '" + path_.string() +
                "' into Leaf:\n\tMissing key(s) in state_dict: \"b\".\n\tUnexpected key(s) in "
                "state_dict: \"extra\".\n\tsize mismatch for shape: the checkpoint has shape [3], "
                "the model [2].");
  EXPECT_EQ(state_dict(leaf)["a"].sum().item<float>(), 0);
  // Another shape is an error without `strict` too, as in Python.
  EXPECT_THROW(load_checkpoint_in_model(leaf, path_), StateDictMismatch);
  EXPECT_EQ(state_dict(leaf)["a"].sum().item<float>(), 0);
}

TEST_F(LoadCheckpointTest, TakesAnyNameOfATiedTensor) {
  write({{"head.weight", torch::full({6, 4}, 3.0)},
         {"block.weight", torch::zeros({4, 4})},
         {"block.bias", torch::zeros({4})}});
  test::Tied tied;
  const auto report = load_checkpoint_in_model(tied, path_, {.strict = true});
  EXPECT_TRUE(report.missing_keys.empty());
  EXPECT_EQ(state_dict(tied)["embed.weight"][5][3].item<float>(), 3);

  write({{"block.weight", torch::zeros({4, 4})}, {"block.bias", torch::zeros({4})}});
  EXPECT_EQ(load_checkpoint_in_model(tied, path_).missing_keys, Names{"embed.weight"});

  write({{"head.weight", torch::ones({6, 4})},
         {"embed.weight", torch::zeros({6, 4})},
         {"block.weight", torch::zeros({4, 4})},
         {"block.bias", torch::zeros({4})}});
  EXPECT_NE(message_of<StateDictMismatch>([&] {
              load_checkpoint_in_model(tied, path_, {.strict = true});
            }).find("Unexpected key(s) in state_dict: \"head.weight\""),
            std::string::npos);
  EXPECT_TRUE(load_checkpoint_in_model(tied, path_).unexpected_keys.empty());
  EXPECT_EQ(state_dict(tied)["embed.weight"][0][0].item<float>(),
            1);  // the last name, as in Python
}

TEST_F(LoadCheckpointTest, MapsNamesAndTensors) {
  write({{"model.h.0.c_attn.weight", torch::arange(12.0).reshape({2, 6})},
         {"model.h.0.gate", torch::full({2, 2}, 1.0)},
         {"model.h.0.up", torch::full({3, 2}, 2.0)},
         {"model.junk", torch::zeros(1)}});
  test::Leaf block(Pairs{{"q", torch::zeros({2, 2})},
                         {"k", torch::zeros({2, 2})},
                         {"v", torch::zeros({2, 2})},
                         {"gate_up", torch::zeros({5, 2})}});
  KeyMapping mapping;
  mapping.strip_prefix("model.")
      .drop("junk")
      .transpose(R"(.*\.c_attn\.weight)")
      .replace(R"(^h\.0\.)", "")
      .split(R"(c_attn\.weight)", {"q", "k", "v"})
      .join({"gate", "up"}, "gate_up");
  const auto report =
      load_checkpoint_in_model(block, path_, {.strict = true, .key_mapping = mapping});
  const auto state = state_dict(block);
  EXPECT_TRUE(torch::equal(state["k"], torch::tensor({{2.0F, 8.0F}, {3.0F, 9.0F}})));
  EXPECT_EQ(state["gate_up"].sum().item<float>(), 4 * 1 + 6 * 2);
  EXPECT_EQ(report.key_mapping.rules.size(), 6U);
  EXPECT_EQ(report.key_mapping.rules[0].matched, 4);
}

TEST_F(LoadCheckpointTest, NamesTheStepOfAMappingThatDoesNotFit) {
  write({{"w", torch::zeros({4, 3})}, {"v", torch::zeros({2, 2})}});
  test::Leaf leaf(Pairs{{"a", torch::zeros({2, 3})}});
  const auto refusal = [&](const KeyMapping& mapping) {
    return message_of<ConfigError>(
        [&] { load_checkpoint_in_model(leaf, path_, {.key_mapping = mapping}); });
  };
  EXPECT_EQ(refusal(KeyMapping().split("w", {"a", "b", "c"})),
            "The key mapping splits a dimension of 4 into 3 equal parts, which is not possible. "
            "Give the sizes of the parts.");
  EXPECT_EQ(
      refusal(KeyMapping().split("w", {"a", "b"}, {.sizes = {1, 2}})),
      "The key mapping splits a dimension of 4 into parts of 1, 2, which are not the whole of "
      "it.");
  EXPECT_EQ(refusal(KeyMapping().transpose("w", 0, 2).rename("w", "a")),
            "The key mapping has a transpose along dimension 2, and the tensor has the shape [4, "
            "3].");
  EXPECT_EQ(
      refusal(KeyMapping().join({"w", "v"}, "a")),
      "The key mapping joins tensors of the shapes [4, 3] and [2, 2] along dimension 0, which "
      "do not fit together.");
}

TEST_F(LoadCheckpointTest, ConvertsToTheDtypeOfTheModelOrTheOneAskedFor) {
  write({{"w", torch::full({2}, 1.5)}, {"norm.w", torch::full({2}, 2.5)}, {"n", torch::ones(1)}});
  test::Leaf leaf(Pairs{{"w", torch::zeros(2, torch::kDouble)}});
  leaf.register_module("norm", std::make_shared<test::Leaf>(Pairs{{"w", torch::zeros(2)}}));
  leaf.register_buffer("n", torch::zeros(1, torch::kLong));
  const auto weight = leaf.parameters().front();
  load_checkpoint_in_model(leaf, path_);
  EXPECT_EQ(weight.scalar_type(), torch::kDouble);
  EXPECT_EQ(weight[0].item<double>(), 1.5);
  load_checkpoint_in_model(leaf, path_, {.dtype = torch::kHalf, .keep_in_fp32_modules = {"norm"}});
  EXPECT_EQ(weight.scalar_type(), torch::kHalf);  // the same tensor object
  EXPECT_EQ(state_dict(leaf)["norm.w"].scalar_type(), torch::kFloat);
  EXPECT_EQ(state_dict(leaf)["n"].scalar_type(), torch::kLong);
  EXPECT_THROW(load_checkpoint_in_model(leaf, path_, {.dtype = torch::kInt}), ArgumentError);
}

TEST_F(LoadCheckpointTest, FollowsADeviceMapWithoutOffload) {
  write({{"w", torch::ones(2)}});
  test::Leaf leaf(Pairs{{"w", torch::zeros(2)}});
  load_checkpoint_in_model(leaf, path_, {.device_map = {{"", "cpu"}}});
  EXPECT_EQ(state_dict(leaf)["w"].sum().item<float>(), 2);
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { load_checkpoint_in_model(leaf, path_, {.device_map = {{"other", "cpu"}}}); }),
            "w doesn't have any device set.");
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { load_checkpoint_in_model(leaf, path_, {.device_map = {{"", "moon"}}}); }),
            "The device map has 'moon', which is no device. Use 'cpu', 'cuda:0' or the number of a "
            "GPU.");
}

TEST_F(LoadCheckpointTest, EnforcesTheFormatInTheMetadata) {
  const test::CapturedLog log;
  const auto path = path_ / "model.safetensors";
  const auto tensors = dict_of({{"w", torch::ones(1)}});
  safetensors::save_file(tensors, path, {});
  EXPECT_EQ(load_state_dict(path).keys(), Names{"w"});
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_EQ(log.messages()[0],
            "The safetensors archive passed at " + path.string() +
                " does not contain metadata. Make sure to save your model with the "
                "`save_pretrained` method. Defaulting to 'pt' metadata.");
  safetensors::save_file(tensors, path, {{"format", "tf"}});
  EXPECT_EQ(message_of<FormatError>([&] { (void)load_state_dict(path); }),
            "The checkpoint passed was saved with tf, we need a the pt format. It is '" +
                path.string() + "'.");
  for (const auto& metadata :
       {safetensors::Metadata{{"format", "np"}}, safetensors::Metadata{{"other", "pt"}}}) {
    safetensors::save_file(tensors, path, metadata);
    EXPECT_EQ(message_of<FormatError>([&] { (void)load_state_dict(path); }),
              "The safetensors archive passed at " + path.string() +
                  " does not contain the valid metadata. Make sure you save your model with the "
                  "`save_pretrained` method.");
  }
}

TEST_F(LoadCheckpointTest, RefusesArchivesThatHoldNoStateDict) {
  torch_save(Value(3), path_ / "three.bin");
  EXPECT_EQ(
      message_of<FormatError>([&] { (void)load_state_dict(path_ / "three.bin"); }),
      "'" + (path_ / "three.bin").string() + "' is of kind int and not the state dict of a model.");
  torch_save(Value::Dict{{"epoch", 3}}, path_ / "epoch.bin");
  EXPECT_EQ(message_of<FormatError>([&] { (void)load_state_dict(path_ / "epoch.bin"); }),
            "'" + (path_ / "epoch.bin").string() +
                "' is not the state dict of a model: its entry 'epoch' is of kind int and not a "
                "tensor.");
}

}  // namespace
}  // namespace accelerate
