// src/checkpoint/write_file.h - state dicts into files that are not published yet.
#pragma once

#include "accelerate/safetensors.h"
#include "accelerate/state_dict.h"
#include "accelerate/value.h"
#include "core/output_file.h"

namespace accelerate::detail::checkpoint {

/// What `safetensors::save_file` writes.
void write_safetensors(const StateDict& tensors, const safetensors::Metadata& metadata,
                       OutputFile& file);
/// What `torch_save` writes.
void write_torch_archive(const StateDict& state, OutputFile& file);
void write_torch_archive(const Value& value, OutputFile& file);

}  // namespace accelerate::detail::checkpoint
