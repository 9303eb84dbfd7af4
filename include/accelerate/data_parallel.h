// accelerate/data_parallel.h - a module whose gradients are averaged over processes in backward.
//
// Internal to the training loop. Python's `DistributedDataParallel`, but for one thing: whether
// gradients are averaged is decided where backward is called, not where forward was.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/fwd.h"
#include "accelerate/kwargs.h"

namespace accelerate::detail {

/// The parameters, or other leaves, that backward from a tensor comes to.
class ACCELERATE_API ReachedLeaves {
 public:
  explicit ReachedLeaves(const at::Tensor& output);
  [[nodiscard]] bool contains(const at::Tensor& leaf) const;

 private:
  std::unordered_set<const c10::TensorImpl*> leaves_;
};

class ACCELERATE_API DataParallel {
 public:
  /// Collective. Gives all processes the parameters and buffers of process 0. Throws `CommError`
  /// that names the first parameter which another process does not have in the same way, and
  /// `ArgumentError` when no parameter wants a gradient.
  DataParallel(const torch::nn::Module& module, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
               const DistributedDataParallelKwargs& options);
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// Whether a loss depends on the module at all.
  [[nodiscard]] bool reached_by(const ReachedLeaves& leaves) const;

  /// The next backward of the loss, which is collective, averages gradients. Throws `ArgumentError`
  /// that names the parameters which the loss does not reach, unless `find_unused_parameters` is
  /// set.
  void before_backward(const at::Tensor& loss, const ReachedLeaves& leaves);

  /// Collective where buffers are broadcast: all processes go on with those of process 0.
  void after_backward();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelerate::detail
