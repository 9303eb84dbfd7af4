#include "pipeline/stage_runner.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/nn/activation_checkpoint.h"
#include "accelerate/operations/objects.h"
#include "comm/peers.h"
#include "core/exception_text.h"
#include "core/text.h"
#include "parallel/own_backward.h"
#include "parallel/reached_leaves.h"

namespace accelerate::detail::pipeline {
namespace {

std::int64_t rank_in(const StageMessages::GroupHandle& group) {
  return group ? group->getRank() : 0;
}

PipelineShape shape_of(const PipelineOptions& options, const StageMessages::GroupHandle& group) {
  return {.ranks = group ? group->getSize() : 1,
          .micro_batches = options.num_micro_batches,
          .chunks = options.chunks};
}

/// The number of rows of a batch. Throws `ArgumentError` if its tensors differ in that.
std::int64_t rows_of(const PipelineTensors& inputs, const PipelineTensors& targets) {
  std::optional<std::int64_t> rows;
  for (const auto* tensors : {&inputs, &targets}) {
    for (const auto& one : *tensors) {
      if (one.dim() == 0) continue;
      if (!rows) rows = one.size(0);
      if (*rows == one.size(0)) continue;
      throw ArgumentError(str("The tensors of a batch have ", *rows, " and ", one.size(0),
                              " rows: it cannot be cut into micro-batches."));
    }
  }
  if (rows) return *rows;
  throw ArgumentError(
      "Could not find batch size from args or kwargs: the batch has no tensor with a dimension.");
}

/// Part number `part`; tensors without dimensions are in all parts.
PipelineTensors part_of(const PipelineTensors& tensors, std::int64_t parts, std::int64_t part) {
  PipelineTensors result;
  for (const auto& one : tensors) {
    result.push_back(one.dim() == 0 ? one
                                    : one.tensor_split(parts)[static_cast<std::size_t>(part)]);
  }
  return result;
}

std::uint64_t hash_of_shapes(const PipelineTensors& tensors, bool trains) {
  std::size_t hash = trains ? 1 : 0;
  for (const auto& one : tensors) {
    hash = c10::hash_combine(hash, static_cast<std::size_t>(one.scalar_type()));
    for (const auto size : one.sizes()) {
      hash = c10::hash_combine(hash, static_cast<std::size_t>(size));
    }
  }
  return hash;
}

PipelineTensors on_device(const PipelineTensors& tensors, c10::Device device) {
  PipelineTensors result;
  for (const auto& one : tensors) result.push_back(one.to(device));
  return result;
}

/// The graph of several tensors, to be walked.
class Roots final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);  // never run
  }
};

/// The place of `output` in its graph, without its values.
at::Tensor without_values(const at::Tensor& output) {
  auto place = at::empty({0}, output.options());
  torch::autograd::impl::set_gradient_edge(place, torch::autograd::impl::gradient_edge(output));
  return place;
}

/// One tensor whose graph is that of all of them.
at::Tensor joined(const PipelineTensors& roots) {
  if (roots.size() == 1) return roots.front();
  const auto node = std::make_shared<Roots>();
  for (const auto& one : roots) node->add_next_edge(torch::autograd::impl::gradient_edge(one));
  auto root = at::empty({0});
  torch::autograd::impl::set_gradient_edge(root, {node, 0});
  return root;
}

}  // namespace

StageRunner::StageRunner(const PipelineImpl& pipeline, const RunnerPlace& place)
    : layers_(pipeline._layers()),
      loss_(pipeline._loss()),
      options_(pipeline.options()),
      place_(place),
      plan_(make_plan(layers_, options_.split_points, shape_of(options_, place.pipeline),
                      rank_in(place.pipeline))),
      actions_(pipeline_actions(options_.schedule, plan_.shape, plan_.rank)),
      messages_(place.pipeline, plan_.rank, place.device) {
  find_tied(pipeline);
}

void StageRunner::find_tied(const PipelineImpl& pipeline) {
  std::vector<const void*> seen;
  for (const auto& entry : pipeline.named_parameters()) {
    const auto& parameter = entry.value();
    const void* const address = parameter.unsafeGetTensorImpl();
    auto holders = plan_.holders(parameter);
    if (holders.size() < 2) continue;
    if (std::ranges::find(seen, address) != seen.end()) continue;
    seen.push_back(address);
    // The same on all ranks: by the order in the model.
    const auto tag = static_cast<int>(2 * plan_.shape.stages()) + static_cast<int>(seen.size());
    if (std::ranges::find(holders, plan_.rank) == holders.end()) continue;
    tied_.push_back({entry.key(), parameter, std::move(holders), tag});
  }
}

StageRunner::Batch StageRunner::cut(const PipelineTensors& inputs, const PipelineTensors& targets,
                                    std::int64_t parts) const {
  const auto rows = rows_of(inputs, targets);
  if (rows < parts) {
    throw ArgumentError(str("A batch of ", rows, " rows cannot be cut into ", parts,
                            " micro-batches. Use larger batches, drop_last of the loader, or fewer "
                            "micro-batches."));
  }
  Batch batch;
  for (std::int64_t part = 0; part < parts; ++part) {
    batch.inputs.push_back(part_of(inputs, parts, part));
    batch.targets.push_back(part_of(targets, parts, part));
    // Parts differ by one row if the batch is no multiple of them.
    const auto share = rows / parts + (part < rows % parts ? 1 : 0);
    batch.weights.push_back(static_cast<double>(share) / static_cast<double>(rows));
    batch.keys.emplace_back(std::nullopt);
    if (!options_.variable_shapes) {
      batch.keys.back() = hash_of_shapes(batch.inputs.back(), at::GradMode::is_enabled());
    }
  }
  return batch;
}

template <class F>
void StageRunner::named(const PipelineAction& action, F&& f) {
  const auto where = [&] {
    return str("Stage ", plan_.stage_of(action.chunk), " of the pipeline (", plan_.shape.stages(),
               " stages) failed in the ", action.is_forward ? "forward" : "backward",
               " of micro-batch ", action.micro_batch, ": ");
  };
  try {
    f();
  } catch (const CommError& error) {
    drop_step();
    throw CommError(where() + error.what(), error.rank());
  } catch (...) {
    drop_step();
    std::throw_with_nested(StateError(where() + current_exception_text().text()));
  }
}

void StageRunner::drop_step() noexcept {
  messages_.drop();
  saved_.clear();
  outputs_.clear();
}

void StageRunner::check_whole() const {
  if (!broken_) return;
  throw StateError(
      "An error has ended an earlier step of this pipeline in its middle. Messages of that step "
      "may still be under way, and would be taken for those of this one. Start the run again, from "
      "its last checkpoint.");
}

// ---- forward ------------------------------------------------------------------------------------

// Two tags for each boundary between stages, so that messages of different directions and chunks
// between two ranks are not mistaken for each other.
MessageAddress StageRunner::forward_message(std::int64_t from_stage, bool is_sender) const {
  return {.peer = plan_.rank_of(is_sender ? from_stage + 1 : from_stage),
          .tag = static_cast<int>(2 * from_stage + 1)};
}

MessageAddress StageRunner::backward_message(std::int64_t from_stage, bool is_sender) const {
  return {.peer = plan_.rank_of(is_sender ? from_stage - 1 : from_stage),
          .tag = static_cast<int>(2 * from_stage)};
}

PipelineTensors StageRunner::run_layers(const LayerRange& layers, PipelineTensors tensors) const {
  const auto group = static_cast<std::size_t>(options_.recompute_layers);
  for (auto begin = layers.begin; begin < layers.end;) {
    const bool again =
        options_.recompute == PipelineRecompute::kUniform ||
        (options_.recompute == PipelineRecompute::kBlock && begin - layers.begin < group);
    const auto end =
        again && options_.recompute == PipelineRecompute::kUniform ? begin + group : begin + 1;
    const auto part = [from = layers_.begin() + static_cast<std::ptrdiff_t>(begin),
                       to = layers_.begin() +
                            static_cast<std::ptrdiff_t>(std::min(end, layers.end))](
                          const PipelineTensors& inputs) {
      auto values = inputs;
      for (auto layer = from; layer != to; ++layer) values = layer->forward(values);
      return values;
    };
    tensors = again ? activation_checkpoint(part, tensors) : part(tensors);
    begin = end;
  }
  return tensors;
}

void StageRunner::forward(const PipelineAction& action, const Batch& batch, bool trains) {
  const auto stage = plan_.stage_of(action.chunk);
  const auto part = static_cast<std::size_t>(action.micro_batch);
  const auto& key = batch.keys[part];
  auto inputs = stage == 0 ? on_device(batch.inputs[part], place_.device)
                           : messages_.receive(forward_message(stage - 1, false), key);
  auto* const engine =
      engines_.empty() ? nullptr : engines_[static_cast<std::size_t>(action.chunk)].get();
  const auto entered = engine != nullptr ? engine->enter_forward() : nullptr;
  auto outputs = run_layers(plan_.stages[static_cast<std::size_t>(stage)], inputs);
  if (engine != nullptr) engine->after_forward();
  if (stage < plan_.last_stage()) {
    messages_.send(forward_message(stage, true), outputs, key);
  } else if (!batch.wants_loss) {
    outputs_.push_back(outputs);
  } else {
    auto loss = loss_(outputs, on_device(batch.targets[part], place_.device));
    if (!loss.defined() || loss.numel() != 1) {
      throw ArgumentError(str("The loss of a pipeline is one number, but this one has ",
                              loss.defined() ? str("the shape [", join(loss.sizes()), "]") : "none",
                              "."));
    }
    loss = loss * batch.weights[part];
    const auto value = loss.detach();
    loss_sum_ = loss_sum_.defined() ? loss_sum_ + value : value;
    outputs = {loss};
  }
  if (trains) keep(action, std::move(inputs), std::move(outputs));
}

void StageRunner::keep(const PipelineAction& action, PipelineTensors inputs,
                       PipelineTensors outputs) {
  auto& saved = saved_[{action.chunk, action.micro_batch}];
  saved.facts = facts_of(outputs);
  const bool was_sent = plan_.stage_of(action.chunk) < plan_.last_stage();
  for (auto& output : outputs) {
    // The next stage has the values; here only the graph is needed.
    if (was_sent && output.requires_grad()) output = without_values(output);
  }
  saved.inputs = std::move(inputs);
  saved.outputs = std::move(outputs);
}

// ---- backward -----------------------------------------------------------------------------------

void StageRunner::run_autograd(std::int64_t chunk, const PipelineTensors& roots,
                               const PipelineTensors& gradients) {
  auto& left = backwards_left_[static_cast<std::size_t>(chunk)];
  const bool is_last = --left == 0;
  auto* const engine = engines_.empty() ? nullptr : engines_[static_cast<std::size_t>(chunk)].get();
  const bool tells = engine != nullptr && (is_last || engine->wants_local_backward());
  if (tells) {
    const auto root = joined(roots);
    const parallel::ReachedLeaves leaves(root);
    engine->before_backward({.loss = root, .leaves = leaves, .synchronizes = is_last});
  }
  {
    const parallel::OwnBackward own;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    torch::autograd::backward(roots, gradients);
  }
  if (tells) engine->after_backward();
}

void StageRunner::backward(const PipelineAction& action) {
  const auto stage = plan_.stage_of(action.chunk);
  auto node = saved_.extract({action.chunk, action.micro_batch});
  auto& saved = node.mapped();
  PipelineTensors roots;
  MessageFacts expected;
  for (std::size_t i = 0; i < saved.outputs.size(); ++i) {
    if (!saved.facts[i].requires_grad) continue;
    roots.push_back(saved.outputs[i]);
    expected.push_back(saved.facts[i]);
  }
  PipelineTensors gradients;
  if (stage < plan_.last_stage()) {
    gradients = messages_.receive_known(backward_message(stage + 1, false), expected);
  } else {
    gradients.resize(roots.size());
  }
  if (roots.empty()) {
    if (stage == plan_.last_stage()) {
      throw ArgumentError("the loss does not depend on anything that is trained.");
    }
  } else {
    run_autograd(action.chunk, roots, gradients);
  }
  if (stage == 0) return;
  PipelineTensors to_send;
  for (const auto& input : saved.inputs) {
    if (!input.requires_grad()) continue;
    to_send.push_back(input.grad().defined() ? input.grad() : at::zeros_like(input));
  }
  messages_.send_known(backward_message(stage, true), to_send);
}

// ---- a step -------------------------------------------------------------------------------------

at::Tensor StageRunner::train(const PipelineTensors& inputs, const PipelineTensors& targets) {
  check_whole();
  const at::AutoGradMode gradients(true);
  const auto batch = cut(inputs, targets, options_.num_micro_batches);
  // Other processes wait for what an error of this one leaves out.
  broken_ = place_.pipeline != nullptr;
  loss_sum_ = at::Tensor();
  backwards_left_.assign(static_cast<std::size_t>(options_.chunks), options_.num_micro_batches);
  std::vector<at::Tensor> before;
  for (auto& one : tied_) {
    before.push_back(one.parameter.grad());
    if (one.parameter.requires_grad()) one.parameter.mutable_grad() = at::Tensor();
  }
  for (const auto& action : actions_) {
    named(action,
          [&] { action.is_forward ? forward(action, batch, /*trains=*/true) : backward(action); });
  }
  add_up_tied(before);
  messages_.flush();
  auto loss = mean_loss();
  broken_ = false;
  return loss;
}

void StageRunner::add_up_tied(const std::vector<at::Tensor>& before) {
  const at::NoGradGuard no_grad;
  ++steps_;
  for (std::size_t i = 0; i < tied_.size(); ++i) {
    const auto& [name, parameter, holders, tag] = tied_[i];
    if (!parameter.requires_grad()) continue;
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);
    // The gradient and, if weights are compared in this step, a sum of them.
    const auto message = [sum = check_sum(parameter)](const at::Tensor& of) {
      return sum.defined() ? PipelineTensors{of, sum} : PipelineTensors{of};
    };
    const auto own = message(gradient);
    const auto facts = facts_of(own);
    if (plan_.rank != holders.front()) {
      messages_.send_known({holders.front(), tag}, own);
      const auto all = messages_.receive_known({holders.front(), tag}, facts);
      gradient.copy_(all.front());
      check_alike(tied_[i], holders.front(), own, all);
    } else {
      std::vector<PipelineTensors> received;
      for (std::size_t k = 1; k < holders.size(); ++k) {
        received.push_back(messages_.receive_known({holders[k], tag}, facts));
        gradient.add_(received.back().front());
      }
      for (std::size_t k = 1; k < holders.size(); ++k) {
        messages_.send_known({holders[k], tag}, message(gradient.clone()));
      }
      messages_.flush();
      for (std::size_t k = 1; k < holders.size(); ++k) {
        check_alike(tied_[i], holders[k], own, received[k - 1]);
      }
    }
    if (before[i].defined()) gradient.add_(before[i]);
  }
}

at::Tensor StageRunner::check_sum(const at::Tensor& parameter) const {
  if (place_.drift_check <= 0 || steps_ % place_.drift_check != 0) return {};
  // Other rows each time, so that large weights cost little.
  constexpr std::int64_t kTurns = 16;
  const auto parts = parameter.detach().reshape({-1}).tensor_split(kTurns);
  const auto turn = steps_ / place_.drift_check % kTurns;
  return parts[static_cast<std::size_t>(turn)].sum(at::kDouble).reshape({1});
}

void StageRunner::check_alike(const Tied& one, std::int64_t other, const PipelineTensors& own,
                              const PipelineTensors& others) {
  // Weights that an overflow has spoilt are NaN everywhere.
  if (own.size() < 2 || at::allclose(own[1], others[1], 0, 0, /*equal_nan=*/true)) return;
  messages_.drop();
  throw CommError(str(
      "The weight '", one.name,
      "' is used by several stages of the pipeline, but differs between "
      "the processes ",
      std::min(plan_.rank, other), " and ", std::max(plan_.rank, other),
      " of the pipeline at step ", steps_,
      ": something has changed it on one of them only. Change weights on all processes alike, or "
      "set drift_check = 0 of AcceleratorOptions."));
}

at::Tensor StageRunner::mean_loss() {
  const at::NoGradGuard no_grad;
  const auto where = std::source_location::current();
  const bool is_last = plan_.rank == plan_.rank_of(plan_.last_stage());
  auto loss = at::zeros({}, at::TensorOptions(place_.device));
  if (is_last) {
    const bool is_double = loss_sum_.scalar_type() == at::kDouble;
    loss = loss_sum_.reshape({}).to(is_double ? at::kDouble : at::kFloat, false, /*copy=*/true);
  }
  loss_sum_ = at::Tensor();
  if (is_last && place_.data) {
    const comm::Peers peers("pipeline loss", {&place_.data, where});
    peers.all_reduce({{loss}});
    loss.div_(peers.size());
  }
  if (!place_.pipeline || !options_.broadcast_loss) return loss;
  // A double holds both types; the second number says which one it is.
  const double is_double = loss.scalar_type() == at::kDouble ? 1 : 0;
  auto message = at::tensor({loss.item<double>(), is_double}, at::kDouble);
  const comm::Peers peers("pipeline loss", {&place_.pipeline, where});
  peers.broadcast(message, static_cast<int>(plan_.rank_of(plan_.last_stage())));
  if (is_last) return loss;
  const auto type = message[1].item<double>() > 0 ? at::kDouble : at::kFloat;
  return message[0].to(place_.device, type, false, /*copy=*/true);
}

// ---- without gradients --------------------------------------------------------------------------

void StageRunner::forward_only(const Batch& batch) {
  const at::NoGradGuard no_grad;
  broken_ = place_.pipeline != nullptr;
  outputs_.clear();
  loss_sum_ = at::Tensor();
  // Chunk by chunk: the first rank gets what the last one has sent.
  for (std::int64_t chunk = 0; chunk < options_.chunks; ++chunk) {
    for (std::size_t part = 0; part < batch.weights.size(); ++part) {
      const PipelineAction action{.micro_batch = static_cast<std::int64_t>(part), .chunk = chunk};
      named(action, [&] { forward(action, batch, /*trains=*/false); });
    }
  }
  messages_.flush();
}

at::Tensor StageRunner::evaluate(const PipelineTensors& inputs, const PipelineTensors& targets) {
  check_whole();
  const at::NoGradGuard no_grad;
  // The last batch of an evaluation may be small.
  const auto parts = std::min(options_.num_micro_batches, rows_of(inputs, targets));
  forward_only(cut(inputs, targets, std::max<std::int64_t>(parts, 1)));
  auto loss = mean_loss();
  broken_ = false;
  return loss;
}

PipelineTensors StageRunner::infer(const PipelineTensors& inputs, std::int64_t micro_batches,
                                   bool everywhere) {
  const at::NoGradGuard no_grad;
  check_whole();
  Batch batch;
  if (plan_.rank == 0) batch = cut(inputs, {}, micro_batches);
  const auto parts = static_cast<std::size_t>(micro_batches);
  batch.inputs.resize(parts);
  batch.targets.resize(parts);
  batch.weights.resize(parts);
  batch.keys.assign(parts, std::nullopt);  // only the first rank knows the shapes
  batch.wants_loss = false;
  forward_only(batch);
  broken_ = false;
  PipelineTensors results;
  for (std::size_t i = 0; i < (outputs_.empty() ? 0 : outputs_.front().size()); ++i) {
    std::vector<at::Tensor> all;
    for (const auto& one : outputs_) all.push_back(one.at(i));
    results.push_back(all.front().dim() == 0 ? at::stack(all) : at::cat(all));
  }
  outputs_.clear();
  if (!everywhere || !place_.pipeline) return results;
  comm::broadcast_objects(results, /*count=*/1, static_cast<int>(plan_.rank_of(plan_.last_stage())),
                          &place_.pipeline, std::source_location::current());
  return on_device(results, place_.device);
}

}  // namespace accelerate::detail::pipeline
