#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "checkpoint/models.h"
#include "core/captured_log.h"
#include "support/reference_path.h"

namespace accelerate::shards_test {
namespace {

StateDict dict_of(const std::vector<std::pair<std::string, torch::Tensor>>& tensors) {
  StateDict state("Tensor");
  for (const auto& [name, tensor] : tensors) state.insert(name, tensor);
  return state;
}

TEST(SplitStateDict, IsThatOfPythonForRandomTensors) {
  std::ifstream in(test::reference_path("shards/splits.json"));
  const auto cases = nlohmann::json::parse(in);
  ASSERT_EQ(cases.size(), 220U);
  for (const auto& one : cases) {
    std::vector<torch::Tensor> storages;
    StateDict state("Tensor");
    for (const auto& [name, storage, bytes] :
         one.at("items").get<std::vector<std::tuple<std::string, std::size_t, std::int64_t>>>()) {
      if (storage == storages.size()) storages.push_back(torch::zeros({bytes}, torch::kByte));
      state.insert(name, storages[storage].slice(0, 0, 1));
    }
    const auto split = split_torch_state_dict_into_shards(
        state, {.filename_pattern = one.at("pattern").get<std::string>(),
                .max_shard_size = one.at("limit").get<std::int64_t>()});
    const std::vector<std::pair<std::string, std::string>> files(split.tensor_to_filename.begin(),
                                                                 split.tensor_to_filename.end());
    EXPECT_EQ(nlohmann::json(files), one.at("tensors"));
  }
}

TEST(SplitStateDict, TakesSizesAsTextAndTheOlderName) {
  const auto state =
      dict_of({{"a", torch::zeros(500, torch::kByte)}, {"b", torch::zeros(600, torch::kByte)}});
  EXPECT_EQ(split_torch_state_dict_into_shards(state, {.max_shard_size = "1KB"}).tensor_to_filename,
            (OrderedMap<std::string, std::string>{{"a", "model-00001-of-00002.safetensors"},
                                                  {"b", "model-00002-of-00002.safetensors"}}));
  EXPECT_EQ(shard_checkpoint(state, 1000).filename_to_tensors.keys().front(),
            "pytorch_model-00001-of-00002.bin");
  EXPECT_FALSE(shard_checkpoint(state).is_sharded);
}

TEST(SplitStateDict, GivesTensorsOnTheMetaDeviceNoCommonStorage) {
  const auto meta = torch::zeros(4, torch::TensorOptions().device(torch::kMeta));
  const auto split = split_torch_state_dict_into_shards(dict_of({{"a", meta}, {"b", meta}}),
                                                        {.max_shard_size = 16});
  EXPECT_TRUE(split.is_sharded);
  EXPECT_EQ(split.total_size, 32);
}

TEST(IdTensorStorage, IsEqualForViewsOfOneStorage) {
  const auto whole = torch::zeros({4, 4});
  EXPECT_EQ(id_tensor_storage(whole), id_tensor_storage(whole[2]));
  EXPECT_NE(id_tensor_storage(whole), id_tensor_storage(whole.clone()));
  EXPECT_EQ(id_tensor_storage(whole[2]).bytes, 64);
  EXPECT_THROW((void)id_tensor_storage(whole.to_sparse()), ArgumentError);
}

TEST(CleanStateDict, RemovesOtherNamesOfATensorWithOneWarning) {
  const test::CapturedLog log;
  const auto weight = torch::arange(6.0).reshape({2, 3});
  const auto clean = clean_state_dict_for_safetensors(
      dict_of({{"a", weight}, {"b", torch::ones(1)}, {"c", weight}, {"d", weight.view({2, 3})}}));
  EXPECT_EQ(clean.keys(), (std::vector<std::string>{"a", "b"}));
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_TRUE(log.messages()[0].starts_with("Removed shared tensor {'c', 'd'} while saving."))
      << log.messages()[0];
}

TEST(CleanStateDict, CopiesViewsOfOneStorageThatAreNotTheSame) {
  const auto whole = torch::arange(6.0);
  const auto clean = clean_state_dict_for_safetensors(
      dict_of({{"low", whole.slice(0, 0, 3)}, {"high", whole.slice(0, 3)}, {"all", whole}}));
  ASSERT_EQ(clean.size(), 3U);
  EXPECT_TRUE(torch::equal(clean["high"], whole.slice(0, 3)));
  EXPECT_NE(id_tensor_storage(clean["low"]), id_tensor_storage(clean["all"]));
  EXPECT_EQ(id_tensor_storage(clean["low"]).bytes, 12);
}

TEST(CleanStateDict, KeepsAllTensorsWithoutElements) {
  const auto none = torch::zeros({0, 3});
  EXPECT_EQ(clean_state_dict_for_safetensors(dict_of({{"a", none}, {"b", none}})).size(), 2U);
}

TEST(CleanStateDict, MakesTensorsContiguous) {
  const auto clean =
      clean_state_dict_for_safetensors(dict_of({{"a", torch::arange(6.0).reshape({2, 3}).t()}}));
  EXPECT_TRUE(clean["a"].is_contiguous());
  EXPECT_EQ(clean["a"][0][1].item<float>(), 3);
}

}  // namespace
}  // namespace accelerate::shards_test
