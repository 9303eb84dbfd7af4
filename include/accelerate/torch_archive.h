// accelerate/torch_archive.h - files of torch.save, read and written: .bin, .pt, .pth, .pkl.
//
//     torch_save(Value::Dict{{"epoch", 3}, {"weight", tensor}}, "state.pt");
//     Value state = torch_load("state.pt");
//     state.at("weight").as_tensor();
//
// Python opens what is written here with torch.load(weights_only=True). What is read may come from
// anywhere: nothing in it is executed, and a file that breaks the rules is an error.
#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <optional>

#include "accelerate/api.h"
#include "accelerate/state_dict.h"
#include "accelerate/value.h"

namespace accelerate {

struct TorchLoadOptions {
  /// Where tensors are put. nullopt: on the CPU, wherever they were saved.
  std::optional<c10::Device> map_location = std::nullopt;
  /// Map the file into memory instead of reading it: pages are read when they are touched. Changes
  /// of the tensors stay in memory. The file must not be cut while tensors of it are alive.
  bool mmap = false;
  /// Compare the checksums of all entries. Off as in Python, where files may have none.
  bool verify_checksums = false;
  /// Ours. Show a progress bar. Unset: if ACCELERATE_PROGRESS is 1.
  std::optional<bool> progress = std::nullopt;

  bool operator==(const TorchLoadOptions&) const = default;
};

/// What torch.save wrote: numbers, texts, bytes, lists, tuples, dicts and tensors. Tensors that
/// share their storage in the file share it here. Ordered dicts become dicts, parameters become
/// tensors that require gradients, arrays of numpy become tensors and its scalars numbers. Objects
/// of other classes stay opaque.
///
/// Throws `CheckpointError` if the file cannot be read, and `FormatError` with the byte offset if
/// it is no file of torch.save: TorchScript and bare pickles are refused by name. Files from before
/// Torch 1.6, which are no archives yet, are read too.
[[nodiscard]] ACCELERATE_API Value torch_load(const std::filesystem::path& path,
                                              const TorchLoadOptions& options = {});

/// Writes `value` for `torch_load` and Python. Tensors may be on any device; those that share a
/// storage share it in the file, which has the whole storage of a view, as in Python. The file
/// appears complete or not at all.
///
/// Throws `ArgumentError` for sparse, quantized and other tensors without strided data, and for
/// objects that are not data; `CheckpointError` if the file cannot be written.
ACCELERATE_API void torch_save(const Value& value, const std::filesystem::path& path);

/// Writes a state dict as Python's `torch.save(module.state_dict(), path)`: an ordered dict of
/// tensors that do not require gradients.
ACCELERATE_API void torch_save(const StateDict& state, const std::filesystem::path& path);

}  // namespace accelerate
