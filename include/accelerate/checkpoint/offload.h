// accelerate/checkpoint/offload.h - weights in an offload folder: one file per tensor and an index.
//
//     offload_state_dict("spill", state_dict(*net));
//     OffloadedWeightsLoader weights({.save_folder = "spill"});
//     weights.at("encoder.weight");
//
// Folders are those of Python, in both directions: <name>.dat has the elements of a tensor, and
// index.json their dtypes and shapes. Included by accelerate/checkpoint.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/checkpoint/offload_index.h"
#include "accelerate/fwd.h"
#include "accelerate/state_dict.h"

namespace accelerate {

/// Writes a tensor to <folder>/<name>.dat, which appears whole or not at all, and notes it in
/// `index`. The folder must exist.
///
/// All functions of this header throw `CheckpointError` with the path if a file cannot be written
/// or read, `FormatError` if an index or a file is not what it must be, and `ArgumentError` for a
/// name that cannot be that of a file.
ACCELERATE_API void offload_weight(const at::Tensor& weight, std::string_view weight_name,
                                   const std::filesystem::path& offload_folder,
                                   OffloadIndex* index = nullptr);
/// The same; returns `index` with the entry.
[[nodiscard]] ACCELERATE_API OffloadIndex
offload_weight(const at::Tensor& weight, std::string_view weight_name,
               const std::filesystem::path& offload_folder, OffloadIndex index);
/// The tensor of a .dat file, on the CPU. It holds no memory of its own: it is the pages of the
/// file. Writing into it does not change the file.
[[nodiscard]] ACCELERATE_API at::Tensor load_offloaded_weight(
    const std::filesystem::path& weight_file, const OffloadedWeight& weight_info);

/// Adds entries to the index.json of a folder; new ones replace those of the same name. An empty
/// index changes nothing. Another process that writes the folder at the same time is an error.
ACCELERATE_API void save_offload_index(const OffloadIndex& index,
                                       const std::filesystem::path& offload_folder);
/// The index.json of a folder.
[[nodiscard]] ACCELERATE_API OffloadIndex
read_offload_index(const std::filesystem::path& offload_folder);

/// Writes all tensors, then the index. The folder is created.
ACCELERATE_API void offload_state_dict(const std::filesystem::path& save_dir,
                                       const StateDict& state_dict);
/// Puts all tensors of an index on the CPU, into the model. Statistics of quantised weights
/// ("SCB") are left out.
ACCELERATE_API void load_offloaded_weights(torch::nn::Module& model, const OffloadIndex& index,
                                           const std::filesystem::path& offload_folder);

/// Tensors by name that are read when they are asked for.
class ACCELERATE_API WeightsMap {
 public:
  virtual ~WeightsMap();
  /// Throws `ArgumentError` for a name that is not there.
  [[nodiscard]] virtual at::Tensor at(const std::string& name) const = 0;
  [[nodiscard]] virtual const std::vector<std::string>& keys() const = 0;
  [[nodiscard]] std::size_t size() const { return keys().size(); }
};

struct OffloadedWeightsOptions {
  /// Tensors in memory. They come first, and before those of the same name in the index.
  std::optional<StateDict> state_dict = std::nullopt;
  std::optional<std::filesystem::path> save_folder = std::nullopt;
  /// Unset: that of `save_folder`.
  std::optional<OffloadIndex> index = std::nullopt;
  /// Where tensors of safetensors files go.
  c10::Device device = c10::kCPU;
};
/// The weights of a state dict and of an offload folder as one.
class ACCELERATE_API OffloadedWeightsLoader : public WeightsMap {
 public:
  /// Throws `ArgumentError` if there is neither a state dict nor a folder nor an index.
  explicit OffloadedWeightsLoader(OffloadedWeightsOptions options);
  [[nodiscard]] at::Tensor at(const std::string& name) const override;
  [[nodiscard]] const std::vector<std::string>& keys() const override { return keys_; }

 private:
  OffloadedWeightsOptions options_;
  std::vector<std::string> keys_;
};

/// The weights of another map whose names begin with a prefix, by the rest of their names.
class ACCELERATE_API PrefixedDataset : public WeightsMap {
 public:
  PrefixedDataset(std::shared_ptr<const WeightsMap> dataset, std::string prefix);
  [[nodiscard]] at::Tensor at(const std::string& name) const override;
  [[nodiscard]] const std::vector<std::string>& keys() const override { return keys_; }

 private:
  std::shared_ptr<const WeightsMap> dataset_;
  std::string prefix_;
  std::vector<std::string> keys_;
};

/// The entries of modules, or of single tensors, with all below them.
[[nodiscard]] ACCELERATE_API StateDict extract_submodules_state_dict(
    const StateDict& state_dict, const std::vector<std::string>& submodule_names);

}  // namespace accelerate
