#include "pipeline/pipeline_engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <unordered_map>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "accelerate/state/partial_state.h"
#include "comm/peers.h"
#include "core/text.h"
#include "model_parallel/parameter_part.h"
#include "modeling/tensors.h"
#include "optim/clip_grad.h"
#include "optim/optimizer_state.h"
#include "parallel/same_model.h"
#include "pipeline/own_stages.h"

namespace accelerate::detail::pipeline {
namespace {

const std::source_location kHere = std::source_location::current();

bool is_member(const std::vector<at::Tensor>& all, const at::Tensor& one) {
  return std::ranges::any_of(all, [&](const at::Tensor& other) { return other.is_same(one); });
}

std::shared_ptr<StageRunner> make_runner(PipelineImpl& pipeline, const RunnerPlace& place) {
  if (pipeline._own_stage().stages > 1) join_stages(pipeline, place.pipeline);
  return std::make_shared<StageRunner>(pipeline, place);
}

/// The part that this process has of a parameter; null if it has all of it.
std::shared_ptr<const model_parallel::ParameterPart> cut_of(const at::Tensor& parameter) {
  auto part = model_parallel::find_part(parameter);
  return part && part->dim ? part : nullptr;
}

/// Values of whole parameters, as far as this process has them.
StateDict cut_values(const StateDict& own, const StateDict& state) {
  StateDict parts("Tensor");
  for (const auto& entry : state) {
    const auto* const known = own.find(entry.key());
    const auto part = known != nullptr ? cut_of(*known) : nullptr;
    const bool is_whole = part && entry.value().sizes() == at::IntArrayRef(part->sizes);
    parts.insert(entry.key(), is_whole ? part->cut(entry.value()) : entry.value());
  }
  return parts;
}

}  // namespace

/// Collective. The tensors of rank `root` on the others, which have tensors of the same shapes in
/// host memory.
void PipelineEngine::broadcast(int root, std::span<at::Tensor> tensors) const {
  if (!is_cut()) return;
  const comm::Peers peers("pipeline state", {&runner_->place().pipeline, kHere});
  for (auto& one : tensors) peers.broadcast(one, root);
}

PipelineEngine::PipelineEngine(PipelineImpl& pipeline, const RunnerPlace& place,
                               const MakePartEngine& make_part_engine)
    : pipeline_(pipeline), runner_(make_runner(pipeline, place)) {
  check_layers();
  check_same();
  place_tensors();
  if (place.data || place.tensor) make_parts(make_part_engine);
}

PipelineEngine::~PipelineEngine() = default;

void PipelineEngine::check_layers() const {
  for (const auto& entry : pipeline_.named_parameters()) {
    if (!plan().holders(entry.value()).empty()) continue;
    throw ArgumentError(str("prepare: the parameter '", entry.key(),
                            "' is in the model, but in none of its ", pipeline_._layers().size(),
                            " layers. Name its module in the `modules` of the PipelineLayer that "
                            "uses it."));
  }
}

void PipelineEngine::check_same() const {
  if (!is_cut()) return;
  std::vector<std::string> facts;
  for (const auto& entry : pipeline_.named_parameters()) {
    const auto stage = plan().used_by.at(entry.value().unsafeGetTensorImpl()).front();
    facts.push_back(parallel::described(entry.key(), entry.value(), str("stage ", stage)));
  }
  parallel::check_same_model(facts, runner_->place().pipeline);
}

/// Gives the values of the first stage's process to all, and frees what other stages hold.
void PipelineEngine::place_tensors() {
  const at::NoGradGuard no_grad;
  const auto device = runner_->place().device;
  std::vector<at::Tensor> done;
  const auto place = [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (!tensor.defined() || is_member(done, tensor)) return;
    done.push_back(tensor);
    if (is_cut() && is_parameter && pipeline_._own_stage().stages == 1) {
      std::vector<at::Tensor> message{tensor.detach().cpu().contiguous()};
      broadcast(0, message);
      if (plan().is_held(tensor)) tensor.copy_(message.front());
    }
    if (tensor.is_meta()) return;
    if (!is_parameter || plan().is_held(tensor)) {
      if (tensor.device() != device) modeling::replace_data(tensor, tensor.to(device), name);
      return;
    }
    modeling::replace_data(tensor, at::empty_like(tensor, tensor.options().device(at::kMeta)),
                           name);
  };
  for (const auto& entry : pipeline_.named_parameters()) place(entry.key(), entry.value(), true);
  for (const auto& entry : pipeline_.named_buffers()) place(entry.key(), entry.value(), false);
}

void PipelineEngine::make_parts(const MakePartEngine& make_part_engine) {
  std::vector<std::shared_ptr<parallel::Engine>> engines;
  for (std::int64_t chunk = 0; chunk < plan().shape.chunks; ++chunk) {
    Part part{.module = std::make_shared<torch::nn::Module>()};
    const auto stage = plan().stage_of(chunk);
    const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
      const auto found = plan().used_by.find(tensor.unsafeGetTensorImpl());
      if (found == plan().used_by.end()) return;
      std::vector<std::int64_t> own;
      for (const auto user : found->second) {
        if (plan().rank_of(user) == plan().rank) own.push_back(user);
      }
      if (std::ranges::find(own, stage) == own.end()) return;
      if (is_parameter && own.size() > 1 && tensor.requires_grad() && runner_->place().data) {
        throw UnsupportedError(
            str("prepare: the parameter '", name, "' is used by stages ", join(own),
                ", which one process computes, and there are data parallel copies. Choose split "
                "points or another number of chunks that bring these layers into one stage."));
      }
      put(*part.module, name, tensor, is_parameter);
    };
    for (const auto& entry : pipeline_.named_parameters()) add(entry.key(), entry.value(), true);
    for (const auto& entry : pipeline_.named_buffers()) add(entry.key(), entry.value(), false);
    part.engine = make_part_engine(*part.module);
    if (part.engine->divides_states()) refuse_tied_shards(part);
    engines.push_back(part.engine);
    parts_.push_back(std::move(part));
  }
  runner_->set_engines(std::move(engines));
}

/// Gradients of tied parameters are added up whole.
void PipelineEngine::refuse_tied_shards(const Part& part) const {
  for (const auto& entry : part.module->named_parameters()) {
    if (!entry.value().requires_grad() || plan().holders(entry.value()).size() < 2) continue;
    throw UnsupportedError(
        str("prepare: '", entry.key(),
            "' is used by several stages, and its optimizer state is to be "
            "divided, which does not go together. Turn use_distributed_optimizer "
            "off, or give the last stage weights of its own."));
  }
}

// ---- backward and steps -------------------------------------------------------------------------

bool PipelineEngine::reached_by(const parallel::ReachedLeaves& /*leaves*/) const { return false; }

void PipelineEngine::before_backward(const parallel::BackwardPass& /*pass*/) {}

void PipelineEngine::after_backward() {}

void PipelineEngine::attach(torch::optim::Optimizer& optimizer) {
  if (pipeline_._own_stage().stages > 1) {
    join_groups(optimizer, pipeline_, runner_->place().pipeline);
  }
  for (const auto& part : parts_) part.engine->attach(optimizer);
  for (auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (parameter.is_meta()) optimizer.state().erase(parameter.unsafeGetTensorImpl());
    }
  }
}

bool PipelineEngine::holds(const at::Tensor& parameter) const {
  if (!plan().holders(parameter).empty()) return true;
  return std::ranges::any_of(parts_,
                             [&](const Part& part) { return part.engine->holds(parameter); });
}

void PipelineEngine::before_step() {
  for (const auto& part : parts_) part.engine->before_step();
}

void PipelineEngine::after_step(torch::optim::Optimizer& optimizer) {
  for (const auto& part : parts_) part.engine->after_step(optimizer);
}

at::Tensor PipelineEngine::found_inf_over_processes(const at::Tensor& found_inf) {
  auto found = found_inf;
  for (const auto& part : parts_) found = part.engine->found_inf_over_processes(found);
  if (!is_cut()) return found;
  found = found.clone();
  const comm::Peers peers("pipeline overflow", {&runner_->place().pipeline, kHere});
  peers.all_reduce({{found, c10d::ReduceOp::MAX}});
  return found;
}

// ---- clipping -----------------------------------------------------------------------------------

/// A tied parameter is one parameter: its first holder counts it.
bool PipelineEngine::counts(const at::Tensor& parameter) const {
  const auto holders = plan().holders(parameter);
  return holders.empty() || holders.front() == plan().rank;
}

std::optional<parallel::GradientShards> PipelineEngine::shards_of(
    std::span<const at::Tensor> parameters) {
  if (is_one_part()) return parts_.front().engine->shards_of(parameters);
  parallel::GradientShards all;
  counted_.clear();
  counted_.emplace_back();
  std::vector<at::Tensor> own;
  std::vector<at::Tensor> seen;
  for (const auto& parameter : parameters) {
    const auto holders = plan().holders(parameter);
    all.sharded.push_back(!holders.empty());
    if (holders.empty() || is_member(seen, parameter)) continue;
    seen.push_back(parameter);
    own.push_back(parameter);
  }
  std::vector<bool> taken(own.size());
  std::vector<at::Tensor> counting;
  for (const auto& one : own) counting.push_back(counts(one) ? one : at::Tensor());
  for (const auto& part : parts_) {
    auto shards = part.engine->shards_of(counting);
    counted_.emplace_back(shards.value_or(parallel::GradientShards{}));
    if (!shards) continue;
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (!shards->sharded[i]) continue;
      taken[i] = true;
      counting[i] = at::Tensor();  // not again by another stage of this process
    }
    all.gradients.insert(all.gradients.end(), shards->gradients.begin(), shards->gradients.end());
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    const auto& gradient = own[i].grad();
    if (taken[i] || !gradient.defined()) continue;
    all.gradients.push_back(gradient);
    if (counts(own[i])) counted_.front().gradients.push_back(gradient);
  }
  return all;
}

at::Tensor PipelineEngine::norm_over_processes(const parallel::GradientShards& given,
                                               double norm_type) {
  if (is_one_part()) return parts_.front().engine->norm_over_processes(given, norm_type);
  std::vector<at::Tensor> norms;
  bool is_double = false;
  for (std::size_t i = 0; i < counted_.size(); ++i) {
    for (const auto& one : counted_[i].gradients) {
      is_double = is_double || one.scalar_type() == at::kDouble;
    }
    const auto& shards = counted_[i];
    const bool is_cut_by_part =
        i > 0 && std::ranges::find(shards.sharded, true) != shards.sharded.end();
    if (!is_cut_by_part && shards.gradients.empty()) continue;
    const auto norm = is_cut_by_part ? parts_[i - 1].engine->norm_over_processes(shards, norm_type)
                                     : optim::get_total_norm(shards.gradients, norm_type);
    norms.push_back(norm.to(runner_->place().device, at::kDouble));
  }
  counted_.clear();
  // What changes no other norm.
  const double neutral = norm_type < 0 ? std::numeric_limits<double>::infinity() : 0;
  if (norms.empty()) {
    norms.push_back(at::full({}, neutral, at::dtype(at::kDouble).device(runner_->place().device)));
  }
  auto all = at::stack(norms);
  auto op = c10d::ReduceOp::SUM;
  if (std::isinf(norm_type)) {
    op = norm_type > 0 ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN;
    all = norm_type > 0 ? all.max() : all.min();
  } else {
    // Of order 0 the norm is a number.
    all = norm_type == 0 ? all.sum() : all.pow(norm_type).sum();
  }
  if (is_cut()) {
    const comm::Peers peers("clip_grad_norm_", {&runner_->place().pipeline, kHere});
    peers.all_reduce({{all, op}});
  }
  if (!std::isinf(norm_type) && norm_type != 0) all = all.pow(1.0 / norm_type);
  return is_double ? all : all.to(at::kFloat);
}

// ---- state --------------------------------------------------------------------------------------

bool PipelineEngine::is_sharded() const {
  return is_cut() ||
         std::ranges::any_of(parts_, [](const Part& part) { return part.engine->is_sharded(); });
}

StateDict PipelineEngine::state_dict(const torch::nn::Module& module) {
  if (!is_sharded()) return accelerate::state_dict(module);
  if (is_one_part()) return parts_.front().engine->state_dict(module);
  const at::NoGradGuard no_grad;
  const bool keeps = PartialState().is_local_main_process();
  auto state = accelerate::state_dict(module);
  std::unordered_map<const void*, at::Tensor> whole;
  for (const auto& entry : state) {
    const auto& own = entry.value();
    const auto holders = plan().holders(own);
    if (holders.empty()) continue;
    auto& values = whole[own.unsafeGetTensorImpl()];
    if (!values.defined()) {
      const bool is_owner = plan().rank == holders.front();
      const auto part = cut_of(own);
      const auto sizes = part ? at::IntArrayRef(part->sizes) : own.sizes();
      const auto joined = is_owner && part ? part->join(own) : own;
      std::vector<at::Tensor> message{is_owner ? joined.detach().cpu().contiguous()
                                               : at::empty(sizes, own.scalar_type())};
      broadcast(static_cast<int>(holders.front()), message);
      values = keeps ? message.front().clone() : at::empty({0});
    }
    state[entry.key()] = values;
  }
  return keeps ? state : StateDict("Tensor");
}

void PipelineEngine::load_state_dict(torch::nn::Module& module, const StateDict& state,
                                     bool strict) {
  const at::NoGradGuard no_grad;
  if (is_one_part() && is_sharded()) {
    return parts_.front().engine->load_state_dict(module, state, strict);
  }
  const auto own = accelerate::state_dict(module);
  const auto parts = cut_values(own, state);
  modeling::check_fits(own, parts, strict);
  for (const auto& part : parts_) {
    if (part.engine->is_sharded()) part.engine->load_state_dict(*part.module, parts, false);
  }
  for (const auto& entry : own) {
    const auto* const values = parts.find(entry.key());
    if (values != nullptr && !entry.value().is_meta()) entry.value().copy_(*values);
  }
}

void PipelineEngine::gather_states(std::span<parallel::ParameterState> states) {
  for (const auto& part : parts_) part.engine->gather_states(states);
  if (!is_cut()) return;
  const at::NoGradGuard no_grad;
  const bool keeps = PartialState().is_local_main_process();
  const auto& group = runner_->place().pipeline;
  using Facts = std::tuple<std::size_t, std::string, int, std::vector<std::int64_t>>;
  for (std::int64_t root = 0; root < plan().shape.ranks; ++root) {
    const bool is_root = plan().rank == root;
    std::vector<Facts> facts;
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; is_root && i < states.size(); ++i) {
      const auto holders = plan().holders(states[i].parameter);
      // A process that has a part of the states steps on tensors that are in no layer.
      const bool is_own = holders.empty() ? holds(states[i].parameter) : holders.front() == root;
      if (!is_own) continue;
      for (const auto& [name, tensor] : states[i].tensors) {
        facts.emplace_back(i, name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec());
        tensors.push_back(tensor.detach().cpu().contiguous());
      }
    }
    comm::broadcast_objects(facts, 1, static_cast<int>(root), &group, kHere);
    for (std::size_t i = 0; i < facts.size(); ++i) {
      const auto& [index, name, type, sizes] = facts[i];
      std::vector<at::Tensor> message{
          is_root ? tensors[i] : at::empty(sizes, static_cast<at::ScalarType>(type))};
      broadcast(static_cast<int>(root), message);
      auto& into = states[index].tensors;
      if (is_root || !keeps) continue;
      std::erase_if(into, [&](const auto& one) { return one.first == name; });
      into.emplace_back(name, message.front());
    }
  }
  if (keeps) return;
  for (auto& one : states) one.tensors.clear();
}

void PipelineEngine::cut_state(parallel::ParameterState& state) {
  if (state.parameter.is_meta()) {
    state.tensors.clear();
    return;
  }
  for (const auto& part : parts_) part.engine->cut_state(state);
}

}  // namespace accelerate::detail::pipeline
