// src/model_parallel/parameter_part.h - which part of a parameter a process has, by tensor
// parallelism.
//
// The parameter stays the tensor that modules and optimizers hold; only its data are those of the
// part. What is known of it is kept here, by the tensor: an engine finds it in `prepare`.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "formats/boxes.h"
#include "lazy/operator_rule.h"
#include "model_parallel/regions.h"

namespace accelerate::detail::model_parallel {

struct ParameterPart {
  ProcessGroupPtr group;
  /// For messages.
  std::string name = {};
  /// Of the whole parameter.
  std::vector<std::int64_t> sizes = {};
  /// The dimension that is cut; unset if each process has the whole parameter.
  std::optional<std::int64_t> dim = std::nullopt;
  /// The dimension is made of blocks of these sizes, each of which is cut. Empty: of one.
  std::vector<std::int64_t> blocks = {};
  /// How operators compute with it; null if the forward of its layer knows.
  std::shared_ptr<lazy::OperatorRule> rule = nullptr;

  /// Where the part lies in the whole, block by block; nothing if it is all of it.
  [[nodiscard]] std::vector<formats::Box> boxes() const;
  /// The part out of the whole, in memory of its own.
  [[nodiscard]] at::Tensor cut(const at::Tensor& whole) const;
  /// Collective. The whole out of the parts of all processes of the group.
  [[nodiscard]] at::Tensor join(const at::Tensor& values) const;
};

/// Throws `ArgumentError` if the dimension cannot be cut for as many processes.
void check_divisible(const ParameterPart& part);

/// Notes what `parameter` is a part of, and sets its rule.
void set_part(const at::Tensor& parameter, std::shared_ptr<const ParameterPart> part);
/// Null for a parameter that is not known here.
[[nodiscard]] std::shared_ptr<const ParameterPart> find_part(const at::Tensor& parameter);

/// Returns true if a process has a part only of some parameter.
[[nodiscard]] bool is_cut(const torch::nn::Module& module);

/// Makes `parameter` the part, in place, and its gradient that of the part.
void cut_in_place(const at::Tensor& parameter, const std::shared_ptr<const ParameterPart>& part);

/// Until `renew_rule`: for an engine that gives the parameters of the module other memory.
void take_rules_off(const torch::nn::Module& module);
/// Rules belong to bytes: sets those again that were lost because a module was moved or converted.
void renew_rule(const at::Tensor& parameter, const ParameterPart& part);

}  // namespace accelerate::detail::model_parallel
