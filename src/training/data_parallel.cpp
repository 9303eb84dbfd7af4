#include "accelerate/data_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <limits>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/name_collectives.h"
#include "accelerate/object_operations.h"
#include "comm/call_facts.h"
#include "core/log.h"
#include "core/text.h"
#include "training/gradient_hooks.h"

namespace accelerate::detail {
namespace {

using torch::autograd::Node;

// Python's: a small first bucket, so that something is under way early.
constexpr std::int64_t kFirstBucketBytes = 1 << 20;
constexpr std::int64_t kDefaultCap = 25;
constexpr std::size_t kBroadcastBytes = std::size_t{250} << 20;
// Of many parameters that are missed some are enough to find the cause.
constexpr std::size_t kMostNames = 8;

struct Parameters {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
};

/// Those that want a gradient, each once.
Parameters trained_parameters(const torch::nn::Module& module) {
  Parameters result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& entry : module.named_parameters()) {
    if (!entry.value().requires_grad()) continue;
    if (!seen.insert(entry.value().unsafeGetTensorImpl()).second) continue;
    result.names.push_back(entry.key());
    result.tensors.push_back(entry.value());
  }
  return result;
}

std::string described(const std::string& name, const at::Tensor& tensor) {
  return detail::str(name, " ", dtype_literal(tensor.scalar_type()), tensor.sizes());
}

/// All processes throw, or none.
void check_equal(const Parameters& own, const GroupHandle& group) {
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < own.names.size(); ++i) {
    texts.push_back(described(own.names[i], own.tensors[i]));
  }
  const auto all = accelerate::gather_object(std::vector<std::vector<std::string>>{texts}, group);
  const auto text = [](const auto& list, std::size_t i) {
    return i < list.size() ? list[i] : std::string("nothing");
  };
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    for (std::size_t i = 0; i < std::max(all[0].size(), all[rank].size()); ++i) {
      if (text(all[0], i) == text(all[rank], i)) continue;
      throw CommError(str("The models of the processes differ, so that their gradients cannot be "
                          "averaged: parameter ",
                          i, " is ", text(all[0], i), " on rank 0 and ", text(all[rank], i),
                          " on rank ", rank, ". Build the same model everywhere."),
                      static_cast<int>(rank));
    }
  }
}

void broadcast_first(const GroupHandle& group, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> detached;
  for (const auto& tensor : tensors) detached.push_back(tensor.detach());
  c10d::broadcast_coalesced(group, detached, kBroadcastBytes, /*rank=*/0);
}

}  // namespace

ReachedLeaves::ReachedLeaves(const at::Tensor& output) {
  std::unordered_set<const Node*> seen;
  std::vector<Node*> open;
  if (const auto& node = output.grad_fn()) open.push_back(node.get());
  if (output.is_leaf() && output.requires_grad()) leaves_.insert(output.unsafeGetTensorImpl());
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if (!seen.insert(node).second) continue;
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      leaves_.insert(leaf->variable.unsafeGetTensorImpl());
    }
    for (const auto& edge : node->next_edges()) {
      if (edge.function) open.push_back(edge.function.get());
    }
  }
}

bool ReachedLeaves::contains(const at::Tensor& leaf) const {
  return leaves_.contains(leaf.unsafeGetTensorImpl());
}

struct DataParallel::State {
  Parameters parameters;
  std::vector<at::Tensor> buffers;
  GroupHandle group;
  DistributedDataParallelKwargs options;
  std::unique_ptr<c10d::Reducer> reducer;
  bool reduced = false;

  void make_reducer() {
    const std::int64_t cap = options.bucket_cap_mb << 20;
    const std::int64_t first =
        options.bucket_cap_mb == kDefaultCap ? std::min(kFirstBucketBytes, cap) : cap;
    // Where the order of gradients is found out in the first backward, one bucket does for that.
    std::vector<std::size_t> limits{std::numeric_limits<std::int64_t>::max()};
    if (options.find_unused_parameters) {
      limits = {static_cast<std::size_t>(first), static_cast<std::size_t>(cap)};
    }
    const std::vector<bool> sparse(parameters.tensors.size(), false);
    auto buckets =
        std::get<0>(c10d::compute_bucket_assignment_by_size(parameters.tensors, limits, sparse));
    // Gradients come from the last layer to the first.
    std::ranges::reverse(buckets);
    std::unordered_map<std::size_t, std::string> names;
    for (std::size_t i = 0; i < parameters.names.size(); ++i) names[i] = parameters.names[i];
    reducer = std::make_unique<c10d::Reducer>(
        parameters.tensors, std::move(buckets), group, sparse, cap, options.find_unused_parameters,
        options.gradient_as_bucket_view, std::move(names), first,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
        std::vector<std::int64_t>());
    if (auto hook = make_gradient_hook(options, group)) {
      reducer->register_comm_hook(std::move(hook));
    }
  }

  void check_reach(const ReachedLeaves& leaves) const {
    std::vector<std::string> missed;
    for (std::size_t i = 0; i < parameters.tensors.size(); ++i) {
      if (!leaves.contains(parameters.tensors[i])) missed.push_back(parameters.names[i]);
    }
    if (missed.empty()) return;
    const auto count = missed.size();
    if (count > kMostNames) missed.resize(kMostNames);
    throw ArgumentError(str(
        "backward: the loss does not depend on ", count, " of the ", parameters.tensors.size(),
        " parameters of the model: ", join(missed, ", "), count > kMostNames ? ", ..." : "",
        ". The processes would wait for their gradients for ever. Add what uses them to the loss, "
        "freeze them (requires_grad_(false) before prepare), or set find_unused_parameters of "
        "DistributedDataParallelKwargs."));
  }
};

DataParallel::DataParallel(const torch::nn::Module& module, const GroupHandle& group,
                           const DistributedDataParallelKwargs& options)
    : state_(std::make_unique<State>()) {
  const auto named = name_collectives("prepare");
  state_->parameters = trained_parameters(module);
  state_->buffers = module.buffers();
  state_->group = group;
  state_->options = options;
  if (options.static_graph) {
    // The Reducer would count backward passes that are not averaged as part of the graph.
    throw UnsupportedError(
        "static_graph of DistributedDataParallelKwargs is not there yet. Leave it out; for "
        "parameters "
        "that a loss does not reach set find_unused_parameters.");
  }
  if (options.check_reduction) {
    warn_once("check_reduction of DistributedDataParallelKwargs does nothing, here as in PyTorch.");
  }
  check_equal(state_->parameters, state_->group);
  if (state_->parameters.tensors.empty()) {
    throw ArgumentError("No parameter of the model wants a gradient: there is nothing to average.");
  }
  auto all = module.parameters();
  all.insert(all.end(), state_->buffers.begin(), state_->buffers.end());
  broadcast_first(state_->group, all);
  state_->make_reducer();
}

DataParallel::~DataParallel() = default;

bool DataParallel::reached_by(const ReachedLeaves& leaves) const {
  return std::ranges::any_of(state_->parameters.tensors,
                             [&](const at::Tensor& one) { return leaves.contains(one); });
}

void DataParallel::before_backward(const at::Tensor& loss, const ReachedLeaves& leaves) {
  auto& state = *state_;
  const bool searches = state.options.find_unused_parameters;
  if (!searches) state.check_reach(leaves);
  state.reducer->prepare_for_forward();
  state.reducer->rebuild_buckets();
  state.reducer->prepare_for_backward(searches ? std::vector{loss} : std::vector<at::Tensor>());
  state.reduced = true;
}

void DataParallel::after_backward() {
  if (!std::exchange(state_->reduced, false) || !state_->options.broadcast_buffers) return;
  const auto named = name_collectives("backward");
  broadcast_first(state_->group, state_->buffers);
}

}  // namespace accelerate::detail
