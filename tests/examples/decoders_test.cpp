// The decoders of examples/generate.cpp against transformers: tests/reference/decoders has folders
// and what the models there say.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "examples/decoder_folder.h"
#include "examples/decoding.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace {

namespace fs = std::filesystem;
using accelerate::ConfigError;
using accelerate::test::has;
using accelerate::test::message_of;
using accelerate::test::reference_path;
using examples::DispatchedDecoder;
using examples::load_decoder;
using examples::read_decoder_folder;
using Ids = std::vector<std::int64_t>;

fs::path path_of(const std::string& model) { return reference_path("decoders/" + model); }

DispatchedDecoder resident(const std::string& model) {
  return load_decoder(read_decoder_folder(path_of(model)),
                      {.device_map = accelerate::DeviceMap{{"", "cpu"}}});
}

/// The scores of all positions, [time, vocab].
torch::Tensor logits(const DispatchedDecoder& model, const Ids& prompt) {
  const torch::NoGradGuard no_grad;
  examples::KvCache cache(model->config().num_hidden_layers, /*capacity=*/64);
  return model(torch::tensor(prompt).unsqueeze(0), &cache, /*logits_to_keep=*/0)[0];
}

struct Expected {
  std::string model;
  Ids prompt;
  std::vector<std::vector<float>> logits;
  Ids tokens;

  [[nodiscard]] torch::Tensor scores() const {
    std::vector<torch::Tensor> rows;
    for (const auto& row : logits) rows.push_back(torch::tensor(row));
    return torch::stack(rows);
  }
};
ACCELERATE_VALUE_FIELDS(Expected, model, prompt, logits, tokens);

std::vector<Expected> expected() {
  const auto file = accelerate::read_json_file(reference_path("decoders/expected.json"));
  return accelerate::from_value<std::vector<Expected>>(file.at("cases"));
}

/// The engine works on the CPU as it does on a GPU.
void expect_the_same_offloaded(const std::string& place) {
  for (const auto& one : expected()) {
    SCOPED_TRACE(one.model);
    const accelerate::test::Folder spill;
    const auto model = load_decoder(read_decoder_folder(path_of(one.model)),
                                    {.device_map = accelerate::DeviceMap{{"", place}},
                                     .offload_folder = spill.path(),
                                     .lazy = {.manage_on_cpu = true}});
    EXPECT_TRUE(logits(model, one.prompt).allclose(one.scores(), 0, 1e-4));
    EXPECT_EQ(decode(model, one.prompt, {.tokens = 24}), one.tokens);
    EXPECT_GT(model.stats().fills, 24);
    EXPECT_LT(model.stats().peak_resident_bytes, model.stats().managed_bytes);
  }
}

TEST(Decoders, SayWhatTransformersSays) {
  ASSERT_EQ(expected().size(), 3U);
  for (const auto& one : expected()) {
    SCOPED_TRACE(one.model);
    const auto model = resident(one.model);
    EXPECT_TRUE(logits(model, one.prompt).allclose(one.scores(), 0, 1e-4));
    EXPECT_EQ(decode(model, one.prompt, {.tokens = 24}), one.tokens);
    EXPECT_EQ(model.stats().fills, 0);
  }
}

TEST(Decoders, EndWithTheFirstTokenThatEndsATextAndWriteIt) {
  const auto one = expected().front();
  const auto model = resident(one.model);
  const auto end = one.tokens.at(5);
  const auto first = std::ranges::find(one.tokens, end);
  EXPECT_EQ(decode(model, one.prompt, {.tokens = 24, .end_ids = {-1, end}}),
            std::vector<std::int64_t>(one.tokens.begin(), first + 1));
}

TEST(Decoders, ReadWhichTokensEndAText) {
  const accelerate::test::Folder folder;
  const auto ids_with = [&](const std::string& entry) {
    std::ifstream from(path_of("llama") / "config.json");
    std::string text{std::istreambuf_iterator<char>(from), {}};
    const std::string none = "\"eos_token_id\": null";
    text.replace(text.find(none), none.size(), entry);
    std::ofstream(folder.path() / "config.json") << text;
    return read_decoder_folder(folder.path()).end_ids;
  };
  using Ids = std::vector<std::int64_t>;
  EXPECT_EQ(ids_with(R"("eos_token_id": null)"), Ids());
  EXPECT_EQ(ids_with(R"("eos_token_id": 2)"), Ids{2});
  EXPECT_EQ(ids_with(R"("eos_token_id": [2, 7])"), (Ids{2, 7}));
}

TEST(Decoders, SayTheSameWithWeightsInHostMemory) { expect_the_same_offloaded("cpu"); }

TEST(Decoders, SayTheSameWithWeightsOnDisk) { expect_the_same_offloaded("disk"); }

TEST(Decoders, TakeAPromptInParts) {
  const torch::NoGradGuard no_grad;
  for (const auto* name : {"gpt2", "llama"}) {
    const auto model = resident(name);
    const auto whole = logits(model, {3, 1, 4, 1, 5, 9, 2, 6});
    examples::KvCache cache(model->config().num_hidden_layers, 8);
    const auto first = model(torch::tensor({{3, 1, 4}}), &cache, 0);
    const auto rest = model(torch::tensor({{1, 5, 9, 2, 6}}), &cache, 0);
    EXPECT_TRUE(torch::cat({first[0], rest[0]}).allclose(whole, 0, 1e-5)) << name;
  }
}

TEST(Decoders, KeepTheDtypeOfTheirConfig) {
  const accelerate::test::Folder copy;
  fs::copy(path_of("llama_tied"), copy.path());
  std::ifstream in(copy / "config.json");
  std::string text((std::istreambuf_iterator<char>(in)), {});
  text.replace(text.find("float32"), 7, "bfloat16");
  std::ofstream(copy / "config.json") << text;
  const auto model = load_decoder(read_decoder_folder(copy.path()), {.device_map = "auto"});
  EXPECT_EQ(model->parameters().front().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(logits(model, {1, 2}).scalar_type(), torch::kBFloat16);
}

TEST(Decoding, IsRepeatedByItsSeed) {
  const auto model = resident("llama");
  const auto written = [&](std::int64_t seed) {
    return decode(model, {1, 2, 3}, {.tokens = 20, .temperature = 2, .seed = seed});
  };
  EXPECT_EQ(written(1), written(1));
  EXPECT_NE(written(1), written(2));
}

TEST(Decoding, HasNoAttentionThatPlansEachLength) {
  const auto model = resident("llama");
  const auto is_on = [] { return at::globalContext().userEnabledCuDNNSDP(); };
  const bool was_on = is_on();
  std::vector<bool> seen;
  decode(model, {1, 2}, {.tokens = 2, .on_token = [&] { seen.push_back(is_on()); }});
  EXPECT_EQ(seen, (std::vector<bool>{false, false}));
  EXPECT_EQ(is_on(), was_on);
}

TEST(Decoding, DrawsFromTheFewestTokensThatAreLikelyEnough) {
  const auto scores = torch::tensor({0.15, 0.5, 0.05, 0.3}).log();
  const auto drawn = [&](double top_p) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    std::vector<std::int64_t> counts(4, 0);
    for (int i = 0; i < 400; ++i) {
      ++counts[static_cast<std::size_t>(
          examples::choose(scores, {.temperature = 1, .top_p = top_p}, generator))];
    }
    return counts;
  };
  EXPECT_EQ(drawn(0.4), (Ids{0, 400, 0, 0}));
  const auto two = drawn(0.7);
  EXPECT_EQ(two[0] + two[2], 0);
  EXPECT_NEAR(static_cast<double>(two[1]), 250, 40);  // 0.5 of 0.8
  const auto all = drawn(1);
  EXPECT_GT(all[2], 0);
}

TEST(Decoding, RefusesPromptsThatTheModelCannotSee) {
  const auto model = resident("gpt2");
  const auto refusal = [&](const Ids& prompt, std::int64_t tokens) {
    return message_of<ConfigError>([&] { decode(model, prompt, {.tokens = tokens}); });
  };
  EXPECT_TRUE(has(refusal({}, 1), "The prompt is empty"));
  EXPECT_TRUE(has(refusal({1, 41}, 1), "has the id 41. The ids of this model go from 0 to 40."));
  EXPECT_TRUE(has(refusal({-1}, 1), "has the id -1."));
  EXPECT_EQ(refusal({1, 2, 3}, 30),
            "The prompt of 3 tokens and 30 more do not fit: the context of this model has 32 "
            "tokens. Shorten one of them.");
  EXPECT_EQ(decode(model, {1, 2}, {.tokens = 30}).size(), 30U);
}

class DecoderFolders : public testing::Test {
 protected:
  /// What is refused in a folder with this config.json.
  std::string refusal(const std::string& config) const {
    std::ofstream(folder / "config.json") << config;
    return message_of<ConfigError>([&] { return read_decoder_folder(folder.path()); });
  }
  void expect_the_tokens_of(const Expected& one) const {
    const auto model = load_decoder(read_decoder_folder(folder.path()),
                                    {.device_map = accelerate::DeviceMap{{"", "cpu"}}});
    EXPECT_EQ(decode(model, one.prompt, {.tokens = 24}), one.tokens);
  }
  accelerate::test::Folder folder;
};

TEST_F(DecoderFolders, AreRefusedWithFileAndReason) {
  EXPECT_TRUE(has(message_of<ConfigError>([&] { return read_decoder_folder(folder / "none"); }),
                  "none' is no folder with a config.json. Give the folder of a model"));
  EXPECT_TRUE(has(refusal("[]"), "config.json' holds no JSON object."));
  EXPECT_TRUE(has(refusal("{"), "config.json, line 1"));
  EXPECT_TRUE(has(refusal(R"({"model_type": "bert"})"),
                  "config.json': model_type is 'bert'. This program knows gpt2 and llama."));
  EXPECT_TRUE(has(refusal(R"({"model_type": "gpt2"})"), "n_embd is missing."));
  EXPECT_TRUE(has(refusal(R"({"model_type": "gpt2", "n_embd": "8"})"), "n_embd is '8'."));
  EXPECT_TRUE(has(refusal(R"({"model_type": "gpt2", "n_embd": 0})"),
                  "n_embd is 0. Expected a number from 1 on."));
  EXPECT_TRUE(has(refusal(R"({"model_type": "gpt2", "n_embd": 8, "n_head": 3})"),
                  "n_head is 3. It does not divide n_embd."));
  EXPECT_TRUE(has(refusal(R"({"model_type": "llama", "hidden_act": "gelu"})"),
                  "hidden_act is 'gelu'. This program only knows 'silu'."));
  EXPECT_TRUE(has(refusal(R"({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2,
                              "vocab_size": 9, "intermediate_size": 4, "num_hidden_layers": 1,
                              "rope_scaling": {"type": "yarn"}})"),
                  "type is 'yarn'. This program only knows 'default' and 'llama3'."));
}

TEST_F(DecoderFolders, MayHaveATiedHeadTwice) {
  fs::copy(path_of("llama_tied") / "config.json", folder.path());
  auto state = accelerate::safetensors::load_file(path_of("llama_tied") / "model.safetensors");
  state.insert("lm_head.weight", state["model.embed_tokens.weight"].clone());
  accelerate::safetensors::save_file(state, folder.path() / "model.safetensors",
                                     {{"format", "pt"}});
  expect_the_tokens_of(expected().back());
}

TEST_F(DecoderFolders, MayBeOfAnOldGpt2) {
  fs::copy(path_of("gpt2") / "config.json", folder.path());
  accelerate::StateDict state;  // without the prefix, and with masks
  const auto stored = accelerate::safetensors::load_file(path_of("gpt2") / "model.safetensors");
  for (const auto& item : stored) {
    state.insert(item.key().substr(std::string("transformer.").size()), item.value());
  }
  state.insert("h.0.attn.bias", torch::ones({1, 1, 32, 32}));
  state.insert("h.0.attn.masked_bias", torch::tensor(-1e4));
  accelerate::safetensors::save_file(state, folder.path() / "model.safetensors",
                                     {{"format", "pt"}});
  expect_the_tokens_of(expected().front());
}

TEST_F(DecoderFolders, MayNameRotaryPositionsAsOldLlamasDo) {
  std::ofstream(folder / "config.json") << R"({"rope_theta": 500000, "rope_scaling": {
      "type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}})";
  const auto [theta, scaling] =
      examples::read_rope(examples::DecoderConfigFile(folder / "config.json"));
  EXPECT_EQ(theta, 500000);
  ASSERT_TRUE(scaling.has_value());
  EXPECT_EQ(scaling->factor, 8);
  EXPECT_EQ(scaling->original_max_position_embeddings, 8192);
}

TEST(RandomDecoders, AreQuantizedBlockByBlock) {
  const auto folder = examples::random_llama("tiny");
  for (const std::string format : {"int8", "nf4"}) {
    SCOPED_TRACE(format);
    const auto model = examples::fill_decoder(folder, examples::bits_of(format, folder.dtype));
    const auto state = model.state_dict();
    EXPECT_LE(state["blocks.1.down.weight"].element_size(), 1);
    EXPECT_EQ(state["blocks.1.norm2.weight"].scalar_type(), torch::kBFloat16);
    EXPECT_EQ(state["head.weight"].scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(logits(model, {1, 2, 3}).isfinite().all().item<bool>());
  }
}

TEST_F(DecoderFolders, MustHaveAllWeights) {
  fs::copy(path_of("llama_tied") / "config.json", folder.path());
  const auto refused = [&] {
    return load_decoder(read_decoder_folder(folder.path()),
                        {.device_map = accelerate::DeviceMap{{"", "cpu"}}});
  };
  EXPECT_TRUE(has(message_of<accelerate::ArgumentError>(refused), folder.path().string()));
  fs::copy(path_of("gpt2") / "model.safetensors", folder.path());
  EXPECT_TRUE(has(message_of<accelerate::StateDictMismatch>(refused),
                  R"(Missing key(s) in state_dict: "blocks.0.attention.key.bias")"));
}

}  // namespace
