// accelerate/accelerator/base.h - what an `Accelerator` knows of its run, and what it does between
// processes.
//
// Part of accelerate/accelerator.h: the base class of `Accelerator`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <source_location>
#include <utility>

#include "accelerate/accelerator/options.h"
#include "accelerate/api.h"
#include "accelerate/checkpoint.h"
#include "accelerate/data/gather_for_metrics.h"
#include "accelerate/operations.h"
#include "accelerate/prepared_loader.h"
#include "accelerate/state.h"
#include "accelerate/state/device_mesh.h"

namespace accelerate {

namespace detail::accelerator {
struct AcceleratorCore;
}

class ACCELERATE_API AcceleratorBase {
 public:
  AcceleratorBase(const AcceleratorBase&) = delete;
  AcceleratorBase& operator=(const AcceleratorBase&) = delete;

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
  [[nodiscard]] auto on_process(int process_index) const {
    return state_.on_process(process_index);
  }
  template <class F>
  [[nodiscard]] auto on_local_process(F&& f, int local_process_index) const {
    return state_.on_local_process(std::forward<F>(f), local_process_index);
  }
  [[nodiscard]] auto on_local_process(int local_process_index) const {
    return state_.on_local_process(local_process_index);
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

  /// `accelerate::save` (accelerate/checkpoint.h), which takes a `Value` or a `StateDict`: the main
  /// process writes; with `save_on_each_node` of the project configuration, one of each host.
  template <class Object>
  void save(const Object& object, const std::filesystem::path& path,
            const SaveOptions& options = {}) const {
    accelerate::save(object, path, for_this_project(options));
  }

  // ---- what the run is like ---------------------------------------------------------------------

  [[nodiscard]] AcceleratorState& state() { return state_; }
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
  /// The processes on a grid, with a process group for each dimension
  /// (accelerate/state/device_mesh.h); null without a `parallelism_config`, and if all its sizes
  /// are 1.
  [[nodiscard]] std::shared_ptr<DeviceMesh> torch_device_mesh() const {
    return state_.device_mesh();
  }
  /// The rank of this process in a dimension of the mesh, 0 if that has one process. Throws
  /// `StateError` without a `parallelism_config`.
  [[nodiscard]] std::int64_t tensor_parallel_rank() const;
  [[nodiscard]] std::int64_t context_parallel_rank() const;
  [[nodiscard]] std::int64_t sequence_parallel_rank() const;
  [[nodiscard]] std::int64_t data_parallel_rank() const;
  [[nodiscard]] std::int64_t data_parallel_shard_rank() const;
  [[nodiscard]] std::int64_t pipeline_parallel_rank() const;

 protected:
  /// The options, with `save_on_each_node` of the project configuration.
  [[nodiscard]] SaveOptions for_this_project(SaveOptions options) const;
  void write_model(const StateDict& state, const std::filesystem::path& save_directory,
                   SaveModelOptions options, std::source_location where) const;

  explicit AcceleratorBase(std::shared_ptr<detail::accelerator::AcceleratorCore> core);
  ~AcceleratorBase();

  [[nodiscard]] const AcceleratorOptions& options() const;

  std::shared_ptr<detail::accelerator::AcceleratorCore> core_;
  AcceleratorState state_;
  GradientState gradient_state_;

 private:
  bool trigger_ = false;
};

}  // namespace accelerate
