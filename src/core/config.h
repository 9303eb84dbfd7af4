// src/core/config.h - parts of accelerate/config.h that the command line and the state layer use.
#pragma once

#include <string_view>

#include "accelerate/config.h"
#include "accelerate/environment.h"

namespace accelerate::detail::inline core {

/// Where Hugging Face's libraries keep their files: HF_HOME, else huggingface in the user's cache.
[[nodiscard]] std::filesystem::path huggingface_home(const Environment& environment);

/// `default_config_file()` of another environment.
[[nodiscard]] std::filesystem::path default_config_file(const Environment& environment);

/// The content of a configuration file. Throws `ConfigError`.
[[nodiscard]] Value::Dict read_config_file(const std::filesystem::path& path);
/// The configuration with this content; `path` names its file in messages. Throws `ConfigError`.
[[nodiscard]] Config config_from(const Value::Dict& content, const std::filesystem::path& path);

/// What `write_basic_config` writes for a machine with `accelerator_count` devices; `several` is
/// the type of a run on more than one of them. Throws `ArgumentError` for an unknown precision.
[[nodiscard]] ClusterConfig basic_config(std::string_view mixed_precision, DistributedType several,
                                         int accelerator_count);

/// `write_basic_config` once the machine is known.
[[nodiscard]] std::optional<std::filesystem::path> write_basic_config(
    std::string_view mixed_precision, const std::filesystem::path& save_location,
    DistributedType several, int accelerator_count);

}  // namespace accelerate::detail::inline core
