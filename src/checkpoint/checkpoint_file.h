// src/checkpoint/checkpoint_file.h - the weights of a model in one file, or in the folder of a
// sharded checkpoint.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/safetensors.h"
#include "accelerate/state_dict.h"
#include "accelerate/value.h"

namespace accelerate::detail::checkpoint {

class CheckpointFile {
 public:
  /// Opens a folder as a checkpoint of torch.distributed.checkpoint or of DeepSpeed, *.safetensors
  /// as such and any other name as a torch archive. Nothing but the description of the tensors is
  /// read.
  ///
  /// Throws `FormatError` for a broken file, a safetensors file for another framework than PyTorch,
  /// and an archive or folder that does not hold a dict of tensors; `CheckpointError` if it cannot
  /// be read.
  explicit CheckpointFile(const std::filesystem::path& path);

  [[nodiscard]] bool is_safetensors() const { return content_.index() == 0; }
  /// In the order of the file, for a folder in that of the alphabet.
  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] std::vector<std::int64_t> shape(const std::string& name) const;
  /// On the CPU its bytes are read when they are touched, those of a folder at once.
  [[nodiscard]] at::Tensor get(const std::string& name, c10::Device device = c10::kCPU) const;
  using Destinations = std::vector<std::pair<std::string, at::Tensor>>;
  /// Copies tensors into others of the same shapes, on any device and of any dtype. Any thread
  /// tells `done` how many bytes of them are filled.
  void read_into(const Destinations& destinations,
                 const std::function<void(std::int64_t bytes)>& done) const;

 private:
  /// Parts of its tensors are in several files.
  using Folder = std::map<std::string, Value>;
  using Content = std::variant<safetensors::File, StateDict, Folder>;

  [[nodiscard]] static Folder open_folder(const std::filesystem::path& path);
  [[nodiscard]] static Content open(const std::filesystem::path& path);

  Content content_;
};

/// The files of a checkpoint, in the order in which Python reads them: the file itself, those of an
/// index (*.json), or those that a folder has, of which pytorch_model.bin comes first, then
/// model.safetensors, then its only *.index.json. A folder of torch.distributed.checkpoint or of
/// DeepSpeed is itself what `CheckpointFile` opens.
///
/// Throws `ArgumentError` if there is no checkpoint or more than one index, and `FormatError` for
/// an index that is wrong.
[[nodiscard]] std::vector<std::filesystem::path> checkpoint_files(
    const std::filesystem::path& checkpoint);

}  // namespace accelerate::detail::checkpoint
