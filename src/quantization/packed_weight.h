// src/quantization/packed_weight.h - the weight of a Linear layer in 8 or 4 bits.
//
// The layer and its parameter stay: the parameter keeps its shape and has the dtype that the weight
// was quantized from, but no bytes. Operators on it come here (lazy/operator_rule.h): products are
// computed from the codes, any other operator that reads it gets its values, and one that writes to
// it throws. The codes and scales are ordinary tensors that stores may manage.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "accelerate/kwargs.h"
#include "modeling/stand_in.h"
#include "quantization/tensors.h"

namespace accelerate::detail::quantization {

[[nodiscard]] at::ScalarType scalar_type(FloatType type);

class PackedWeight final : public modeling::StandIn,
                           public LinearProduct,
                           public std::enable_shared_from_this<PackedWeight> {
 public:
  /// Takes over the weight of a layer called `name`, quantized from `dtype`. Its value is packed,
  /// unless it is on the meta device: then `load` follows.
  static void attach(torch::nn::LinearImpl& layer, const std::string& name, at::ScalarType dtype,
                     const BnbQuantizationConfig& config);

  PackedWeight(std::string name, std::int64_t outputs, std::int64_t inputs, at::ScalarType dtype,
               const BnbQuantizationConfig& config);

  [[nodiscard]] bool is_4bit() const { return config_.load_in_4bit; }

  /// Computes an operator that has the parameter as an argument: see lazy/operator_rule.h.
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::size_t argument);

  // StandIn
  [[nodiscard]] StateDict state(const std::string& name) const override;
  [[nodiscard]] bool owns(std::string_view key, const std::string& name) const override;
  void load(const std::string& name, const StateDict& state) override;
  void adopt(const std::string& name, const StateDict& state) override;
  [[nodiscard]] StateDict placed(const std::string& name) const override;
  void move_to(c10::Device device) override;

  // LinearProduct
  [[nodiscard]] at::Tensor forward(const at::Tensor& rows, const at::Tensor& bias) const override;
  [[nodiscard]] at::Tensor backward(const at::Tensor& gradient) const override;
  [[nodiscard]] at::Tensor values(at::ScalarType dtype) const override;
  [[nodiscard]] std::int64_t outputs() const override { return outputs_; }

 private:
  struct FourBit {
    at::Tensor packed;
    quant::QuantState state;
    at::Tensor text;  // as files have it
  };
  class Pinned;

  using Weight = std::variant<std::monostate, FourBit, quant::Int8Weight>;

  void quantize(const at::Tensor& value);
  /// Writes what `load` has read to the tensors of before, where they have the same form.
  void keep_tensors(const Weight& before);
  void load_4bit(const std::string& name, const StateDict& state);
  void load_8bit(const std::string& name, const StateDict& state);
  void bind(const at::Tensor& parameter, c10::Device device);
  void check_loaded() const;
  /// Undefined if the layer is gone.
  [[nodiscard]] at::Tensor parameter() const;
  [[nodiscard]] at::Tensor product(const at::Tensor& x, const at::Tensor& bias);
  [[nodiscard]] std::optional<at::Tensor> product_of(const c10::OperatorHandle& op,
                                                     c10::ArrayRef<c10::IValue> arguments,
                                                     std::size_t argument);

  std::string name_;  // of the parameter
  std::int64_t outputs_;
  std::int64_t inputs_;
  at::ScalarType dtype_;
  BnbQuantizationConfig config_;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> parameter_;
  Weight weight_;
};

/// The packed weight that a parameter is; null for an ordinary one.
[[nodiscard]] std::shared_ptr<PackedWeight> find_packed(const at::Tensor& parameter);

}  // namespace accelerate::detail::quantization
