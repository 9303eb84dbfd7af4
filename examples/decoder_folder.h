// A decoder from a folder of Hugging Face: config.json, and weights in one safetensors file or in
// several with an index.
#pragma once

#include <accelerate/accelerate.h>
#include <accelerate/value/from_value.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "decoders.h"

namespace examples {

/// The entries of a config.json.
class DecoderConfigFile {
 public:
  explicit DecoderConfigFile(std::filesystem::path path)
      : path_(std::move(path)), entries_(accelerate::read_json_file(path_)) {
    if (!entries_.is_dict()) {
      throw accelerate::ConfigError("'" + path_.string() + "' holds no JSON object.");
    }
  }

  /// An entry, or `usual` if it is missing or null. Throws `ConfigError` if it is of another type,
  /// or is missing and has no usual value.
  template <class T>
  [[nodiscard]] T get(const std::string& name, const std::optional<T>& usual = {}) const {
    const auto* value = find(name);
    if (value == nullptr && usual) return *usual;
    if (value == nullptr) refuse(name, "This kind of model needs it.");
    try {
      return accelerate::from_value<T>(*value);
    } catch (const accelerate::ArgumentError& error) {
      refuse(name, error.what());
    }
  }
  [[nodiscard]] std::int64_t size(const std::string& name,
                                  const std::optional<std::int64_t>& usual = {}) const {
    const auto value = get(name, usual);
    if (value < 1) refuse(name, "Expected a number from 1 on.");
    return value;
  }
  /// Refuses models that compute in another way than this program does.
  template <class T>
  void expect(const std::string& name, const T& wanted) const {
    if (get<T>(name, wanted) != wanted) {
      refuse(name, "This program only knows " + accelerate::Value(wanted).repr() + ".");
    }
  }
  /// The entries of an object in this file; none if it is missing.
  [[nodiscard]] DecoderConfigFile section(const std::string& name) const {
    auto part = *this;
    part.entries_ = get<accelerate::Value::Dict>(name, accelerate::Value::Dict());
    return part;
  }
  [[nodiscard]] bool has(const std::string& name) const { return find(name) != nullptr; }
  [[noreturn]] void refuse(const std::string& name, const std::string& why) const {
    const auto* value = find(name);
    throw accelerate::ConfigError("'" + path_.string() + "': " + name + " is " +
                                  (value != nullptr ? value->repr() : "missing") + ". " + why);
  }

 private:
  [[nodiscard]] const accelerate::Value* find(const std::string& name) const {
    const auto* value = entries_.as_dict().get(name);
    return value != nullptr && !value->is_none() ? value : nullptr;
  }

  std::filesystem::path path_;
  accelerate::Value entries_;
};

/// The model that a folder describes.
struct DecoderFolder {
  DecoderConfig config = {};
  /// Builds it.
  std::function<std::shared_ptr<Decoder>()> make = {};
  /// From the names in the files to those of the model.
  accelerate::KeyMapping key_mapping = {};
  torch::ScalarType dtype = torch::kFloat;
  /// Tokens after which nothing is written.
  std::vector<std::int64_t> end_ids = {};
  std::filesystem::path path = {};
};

inline DecoderFolder gpt2_folder(const DecoderConfigFile& file) {
  file.expect<std::string>("activation_function", "gelu_new");
  file.expect("scale_attn_weights", true);
  file.expect("scale_attn_by_inverse_layer_idx", false);
  const auto width = file.size("n_embd");
  const auto heads = file.size("n_head");
  if (width % heads != 0) file.refuse("n_head", "It does not divide n_embd.");
  const DecoderConfig config{.vocab_size = file.size("vocab_size"),
                             .max_position_embeddings = file.size("n_positions"),
                             .hidden_size = width,
                             .intermediate_size = file.size("n_inner", 4 * width),
                             .num_hidden_layers = file.size("n_layer"),
                             .num_attention_heads = heads,
                             .num_key_value_heads = heads,
                             .head_dim = width / heads,
                             .norm_eps = file.get<double>("layer_norm_epsilon", 1e-5),
                             .attention_bias = true,
                             .mlp_bias = true,
                             .tie_word_embeddings = file.get<bool>("tie_word_embeddings", true)};
  // GPT-2 keeps its weights transposed, and those of queries, keys and values in one matrix.
  accelerate::KeyMapping mapping;
  mapping.strip_prefix("transformer.")
      .drop(R"(h\.\d+\.attn\.(masked_)?bias)")  // masks in old files
      .transpose(R"(.*\.c_(attn|proj|fc)\.weight)")
      .split(R"(h\.(\d+)\.attn\.c_attn\.(weight|bias))",
             {R"(blocks.\1.attention.query.\2)", R"(blocks.\1.attention.key.\2)",
              R"(blocks.\1.attention.value.\2)"})
      .replace(R"(^h\.(\d+)\.attn\.c_proj\.)", R"(blocks.\1.attention.out.)")
      .replace(R"(^h\.(\d+)\.mlp\.c_fc\.)", R"(blocks.\1.up.)")
      .replace(R"(^h\.(\d+)\.mlp\.c_proj\.)", R"(blocks.\1.down.)")
      .replace(R"(^h\.(\d+)\.ln_(\d)\.)", R"(blocks.\1.norm\2.)")
      .replace(R"(^ln_f\.)", "norm.")
      .replace(R"(^wte\.)", "tokens.")
      .replace(R"(^wpe\.)", "positions.");
  return {config, [config] { return std::make_shared<Gpt2>(config); }, mapping};
}

/// Newer files have all about rotary positions in `rope_parameters`, older ones in two entries.
inline std::pair<double, std::optional<RopeScaling>> read_rope(const DecoderConfigFile& file) {
  const bool is_new = file.has("rope_parameters");
  const auto rope = file.section(is_new ? "rope_parameters" : "rope_scaling");
  const auto theta = (is_new ? rope : file).get<double>("rope_theta", 10000.0);
  const std::string name = rope.has("rope_type") ? "rope_type" : "type";
  const auto type = rope.get<std::string>(name, "default");
  if (type == "default") return {theta, std::nullopt};
  if (type != "llama3") rope.refuse(name, "This program only knows 'default' and 'llama3'.");
  return {theta, RopeScaling{.factor = rope.get<double>("factor"),
                             .low_freq_factor = rope.get<double>("low_freq_factor"),
                             .high_freq_factor = rope.get<double>("high_freq_factor"),
                             .original_max_position_embeddings =
                                 rope.get<double>("original_max_position_embeddings")}};
}

inline DecoderFolder llama_folder(const DecoderConfigFile& file) {
  file.expect<std::string>("hidden_act", "silu");
  const auto width = file.size("hidden_size");
  const auto heads = file.size("num_attention_heads");
  const auto shared_heads = file.size("num_key_value_heads", heads);
  if (heads % shared_heads != 0) {
    file.refuse("num_key_value_heads", "It does not divide num_attention_heads.");
  }
  const DecoderConfig config{.vocab_size = file.size("vocab_size"),
                             .max_position_embeddings = file.size("max_position_embeddings", 2048),
                             .hidden_size = width,
                             .intermediate_size = file.size("intermediate_size"),
                             .num_hidden_layers = file.size("num_hidden_layers"),
                             .num_attention_heads = heads,
                             .num_key_value_heads = shared_heads,
                             .head_dim = file.size("head_dim", width / heads),
                             .norm_eps = file.get<double>("rms_norm_eps", 1e-6),
                             .attention_bias = file.get<bool>("attention_bias", false),
                             .mlp_bias = file.get<bool>("mlp_bias", false),
                             .tie_word_embeddings = file.get<bool>("tie_word_embeddings", false)};
  accelerate::KeyMapping mapping;
  mapping.strip_prefix("model.")
      .drop(R"(.*\.rotary_emb\.inv_freq)")  // in old files
      .replace(R"(^layers\.)", "blocks.")
      .replace(R"(\.self_attn\.q_proj\.)", ".attention.query.")
      .replace(R"(\.self_attn\.k_proj\.)", ".attention.key.")
      .replace(R"(\.self_attn\.v_proj\.)", ".attention.value.")
      .replace(R"(\.self_attn\.o_proj\.)", ".attention.out.")
      .replace(R"(\.mlp\.(gate|up|down)_proj\.)", R"(.\1.)")
      .replace(R"(\.input_layernorm\.)", ".norm1.")
      .replace(R"(\.post_attention_layernorm\.)", ".norm2.")
      .replace(R"(^embed_tokens\.)", "tokens.");
  const auto [theta, scaling] = read_rope(file);
  return {config,
          [config, theta = theta, scaling = scaling] {
            return std::make_shared<Llama>(config, theta, scaling);
          },
          mapping};
}

inline torch::ScalarType read_dtype(const DecoderConfigFile& file) {
  const std::string name = file.has("dtype") ? "dtype" : "torch_dtype";  // since transformers 5
  const auto text = file.get<std::string>(name, "float32");
  if (text == "float32") return torch::kFloat;
  if (text == "float16") return torch::kHalf;
  if (text == "bfloat16") return torch::kBFloat16;
  file.refuse(name, "Choose one of: float32, float16, bfloat16.");
}

/// One id, or a list of them.
inline std::vector<std::int64_t> read_end_ids(const DecoderConfigFile& file) {
  using accelerate::Value;
  const auto ids = file.get<Value>("eos_token_id", Value(Value::List()));
  return accelerate::from_value<std::vector<std::int64_t>>(ids.is_list() ? ids
                                                                         : Value(Value::List{ids}));
}

/// Reads config.json. Throws `ConfigError` for a folder that this program cannot use.
inline DecoderFolder read_decoder_folder(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path / "config.json")) {
    throw accelerate::ConfigError("'" + path.string() +
                                  "' is no folder with a config.json. Give the folder of a model "
                                  "as save_pretrained writes it.");
  }
  const DecoderConfigFile file(path / "config.json");
  const auto type = file.get<std::string>("model_type");
  if (type != "gpt2" && type != "llama") {
    file.refuse("model_type", "This program knows gpt2 and llama.");
  }
  auto folder = type == "gpt2" ? gpt2_folder(file) : llama_folder(file);
  folder.path = path;
  folder.dtype = read_dtype(file);
  folder.end_ids = read_end_ids(file);
  folder.key_mapping.replace(R"(^lm_head\.)", "head.");
  // Some files have the weights of a tied head a second time.
  if (folder.config.tie_word_embeddings) folder.key_mapping.drop(R"(head\.weight)");
  return folder;
}

using DispatchedDecoder = accelerate::Dispatched<std::shared_ptr<Decoder>>;

/// Linear layers in "int8", "nf4" or "fp4"; all else in `dtype`.
inline accelerate::BnbQuantizationConfig bits_of(const std::string& format,
                                                 torch::ScalarType dtype) {
  using accelerate::FloatType;
  if (format != "int8" && format != "nf4" && format != "fp4") {
    throw accelerate::ConfigError("--quantize is '" + format + "'. Choose one of: int8, nf4, fp4.");
  }
  const auto type = dtype == torch::kFloat  ? FloatType::kFp32
                    : dtype == torch::kHalf ? FloatType::kFp16
                                            : FloatType::kBf16;
  accelerate::BnbQuantizationConfig config{.load_in_8bit = format == "int8"};
  config.load_in_4bit = !config.load_in_8bit;
  if (config.load_in_4bit) config.bnb_4bit_quant_type = format;
  config.bnb_4bit_compute_dtype = type;
  config.torch_dtype = type;
  return config;
}

/// Builds the model without memory, and loads its weights to where the options want them, as they
/// are or quantized. What only the folder knows is set here: dtype, names, blocks. Throws as
/// `load_checkpoint_and_dispatch` and `load_and_quantize_model`.
inline DispatchedDecoder load_decoder(
    const DecoderFolder& folder, accelerate::LoadDispatchOptions options,
    const std::optional<accelerate::BnbQuantizationConfig>& quantization = std::nullopt) {
  const auto decoder = accelerate::init_empty_weights(folder.make);
  decoder->eval();
  if (quantization) {
    return accelerate::load_and_quantize_model(decoder, *quantization,
                                               {.weights_location = folder.path,
                                                .device_map = options.device_map,
                                                .no_split_module_classes = kDecoderBlocks,
                                                .max_memory = options.max_memory,
                                                .offload_folder = options.offload_folder,
                                                .preload_module_classes = kDecoderBlocks,
                                                .strict = true,
                                                .key_mapping = folder.key_mapping,
                                                .progress = options.progress});
  }
  options.key_mapping = folder.key_mapping;
  options.dtype = folder.dtype;
  options.strict = true;
  options.no_split_module_classes = kDecoderBlocks;
  options.preload_module_classes = kDecoderBlocks;
  return accelerate::load_checkpoint_and_dispatch(decoder, folder.path, options);
}

/// The shape of a Llama: "1b", "7b", or "tiny" to try things out.
inline DecoderFolder random_llama(const std::string& size) {
  DecoderConfig config{.vocab_size = 128256,
                       .max_position_embeddings = 4096,
                       .hidden_size = 2048,
                       .intermediate_size = 8192,
                       .num_hidden_layers = 16,
                       .num_attention_heads = 32,
                       .num_key_value_heads = 8,
                       .head_dim = 64,
                       .norm_eps = 1e-5,
                       .tie_word_embeddings = true};
  if (size == "7b") {
    config.vocab_size = 32000;
    config.hidden_size = 4096;
    config.intermediate_size = 11008;
    config.num_hidden_layers = config.num_attention_heads = config.num_key_value_heads = 32;
    config.head_dim = 128;
    config.tie_word_embeddings = false;
  } else if (size == "tiny") {
    config.vocab_size = config.hidden_size = config.intermediate_size = 128;
    config.num_hidden_layers = config.num_attention_heads = config.num_key_value_heads = 2;
  } else if (size != "1b") {
    throw accelerate::ConfigError("--random is '" + size + "'. Choose one of: tiny, 1b, 7b.");
  }
  return {.config = config,
          .make = [config] { return std::make_shared<Llama>(config, 10000.0, std::nullopt); },
          .dtype = torch::kBFloat16};
}

/// Weights drawn from a seed, on the first GPU if there is one. Each block is quantized before the
/// next one is drawn, so that the peak of memory is what the quantized model needs.
inline DispatchedDecoder fill_decoder(
    const DecoderFolder& folder,
    std::optional<accelerate::BnbQuantizationConfig> quantization = std::nullopt) {
  const auto decoder = accelerate::init_empty_weights(folder.make);
  decoder->eval();
  const torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  const torch::Device device =
      torch::cuda::is_available() ? torch::Device(torch::kCUDA, 0) : torch::Device(torch::kCPU);
  const auto options = torch::TensorOptions(folder.dtype).device(device);
  const auto fill = [&](torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      if (!item.value().is_meta()) continue;
      const auto& shape = item.value().sizes();
      const bool is_norm = shape.size() == 1;
      accelerate::set_module_tensor_to_device(
          module, item.key(), device,
          {.value = is_norm ? torch::ones(shape, options) : torch::randn(shape, options) * 0.02,
           .dtype = folder.dtype});
    }
  };
  if (quantization) {
    quantization->skip_modules.emplace();  // all linear layers of a block; the head is in none
    for (const auto& module : decoder->modules()) {
      if (module->as<LlamaBlock>() == nullptr) continue;
      fill(*module);
      accelerate::load_and_quantize_model(module, *quantization).remove_hooks();
    }
  }
  fill(*decoder);
  if (device.is_cpu()) return accelerate::dispatch_model(decoder, {{"", "cpu"}});
  return accelerate::dispatch_model(decoder, {{"", 0}});
}

}  // namespace examples
