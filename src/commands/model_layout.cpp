#include "commands/model_layout.h"

#include <algorithm>
#include <array>

#include "accelerate/errors.h"
#include "commands/layout_builder.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

struct Architecture {
  std::string_view model_type;
  void (*build)(Builder&, const Settings&);
};
constexpr std::array<Architecture, 23> kArchitectures{{
    {"albert", layout_albert},     {"bart", layout_bart},        {"bert", layout_bert},
    {"bloom", layout_bloom},       {"camembert", layout_bert},   {"distilbert", layout_distilbert},
    {"electra", layout_electra},   {"gemma", layout_gemma},      {"gpt2", layout_gpt2},
    {"gpt_neox", layout_gpt_neox}, {"gptj", layout_gptj},        {"llama", layout_llama},
    {"mistral", layout_mistral},   {"mixtral", layout_mixtral},  {"opt", layout_opt},
    {"phi", layout_phi},           {"phi3", layout_phi3},        {"qwen2", layout_qwen2},
    {"qwen3", layout_qwen3},       {"roberta", layout_roberta},  {"t5", layout_t5},
    {"vit", layout_vit},           {"xlm-roberta", layout_bert},
}};

}  // namespace

ModelLayout layout_of_config(const Value::Dict& config, const std::string& source) {
  const Settings settings(config, source);
  const auto type = settings.text("model_type");
  const auto* const found = std::ranges::find(kArchitectures, type, &Architecture::model_type);
  if (found == kArchitectures.end()) {
    throw ConfigError(str(
        source,
        type.empty() ? " has no 'model_type'" : str(": the model type '", type, "' is not known"),
        ". Pass the .safetensors file of the model, whose header tells the same; of config.json, "
        "these types are known: ",
        join(known_model_types()), "."));
  }
  Builder builder;
  found->build(builder, settings);
  return builder.take();
}

std::vector<std::string> known_model_types() {
  std::vector<std::string> types;
  for (const auto& architecture : kArchitectures) types.emplace_back(architecture.model_type);
  return types;
}

}  // namespace accelerate::detail::commands
