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

#include "accelerate/accelerator_options.h"
#include "accelerate/api.h"
#include "accelerate/gather_for_metrics.h"
#include "accelerate/grad_scaler.h"
#include "accelerate/memory.h"
#include "accelerate/modeling.h"
#include "accelerate/operations.h"
#include "accelerate/prepare.h"
#include "accelerate/prepared_loader.h"
#include "accelerate/scheduler.h"
#include "accelerate/state.h"
#include "accelerate/training_scopes.h"

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

class ACCELERATE_API Accelerator {
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

  /// Collective. A tuple of the prepared objects in the order of the arguments; one argument is
  /// returned by itself. Data loaders become the part of this process, models `PreparedModel`,
  /// optimizers `AcceleratedOptimizer`, schedulers `AcceleratedScheduler`; all else comes back as
  /// it is, and so does what is prepared already.
  ///
  /// Optimizers and schedulers given by rvalue are owned by what comes back, those given by lvalue
  /// must outlive it. A scheduler of ours that was built on an optimizer given by rvalue follows
  /// it.
  template <class... Ts>
  requires(!detail::BeginsWithPlacement<Ts...>) [[nodiscard]] auto prepare(Ts&&... objects) {
    static_assert(sizeof...(Ts) > 0, "accelerate: prepare needs something to prepare.");
    return detail::prepare_all(*core_, nullptr, std::forward<Ts>(objects)...);
  }
  /// The same with one flag per object: whether it is put on the device. Throws `ArgumentError` for
  /// another number of flags.
  template <class... Ts>
  [[nodiscard]] auto prepare(const DevicePlacement& device_placement, Ts&&... objects) {
    return detail::prepare_all(*core_, &device_placement, std::forward<Ts>(objects)...);
  }

  /// Collective. Each is `prepare` of one object.
  template <class Model>
  [[nodiscard]] auto prepare_model(const Model& model, const PrepareModelOptions& options = {},
                                   std::source_location where = std::source_location::current()) {
    const detail::CalledFrom here(where);
    return detail::prepare_model(*core_, model, options.device_placement, options.evaluation_mode);
  }
  template <class Optimizer>
  [[nodiscard]] AcceleratedOptimizer prepare_optimizer(
      Optimizer&& optimizer, std::optional<bool> device_placement = std::nullopt) {
    return detail::prepare_optimizer(*core_, std::forward<Optimizer>(optimizer), device_placement);
  }
  template <class Batch>
  [[nodiscard]] DataLoader<Batch> prepare_data_loader(
      const DataLoader<Batch>& loader, std::optional<bool> device_placement = std::nullopt,
      std::type_identity_t<SliceFunction<Batch>> slice_fn_for_dispatch = {},
      std::source_location where = std::source_location::current()) {
    const detail::CalledFrom here(where);
    return detail::prepare_loader(*core_, loader, device_placement,
                                  std::move(slice_fn_for_dispatch));
  }
  template <class Scheduler>
  [[nodiscard]] AcceleratedScheduler prepare_scheduler(Scheduler&& scheduler) {
    return detail::prepare_scheduler(*core_, std::forward<Scheduler>(scheduler));
  }

  /// The holder that was prepared; a holder that was not comes back as it is.
  template <class Holder>
  [[nodiscard]] Holder unwrap_model(const PreparedModel<Holder>& model,
                                    const UnwrapModelOptions& = {}) const {
    return model.holder();
  }
  template <detail::ModelHolder Holder>
  [[nodiscard]] Holder unwrap_model(const Holder& model, const UnwrapModelOptions& = {}) const {
    return model;
  }
  /// Parameters and buffers by name.
  template <class Model>
  [[nodiscard]] StateDict get_state_dict(const Model& model) const {
    return accelerate::state_dict(*detail::module_of(model));
  }

  /// Empties the objects, forgets all that was prepared, gives cached memory of the device back.
  template <class... Ts>
  void free_memory(Ts&... objects) {
    (detail::reset_object(objects), ...);
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
  requires(detail::AnyModel<Models>&&...)
      [[nodiscard]] GradientSyncScope<sizeof...(Models)> accumulate(const Models&... models) {
    std::array<std::shared_ptr<detail::ModelCore>, sizeof...(Models)> cores = {
        detail::core_of(models)...};
    count_batch();
    return {averages_this_batch(), std::move(cores)};
  }
  /// The same around a function.
  template <class F, class... Models>
  requires(!detail::AnyModel<F>) decltype(auto) accumulate(F&& f, const Models&... models) {
    const auto scope = accumulate(models...);
    return std::forward<F>(f)();
  }
  /// Gradients of the model stay with the process in every backward of the scope.
  template <detail::AnyModel Model>
  [[nodiscard]] GradientSyncScope<1> no_sync(const Model& model) const {
    return {std::optional(false), {detail::core_of(model)}};
  }
  /// Gradients are averaged in every backward of the scope, also within `no_sync` or `accumulate`.
  template <detail::AnyModel Model>
  [[nodiscard]] static GradientSyncScope<1> trigger_sync_in_backward(const Model& model) {
    return {std::optional(true), {detail::core_of(model)}};
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
          const std::shared_ptr<detail::ModelCore> cores[] = {detail::core_of(each)...};
          join(cores, options, std::forward<F>(f), where);
        },
        models);
  }

  /// Divides gradients by the factor of float16, once per step; nothing without float16.
  void unscale_gradients();
  void unscale_gradients(const AcceleratedOptimizer& optimizer);
  /// Scales gradients down to a total norm, and returns the norm they had, which is not waited for.
  /// With float16 throws `StateError` on batches that are only accumulated.
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
  [[nodiscard]] std::int64_t gradient_accumulation_steps() const {
    return gradient_state_.num_steps();
  }
  void set_gradient_accumulation_steps(std::int64_t steps) { gradient_state_.set_num_steps(steps); }
  /// Whether the last step of a prepared optimizer was left out because of infinite gradients.
  [[nodiscard]] bool optimizer_step_was_skipped() const;
  /// The factor on the loss; null without float16.
  [[nodiscard]] GradScaler* scaler() const;

  // ---- between processes ------------------------------------------------------------------------

  /// Collective. As the functions of the same name in accelerate/operations.h and
  /// accelerate/data_loader.h; `reduce` sums unless told otherwise, as in Python.
  template <class T>
  [[nodiscard]] auto gather(T&& tree,
                            std::source_location where = std::source_location::current()) const {
    return accelerate::gather(std::forward<T>(tree), where);
  }
  template <class T>
  [[nodiscard]] auto gather_for_metrics(
      T&& tree, const GatherForMetricsOptions& options = {},
      std::source_location where = std::source_location::current()) const {
    return accelerate::gather_for_metrics(std::forward<T>(tree), options, where);
  }
  template <class T>
  [[nodiscard]] auto reduce(T&& tree, Reduction reduction = Reduction::kSum, double scale = 1.0,
                            std::source_location where = std::source_location::current()) const {
    return accelerate::reduce(std::forward<T>(tree), reduction, scale, where);
  }
  template <class T>
  [[nodiscard]] auto pad_across_processes(
      T&& tree, const PadOptions& options = {},
      std::source_location where = std::source_location::current()) const {
    return accelerate::pad_across_processes(std::forward<T>(tree), options, where);
  }
  /// Collective.
  void wait_for_everyone(std::source_location where = std::source_location::current()) const {
    state_.wait_for_everyone(where);
  }
  /// Raises a flag on this process.
  void set_trigger() noexcept { trigger_ = true; }
  /// Collective. Whether a process has raised its flag; lowers them all.
  [[nodiscard]] bool check_trigger(std::source_location where = std::source_location::current());
  /// Collective. Whether any process wants to stop: all leave a loop together.
  ///
  ///     if (accelerator.agree_to_stop(loss_is_small)) break;
  [[nodiscard]] bool agree_to_stop(
      bool stop, std::source_location where = std::source_location::current()) const;

  /// See `PartialState` for these.
  template <class Inputs>
  [[nodiscard]] auto split_between_processes(Inputs&& inputs, SplitOptions options = {}) const {
    return state_.split_between_processes(std::forward<Inputs>(inputs), options);
  }
  template <class Inputs, class F>
  decltype(auto) split_between_processes(Inputs&& inputs, SplitOptions options, F&& f) const {
    return state_.split_between_processes(std::forward<Inputs>(inputs), options,
                                          std::forward<F>(f));
  }
  template <class F>
  decltype(auto) main_process_first(
      F&& f, std::source_location where = std::source_location::current()) const {
    return state_.main_process_first(std::forward<F>(f), where);
  }
  template <class F>
  decltype(auto) local_main_process_first(
      F&& f, std::source_location where = std::source_location::current()) const {
    return state_.local_main_process_first(std::forward<F>(f), where);
  }
  template <class F>
  [[nodiscard]] auto on_main_process(F&& f) const {
    return state_.on_main_process(std::forward<F>(f));
  }
  template <class F>
  [[nodiscard]] auto on_local_main_process(F&& f) const {
    return state_.on_local_main_process(std::forward<F>(f));
  }
  template <class F>
  [[nodiscard]] auto on_last_process(F&& f) const {
    return state_.on_last_process(std::forward<F>(f));
  }
  template <class F>
  [[nodiscard]] auto on_process(F&& f, int process_index) const {
    return state_.on_process(std::forward<F>(f), process_index);
  }
  template <class F>
  [[nodiscard]] auto on_local_process(F&& f, int local_process_index) const {
    return state_.on_local_process(std::forward<F>(f), local_process_index);
  }
  template <class... Args>
  void print(const Args&... args) const {
    state_.print(args...);
  }

  template <class Batch>
  [[nodiscard]] DataLoader<Batch> skip_first_batches(const DataLoader<Batch>& loader,
                                                     std::int64_t num_batches = 0) const {
    return accelerate::skip_first_batches(loader, num_batches);
  }

  // ---- what is the case -------------------------------------------------------------------------

  [[nodiscard]] const AcceleratorState& state() const { return state_; }
  [[nodiscard]] const GradientState& gradient_state() const { return gradient_state_; }
  [[nodiscard]] c10::Device device() const { return state_.device(); }
  [[nodiscard]] DistributedType distributed_type() const { return state_.distributed_type(); }
  [[nodiscard]] int num_processes() const { return state_.num_processes(); }
  [[nodiscard]] int process_index() const { return state_.process_index(); }
  [[nodiscard]] int local_process_index() const { return state_.local_process_index(); }
  [[nodiscard]] bool is_main_process() const { return state_.is_main_process(); }
  [[nodiscard]] bool is_local_main_process() const { return state_.is_local_main_process(); }
  [[nodiscard]] bool is_last_process() const { return state_.is_last_process(); }
  [[nodiscard]] bool use_distributed() const { return state_.use_distributed(); }
  /// Several processes with an accelerator each.
  [[nodiscard]] bool multi_device() const;
  [[nodiscard]] PrecisionType mixed_precision() const { return state_.mixed_precision(); }
  [[nodiscard]] bool is_fsdp2() const { return state_.is_fsdp2(); }
  /// Whether parallelism beside plain data parallelism is composed of several kinds.
  [[nodiscard]] bool is_composable_parallelism_enabled() const { return is_fsdp2(); }
  /// Whether this process writes the model: the main one, or the first of each host with
  /// `save_on_each_node`.
  [[nodiscard]] bool should_save_model() const;
  /// Whether the model is spread over several devices of this process.
  template <class Model>
  [[nodiscard]] bool verify_device_map(const Model&) const {
    return false;
  }

  [[nodiscard]] bool split_batches() const { return options().dataloader_config.split_batches; }
  [[nodiscard]] std::optional<bool> dispatch_batches() const {
    return options().dataloader_config.dispatch_batches;
  }
  [[nodiscard]] bool even_batches() const { return options().dataloader_config.even_batches; }
  void set_even_batches(bool even);
  [[nodiscard]] bool use_seedable_sampler() const {
    return options().dataloader_config.use_seedable_sampler;
  }
  [[nodiscard]] const std::optional<std::int64_t>& data_seed() const {
    return options().dataloader_config.data_seed;
  }
  [[nodiscard]] bool non_blocking() const { return options().dataloader_config.non_blocking; }
  [[nodiscard]] bool use_stateful_dataloader() const {
    return options().dataloader_config.use_stateful_dataloader;
  }
  [[nodiscard]] const std::optional<std::filesystem::path>& project_dir() const;
  [[nodiscard]] const std::optional<std::filesystem::path>& logging_dir() const;
  [[nodiscard]] std::int64_t save_iteration() const;
  [[nodiscard]] FP8BackendType fp8_backend() const { return FP8BackendType::kNo; }

  [[nodiscard]] std::shared_ptr<DeepSpeedPlugin> deepspeed_plugin() const {
    return state_.deepspeed_plugin();
  }
  [[nodiscard]] std::shared_ptr<ParallelismConfig> parallelism_config() const {
    return state_.parallelism_config();
  }
  /// How the processes are laid out; nothing without a `parallelism_config`.
  [[nodiscard]] std::optional<MeshLayout> torch_device_mesh() const;
  /// The place of this process in a dimension of the mesh, 0 where that has one process. Throws
  /// `StateError` without a `parallelism_config`.
  [[nodiscard]] std::int64_t tensor_parallel_rank() const;
  [[nodiscard]] std::int64_t context_parallel_rank() const;
  [[nodiscard]] std::int64_t data_parallel_rank() const;
  [[nodiscard]] std::int64_t data_parallel_shard_rank() const;
  /// Throws `UnsupportedError`: there is no such rank, in Python neither.
  [[nodiscard]] std::int64_t pipeline_parallel_rank() const;

  // ---- not there yet, or not for C++: each throws `UnsupportedError` that says why
  // ---------------

  [[noreturn]] void save_state(const std::filesystem::path& output_dir = {});
  [[noreturn]] void load_state(const std::filesystem::path& input_dir = {});
  [[noreturn]] void wait_for_save_state();
  template <class... Ts>
  [[noreturn]] void save(const Ts&...) {
    detail::refuse_member("save");
  }
  template <class... Ts>
  [[noreturn]] void save_model(const Ts&...) {
    detail::refuse_member("save_model");
  }
  template <class... Ts>
  [[noreturn]] void register_for_checkpointing(const Ts&...) {
    detail::refuse_member("register_for_checkpointing");
  }
  template <class Hook>
  [[noreturn]] void register_save_state_pre_hook(const Hook&) {
    detail::refuse_member("register_save_state_pre_hook");
  }
  template <class Hook>
  [[noreturn]] void register_load_state_pre_hook(const Hook&) {
    detail::refuse_member("register_load_state_pre_hook");
  }
  template <class... Ts>
  [[noreturn]] void init_trackers(const Ts&...) {
    detail::refuse_member("init_trackers");
  }
  template <class... Ts>
  [[noreturn]] void get_tracker(const Ts&...) {
    detail::refuse_member("get_tracker");
  }
  template <class... Ts>
  [[noreturn]] void log(const Ts&...) {
    detail::refuse_member("log");
  }
  /// Nothing to end: there are no trackers.
  void end_training() const {}
  template <class... Ts>
  [[noreturn]] void profile(const Ts&...) {
    detail::refuse_member("profile");
  }
  template <class... Ts>
  [[noreturn]] void capture(const Ts&...) {
    detail::refuse_member("capture");
  }
  template <class... Ts>
  [[noreturn]] void maybe_context_parallel(const Ts&...) {
    detail::refuse_member("maybe_context_parallel");
  }
  [[noreturn]] void lomo_backward(const at::Tensor& loss, double learning_rate);
  template <class... Ts>
  [[noreturn]] void deepspeed_ulysses_dl_adapter(const Ts&...) {
    detail::refuse_member("deepspeed_ulysses_dl_adapter");
  }

 private:
  [[nodiscard]] const AcceleratorOptions& options() const;
  /// Moves the count of `accumulate` on.
  void count_batch();
  /// Unset: as it was; false: not.
  [[nodiscard]] std::optional<bool> averages_this_batch() const;
  void forget_prepared();
  void join(std::span<const std::shared_ptr<detail::ModelCore>> models, const JoinOptions& options,
            const std::function<void()>& f, std::source_location where);

  std::shared_ptr<detail::AcceleratorCore> core_;
  AcceleratorState state_;
  GradientState gradient_state_;
  bool trigger_ = false;
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
