#include "accelerate/detail/accelerator/step_capture.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "accelerate/accelerator/captured_step.h"
#include "accelerate/errors.h"
#include "accelerate/logging.h"
#include "accelerate/optim.h"
#include "accelerator/accelerator_core.h"
#include "accelerator/batch_count.h"
#include "accelerator/operator_watch.h"
#include "accelerator/recorded_state.h"
#include "core/exception_text.h"
#include "core/log.h"
#include "core/text.h"
#include "fp8/delayed_scaling.h"
#include "state/accelerator_backend.h"
#include "state/step_graph.h"
#include "state/step_recording.h"

namespace accelerate::detail::accelerator {
namespace {

using Tensors = std::vector<at::Tensor>;

/// What makes two steps the same for a graph.
struct StepKey {
  struct Input {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    c10::Device device;
    bool operator==(const Input&) const = default;
  };
  std::vector<Input> inputs;
  /// Whether the batch ends a step.
  bool sync_gradients;
  /// Of the prepared models.
  std::vector<bool> training;
  bool operator==(const StepKey&) const = default;
};

/// `counts`: the step itself counts the batch.
StepKey key_of(const AcceleratorCore& core, const Tensors& inputs, bool counts) {
  const auto count = counts ? next_count(core) : current_count(core);
  StepKey key{.inputs = {}, .sync_gradients = count.sync_gradients, .training = {}};
  for (const auto& one : inputs)
    key.inputs.push_back({one.sizes().vec(), one.scalar_type(), one.device()});
  for (const auto& model : core.registry.models)
    key.training.push_back(model->module->is_training());
  return key;
}

/// Entries without a graph that are kept: warm-ups.
constexpr std::int64_t kMaxWarmUps = 64;
/// A recording that is made anew after fewer replays costs more than it saves.
constexpr std::int64_t kFewReplays = 10;

/// The steps of one key: how often they ran, then their graph.
struct Entry {
  StepKey key;
  std::int64_t eager_runs = 0;
  /// Why there is no recording; empty if there is or will be one.
  std::string refusal = {};
  /// How often the recording was dropped, by what had changed, and replays since the last was made.
  std::int64_t option_drops = 0;
  std::int64_t memory_drops = 0;
  std::int64_t replays = 0;
  std::unique_ptr<RecordedState> state = nullptr;
  Tensors inputs = {};
  StepOutput output = {};
  state::StepRecording recording = {};
  std::unique_ptr<state::StepGraph> graph = nullptr;
};

Tensors copies_of(const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  Tensors copies;
  for (const auto& one : tensors) copies.push_back(one.clone());
  return copies;
}

/// The gradients of parameters, for a recording that fails.
class GradientsBefore {
 public:
  explicit GradientsBefore(const ObjectRegistry& registry) {
    for (const auto& optimizer : registry.optimizers) {
      for (const auto& group : optimizer->optimizer->param_groups()) {
        for (const auto& parameter : group.params())
          before_.emplace_back(parameter, parameter.grad());
      }
    }
  }
  void restore() {
    for (auto& [parameter, gradient] : before_) parameter.mutable_grad() = gradient;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

/// While it lives, `zero_grad` of this thread keeps gradients where they are.
class KeepingGradients {
 public:
  explicit KeepingGradients(bool keep)
      : before_(std::exchange(state::StepRecording::keeps_gradients, keep)) {}
  ~KeepingGradients() { state::StepRecording::keeps_gradients = before_; }
  KeepingGradients(const KeepingGradients&) = delete;
  KeepingGradients& operator=(const KeepingGradients&) = delete;

 private:
  bool before_;
};

/// Lets learning rates and step counts live on the device. Returns why an optimizer cannot.
std::string make_capturable(optim::OptimizerCore& optimizer) {
  if (dynamic_cast<FusedOptimizer*>(optimizer.optimizer.get()) == nullptr) {
    return "an optimizer keeps its learning rate and step count on the host. Use the one of the "
           "same name in accelerate/optim.h, such as accelerate::AdamW";
  }
  for (auto& group : optimizer.optimizer->param_groups()) {
    dynamic_cast<ParamGroupOptions&>(group.options()).update({{"capturable", true}});
  }
  return "";
}

}  // namespace

class StepCapture::Impl {
 public:
  Impl(std::shared_ptr<AcceleratorCore> core, const CaptureOptions& options,
       std::source_location where)
      : core_(std::move(core)),
        options_(options),
        where_(str(where.file_name(), ":", where.line())) {
    if (options.warmup < 1 || options.max_graphs < 1) {
      throw ArgumentError(str("capture: ", options.warmup < 1 ? "warmup" : "max_graphs", " is ",
                              std::min(options.warmup, options.max_graphs),
                              "; it must be 1 or more."));
    }
    const auto plugin = core_->state.dynamo_plugin();
    if (plugin == nullptr) return;
    disabled_ = plugin->disable;
    const bool asked = plugin->backend == DynamoBackend::kCudagraphs;
    falls_back_ = asked && !plugin->fullgraph.value_or(false);
    one_shape_ = asked && plugin->dynamic == false;
  }

  StepOutput run(const Tensors& inputs, const Body& body) {
    if (!started_) start();
    if (graphs_ == nullptr) return body(inputs);
    const KeepingGradients keeping(keeps_gradients_);
    auto& entry = entry_of(key_of(*core_, inputs, counts_));
    if (entry.graph != nullptr) drop_if_changed(entry);
    if (!entry.refusal.empty()) {
      if (!may_fall_back()) refuse(entry.refusal);
      return body(inputs);
    }
    if (entry.graph == nullptr && entry.eager_runs < options_.warmup) {
      state::StepRecording::batch_counted = false;
      StepOutput output;
      graphs_->warm_up([&] { output = body(inputs); });
      counts_ = state::StepRecording::batch_counted;
      // A step that was left out has made no optimizer state, and a recording must not make any.
      if (!entry.key.sync_gradients || !any_step_was_skipped()) ++entry.eager_runs;
      return output;
    }
    if (entry.graph == nullptr && !record(entry, inputs, body)) return body(inputs);
    return replay(entry, inputs);
  }

  [[nodiscard]] std::int64_t num_graphs() const {
    return std::ranges::count_if(entries_, has_graph);
  }

 private:
  /// Once objects are prepared: whether there is a device to record, and what stands against it.
  void start() {
    auto* const maker = dynamic_cast<state::StepGraphMaker*>(state::accelerator_backend());
    auto graphs =
        disabled_ || maker == nullptr ? nullptr : maker->make_step_graphs(core_->state.device());
    if (graphs != nullptr) {
      if (const auto reason = obstacle(); !reason.empty()) {
        refuse(reason);
        graphs = nullptr;
      }
    }
    started_ = true;
    if (graphs == nullptr) return;
    // Two recordings then write to the same gradients.
    keeps_gradients_ = core_->num_steps() > 1 || !core_->gradient_state.sync_gradients();
    optimizers_ = core_->registry.optimizers;
    graphs_ = std::move(graphs);
  }

  [[nodiscard]] std::string obstacle() const {
    const auto& registry = core_->registry;
    if (core_->state.num_processes() > 1 ||
        std::ranges::any_of(registry.models,
                            [](const auto& one) { return one->engine != nullptr; })) {
      return "gradients are reduced between processes, and recordings of that are not supported "
             "yet";
    }
    for (const auto& model : registry.models) {
      const auto& scaling = model->delayed_scaling;
      if (scaling == nullptr || *scaling->kwargs().interval == 1) continue;
      return str("the fp8 recipe has an interval of ", *scaling->kwargs().interval,
                 " steps between two computations of the scales, and a recording repeats one step. "
                 "Set interval to 1");
    }
    for (const auto& optimizer : registry.optimizers) {
      if (const auto reason = make_capturable(*optimizer); !reason.empty()) return reason;
    }
    return "";
  }

  [[nodiscard]] bool any_step_was_skipped() const {
    return std::ranges::any_of(optimizers_, [](const auto& one) { return one->step_was_skipped; });
  }

  /// Moves the entry to the front, so that the one at the end was not used for the longest time.
  Entry& entry_of(StepKey key) {
    const auto found = std::ranges::find(entries_, key, &Entry::key);
    if (found != entries_.end()) {
      entries_.splice(entries_.begin(), entries_, found);
      return entries_.front();
    }
    if (one_shape_ && !entries_.empty() && entries_.front().key.inputs != key.inputs) {
      throw ArgumentError(
          str("capture at ", where_,
              ": the tensors of this batch have other shapes than those before, and dynamic of the "
              "TorchDynamoPlugin is false. Pad the batch, or leave dynamic unset."));
    }
    make_room_for_warm_up();
    entries_.push_front(Entry{.key = std::move(key)});
    return entries_.front();
  }

  static bool has_graph(const Entry& entry) { return entry.graph != nullptr; }

  /// Graphs do not make room for warm-ups, which may never come to a recording.
  void make_room_for_warm_up() {
    const auto warm_ups = static_cast<std::int64_t>(entries_.size()) - num_graphs();
    if (warm_ups < kMaxWarmUps) return;
    const auto oldest = std::ranges::find_if_not(entries_.rbegin(), entries_.rend(), has_graph);
    if (oldest->refusal.empty()) {
      warn_once(str("capture at ", where_, ": more than ", kMaxWarmUps,
                    " sets of shapes take turns, so that some of them run as they are and are "
                    "never recorded. Pad batches to fewer shapes (pad_to_multiple_of)."));
    }
    entries_.erase(std::next(oldest).base());
  }

  /// The entry at the front has a new graph.
  void make_room_for_graph() {
    if (num_graphs() <= options_.max_graphs) return;
    warn_once(str("capture at ", where_, ": there are more than max_graphs = ", options_.max_graphs,
                  " sets of shapes, so that recordings are dropped and made again. Pad batches to "
                  "fewer shapes, or raise max_graphs."));
    const auto oldest = std::ranges::find_if(entries_.rbegin(), entries_.rend(), has_graph);
    entries_.erase(std::next(oldest).base());
  }

  /// After one more warm-up the step is recorded again if it would compute with old memory or
  /// options.
  void drop_if_changed(Entry& entry) {
    const auto change = entry.state->change();
    if (!change) return;
    auto& drops = change->option.empty() ? entry.memory_drops : entry.option_drops;
    const bool often = drops++ > 0 && entry.replays < kFewReplays;
    drop_recording(entry);
    entry.eager_runs = options_.warmup - 1;
    entry.refusal = obstacle();  // of options that are new
    const auto text = str("capture at ", where_, ": the step is recorded again, because ");
    if (change->option.empty()) {
      get_logger("accelerate")
          .debug(str(text, change->memory, " has other memory than in the recording."));
      if (often) {
        warn_once(str(text, change->memory,
                      " has other memory from step to step. Move what "
                      "replaces it, such as zero_grad, into the step."));
      }
      return;
    }
    get_logger("accelerate").debug(str(text, change->option, " has changed."));
    if (!often) return;
    entry.refusal = str(change->option,
                        " changes from step to step, and a recording keeps its value "
                        "(cycle_momentum of OneCycleLR and CyclicLR changes betas and momentum: "
                        "set it to false)");
    refuse(entry.refusal);
  }

  /// Returns false if the step cannot be recorded and runs as it is.
  bool record(Entry& entry, const Tensors& inputs, const Body& body) {
    if (entry.refusal = obstacle(); !entry.refusal.empty()) {  // of what was prepared since
      refuse(entry.refusal);
      return false;
    }
    optimizers_ = core_->registry.optimizers;
    const auto count = current_count(*core_);
    GradientsBefore gradients(core_->registry);
    entry.inputs = copies_of(inputs);
    entry.state = std::make_unique<RecordedState>(core_->registry, entry.key.sync_gradients);
    std::string reason;
    {
      const OperatorWatch watch(core_->state.device());
      try {
        entry.graph = graphs_->record([&entry, body] {
          const state::StepRecording::Scope scope(entry.recording);
          entry.output = body(entry.inputs);
          entry.recording.close();
        });
        reason = watch.problem();
        if (const auto& scaling = core_->registry.scaling; reason.empty() && scaling) {
          reason = scaling->why_not_replayed();
        }
      } catch (const UnsupportedError& error) {
        reason = error.what();
      } catch (const c10::Error&) {
        reason = watch.problem();
        if (reason.empty())
          reason = str(watch.last(), " failed: ", current_exception_text().message);
      } catch (...) {  // of the program
        discard(entry, count, gradients);
        throw;
      }
    }
    set_count(*core_, count);
    if (reason.empty()) {
      entry.state->close();
      make_room_for_graph();
      return true;
    }
    discard(entry, count, gradients);
    entry.refusal = reason;
    refuse(reason);
    return false;
  }

  /// As if nothing was recorded.
  void discard(Entry& entry, const BatchCount& count, GradientsBefore& gradients) {
    set_count(*core_, count);
    gradients.restore();
    if (const auto& scaling = core_->registry.scaling) {
      auto& scaler = scaling->scaler();
      scaler.update(scaler.get_scale());  // forgets what was unscaled
    }
    drop_recording(entry);
  }

  static void drop_recording(Entry& entry) {
    entry.graph = nullptr;
    entry.output = {};
    entry.inputs = {};
    entry.recording = {};
    entry.state = nullptr;
    entry.replays = 0;
  }

  StepOutput replay(Entry& entry, const Tensors& inputs) const {
    ++entry.replays;
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        entry.inputs[i].copy_(inputs[i], /*non_blocking=*/true);
      }
    }
    entry.recording.run_before();
    entry.graph->replay();
    entry.recording.run_after();
    // The next replay overwrites the tensors of this one.
    return {.tree = entry.output.tree, .tensors = copies_of(entry.output.tensors)};
  }

  [[nodiscard]] bool may_fall_back() const {
    return options_.fallback_to_eager.value_or(falls_back_);
  }

  void refuse(const std::string& reason) const {
    const auto text = str("capture at ", where_, ": the step cannot be recorded: ", reason, ".");
    if (may_fall_back()) {
      return warn_once(str(text, " It runs as it is."));
    }
    throw UnsupportedError(
        str(text, " Move that out of the step, or set fallback_to_eager of the CaptureOptions."));
  }

  std::shared_ptr<AcceleratorCore> core_;
  CaptureOptions options_;
  std::string where_;
  bool disabled_ = false;
  bool falls_back_ = false;
  bool one_shape_ = false;
  bool started_ = false;
  bool keeps_gradients_ = false;
  bool counts_ = true;  // known after the first call
  std::vector<std::shared_ptr<optim::OptimizerCore>> optimizers_ = {};
  std::unique_ptr<state::StepGraphs> graphs_ = nullptr;
  std::list<Entry> entries_ = {};  // recordings refer to their entry
};

StepCapture::StepCapture(std::shared_ptr<AcceleratorCore> core, const CaptureOptions& options,
                         std::source_location where)
    : impl_(std::make_unique<Impl>(std::move(core), options, where)) {}
StepCapture::~StepCapture() = default;

StepOutput StepCapture::run(const Tensors& inputs, const Body& body) {
  return impl_->run(inputs, body);
}

std::int64_t StepCapture::num_graphs() const { return impl_->num_graphs(); }

}  // namespace accelerate::detail::accelerator
