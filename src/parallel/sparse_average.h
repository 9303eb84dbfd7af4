// src/parallel/sparse_average.h - means of sparse gradients, which no bucket can hold.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace accelerate::detail::parallel {

/// The weights of each Embedding and EmbeddingBag that is made with `sparse(true)`.
[[nodiscard]] std::vector<at::Tensor> sparse_weights(const torch::nn::Module& module);

/// Collective. Gives each parameter the mean of its gradient over all processes, also where only
/// some of them have one; nothing where none has. Sparse ones stay sparse, unless one process has a
/// dense one: a weight that another layer shares.
void average_sparse_gradients(const std::vector<at::Tensor>& parameters,
                              const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace accelerate::detail::parallel
