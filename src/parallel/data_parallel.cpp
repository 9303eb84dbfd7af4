#include "parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "core/first_names.h"
#include "core/log.h"
#include "core/text.h"
#include "modeling/stand_in.h"
#include "parallel/data_parallel_state.h"
#include "parallel/own_backward.h"
#include "parallel/same_model.h"
#include "parallel/sparse_average.h"

namespace accelerate::detail::parallel {
namespace {

// As in Python: a small first bucket, so that the first message leaves early.
constexpr std::int64_t kFirstBucketBytes = 1 << 20;
constexpr std::int64_t kDefaultCap = 25;
constexpr std::size_t kBroadcastBytes = std::size_t{250} << 20;
// Error texts list this many parameters at most.

/// The parameters in order; shared ones once, packed ones as what they are kept in.
Parameters parameters_of(const torch::nn::Module& module) {
  Parameters result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& entry : module.named_parameters()) {
    if (!seen.insert(entry.value().unsafeGetTensorImpl()).second) continue;
    const auto stand_in = modeling::find_stand_in(entry.value());
    if (stand_in == nullptr) {
      result.add(entry.key(), entry.value());
      continue;
    }
    for (const auto& part : stand_in->placed(entry.key())) result.add(part.key(), part.value());
  }
  return result;
}

std::vector<modeling::NamedStandIn> packed_weights_of(const torch::nn::Module& module) {
  auto packed = modeling::stand_ins(module);
  std::erase_if(packed, [](const auto& one) { return one.stand_in->placed(one.name).is_empty(); });
  return packed;
}

/// The small tensors of a packed weight: maps, scales of scales, the description.
StateDict small_tensors_of(const modeling::NamedStandIn& packed) {
  const auto large = packed.stand_in->placed(packed.name);
  StateDict small("Tensor");
  for (const auto& part : packed.stand_in->state(packed.name)) {
    if (!large.contains(part.key())) small.insert(part.key(), part.value());
  }
  return small;
}

Parameters trained(const Parameters& all) {
  Parameters result;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all.tensors[i].requires_grad()) result.add(all.names[i], all.tensors[i]);
  }
  return result;
}

std::vector<std::size_t> up_to(std::size_t count) {
  std::vector<std::size_t> result(count);
  std::iota(result.begin(), result.end(), 0);
  return result;
}

/// Collective. Throws on all processes if their models differ, or how often they are compared.
void check_equal(const Parameters& own, const Parameters& buffers,
                 const std::vector<modeling::NamedStandIn>& packed, std::int64_t drift_check,
                 const comm::GroupHandle& group) {
  const auto intervals = accelerate::gather_object(std::vector{drift_check}, group);
  for (std::size_t rank = 1; rank < intervals.size(); ++rank) {
    if (intervals[0] == intervals[rank]) continue;
    throw CommError(
        str("drift_check is ", intervals[0], " on rank 0 and ", intervals[rank], " on rank ", rank,
            ". Set it alike on all processes (AcceleratorOptions, or ACCELERATE_DRIFT_CHECK)."),
        static_cast<int>(rank));
  }
  std::vector<std::string> facts;
  for (std::size_t i = 0; i < own.size(); ++i) {
    const char* const kind = own.tensors[i].requires_grad() ? "" : "the frozen ";
    facts.push_back(described(kind + own.names[i], own.tensors[i]));
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    facts.push_back(described("the buffer " + buffers.names[i], buffers.tensors[i]));
  }
  for (const auto& one : packed) {
    for (const auto& part : small_tensors_of(one)) facts.push_back(part.key());
  }
  check_same_model(facts, group);
}

void broadcast(const comm::GroupHandle& group, const std::vector<at::Tensor>& tensors, int from) {
  if (tensors.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> detached;
  for (const auto& tensor : tensors) detached.push_back(tensor.detach());
  c10d::broadcast_coalesced(group, detached, kBroadcastBytes, from);
}

/// Drops the gradient and the accumulator of a parameter if they have its old shape.
void forget_old_shape(const at::Tensor& parameter) {
  auto& gradient = parameter.mutable_grad();
  if (gradient.defined() && gradient.sizes() != parameter.sizes()) gradient = at::Tensor();
  auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr) return;
  const std::lock_guard lock(meta->mutex_);
  const auto accumulator = meta->grad_accumulator_.lock();
  if (!accumulator) return;
  const auto shape = accumulator->input_metadata(0).shape_as_dim_vector();
  if (shape != parameter.sym_sizes()) meta->grad_accumulator_.reset();
}

}  // namespace

GradientCounts::GradientCounts(const std::vector<at::Tensor>& tensors)
    : shared_(std::make_shared<Shared>(tensors.size())) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto count = [shared = shared_, i](const at::Tensor&) {
      if (shared->counting) ++shared->counts[i];
    };
    hooks_.emplace_back(tensors[i], tensors[i].register_hook(count));
  }
}

GradientCounts::~GradientCounts() {
  for (const auto& [tensor, position] : hooks_) tensor.remove_hook(position);
}

void GradientCounts::start() {
  for (auto& count : shared_->counts) count = 0;
  shared_->counting = true;
}

void DataParallel::State::begin() {
  check_equal(all, buffers, packed, drift_check, group);
  if (parameters.size() == 0) {
    throw ArgumentError(
        "No parameter of the model requires a gradient: there is nothing to average.");
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all.tensors[i].requires_grad()) frozen.push_back(i);
  }
  for (const auto& parameter : parameters.tensors) {
    addresses.insert(parameter.unsafeGetTensorImpl());
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto same = [&](const at::Tensor& one) { return one.is_same(parameters.tensors[i]); };
    if (std::ranges::any_of(sparse_weights, same)) sparse.push_back(i);
  }
  broadcast_all(0);
  if (drift_check > 0) drift = std::make_unique<DriftWatch>(all, group, drift_check);
  hook = make_gradient_hook(options, group);
  if (options.static_graph) {
    learning = std::make_unique<GradientCounts>(parameters.tensors);
    return;
  }
  checked = up_to(parameters.size());
  if (searches()) {
    local = std::make_unique<GradientCounts>(parameters.tensors);
    local->start();
  }
  auto dense = checked;
  std::erase_if(dense, [this](std::size_t i) { return is_sparse(i); });
  if (searches() && !sparse.empty()) {
    // A Reducer waits for the first of its gradients, but a loss may have sparse gradients only.
    late = std::move(dense);
    return;
  }
  make_reducer(std::move(dense));
}

std::size_t DataParallel::State::first_reached(const ReachedLeaves& leaves) const {
  const auto& tensors = parameters.tensors;
  const auto found =
      std::ranges::find_if(tensors, [&](const at::Tensor& one) { return leaves.contains(one); });
  return static_cast<std::size_t>(found - tensors.begin());
}

bool DataParallel::State::is_sparse(std::size_t index) const {
  return std::ranges::find(sparse, index) != sparse.end();
}

void DataParallel::State::make_reducer(std::vector<std::size_t> indices) {
  in_reducer = std::move(indices);
  if (in_reducer.empty()) return;
  Parameters chosen;
  for (const auto i : in_reducer) chosen.add(parameters.names[i], parameters.tensors[i]);
  const bool plain = !hook && !searches() && !options.gradient_as_bucket_view;
  if (plain && InPlaceAverage::suits(chosen.tensors, group)) {
    in_place = std::make_unique<InPlaceAverage>(std::move(chosen.tensors), group);
    return;
  }
  const std::int64_t cap = options.bucket_cap_mb << 20;
  const std::int64_t first =
      options.bucket_cap_mb == kDefaultCap ? std::min(kFirstBucketBytes, cap) : cap;
  auto& tensors = chosen.tensors;
  std::unordered_map<std::size_t, std::string> names;
  for (std::size_t i = 0; i < chosen.size(); ++i) names[i] = chosen.names[i];
  // The Reducer learns the order of gradients in the first backward: one bucket is enough until
  // then.
  std::vector<std::size_t> limits{std::numeric_limits<std::int64_t>::max()};
  if (searches()) limits = {static_cast<std::size_t>(first), static_cast<std::size_t>(cap)};
  const std::vector<bool> expect_sparse(tensors.size(), false);
  auto buckets =
      std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, limits, expect_sparse));
  // Gradients come from the last layer to the first.
  std::ranges::reverse(buckets);
  reducer = std::make_shared<c10d::Reducer>(
      std::move(tensors), std::move(buckets), group, expect_sparse, cap, searches(),
      options.gradient_as_bucket_view, std::move(names), first,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      std::vector<std::int64_t>());
  if (searches()) {
    reducer_log = std::make_shared<c10d::Logger>(reducer);
    reducer->set_logger(reducer_log);
  }
  if (hook) reducer->register_comm_hook(shared_hook(hook));
}

void DataParallel::State::arm(const std::vector<at::Tensor>& outputs) {
  if (!reducer) return;
  reducer->prepare_for_forward();
  reducer->rebuild_buckets();
  reducer->prepare_for_backward(outputs);
}

void DataParallel::State::check_reach(const ReachedLeaves& leaves) const {
  std::vector<std::string> missed;
  for (const auto i : checked) {
    if (!leaves.contains(parameters.tensors[i])) missed.push_back(parameters.names[i]);
  }
  if (missed.empty()) return;
  const auto count = missed.size();
  if (options.static_graph) {
    throw ArgumentError(
        str("backward: the loss does not depend on ", count, " of the ", parameters.size(),
            " parameters of the model, which it did before: ", first_names(std::move(missed)),
            ". With static_graph all steps use the same ones. Turn static_graph of "
            "DistributedDataParallelKwargs off and set find_unused_parameters."));
  }
  throw ArgumentError(str(
      "backward: the loss does not depend on ", count, " of the ", parameters.size(),
      " parameters of the model: ", first_names(std::move(missed)),
      ". The processes would wait for their gradients without end. Add what uses them to the loss, "
      "freeze them (requires_grad_(false) before prepare), or set find_unused_parameters of "
      "DistributedDataParallelKwargs."));
}

void DataParallel::State::check_frozen() const {
  std::vector<std::string> trained_now;
  for (const auto i : frozen) {
    if (all.tensors[i].requires_grad()) trained_now.push_back(all.names[i]);
  }
  if (trained_now.empty()) return;
  throw ArgumentError(
      str("backward: parameters that were frozen when the model was prepared want gradients now, "
          "which would not be averaged: ",
          first_names(std::move(trained_now)),
          ". Prepare the model again: accelerator.free_memory(model), then prepare."));
}

void DataParallel::State::check_unused() const {
  std::vector<std::string> changed;
  for (const auto i : unused) {
    if (parameters.tensors[i].grad().defined()) changed.push_back(parameters.names[i]);
  }
  if (changed.empty()) return;
  throw ArgumentError(
      str("backward: the graph has changed. Parameters that no process used in the first step now "
          "have a gradient, which is not averaged: ",
          first_names(std::move(changed)),
          ". Turn static_graph of DistributedDataParallelKwargs off (static_graph = false) and set "
          "find_unused_parameters = true."));
}

// The Reducer counts a parameter as used if it got a gradient in a step that was not averaged, and
// then requires that gradient.
void DataParallel::State::check_discarded(const ReachedLeaves& leaves) const {
  std::vector<std::string> discarded;
  for (const auto i : in_reducer) {
    const auto& parameter = parameters.tensors[i];
    const bool gone = local->of(i) > 0 && !parameter.grad().defined();
    if (gone && !leaves.contains(parameter)) discarded.push_back(parameters.names[i]);
  }
  if (discarded.empty()) return;
  throw ArgumentError(str(
      "backward: the loss does not depend on parameters whose gradients of earlier steps, which "
      "were not averaged, are gone: ",
      first_names(std::move(discarded)),
      ". With find_unused_parameters they would be missed now. Clear such gradients with "
      "zero_grad(/*set_to_none=*/false), or clear them only after a step that averages."));
}

void DataParallel::State::learn() {
  learning->stop();
  // For each parameter the number of gradients it got, then for each whether it has one at all.
  const auto size = parameters.size();
  std::vector<std::int64_t> own;
  if (!shadows) {  // a process without data has no graph, and sends no vote
    own.resize(2 * size);
    for (std::size_t i = 0; i < size; ++i) {
      own[i] = learning->of(i);
      own[size + i] = parameters.tensors[i].grad().defined() ? 1 : 0;
    }
  }
  auto votes = accelerate::all_gather_object(own, group);
  std::erase_if(votes, [](const auto& vote) { return vote.empty(); });

  std::vector<std::size_t> there, once;
  for (std::size_t i = 0; i < size; ++i) {
    const auto has = [&](const auto& vote) { return vote[size + i] != 0; };
    if (!std::ranges::any_of(votes, has)) {
      unused.push_back(i);
      continue;
    }
    if (is_sparse(i)) continue;
    there.push_back(i);
    // A Reducer cannot tell when a gradient is complete that comes several times, or only on some
    // processes.
    const bool is_once = std::ranges::all_of(votes, [&](const auto& vote) { return vote[i] == 1; });
    (is_once ? once : late).push_back(i);
  }
  average_now(there, hook);

  learning = nullptr;
  // Parameters of recomputed parts do not show in the graph: they cannot be checked.
  for (const auto i : once) {
    if (reachable[i]) checked.push_back(i);
  }
  make_reducer(std::move(once));
}

void DataParallel::State::average_those_there(const std::vector<std::size_t>& indices) {
  if (indices.empty()) return;
  std::string own;
  for (const auto i : indices) own += parameters.tensors[i].grad().defined() ? '1' : '0';
  const auto all = accelerate::all_gather_object(own, group);
  std::vector<std::size_t> there;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const auto has = [&](const std::string& one) { return one[i] == '1'; };
    if (std::ranges::any_of(all, has)) there.push_back(indices[i]);
  }
  if (!late_hook) late_hook = make_gradient_hook(options, group);
  average_now(there, late_hook);
}

void DataParallel::State::average_now(const std::vector<std::size_t>& indices,
                                      const GradientHook& how) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto i : indices) {
    auto& gradient = parameters.tensors[i].mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameters.tensors[i]);
    gradients.push_back(gradient);
  }
  average_gradients(gradients, how, group);
}

void DataParallel::State::average_sparse() {
  std::vector<at::Tensor> weights;
  for (const auto i : sparse) weights.push_back(parameters.tensors[i]);
  average_sparse_gradients(weights, group);
}

void DataParallel::State::broadcast_all(int from) const {
  auto tensors = all.tensors;
  tensors.insert(tensors.end(), buffers.tensors.begin(), buffers.tensors.end());
  broadcast(group, tensors, from);
  broadcast_packed(from);
}

void DataParallel::State::broadcast_packed(int from) const {
  if (packed.empty()) return;
  std::vector<std::vector<std::int64_t>> sizes;
  std::vector<StateDict> small;
  for (const auto& one : packed) {
    small.push_back(small_tensors_of(one));
    for (const auto& part : small.back()) sizes.push_back(part.value().sizes().vec());
  }
  // Descriptions of the same layers may have other lengths.
  sizes = accelerate::all_gather_object(sizes, group).at(static_cast<std::size_t>(from));
  const bool sends = group->getRank() == from;
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < packed.size(); ++i) {
    const auto device = packed[i].parameter.device();
    for (auto& part : small[i]) {
      auto& tensor = part.value();
      tensor = sends ? tensor.to(device)
                     : at::empty(sizes[tensors.size()], tensor.options().device(device));
      tensors.push_back(tensor);
    }
  }
  broadcast(group, tensors, from);
  if (sends) return;
  for (std::size_t i = 0; i < packed.size(); ++i) {
    const auto& [name, parameter, stand_in] = packed[i];
    for (const auto& part : stand_in->placed(name)) small[i].insert(part.key(), part.value());
    stand_in->load(name, small[i]);
  }
}

DataParallel::DataParallel(const torch::nn::Module& module, const comm::GroupHandle& group,
                           const DistributedDataParallelKwargs& options, std::int64_t drift_check)
    : state_(std::make_unique<State>()) {
  const auto named = name_collectives("prepare");
  state_->all = parameters_of(module);
  state_->packed = packed_weights_of(module);
  state_->parameters = trained(state_->all);
  for (const auto& entry : module.named_buffers()) state_->buffers.add(entry.key(), entry.value());
  state_->sparse_weights = sparse_weights(module);
  state_->group = group;
  state_->options = options;
  state_->drift_check = drift_check;
  if (options.check_reduction) {
    warn_once("check_reduction of DistributedDataParallelKwargs does nothing, here as in PyTorch.");
  }
  state_->begin();
}

DataParallel::~DataParallel() = default;

void DataParallel::rebuild() {
  const auto named = name_collectives("prepare");
  auto fresh = std::make_unique<State>();
  fresh->all = std::move(state_->all);
  fresh->buffers = std::move(state_->buffers);
  fresh->packed = std::move(state_->packed);
  fresh->sparse_weights = std::move(state_->sparse_weights);
  fresh->group = state_->group;
  fresh->options = state_->options;
  fresh->drift_check = state_->drift_check;
  fresh->buffers_from = state_->buffers_from;
  // Destroy the old Reducer first: it keeps accumulators with the old shapes alive.
  state_ = std::move(fresh);
  state_->parameters = trained(state_->all);
  for (const auto& parameter : state_->parameters.tensors) forget_old_shape(parameter);
  state_->begin();
}

bool DataParallel::is_static() const { return state_->options.static_graph; }

bool DataParallel::reached_by(const ReachedLeaves& leaves) const {
  return state_->first_reached(leaves) < state_->parameters.size();
}

void DataParallel::before_backward(const BackwardPass& pass) {
  const auto& leaves = pass.leaves;
  auto& state = *state_;
  state.check_frozen();
  state.shadows = false;
  if (state.learning) {
    state.reachable.clear();
    for (const auto& one : state.parameters.tensors) {
      state.reachable.push_back(leaves.contains(one));
    }
    state.learning->start();
  } else if (state.searches()) {
    if (!state.in_one_go) {
      state.check_discarded(leaves);
      state.arm({pass.loss});
    }
  } else {
    state.check_reach(leaves);
    if (!state.in_one_go) state.arm({});
  }
  if (state.drift) state.drift->note_loss(pass.loss);
  state.averages = true;
}

void DataParallel::after_backward() {
  auto& state = *state_;
  if (!std::exchange(state.averages, false)) return;
  const auto named = name_collectives("backward");
  if (state.learning) {
    state.learn();
  } else if (std::exchange(state.in_one_go, false)) {
    auto all = state.in_reducer;
    all.insert(all.end(), state.late.begin(), state.late.end());
    state.average_those_there(all);
  } else {
    if (state.local) state.local->start();
    if (state.in_place) state.in_place->average();
    state.average_those_there(state.late);
  }
  state.average_sparse();
  if (state.options.broadcast_buffers)
    broadcast(state.group, state.buffers.tensors, state.buffers_from);
  if (state.drift) state.drift->exchange();
  // Last: if this process throws, the others have completed the step.
  state.check_unused();
}

bool DataParallel::holds(const at::Tensor& parameter) const {
  return state_->addresses.contains(parameter.unsafeGetTensorImpl());
}

void DataParallel::before_step() {
  if (state_->drift) state_->drift->sum_up();
}

namespace {

/// Takes the gradients of parameters away, and puts them back when it is destroyed.
class SetAside {
 public:
  SetAside(const std::vector<at::Tensor>& tensors, bool in_buckets) : tensors_(tensors) {
    for (const auto& tensor : tensors_) {
      auto& gradient = tensor.mutable_grad();
      // A view of a bucket would be overwritten by the next step.
      gradients_.push_back(gradient.defined() && in_buckets ? gradient.clone() : gradient);
      gradient = at::Tensor();
    }
  }
  ~SetAside() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) tensors_[i].mutable_grad() = gradients_[i];
  }
  SetAside(const SetAside&) = delete;
  SetAside& operator=(const SetAside&) = delete;

 private:
  const std::vector<at::Tensor>& tensors_;
  std::vector<at::Tensor> gradients_;
};

}  // namespace

const comm::GroupHandle& DataParallel::group() const { return state_->group; }

std::int64_t DataParallel::announcement(const ReachedLeaves& leaves) const {
  return static_cast<std::int64_t>(state_->first_reached(leaves));
}

void DataParallel::begin_joined(const JoinedBackward& backward) {
  state_->buffers_from = backward.source;
  state_->in_one_go = backward.several_models;
  // Processes without data do not step.
  if (state_->drift) state_->drift->pause();
}

void DataParallel::broadcast_from(int source) { state_->broadcast_all(source); }

void DataParallel::end_joined() noexcept {
  state_->buffers_from = 0;
  state_->in_one_go = false;
  if (state_->drift) state_->drift->resume();
}

void DataParallel::shadow(std::int64_t announcement) {
  auto& state = *state_;
  const SetAside aside(state.parameters.tensors, state.options.gradient_as_bucket_view);
  state.shadows = true;
  std::vector<at::Tensor> roots;
  if (state.learning) {
    state.reachable.assign(state.parameters.size(), false);
  } else if (!state.in_one_go && state.searches()) {
    // A parameter that another process uses: this backward must mark no other one as used.
    const at::AutoGradMode with_gradients(true);
    const auto& parameter = state.parameters.tensors.at(static_cast<std::size_t>(announcement));
    roots.push_back(parameter.view_as(parameter));
    state.arm(roots);
  } else if (!state.in_one_go) {
    for (const auto i : state.in_reducer) roots.push_back(state.parameters.tensors[i]);
    state.arm({});
  }
  if (!roots.empty()) {
    std::vector<at::Tensor> zeros;
    for (const auto& root : roots) zeros.push_back(at::zeros_like(root));
    const OwnBackward own;
    torch::autograd::backward(roots, zeros);
    // The root may be one of these; its zeros are dense.
    for (const auto i : state.sparse) state.parameters.tensors[i].mutable_grad() = at::Tensor();
  }
  state.averages = true;
  after_backward();
}

}  // namespace accelerate::detail::parallel
