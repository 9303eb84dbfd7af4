// src/modeling/saved_tensor_hooks.h - what autograd keeps in place of the tensors that it saves.
//
// Python's torch.autograd.graph.saved_tensors_hooks. LibTorch asks its autograd engine for hooks
// whenever it saves a tensor; the engine of C++ has none, that of Python overrides the function.
// So does the one here, which is LibTorch's in all else.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

#include "accelerate/api.h"

namespace accelerate::detail::modeling {

class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;

  /// Called for each tensor that is saved. Null keeps it as it is.
  [[nodiscard]] virtual std::unique_ptr<torch::autograd::SavedVariableHooks> next() = 0;
};

/// Replaces the autograd engine of the process, once. Throws `UnsupportedError` if it is not
/// LibTorch's own.
ACCELERATE_API void install_saved_tensor_hooks();

/// While it lives, `hooks` are asked for each tensor that this thread saves. The innermost scope
/// counts. The hooks must be installed.
class ACCELERATE_API SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensorHooks& hooks);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  SavedTensorHooks* before_;
};

}  // namespace accelerate::detail::modeling
