// accelerate/big_modeling/layerwise_casting.h - keep weights in fewer bits than they compute with.
//
// Part of accelerate/big_modeling.h.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

struct LayerwiseCastingOptions {
  /// Regular expressions, searched in the dotted names of modules. What matches is skipped with all
  /// below it.
  std::vector<std::string> skip_modules_pattern = {};
  /// Class names, likewise.
  std::vector<std::string> skip_modules_classes = {};
};

/// Layers whose weights are kept in another dtype, until it is destroyed or `remove` is called.
class ACCELERATE_API LayerwiseCasting {
 public:
  struct State;  ///< of the implementation
  /// For this library.
  explicit LayerwiseCasting(std::unique_ptr<State> state);
  ~LayerwiseCasting();
  LayerwiseCasting(LayerwiseCasting&&) noexcept;
  LayerwiseCasting& operator=(LayerwiseCasting&&) noexcept;

  /// The weights are ordinary tensors of the compute dtype again, with the values that were kept.
  void remove();
  /// The dotted names of the layers.
  [[nodiscard]] const std::vector<std::string>& layers() const;

 private:
  std::unique_ptr<State> state_;
};

/// Keeps the floating point weights of Linear and Conv layers in `storage_dtype`, on their device,
/// and computes with them in `compute_dtype`: their values are rounded to the former once. The
/// parameters show the compute dtype; `storage_dtype(parameter)` tells the other. Values beyond
/// what an 8-bit format holds are a warning that names the layer. Throws `StateError` for a layer
/// whose weights are offloaded, or cast already.
///
///     auto casting = attach_layerwise_casting_hooks(*net, torch::kFloat8_e4m3fn, torch::kBFloat16,
///                                                   {.skip_modules_pattern = {"norm", "head"}});
[[nodiscard]] ACCELERATE_API LayerwiseCasting attach_layerwise_casting_hooks(
    torch::nn::Module& module, c10::ScalarType storage_dtype, c10::ScalarType compute_dtype,
    const LayerwiseCastingOptions& options = {});

}  // namespace accelerate
