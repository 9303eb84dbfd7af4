#include "model_parallel/tensor_parallel_engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "accelerate/errors.h"
#include "accelerate/state/partial_state.h"
#include "core/text.h"
#include "optim/clip_grad.h"
#include "optim/elementwise.h"
#include "optim/optimizer_state.h"
#include "parallel/same_model.h"

namespace accelerate::detail::model_parallel {

void refuse_uncut(int processes) {
  throw ArgumentError(detail::str(
      "Model should undergo tensor parallel before passing it to accelerate: tp_size of "
      "parallelism_config is ",
      processes,
      ", but no layer of the model is cut. Call apply_tp_plan(*model, plan, "
      "accelerator.torch_device_mesh()) before prepare, or build the model of the layers of "
      "accelerate/parallel.h."));
}

TensorParallelEngine::TensorParallelEngine(std::shared_ptr<parallel::Engine> inner,
                                           const torch::nn::Module& module, ProcessGroupPtr group,
                                           ProcessGroupPtr data, std::int64_t drift_check)
    : WrappedEngine(std::move(inner)),
      group_(std::move(group)),
      data_(std::move(data)),
      sharded_(dynamic_cast<checkpoint::ShardedModel*>(&this->inner())) {
  for (const auto& entry : module.named_parameters()) {
    parameters_.push_back({entry.key(), entry.value(), find_part(entry.value())});
  }
  const auto own = accelerate::state_dict(module);
  for (const auto& entry : own) {
    if (find(entry.key()) == nullptr) buffers_.insert(entry.key(), entry.value());
  }
  if (std::ranges::none_of(parameters_, &Named::is_cut)) refuse_uncut(group_->getSize());
  std::vector<std::string> facts;
  for (const auto& one : parameters_) {
    if (one.part && one.part->group->getSize() != group_->getSize()) {
      throw ArgumentError(detail::str("tp_size of parallelism_config is ", group_->getSize(),
                                      ", but '", one.name, "' was cut for ",
                                      one.part->group->getSize(),
                                      " processes: it should be same as model's tp size."));
    }
    facts.push_back(parallel::described(one.name, one.tensor, one.is_cut() ? "tp" : ""));
  }
  parallel::check_same_model(facts, group_);
  renew_rules();
  watch_drift(drift_check);
}

void TensorParallelEngine::watch_drift(std::int64_t drift_check) {
  if (drift_check <= 0) return;
  parallel::Parameters alike;
  if (sharded_ != nullptr) {
    for (const auto& shard : sharded_->local_shards()) {
      const auto* const known = find(shard.name);
      if (known != nullptr && !known->is_cut() && shard.tied_to.empty()) {
        alike.add(shard.name, shard.values);
      }
    }
  } else {
    for (const auto& one : parameters_) {
      if (!one.is_cut()) alike.add(one.name, one.tensor);
    }
  }
  drift_ = std::make_unique<parallel::DriftWatch>(std::move(alike), group_, drift_check);
}

const TensorParallelEngine::Named* TensorParallelEngine::find(const std::string& name) const {
  const auto found = std::ranges::find(parameters_, name, &Named::name);
  return found == parameters_.end() ? nullptr : &*found;
}

const TensorParallelEngine::Named* TensorParallelEngine::find(const at::Tensor& parameter) const {
  const auto found = std::ranges::find_if(
      parameters_, [&](const Named& one) { return one.tensor.is_same(parameter); });
  return found == parameters_.end() ? nullptr : &*found;
}

/// Null for a parameter that each process has whole, and for one of another model.
const ParameterPart* TensorParallelEngine::cut_of(const at::Tensor& parameter) const {
  if (!parameter.defined()) return nullptr;
  const auto stand_in = stand_ins_.find(parameter.unsafeGetTensorImpl());
  if (stand_in != stand_ins_.end()) return stand_in->second.get();
  const auto* const known = find(parameter);
  return known != nullptr && known->is_cut() ? known->part.get() : nullptr;
}

void TensorParallelEngine::renew_rules() const {
  for (const auto& one : parameters_) {
    if (one.part) renew_rule(one.tensor, *one.part);
  }
}

std::shared_ptr<void> TensorParallelEngine::enter_forward() {
  renew_rules();
  return inner().enter_forward();
}

void TensorParallelEngine::before_backward(const parallel::BackwardPass& pass) {
  synchronizes_ = pass.synchronizes;
  inner().before_backward(pass);
}

void TensorParallelEngine::after_backward() {
  inner().after_backward();
  if (drift_ && synchronizes_) drift_->exchange();
}

// ---- optimizers ---------------------------------------------------------------------------------

void TensorParallelEngine::attach(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  std::vector<std::shared_ptr<const ParameterPart>> parts;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto* const known = find(parameter);
      parts.push_back(known != nullptr && known->is_cut() ? known->part : nullptr);
      if (!parts.back()) continue;
      optim::check_elementwise(optimizer);
      if (optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0) continue;
      // Made before the model was cut, or it has the sizes of the part already.
      parallel::ParameterState state{parameter, optim::optimizer_state_of(optimizer, parameter)};
      for (auto& [name, tensor] : state.tensors) {
        if (tensor.defined() && tensor.sizes() == parts.back()->sizes) {
          tensor = parts.back()->cut(tensor);
        }
      }
      optimizer.state().erase(parameter.unsafeGetTensorImpl());
      optim::set_optimizer_state_of(optimizer, parameter, state.tensors);
    }
  }
  inner().attach(optimizer);
  std::size_t position = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& part = parts[position++];
      if (part) stand_ins_[parameter.unsafeGetTensorImpl()] = part;
    }
  }
}

void TensorParallelEngine::before_step() {
  if (drift_) drift_->sum_up();
  inner().before_step();
}

void TensorParallelEngine::gather_states(std::span<parallel::ParameterState> states) {
  const at::NoGradGuard no_grad;
  inner().gather_states(states);
  const auto device = parameters_.front().tensor.device();
  for (auto& state : states) {
    const auto* const part = cut_of(state.parameter);
    if (part == nullptr) continue;
    auto local = part->sizes;
    local[static_cast<std::size_t>(*part->dim)] /= group_->getSize();
    for (auto& [name, tensor] : state.tensors) {
      if (!tensor.defined() || tensor.sizes() != at::IntArrayRef(local) || name == "step") continue;
      tensor = part->join(tensor.to(device)).cpu();
    }
  }
  if (sharded_ == nullptr || PartialState().is_local_main_process()) return;
  for (auto& state : states) {
    if (inner().holds(state.parameter)) state.tensors.clear();
  }
}

void TensorParallelEngine::cut_state(parallel::ParameterState& state) {
  if (const auto* const part = cut_of(state.parameter)) {
    for (auto& [name, tensor] : state.tensors) {
      if (tensor.defined() && tensor.sizes() == part->sizes) tensor = part->cut(tensor);
    }
  }
  inner().cut_state(state);
}

at::Tensor TensorParallelEngine::found_inf_over_processes(const at::Tensor& found_inf) {
  auto flag = inner().found_inf_over_processes(found_inf).clone();
  all_reduce(flag, group_, "infinite gradients", c10d::ReduceOp::MAX);
  return flag;
}

// ---- clipping -----------------------------------------------------------------------------------

std::optional<parallel::GradientShards> TensorParallelEngine::shards_of(
    std::span<const at::Tensor> parameters) {
  parallel::GradientShards result;
  std::vector<at::Tensor> cut;
  std::vector<at::Tensor> rest;
  for (const auto& parameter : parameters) {
    const bool is_cut = cut_of(parameter) != nullptr;
    result.sharded.push_back(is_cut);
    cut.push_back(is_cut ? parameter : at::Tensor());
    rest.push_back(is_cut ? at::Tensor() : parameter);
    if (!is_cut || sharded_ != nullptr || !parameter.grad().defined()) continue;
    const bool again = std::ranges::any_of(
        result.gradients, [&](const at::Tensor& one) { return one.is_same(parameter.grad()); });
    if (!again) result.gradients.push_back(parameter.grad());
  }
  if (sharded_ != nullptr) {
    const auto of_cut = inner().shards_of(cut);
    const auto of_rest = inner().shards_of(rest);
    if (of_cut) result.gradients = of_cut->gradients;
    result.cut = result.gradients.size();
    if (!of_rest) return result;
    result.gradients.insert(result.gradients.end(), of_rest->gradients.begin(),
                            of_rest->gradients.end());
    for (std::size_t i = 0; i < rest.size(); ++i) {
      if (of_rest->sharded[i]) result.sharded[i] = true;
    }
    return result;
  }
  result.cut = result.gradients.size();
  return result;
}

at::Tensor TensorParallelEngine::norm_of_cut(std::span<const at::Tensor> gradients,
                                             double norm_type) const {
  at::Tensor norm;
  if (sharded_ != nullptr) {
    norm =
        inner().norm_over_processes({.gradients = {gradients.begin(), gradients.end()}}, norm_type);
  } else {
    norm = optim::get_total_norm(gradients, norm_type);
    if (gradients.empty()) norm = norm.to(parameters_.front().tensor.device());
  }
  const auto wide = norm.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto own = norm.to(wide, /*non_blocking=*/false, /*copy=*/true);
  const char* const what = "norm of cut gradients";
  if (std::isinf(norm_type)) {
    all_reduce(own, group_, what, norm_type > 0 ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN);
    return own.to(norm.scalar_type());
  }
  // Of order 0 the norm is a number of elements.
  if (norm_type != 0) own = own.pow(norm_type);
  all_reduce(own, group_, what);
  if (norm_type != 0) own = own.pow(1 / norm_type);
  return own.to(norm.scalar_type());
}

at::Tensor TensorParallelEngine::norm_over_processes(const parallel::GradientShards& shards,
                                                     double norm_type) {
  const auto all = std::span(shards.gradients);
  const auto of_cut = norm_of_cut(all.first(shards.cut), norm_type);
  const auto rest = all.subspan(shards.cut);
  if (sharded_ == nullptr) return of_cut;
  const auto of_rest =
      inner().norm_over_processes({.gradients = {rest.begin(), rest.end()}}, norm_type);
  const auto both = at::stack({of_cut, of_rest.to(of_cut.options())});
  return at::linalg_vector_norm(both, norm_type);
}

// ---- state --------------------------------------------------------------------------------------

at::Tensor TensorParallelEngine::accumulated_gradient(const at::Tensor& parameter) {
  const auto gradient = inner().accumulated_gradient(parameter);
  const auto* const part = cut_of(parameter);
  if (part == nullptr || !gradient.defined()) return gradient;
  auto whole = at::zeros(part->sizes, gradient.options());
  checkpoint::place(
      {.sizes = part->sizes, .end = gradient.numel(), .values = gradient, .boxes = part->boxes()},
      whole);
  return whole;
}

void TensorParallelEngine::set_accumulated_gradient(const at::Tensor& parameter,
                                                    const at::Tensor& gradient) {
  const auto* const part = cut_of(parameter);
  const bool cuts = part != nullptr && gradient.defined();
  inner().set_accumulated_gradient(parameter, cuts ? part->cut(gradient) : gradient);
}

std::int64_t TensorParallelEngine::parts_of(const at::Tensor& parameter) const {
  return cut_of(parameter) == nullptr ? 1 : group_->getSize();
}

StateDict TensorParallelEngine::state_dict(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  auto result = accelerate::state_dict(module);
  for (const auto& shard : local_shards()) {
    if (!shard.tied_to.empty()) {
      result[shard.name] = result[shard.tied_to];
      continue;
    }
    auto whole = at::zeros(shard.sizes, shard.values.options());
    if (!shard.replica) checkpoint::place(shard, whole);
    all_reduce(whole, group_, "whole " + shard.name);
    if (data_) all_reduce(whole, data_, "whole " + shard.name);
    result[shard.name] = whole.cpu();
  }
  return result;
}

void TensorParallelEngine::load_state_dict(torch::nn::Module& module, const StateDict& state,
                                           bool strict) {
  StateDict parts("Tensor");
  for (const auto& entry : state) {
    const auto* const known = find(entry.key());
    const bool fits = known != nullptr && known->is_cut() &&
                      entry.value().sizes() == at::IntArrayRef(known->part->sizes);
    parts.insert(entry.key(), fits ? known->part->cut(entry.value()) : entry.value());
  }
  inner().load_state_dict(module, parts, strict);
}

std::vector<checkpoint::LocalShard> TensorParallelEngine::local_shards() {
  const bool first_of_group = group_->getRank() == 0;
  std::vector<checkpoint::LocalShard> shards;
  if (sharded_ != nullptr) {
    shards = sharded_->local_shards();
  } else {
    const bool replica = data_ && data_->getRank() > 0;
    for (const auto& one : parameters_) {
      const auto* const first = find(one.tensor);
      shards.push_back({.name = one.name,
                        .sizes = one.tensor.sizes().vec(),
                        .dtype = one.tensor.scalar_type(),
                        .end = one.tensor.numel(),
                        .values = one.tensor.detach(),
                        .replica = replica,
                        .tied_to = first->name == one.name ? "" : first->name});
    }
  }
  for (auto& shard : shards) {
    const auto* const known = find(shard.name);
    if (known != nullptr && known->is_cut()) {
      shard.sizes = known->part->sizes;
      shard.boxes = known->part->boxes();
    } else {
      shard.replica = shard.replica || !first_of_group;
    }
  }
  return shards;
}

StateDict TensorParallelEngine::whole_tensors() {
  return sharded_ != nullptr ? sharded_->whole_tensors() : buffers_;
}

void TensorParallelEngine::loaded() {
  if (sharded_ != nullptr) sharded_->loaded();
}

std::vector<std::string> TensorParallelEngine::names_in(const torch::optim::Optimizer& optimizer) {
  if (sharded_ != nullptr) return sharded_->names_in(optimizer);
  std::vector<std::string> names;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto* const known = find(parameter);
      names.push_back(known == nullptr ? "" : known->name);
    }
  }
  return names;
}

StateDictType TensorParallelEngine::state_dict_type() const {
  return sharded_ != nullptr ? sharded_->state_dict_type() : StateDictType::kShardedStateDict;
}

bool TensorParallelEngine::has_deepspeed_names() const {
  return sharded_ != nullptr && sharded_->has_deepspeed_names();
}

}  // namespace accelerate::detail::model_parallel
