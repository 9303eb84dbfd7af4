// accelerate/data_parallel.h - a module whose gradients are averaged over processes in backward.
//
// Internal to the training loop. Python's `DistributedDataParallel`, but for one thing: whether
// gradients are averaged is decided where backward is called, not where forward was.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/fwd.h"
#include "accelerate/kwargs.h"

namespace torch::autograd {
struct Node;
}

namespace accelerate::detail {

/// Addresses, each once. Keeps its memory when it is cleared.
class ACCELERATE_API AddressSet {
 public:
  void clear();
  /// Whether it is new. `address` must not be null.
  bool insert(const void* address);
  [[nodiscard]] bool contains(const void* address) const;

 private:
  void grow();
  std::vector<const void*> slots_;
  std::size_t count_ = 0;
};

/// The parameters, or other leaves, that backward from a tensor comes to. One object that is used
/// for every step allocates nothing after the first.
class ACCELERATE_API ReachedLeaves {
 public:
  ReachedLeaves() = default;
  explicit ReachedLeaves(const at::Tensor& output) { walk(output); }
  /// Forgets what it knew.
  void walk(const at::Tensor& output);
  [[nodiscard]] bool contains(const at::Tensor& leaf) const {
    return leaves_.contains(leaf.unsafeGetTensorImpl());
  }

 private:
  AddressSet leaves_;
  AddressSet seen_;
  std::vector<torch::autograd::Node*> open_;
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

  [[nodiscard]] bool is_static() const;
  /// Whether a loss depends on the module at all.
  [[nodiscard]] bool reached_by(const ReachedLeaves& leaves) const;

  /// The next backward of the loss, which is collective, averages gradients. Throws `ArgumentError`
  /// that names the parameters which the loss does not reach, unless `find_unused_parameters` is
  /// set. With `static_graph` the first such backward finds out what is reached, and later ones
  /// must reach the same.
  void before_backward(const at::Tensor& loss, const ReachedLeaves& leaves);

  /// Collective where gradients are averaged late (`static_graph`) and where buffers are broadcast:
  /// all processes go on with those of process 0. Throws `ArgumentError` where a parameter got a
  /// gradient that, by `static_graph`, never gets one.
  void after_backward();

  /// Collective. Begins anew, after parameters have been given other data, also of another shape,
  /// or have been frozen: checks that the processes agree, gives all of them the parameters and
  /// buffers of process 0, and forgets what static graphs and compression had learned. Gradients of
  /// an old shape are dropped. No graph of an earlier forward may be used afterwards.
  void rebuild();

 private:
  friend class JoinScope;
  /// Collective. Takes part in an averaged backward of others, with zeros. `used` is a parameter
  /// that another process uses.
  void shadow(std::size_t used);
  /// The first parameter that is reached, or the number of parameters.
  [[nodiscard]] std::size_t first_reached(const ReachedLeaves& leaves) const;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelerate::detail
