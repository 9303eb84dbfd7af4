// src/sharding/swap_files.h - tensors in host memory that lie in files on a drive: offload to NVMe.
//
// Masters and the states of optimizers are mapped files. The kernel reads their pages ahead of the
// step that uses them and writes them back behind it, so that the process needs memory for what is
// in use only. The files have no names: they go with the process, however it ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "accelerate/api.h"

namespace accelerate::detail::sharding {

class ACCELERATE_API SwapFiles {
 public:
  /// Throws `ConfigError` if the folder is not there or no file can be made in it.
  explicit SwapFiles(std::filesystem::path folder);
  ~SwapFiles();
  SwapFiles(const SwapFiles&) = delete;
  SwapFiles& operator=(const SwapFiles&) = delete;

  /// A tensor of the host with the same shape and values, in a file of its own, which lives as long
  /// as the tensor. Small tensors stay in memory: a copy. Throws `Error` with the folder and the
  /// size if the drive is full.
  [[nodiscard]] at::Tensor place(const at::Tensor& tensor);
  /// Whether the elements are in one of the files, or few enough to stay in memory.
  [[nodiscard]] bool holds(const at::Tensor& tensor) const;
  /// Starts to write what has changed to the drive, and takes the pages out of the memory of the
  /// process.
  void release();
  /// Of all files that are in use.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  struct File;
  [[nodiscard]] std::shared_ptr<File> make_file(std::int64_t bytes) const;

  std::filesystem::path folder_;
  std::vector<std::weak_ptr<File>> files_;
};

}  // namespace accelerate::detail::sharding
