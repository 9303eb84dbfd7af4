#include "accelerate/accelerator/base.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/big_modeling/offloaded_tensors.h"
#include "accelerate/errors.h"
#include "accelerator/accelerator_core.h"
#include "checkpoint/write_file.h"
#include "core/text.h"
#include "offload/lazy_params.h"

namespace accelerate {

using detail::str;

AcceleratorBase::AcceleratorBase(std::shared_ptr<detail::accelerator::AcceleratorCore> core)
    : core_(std::move(core)) {}

AcceleratorBase::~AcceleratorBase() = default;

const AcceleratorOptions& AcceleratorBase::options() const { return core_->options; }

// ---- agreement ----------------------------------------------------------------------------------

bool AcceleratorBase::agree_to_stop(bool stop, std::source_location where) const {
  if (!use_distributed()) return stop;
  const auto flag = at::full({1}, stop ? 1 : 0, at::TensorOptions(at::kInt).device(device()));
  return accelerate::reduce(flag, Reduction::kMax, 1.0, where).item<int>() != 0;
}

bool AcceleratorBase::check_trigger(std::source_location where) {
  const bool raised = agree_to_stop(trigger_, where);
  if (raised) trigger_ = false;
  return raised;
}

// ---- what the run is like
// ---------------------------------------------------------------------------

bool AcceleratorBase::multi_device() const {
  return use_distributed() && distributed_type() != DistributedType::kMultiCpu;
}

bool AcceleratorBase::should_save_model() const {
  return core_->project.save_on_each_node ? is_local_main_process() : is_main_process();
}

SaveOptions AcceleratorBase::for_this_project(SaveOptions options) const {
  options.save_on_each_node |= core_->project.save_on_each_node;
  return options;
}

void AcceleratorBase::write_model(const StateDict& state,
                                  const std::filesystem::path& save_directory,
                                  SaveModelOptions options, std::source_location where) const {
  options.save_on_each_node |= core_->project.save_on_each_node;
  const bool is_offloaded = std::ranges::any_of(
      state, [](const auto& entry) { return accelerate::is_offloaded(entry.value()); });
  if (!is_offloaded) return accelerate::save_model(state, save_directory, options, where);
  detail::checkpoint::save_model(state, detail::offload::host_values, save_directory, options,
                                 where);
}

void AcceleratorBase::set_even_batches(bool even) {
  core_->options.dataloader_config.even_batches = even;
}

const std::optional<std::filesystem::path>& AcceleratorBase::project_dir() const {
  return core_->project.project_dir;
}
const std::optional<std::filesystem::path>& AcceleratorBase::logging_dir() const {
  return core_->project.logging_dir;
}
std::int64_t AcceleratorBase::save_iteration() const { return core_->project.iteration; }
FP8BackendType AcceleratorBase::fp8_backend() const { return detail::backend_of(core_->fp8); }

namespace {

std::int64_t rank_in(const AcceleratorState& state, const char* dimension, const char* property) {
  if (!state.parallelism_config()) {
    throw StateError(str("There is no ", property,
                         " without a parallelism_config. Give one to the first `Accelerator`."));
  }
  const auto mesh = state.device_mesh();
  return mesh && mesh->has(dimension) ? mesh->get_local_rank(dimension) : 0;
}

}  // namespace

std::int64_t AcceleratorBase::tensor_parallel_rank() const {
  return rank_in(state_, "tp", "tensor_parallel_rank");
}
std::int64_t AcceleratorBase::context_parallel_rank() const {
  return rank_in(state_, "cp", "context_parallel_rank");
}
std::int64_t AcceleratorBase::sequence_parallel_rank() const {
  return rank_in(state_, "sp", "sequence_parallel_rank");
}
std::int64_t AcceleratorBase::data_parallel_rank() const {
  return rank_in(state_, "dp_replicate", "data_parallel_rank");
}
std::int64_t AcceleratorBase::data_parallel_shard_rank() const {
  return rank_in(state_, "dp_shard", "data_parallel_shard_rank");
}
std::int64_t AcceleratorBase::pipeline_parallel_rank() const {
  return rank_in(state_, "pp", "pipeline_parallel_rank");
}

}  // namespace accelerate
