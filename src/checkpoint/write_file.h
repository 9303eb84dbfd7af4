// src/checkpoint/write_file.h - state dicts into files that are not published yet.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <source_location>

#include "accelerate/checkpoint.h"
#include "accelerate/safetensors.h"
#include "accelerate/state_dict.h"
#include "accelerate/value.h"
#include "core/byte_bar.h"
#include "core/output_file.h"

namespace accelerate::detail::checkpoint {

using ValuesOfState = std::function<StateDict(const StateDict& state)>;
/// Collective. `accelerate::save_model`. `values_of`, unless it is empty, is called where the model
/// is written and returns what is written for `state`; what it throws, all processes throw.
void save_model(const StateDict& state, const ValuesOfState& values_of,
                const std::filesystem::path& save_directory, const SaveModelOptions& options,
                std::source_location where);

/// What `safetensors::save_file` writes. `bar` counts the bytes of tensors, as below.
void write_safetensors(const StateDict& tensors, const safetensors::Metadata& metadata,
                       OutputFile& file, ByteBar& bar);
/// What `torch_save` writes.
void write_torch_archive(const StateDict& state, OutputFile& file, ByteBar& bar);
void write_torch_archive(const Value& value, OutputFile& file, ByteBar& bar);

/// The bytes that they count.
[[nodiscard]] std::int64_t bytes_in_safetensors(const StateDict& tensors);
[[nodiscard]] std::int64_t bytes_in_torch_archive(const StateDict& state);
[[nodiscard]] std::int64_t bytes_in_torch_archive(const Value& value);

}  // namespace accelerate::detail::checkpoint
