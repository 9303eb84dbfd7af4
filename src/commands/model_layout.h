// src/commands/model_layout.h - the tensors of a model by name and size, without their values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/value.h"

namespace accelerate::detail::commands {

struct SizedTensor {
  std::string name;
  std::int64_t elements = 0;
  /// Floating types count as float32.
  std::int64_t bytes = 0;
  bool trainable = true;
};

/// What the activations of a transformer depend on.
struct TransformerShape {
  std::int64_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  /// The width of the feed-forward part, as often as it is computed per token.
  std::int64_t intermediate = 0;
  bool gated = false;
  /// The longest sequence.
  std::int64_t positions = 0;
};

struct ModelLayout {
  std::vector<SizedTensor> tensors = {};
  /// Paths of modules that count as one layer, as "encoder.layer.*": they match the last parts of a
  /// path.
  std::vector<std::string> no_split = {};
  std::optional<TransformerShape> shape = std::nullopt;
};

/// The model that Python's `AutoModel.from_config` builds from the content of a config.json. Tied
/// weights are listed once. Throws `ConfigError` with `source` for a model type that is not known
/// and for values that are not possible.
[[nodiscard]] ModelLayout layout_of_config(const Value::Dict& config, const std::string& source);

}  // namespace accelerate::detail::commands
