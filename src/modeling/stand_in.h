// src/modeling/stand_in.h - tensors that stand for a parameter: a weight that is kept in few bits.
//
// Such a parameter has a shape and a dtype, and no bytes of its own. State dictionaries have its
// stand-ins in its place, and these are what is moved, offloaded, saved and loaded.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/state_dict.h"

namespace accelerate::detail::modeling {

class ACCELERATE_API StandIn {
 public:
  virtual ~StandIn();

  /// What a state dict has; `name` is that of the parameter, which comes first. Only the parameter
  /// itself, without a value, before the first `load`.
  [[nodiscard]] virtual StateDict state(const std::string& name) const = 0;
  /// Whether `key` is one that `state(name)` may have.
  [[nodiscard]] virtual bool owns(std::string_view key, const std::string& name) const = 0;
  /// Takes the values of a state dict: the packed tensors, or a tensor with the shape of the
  /// parameter. `placed` tensors of the same dtype and shape are written to, since engines may
  /// watch them; else those of `state` become its own. Throws `FormatError` that names the
  /// parameter if they do not fit together; nothing has changed then.
  virtual void load(const std::string& name, const StateDict& state) = 0;
  /// The same, but the tensors of `state` become its own in any case: pages of a file.
  virtual void adopt(const std::string& name, const StateDict& state) = 0;
  /// Those of `state` that are large: offloaded where the parameter would be. Empty before `load`.
  [[nodiscard]] virtual StateDict placed(const std::string& name) const = 0;
  /// The parameter computes on another device from now on; its `placed` tensors follow, unless they
  /// are offloaded.
  virtual void move_to(c10::Device device) = 0;
};

/// `parameter` is one that `stand_in` stands for. Belongs to the bytes of the parameter, and does
/// not own the stand-in: after `set_data` the parameter is an ordinary one.
ACCELERATE_API void set_stand_in(const at::Tensor& parameter,
                                 const std::shared_ptr<StandIn>& stand_in);
/// Null for other tensors.
[[nodiscard]] ACCELERATE_API std::shared_ptr<StandIn> find_stand_in(const at::Tensor& tensor);

struct NamedStandIn {
  std::string name;  // of the parameter
  at::Tensor parameter;
  std::shared_ptr<StandIn> stand_in;
};
[[nodiscard]] ACCELERATE_API std::vector<NamedStandIn> stand_ins(const torch::nn::Module& module);
/// The stand-in that owns a key of a state dict; null for other keys.
[[nodiscard]] const NamedStandIn* owner_of(std::string_view key,
                                           const std::vector<NamedStandIn>& stand_ins);

/// The entries of `state` that a stand-in owns: copies, which `load` may keep.
[[nodiscard]] StateDict part_of(const std::string& name, const StandIn& stand_in,
                                const StateDict& state);

/// For an ordinary tensor of a model, which has the dtype `own`: throws `FormatError` if what a
/// state has by its name are codes of bitsandbytes. `contains` tells which names the state has,
/// `theirs` what the dtype by this name is.
void refuse_codes(const std::string& name, c10::ScalarType own,
                  const std::function<bool(const std::string&)>& contains,
                  const std::function<c10::ScalarType()>& theirs);

}  // namespace accelerate::detail::modeling
