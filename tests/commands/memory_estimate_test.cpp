#include "commands/memory_estimate.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "accelerate/errors.h"
#include "commands/model_files.h"
#include "commands/running.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "formats/safetensors_header.h"
#include "support/reference_path.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;
using formats::Dtype;
using formats::TensorEntry;
using nlohmann::json;

Value::Dict config_of(const std::string& text) { return json_loads(text).as_dict(); }

TEST(ModelLayout, HasTheSizesOfTransformers) {
  std::ifstream file(test::reference_path("estimate/estimates.json"));
  int count = 0;
  for (const auto& each : json::parse(file)) {
    SCOPED_TRACE(each["config"].dump());
    const auto layout = layout_of_config(config_of(each["config"].dump()), "config.json");
    const auto sizes = measure(layout);
    EXPECT_EQ(sizes.parameters, each["parameters"].get<std::int64_t>());
    EXPECT_EQ(sizes.total, each["total"].get<std::int64_t>());
    EXPECT_EQ(sizes.largest_layer, each["largest"].get<std::int64_t>());
    EXPECT_EQ(sizes.largest_names, each["names"].get<Words>());
    EXPECT_TRUE(layout.shape.has_value());
    const EstimateOptions options{.model = each["config"]["model_type"]};
    const auto text = estimate(layout, options).text();
    EXPECT_TRUE(starts(text, each["table"].get<std::string>()));
    ++count;
  }
  EXPECT_GE(count, 40);
}

TEST(ModelLayout, RefusesWhatItDoesNotKnowWithAdvice) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      (void)measure(layout_of_config(config_of(text), "config.json"));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_TRUE(
      starts(message("{\"model_type\": \"mamba\"}"),
             "config.json: the model type 'mamba' is not known. Pass the .safetensors file"));
  EXPECT_TRUE(has(message("{}"), "config.json has no 'model_type'"));
  EXPECT_TRUE(has(message("{}"), "known: albert, bart, bert"));
  EXPECT_EQ(message("{\"model_type\": \"bert\", \"hidden_size\": -1}"),
            "config.json: 'hidden_size' is -1, expected a number from 1 to 16777216.");
  EXPECT_EQ(message("{\"model_type\": \"bert\", \"num_hidden_layers\": 1e9}"),
            "config.json: 'num_hidden_layers' is 1000000000.0, expected a number from 0 to 4096.");
  // Each size is possible, their product is not.
  EXPECT_TRUE(has(message("{\"model_type\": \"mixtral\", \"hidden_size\": 16777216, "
                          "\"intermediate_size\": 16777216, \"num_local_experts\": 16777216}"),
                  "does not fit into 64 bits"));
}

ModelLayout layout_with(std::vector<std::pair<std::string, std::int64_t>> tensors,
                        std::vector<std::string> no_split = {}) {
  ModelLayout layout{.no_split = std::move(no_split)};
  for (auto& [name, bytes] : tensors) layout.tensors.push_back({name, bytes / 4, bytes});
  return layout;
}

TEST(Measure, TakesModulesWithTensorsForLayersAndGroupsThoseThatAreNotSplit) {
  const auto tensors =
      std::vector<std::pair<std::string, std::int64_t>>{{"model.layers.0.a.weight", 40},
                                                        {"model.layers.0.b.weight", 20},
                                                        {"model.layers.1.a.weight", 40},
                                                        {"model.layers.1.b.weight", 20},
                                                        {"head.weight", 48},
                                                        {"scale", 44}};
  const auto plain = measure(layout_with(tensors));
  EXPECT_EQ(plain.total, 212);
  EXPECT_EQ(plain.largest_layer, 48);
  EXPECT_EQ(plain.largest_names, Words{"head"});
  // A pattern matches the last parts of a path, so that it fits models inside of others.
  const auto grouped = measure(layout_with(tensors, {"layers.*"}));
  EXPECT_EQ(grouped.largest_layer, 60);
  EXPECT_EQ(grouped.largest_names, (Words{"model.layers.0", "model.layers.1"}));
}

TEST(TrainingUsage, HasPythonsNumbers) {
  const auto full = *training_usage(1000, "float32");
  EXPECT_EQ(full.peak(), 4000);
  EXPECT_EQ(full.optimizer, 2000);
  const auto half = *training_usage(1001, "float16");
  EXPECT_EQ(half.gradients, 1501);
  EXPECT_EQ(half.peak(), 2002);
  EXPECT_FALSE(training_usage(1000, "int8"));
}

TEST(Estimate, ShardsByZeroStageOverProcesses) {
  const auto result = estimate(layout_with({{"w.weight", 1200}}),
                               {.model = "m", .dtypes = {"float32"}, .num_processes = {1, 4}});
  ASSERT_EQ(result.sharded.size(), 4U);
  const std::vector<std::vector<double>> expected{
      {1200, 1200, 2400}, {1200, 1200, 600}, {1200, 300, 600}, {300, 300, 600}};
  for (std::size_t stage = 0; stage < 4; ++stage) {
    const auto& row = result.sharded[stage];
    EXPECT_EQ(row.zero_stage, static_cast<int>(stage));
    EXPECT_EQ((std::vector<double>{row.parameters, row.gradients, row.optimizer}), expected[stage]);
    EXPECT_EQ(row.activations, std::nullopt);
  }
  EXPECT_TRUE(has(result.text(), "Activations are not included"));
}

TEST(Estimate, CountsActivationsAsThePaperDoes) {
  // s b h (34 + 5 a s / h) bytes per layer in 16 bits, for a feed-forward part of 4 h.
  const TransformerShape shape{.layers = 3, .hidden = 64, .heads = 4, .intermediate = 256};
  const double s = 128;
  const double b = 2;
  EXPECT_DOUBLE_EQ(activation_bytes(shape, "float16", 2, 128),
                   3 * s * b * 64 * (34 + 5 * 4 * s / 64));
}

TEST(BoxTable, WidensTheLastColumnForALongTitle) {
  EXPECT_EQ(box_table("a title that is long", {"a", "b"}, {{"1", "22"}}),
            "┌────────────────────┐\n"
            "│a title that is long│\n"
            "├─┬──────────────────┤\n"
            "│a│        b         │\n"
            "├─┼──────────────────┤\n"
            "│1│        22        │\n"
            "└─┴──────────────────┘\n");
}

// --- files

class ModelOnDiskTest : public testing::Test {
 protected:
  ModelOnDiskTest() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  void write_tensors(const std::string& name, std::vector<TensorEntry> tensors) const {
    const auto header = formats::plan_safetensors(std::move(tensors), {});
    auto bytes = formats::safetensors_header_bytes(header);
    bytes.resize(bytes.size() + static_cast<std::size_t>(header.tensors.back().end));
    write(name, bytes);
  }
  [[nodiscard]] Ran estimated(const Words& words) const {
    Words argv{kAccelerate, "estimate-memory"};
    argv.insert(argv.end(), words.begin(), words.end());
    return ran(argv,
               {.environment = {{"HF_HOME", (folder_ / "home").string()}}, .folder = folder_});
  }
  [[nodiscard]] json answer(Words words) const {
    words.emplace_back("--json");
    const auto result = estimated(words);
    EXPECT_EQ(result.code, 0) << result.err;
    return json::parse(result.out);
  }

  const fs::path folder_ = testing::TempDir() + "/estimate";
};

TensorEntry entry(const std::string& name, Dtype dtype, std::vector<std::int64_t> shape) {
  return {.name = name, .dtype = dtype, .shape = std::move(shape)};
}

TEST_F(ModelOnDiskTest, CountsFloatsIn32BitsIntegersAsTheyAreAndBoolsAsBits) {
  write_tensors("m.safetensors",
                {entry("a.weight", Dtype::kBF16, {10}), entry("a.scale", Dtype::kF64, {2}),
                 entry("b.ids", Dtype::kI64, {3}), entry("b.mask", Dtype::kBool, {16})});
  const auto result = answer({"m.safetensors"});
  EXPECT_EQ(result["total_size"], 10 * 4 + 2 * 4 + 3 * 8 + 2);
  EXPECT_EQ(result["parameters"], 12);
  EXPECT_EQ(result["largest_layer"], 48);
  EXPECT_EQ(result["largest_layer_names"], json({"a"}));
  EXPECT_EQ(result["sequence_length"], nullptr);
}

TEST_F(ModelOnDiskTest, ReadsShardsThroughTheirIndex) {
  write_tensors("big/x-1.safetensors", {entry("a.weight", Dtype::kF32, {10})});
  write_tensors("big/x-2.safetensors", {entry("b.weight", Dtype::kF32, {5})});
  write("big/model.safetensors.index.json",
        R"({"weight_map": {"a.weight": "x-1.safetensors", "b.weight": "x-2.safetensors"}})");
  const auto result = answer({"big"});
  EXPECT_EQ(result["total_size"], 60);
  EXPECT_EQ(result["files"].size(), 2U);
  EXPECT_EQ(answer({"big/model.safetensors.index.json"})["total_size"], 60);
}

TEST_F(ModelOnDiskTest, TakesSizesFromTheWeightsAndActivationsFromTheConfig) {
  write_tensors("both/model.safetensors",
                {entry("bert.encoder.layer.0.a.weight", Dtype::kF16, {10}),
                 entry("bert.encoder.layer.0.b.weight", Dtype::kF16, {10})});
  write("both/config.json", R"({"model_type": "bert"})");
  const auto result = answer({"both", "--batch_size", "2", "--sequence_length=64"});
  EXPECT_EQ(result["total_size"], 80);
  EXPECT_EQ(result["largest_layer_names"], json({"bert.encoder.layer.0"}));
  EXPECT_EQ(result["sequence_length"], 64);
  EXPECT_GT(result["sharding"][0]["activations"], 0);
}

TEST_F(ModelOnDiskTest, FindsAModelInTheCacheOfHuggingFace) {
  write("home/hub/models--me--tiny/refs/main", "abc");
  write("home/hub/models--me--tiny/snapshots/abc/config.json", R"({"model_type": "gpt2"})");
  EXPECT_EQ(answer({"me/tiny"})["parameters"], 124439808);
}

TEST_F(ModelOnDiskTest, RefusesWithTheReason) {
  write("empty/readme", "");
  write("two/a.safetensors", "");
  write("two/b.safetensors", "");
  write("escape/model.safetensors.index.json", R"({"weight_map": {"a": "../../secret"}})");
  write("notes.txt", "");
  for (const auto& [words, reason] : std::vector<std::pair<Words, std::string>>{
           {{}, "There is no model"},
           {{"bert-base-cased"}, "Nothing is downloaded: fetch the model first"},
           {{"empty"}, "has no .safetensors file"},
           {{"two"}, "has 2 files *.safetensors"},
           {{"notes.txt"}, "neither a .safetensors file nor a config.json"},
           {{"x", "--dtypes", "float23"},
            "--dtypes is 'float23'. Choose one of: float32, float16, "
            "int8, int4. Did you mean 'float32'?"},
           {{"x", "--num_processes", "2,zero"}, "--num_processes is 'zero', expected a number"}}) {
    const auto result = estimated(words);
    EXPECT_EQ(result.code, 2) << join(words, " ");
    EXPECT_TRUE(has(result.err, reason));
    EXPECT_EQ(result.out, "");
  }
  const auto escape = estimated({"escape"});
  EXPECT_EQ(escape.code, 1);
  EXPECT_TRUE(has(escape.err, "leads out of the folder"));
}

TEST_F(ModelOnDiskTest, ShowsTheDtypesInTheOrderGiven) {
  write("config.json", R"({"model_type": "gpt2"})");
  const auto result =
      estimated({"--dtypes", "int8", "float32", "config.json", "--trust_remote_code"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_LT(result.out.find("int8"), result.out.find("float32"));
  EXPECT_EQ(result.out.find("float16"), std::string::npos);
  EXPECT_TRUE(has(result.err, "--trust_remote_code has no effect"));
}

}  // namespace
}  // namespace accelerate::detail::commands
