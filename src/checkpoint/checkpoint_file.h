// src/checkpoint/checkpoint_file.h - the weights of a model in one file, of either format.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/safetensors.h"
#include "accelerate/state_dict.h"

namespace accelerate::detail::checkpoint {

class CheckpointFile {
 public:
  /// Opens *.safetensors as such and any other name as a torch archive. Nothing but the description
  /// of the tensors is read.
  ///
  /// Throws `FormatError` for a broken file, a safetensors file for another framework than PyTorch,
  /// and an archive that does not hold a dict of tensors; `CheckpointError` if it cannot be read.
  explicit CheckpointFile(const std::filesystem::path& path);

  [[nodiscard]] bool is_safetensors() const { return content_.index() == 0; }
  /// In the order of the file.
  [[nodiscard]] std::vector<std::string> names() const;
  /// On the CPU its bytes are read when they are touched.
  [[nodiscard]] at::Tensor get(const std::string& name, c10::Device device = c10::kCPU) const;
  /// Copies a tensor into one of the same shape, on any device and of any dtype.
  void read_into(const std::string& name, const at::Tensor& destination) const;

 private:
  std::variant<safetensors::File, StateDict> content_;
};

/// The files of a checkpoint, in the order in which Python reads them: the file itself, those of an
/// index (*.json), or those that a folder has, of which pytorch_model.bin comes first, then
/// model.safetensors, then its only *.index.json.
///
/// Throws `ArgumentError` if there is no checkpoint or more than one index, and `FormatError` for
/// an index that is wrong.
[[nodiscard]] std::vector<std::filesystem::path> checkpoint_files(
    const std::filesystem::path& checkpoint);

}  // namespace accelerate::detail::checkpoint
