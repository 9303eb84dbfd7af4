// src/commands/model_files.h - finds a model on this machine and reads the sizes of its tensors.
#pragma once

#include <string>
#include <vector>

#include "accelerate/environment.h"
#include "commands/model_layout.h"

namespace accelerate::detail::commands {

struct ModelOnDisk {
  ModelLayout layout;
  /// The files that were read.
  std::vector<std::string> files = {};
};

/// `model` is a .safetensors file, its index, a config.json, a folder with any of them, or the name
/// of a model that is in the local cache of Hugging Face. Sizes come from safetensors headers where
/// there are some, else from config.json; no tensor is read and nothing is downloaded.
///
/// Throws `ConfigError` that says where it looked, or why a file cannot be used.
[[nodiscard]] ModelOnDisk find_model(const std::string& model, const Environment& environment);

}  // namespace accelerate::detail::commands
