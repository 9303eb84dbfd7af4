// src/formats/zero_folder.h - the weights in a checkpoint of DeepSpeed, which is read and not
// written.
//
// A folder of a step ("tag") has a file per process with its part of the float32 weights, flat, and
// at least one with the names and shapes of the parameters, and the buffers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "formats/boxes.h"
#include "formats/byte_source.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::formats {

/// A tensor that is put together from parts of several files.
struct ZeroTensor {
  /// Consecutive elements, at a byte of a file.
  struct Piece {
    std::filesystem::path file;
    std::uint64_t offset = 0;
    std::int64_t count = 0;
  };

  std::string name;
  const TorchDtype* dtype = nullptr;
  std::vector<std::int64_t> sizes;
  std::vector<Piece> pieces;  // in row-major order; they have all elements
};

/// The folder of the weights: `folder` itself, or the one in it that its file `latest` names.
/// nullopt if DeepSpeed did not write it.
[[nodiscard]] std::optional<std::filesystem::path> find_zero_folder(
    const std::filesystem::path& folder);

/// Reads which tensors a folder has, of any stage from 0 to 3. Trained parameters are the float32
/// masters, frozen ones and buffers as they were saved. Throws `FormatError` for files that break
/// the rules of the format, `CheckpointError` for files that are missing, and `UnsupportedError`
/// for models that were split by tensor parallelism.
[[nodiscard]] std::vector<ZeroTensor> read_zero_folder(const std::filesystem::path& folder);

/// Some elements of a tensor into `out`, which has their size.
void read_zero_range(OpenFiles& files, const ZeroTensor& tensor, FlatRange range,
                     std::span<char> out);

}  // namespace accelerate::detail::formats
