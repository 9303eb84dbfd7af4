// src/parallel/reached_leaves.h - the parameters that a backward from some tensor comes to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "accelerate/api.h"

namespace torch::autograd {
struct Node;
}

namespace accelerate::detail::parallel {

/// A set of addresses. `clear` keeps its memory.
class AddressSet {
 public:
  void clear();
  /// Returns true if the address is new. `address` must not be null.
  bool insert(const void* address);
  [[nodiscard]] bool contains(const void* address) const;

 private:
  void grow();
  std::vector<const void*> slots_;
  std::size_t count_ = 0;
};

/// The leaves of the graph of a tensor. An object that is used again for every step allocates
/// nothing after the first one.
class ACCELERATE_API ReachedLeaves {
 public:
  ReachedLeaves() = default;
  explicit ReachedLeaves(const at::Tensor& output) { walk(output); }
  /// Replaces the leaves by those of `output`.
  void walk(const at::Tensor& output);
  [[nodiscard]] bool contains(const at::Tensor& leaf) const;

 private:
  AddressSet leaves_;
  AddressSet seen_;
  std::vector<torch::autograd::Node*> open_;
};

}  // namespace accelerate::detail::parallel
