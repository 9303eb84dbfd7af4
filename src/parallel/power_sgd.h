// src/parallel/power_sgd.h - gradients that travel as products of thin matrices.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <random>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_map>
#include <vector>

#include "accelerate/api.h"
#include "core/power_sgd_options.h"

namespace c10d {
class ProcessGroup;
}

namespace accelerate::detail::parallel {

/// Of numpy's `RandomState`.
class ACCELERATE_API NumpyRandom {
 public:
  explicit NumpyRandom(std::uint32_t seed) : engine_(seed) {}
  /// `randint(1_000_000_000)`.
  [[nodiscard]] std::uint32_t below_a_billion();

 private:
  std::mt19937 engine_;
};

/// Averages buckets in place. Every step is finished when it returns: steps of two buckets never
/// mix, which the tasks of PyTorch's hook can do.
class PowerSgd {
 public:
  PowerSgd(c10::intrusive_ptr<c10d::ProcessGroup> group, const PowerSgdOptions& options,
           bool batched);

  /// Collective. `bucket` may hold its gradients in 16 bits.
  void average(c10d::GradBucket& bucket);

 private:
  struct Memory {
    at::Tensor error, p, q;
  };
  /// Matrices of one shape, one behind the other, and the gradients they are of.
  struct Stack {
    at::Tensor matrices, p, q;
    std::vector<at::Tensor> sources;
  };

  void sum(at::Tensor& tensor);
  void average_layers(c10d::GradBucket& bucket, Memory& memory);
  void average_as_square(c10d::GradBucket& bucket, Memory& memory);
  [[nodiscard]] std::vector<Stack> stacks_of(const std::vector<at::Tensor>& matrices) const;
  void fill_random(at::Tensor tensor, at::Generator& generator) const;
  void report(bool is_last);
  void count(bool is_last);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  PowerSgdOptions options_;
  bool batched_;
  NumpyRandom random_;
  std::unordered_map<std::size_t, Memory> memory_;
  std::int64_t iter_ = 0;
  std::int64_t next_report_ = 0;
  std::int64_t elements_before_ = 0;
  std::int64_t elements_after_ = 0;
};

}  // namespace accelerate::detail::parallel
