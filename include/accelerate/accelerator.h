// accelerate/accelerator.h - one object that makes a training program run on one CPU, on many
// processes and on GPUs, in the precision and with the accumulation that were asked for.
//
//     Accelerator accelerator({.mixed_precision = PrecisionType::kBf16});
//     auto [model, optimizer, loader] = accelerator.prepare(net, std::move(adamw), data);
//     for (auto& [x, y] : loader) {
//       auto accumulating = accelerator.accumulate(model);
//       accelerator.backward(cross_entropy(model(x), y));
//       if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
//       optimizer.step();
//       optimizer.zero_grad();
//     }
//
// Functions marked "Collective" must be called by every process, in one order.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/accelerator/checkpoint_members.h"
#include "accelerate/accelerator/options.h"
#include "accelerate/accelerator/refused_members.h"
#include "accelerate/accelerator/scopes.h"
#include "accelerate/accelerator/step_members.h"
#include "accelerate/accelerator/tracking_members.h"
#include "accelerate/api.h"
#include "accelerate/checkpoint.h"
#include "accelerate/data/ulysses_batch_sharder.h"
#include "accelerate/detail/accelerator/prepare.h"
#include "accelerate/grad_scaler.h"
#include "accelerate/memory.h"
#include "accelerate/modeling.h"
#include "accelerate/scheduler.h"
#include "accelerate/state/stateful.h"
#include "accelerate/value.h"

namespace accelerate {

/// What backward passes on to autograd.
struct BackwardOptions {
  /// The gradient of the loss, where it has more than one element.
  at::Tensor gradient = {};
  std::optional<bool> retain_graph = std::nullopt;
  bool create_graph = false;
  /// Leaves to which gradients are added; of a model that is averaged all or none. Empty: all.
  std::vector<at::Tensor> inputs = {};
};

struct PrepareModelOptions {
  /// Unset: that of the accelerator.
  std::optional<bool> device_placement = std::nullopt;
  /// Precision and placement only: no gradients are averaged, nothing is sent.
  bool evaluation_mode = false;
};

/// Kept for ported programs. Autocast and float32 results belong to the prepared model and not to
/// the module inside it, so that there is nothing to keep on or to take off.
struct UnwrapModelOptions {
  bool keep_fp32_wrapper = true;
  bool keep_torch_compile = true;
};

class ACCELERATE_API Accelerator : public CheckpointMembers,
                                   public TrackingMembers,
                                   public StepMembers,
                                   public RefusedMembers {
 public:
  /// Collective where several processes were started. The first one makes the `AcceleratorState`;
  /// later ones attach to it and may not ask for another precision, device or engine.
  ///
  /// Throws `ConfigError` for options and variables that contradict each other, `UnsupportedError`
  /// for what this build or device cannot do. Then no state is left that it has made itself.
  explicit Accelerator(const AcceleratorOptions& options = {});
  ~Accelerator();
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;

  // ---- what it is given, and gives back ---------------------------------------------------------

  /// Collective. Returns a tuple of the prepared objects in the order of the arguments; one
  /// argument is returned by itself. Data loaders become the part of this process, models
  /// `PreparedModel`, optimizers `AcceleratedOptimizer`, schedulers `AcceleratedScheduler`; all
  /// else comes back as it is, and so does what is prepared already.
  ///
  /// Optimizers and schedulers given by rvalue are owned by what comes back, those given by lvalue
  /// must outlive it. A scheduler of ours that was built on an optimizer given by rvalue follows
  /// it. Whatever the order of the arguments, models are prepared first, then optimizers,
  /// schedulers and loaders.
  template <class... Ts>
    requires(!detail::accelerator::BeginsWithPlacement<Ts...>)
  [[nodiscard]] auto prepare(Ts&&... objects) {
    static_assert(sizeof...(Ts) > 0, "accelerate: prepare needs something to prepare.");
    return detail::accelerator::prepare_all(preparer(), nullptr, std::forward<Ts>(objects)...);
  }
  /// `prepare` with one flag per object: whether it is put on the device. Throws `ArgumentError`
  /// for another number of flags.
  template <class... Ts>
  [[nodiscard]] auto prepare(const DevicePlacement& device_placement, Ts&&... objects) {
    return detail::accelerator::prepare_all(preparer(), &device_placement,
                                            std::forward<Ts>(objects)...);
  }

  /// Collective. Each is `prepare` of one object.
  template <class Model>
  [[nodiscard]] auto prepare_model(const Model& model, const PrepareModelOptions& options = {},
                                   std::source_location where = std::source_location::current()) {
    const detail::accelerator::CalledFrom here(where);
    return detail::accelerator::prepare_model(preparer(), model, options.device_placement,
                                              options.evaluation_mode);
  }
  template <class Optimizer>
  [[nodiscard]] AcceleratedOptimizer prepare_optimizer(
      Optimizer&& optimizer, std::optional<bool> device_placement = std::nullopt) {
    return detail::accelerator::prepare_optimizer(preparer(), std::forward<Optimizer>(optimizer),
                                                  device_placement);
  }
  template <class Batch>
  [[nodiscard]] DataLoader<Batch> prepare_data_loader(
      const DataLoader<Batch>& loader, std::optional<bool> device_placement = std::nullopt,
      std::type_identity_t<SliceFunction<Batch>> slice_fn_for_dispatch = {},
      std::source_location where = std::source_location::current()) {
    const detail::accelerator::CalledFrom here(where);
    return detail::accelerator::prepare_loader(preparer(), loader, device_placement,
                                               std::move(slice_fn_for_dispatch));
  }
  template <class Scheduler>
  [[nodiscard]] AcceleratedScheduler prepare_scheduler(Scheduler&& scheduler) {
    return detail::accelerator::prepare_scheduler(preparer(), std::forward<Scheduler>(scheduler));
  }

  /// The holder that was prepared; a holder that was not comes back as it is.
  template <class Holder>
  [[nodiscard]] Holder unwrap_model(const PreparedModel<Holder>& model,
                                    const UnwrapModelOptions& = {}) const {
    return model.holder();
  }
  template <class Holder>
  [[nodiscard]] Holder unwrap_model(const Holder& model, const UnwrapModelOptions& = {}) const {
    static_assert(detail::accelerator::check_model<Holder>());
    return model;
  }
  /// Collective if parameters are sharded. Whole parameters and buffers by name. Without `unwrap`
  /// names have the prefix that Python's wrapper gives them: "module." where gradients are
  /// averaged.
  template <class Model>
  [[nodiscard]] StateDict get_state_dict(const Model& model, bool unwrap = true) const {
    static_assert(detail::accelerator::check_model<Model>());
    return detail::accelerator::state_dict_of(detail::accelerator::module_of(model),
                                              detail::accelerator::core_of(model), unwrap);
  }

  /// Whether `dispatch_model` has spread the model, or a module in it, by a device map with more
  /// than one entry. Such a model stays where it is in `prepare`, which takes it in runs of one
  /// process only, unless ACCELERATE_BYPASS_DEVICE_MAP is set.
  template <class Model>
  [[nodiscard]] bool verify_device_map(const Model& model) const {
    return detail::accelerator::is_spread(*detail::accelerator::module_of(model));
  }

  /// Empties the objects, forgets all that was prepared, gives cached memory of the device back.
  template <class... Ts>
  void free_memory(Ts&... objects) {
    (detail::state::reset_object(objects), ...);
    forget_prepared();
  }
  template <class... Ts>
  void clear(Ts&... objects) {
    free_memory(objects...);
  }

  // ---- a step -----------------------------------------------------------------------------------

  /// Collective where it ends in averaged gradients. The gradients of `loss`, divided by the number
  /// of accumulation steps. Those of each prepared model that the loss depends on are averaged over
  /// processes, unless the model is under `no_sync` or this batch is only accumulated.
  ///
  /// Throws `ArgumentError` that names parameters of such a model which the loss does not reach,
  /// unless `find_unused_parameters` or `static_graph` is set; `StateError` after one that threw.
  void backward(const at::Tensor& loss, const BackwardOptions& options = {},
                std::source_location where = std::source_location::current());

  /// Counts a batch: gradients are averaged and applied with every
  /// `gradient_accumulation_steps()`th of them, and with the last one of a data loader. Before that
  /// the gradients of these models stay with the process.
  template <class... Models>
    requires(detail::accelerator::AnyModel<Models> && ...)
  [[nodiscard]] GradientSyncScope<sizeof...(Models)> accumulate(const Models&... models) {
    std::array<std::shared_ptr<detail::accelerator::ModelCore>, sizeof...(Models)> cores = {
        detail::accelerator::core_of(models)...};
    count_batch();
    return {synchronizes_this_batch(), std::move(cores)};
  }
  /// Calls `f` in the scope of `accumulate(models...)`.
  template <class F, class... Models>
    requires(!detail::accelerator::AnyModel<F>)
  decltype(auto) accumulate(F&& f, const Models&... models) {
    static_assert(std::invocable<F>,
                  "accelerate: accumulate takes prepared models, or a function without arguments "
                  "and then the models.");
    const auto scope = accumulate(models...);
    return std::forward<F>(f)();
  }
  /// Gradients of the model stay with the process in every backward of the scope.
  template <class Model>
  [[nodiscard]] GradientSyncScope<1> no_sync(const Model& model) const {
    return {std::optional(false), {detail::accelerator::core_of(model)}};
  }
  /// Gradients are averaged in every backward of the scope, also within `no_sync` or `accumulate`.
  template <class Model>
  [[nodiscard]] static GradientSyncScope<1> trigger_sync_in_backward(const Model& model) {
    return {std::optional(true), {detail::accelerator::core_of(model)}};
  }

  /// Collective at its end. Runs `f`, in which processes may see different numbers of batches:
  /// those that are through take part in the averages of the others, with zeros. All end with the
  /// parameters of the one that was through last.
  ///
  /// `even_batches` is what the loaders of `f` are told, where they are of data by index; unset it
  /// is that of the accelerator. Where batches are even, and with one process, `f` is just called.
  ///
  ///     accelerator.join_uneven_inputs(std::tie(model), {.even_batches = false}, [&] { ... });
  template <class... Models, class F>
  void join_uneven_inputs(const std::tuple<Models&...>& models, const JoinOptions& options, F&& f,
                          std::source_location where = std::source_location::current()) {
    std::apply(
        [&](const auto&... each) {
          const std::shared_ptr<detail::accelerator::ModelCore> cores[] = {
              detail::accelerator::core_of(each)...};
          join(cores, options, std::forward<F>(f), where);
        },
        models);
  }

  /// With `cp_size` above 1: until the scope ends each buffer is its part of this process, changed
  /// in place, and attention is computed over the sequence of all processes; see
  /// accelerate/parallel/context_parallel.h. Forward and backward belong into it; make a new one
  /// for each step. Otherwise it has no effect, with one warning. Throws `ArgumentError`
  /// for a buffer that cannot be cut, and no buffer has changed then.
  ///
  ///     auto split = accelerator.maybe_context_parallel({.buffers = {x}, .buffer_seq_dims = {1}});
  [[nodiscard]] ContextParallelScope maybe_context_parallel(
      const ContextParallelOptions& options = {}) const;
  /// With `sp_size` above 1 a `UlyssesBatchSharder` over the loader; else the loader itself.
  template <class Batch, class Model>
  [[nodiscard]] DataLoader<Batch> deepspeed_ulysses_dl_adapter(const DataLoader<Batch>& loader,
                                                               const Model&) const {
    if (!shares_sequences()) return loader;
    UlyssesBatchSharder<Batch> sharder(loader);
    save_instead(sharder._core(), *loader._core());
    return sharder;
  }

  /// Divides gradients by the factor of float16, once per step; nothing without float16.
  void unscale_gradients();
  void unscale_gradients(const AcceleratedOptimizer& optimizer);
  /// Collective if gradients are sharded. Scales gradients down to a total norm, and returns the
  /// norm they had over all processes, which is not waited for. With float16 throws `StateError` on
  /// batches that are only accumulated.
  at::Tensor clip_grad_norm_(std::span<const at::Tensor> parameters, double max_norm,
                             double norm_type = 2.0);
  at::Tensor clip_grad_norm_(const at::Tensor& parameter, double max_norm, double norm_type = 2.0) {
    return clip_grad_norm_(std::span(&parameter, 1), max_norm, norm_type);
  }
  /// Puts each element of the gradients between -clip_value and clip_value.
  void clip_grad_value_(std::span<const at::Tensor> parameters, double clip_value);
  void clip_grad_value_(const at::Tensor& parameter, double clip_value) {
    clip_grad_value_(std::span(&parameter, 1), clip_value);
  }
  /// The chosen precision for a part of your own; nothing without mixed precision.
  [[nodiscard]] AutocastScope autocast(
      const std::optional<AutocastKwargs>& autocast_handler = std::nullopt) const;

  /// Whether this batch ends in a step of the optimizer.
  [[nodiscard]] bool sync_gradients() const { return gradient_state_.sync_gradients(); }
  void set_sync_gradients(bool sync) { gradient_state_._set_sync_gradients(sync); }
  [[nodiscard]] std::int64_t gradient_accumulation_steps() const;
  void set_gradient_accumulation_steps(std::int64_t steps);
  /// Whether the last step of a prepared optimizer was left out because of infinite gradients.
  [[nodiscard]] bool optimizer_step_was_skipped() const;
  /// The factor on the loss; null without float16.
  [[nodiscard]] GradScaler* scaler() const;

  // ---- state ------------------------------------------------------------------------------------

  /// Collective. Writes the weights of a model into a folder: `accelerate::save_model` of
  /// `get_state_dict(model)` (accelerate/checkpoint.h). Weights that are offloaded are read from
  /// where they are kept, as `get_state_dict_offloaded_model` does. With `save_on_each_node` of the
  /// project configuration, one process of each host writes.
  template <class Model>
  void save_model(const Model& model, const std::filesystem::path& save_directory,
                  const SaveModelOptions& options = {},
                  std::source_location where = std::source_location::current()) const {
    write_model(get_state_dict(model), save_directory, options, where);
  }

  /// Ends asynchronous saves, trackers and the process group: no collective can follow. In a
  /// process that a launcher function of this library made, the launcher ends the group.
  void end_training();

 private:
  [[nodiscard]] bool shares_sequences() const;
  /// Checkpoints have the position of `loader` in the place of that of `other`.
  void save_instead(const std::shared_ptr<detail::data::LoaderCore>& loader,
                    const detail::data::LoaderCore& other) const;
  [[nodiscard]] detail::accelerator::Preparer preparer() const {
    return detail::accelerator::Preparer(*core_);
  }
  /// Counts a batch of `accumulate`.
  void count_batch();
  /// For a batch of `accumulate`: nullopt keeps the setting of the models; false keeps gradients
  /// local.
  [[nodiscard]] std::optional<bool> synchronizes_this_batch() const;
  void forget_prepared();
  void join(std::span<const std::shared_ptr<detail::accelerator::ModelCore>> models,
            const JoinOptions& options, const std::function<void()>& f, std::source_location where);
};

/// The holder that was prepared. What `prepare` adds stands beside the module, so there is nothing
/// to take off; options act on wrappers of the model's own.
template <class Holder>
[[nodiscard]] Holder extract_model_from_parallel(const PreparedModel<Holder>& model,
                                                 const ExtractModelOptions& options = {}) {
  auto extracted = extract_model_from_parallel(model.holder(), options);
  if constexpr (std::constructible_from<Holder, decltype(extracted)>) {
    return Holder(std::move(extracted));
  } else {
    return model.holder();  // a holder of a wrapper's class cannot hold what is inside
  }
}

}  // namespace accelerate
