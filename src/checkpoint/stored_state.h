// src/checkpoint/stored_state.h - a state in files, of which tensors are read when they are needed,
// and only the elements that are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/value.h"
#include "formats/boxes.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::checkpoint {

/// A tensor of a checkpoint that is not in memory.
class StoredTensor final : public ValueLeaf {
 public:
  /// Fills `out` with the elements of a range.
  using Read = std::function<void(formats::FlatRange range, std::span<char> out)>;

  /// Throws if the files cannot have the tensor, before memory is allocated for it.
  using Check = std::function<void()>;

  /// Throws `UnsupportedError` if this LibTorch does not have the dtype.
  StoredTensor(
      std::string name, const formats::TorchDtype& dtype, std::vector<std::int64_t> sizes,
      Read read, Check check = [] {});

  [[nodiscard]] const std::vector<std::int64_t>& sizes() const { return sizes_; }
  /// Some elements, on the CPU.
  [[nodiscard]] at::Tensor range(formats::FlatRange range) const;

  [[nodiscard]] std::string_view kind_name() const override { return "stored tensor"; }
  [[nodiscard]] bool equals(const ValueLeaf& other) const override { return this == &other; }
  [[nodiscard]] std::string repr() const override;

 private:
  std::string name_;
  at::ScalarType dtype_;
  std::vector<std::int64_t> sizes_;
  Read read_;
  Check check_;
};

/// The state in a file or folder as a tree: a folder of torch.distributed.checkpoint (without the
/// key above all others) or of DeepSpeed has `StoredTensor`s, *.safetensors and torch archives have
/// tensors whose bytes are read when they are touched. Throws `CheckpointError` if there is none,
/// `FormatError` for a broken one.
[[nodiscard]] ACCELERATE_API Value open_stored_state(const std::filesystem::path& path);

/// Whether `leaf` is a tensor of such a tree.
[[nodiscard]] bool is_stored_tensor(const Value& leaf);
[[nodiscard]] ACCELERATE_API std::vector<std::int64_t> stored_sizes(const Value& leaf);
/// Elements of a tensor of such a tree, on the CPU, with one dimension.
[[nodiscard]] ACCELERATE_API at::Tensor stored_range(const Value& leaf, formats::FlatRange range);
/// All of them, in the shape of the tensor.
[[nodiscard]] ACCELERATE_API at::Tensor stored_whole(const Value& leaf);

}  // namespace accelerate::detail::checkpoint
