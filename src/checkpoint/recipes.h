// src/checkpoint/recipes.h - the tensors that a key mapping makes of those in the files.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_file.h"
#include "formats/key_mapping.h"

namespace accelerate::detail::checkpoint {

/// Where the tensors of all files are. A name in two files is that of the last, as in Python.
class TensorSources {
 public:
  explicit TensorSources(const std::vector<CheckpointFile>& files);

  /// All names, in the order of the files.
  [[nodiscard]] const std::vector<std::string>& names() const { return names_; }
  [[nodiscard]] const CheckpointFile& file_of(const std::string& name) const;

  /// The shape that `recipe` gives. Reads no elements. Throws `ConfigError` if a step does not fit
  /// its tensor: a dimension that is not there, parts that are not equal, shapes that do not join.
  [[nodiscard]] std::vector<std::int64_t> shape_of(const formats::TensorRecipe& recipe) const;
  /// The tensor, of the files' memory where no elements must be moved. `shape_of` has accepted it.
  [[nodiscard]] at::Tensor make(const formats::TensorRecipe& recipe) const;
  using Destinations = std::vector<std::pair<const formats::TensorRecipe*, at::Tensor>>;
  /// The tensors, copied into others of their shapes. Any thread tells `done` how many bytes of
  /// them are filled.
  void make_into(const Destinations& destinations,
                 const std::function<void(std::int64_t bytes)>& done) const;

 private:
  std::vector<std::string> names_;
  std::map<std::string, const CheckpointFile*, std::less<>> files_;
};

}  // namespace accelerate::detail::checkpoint
