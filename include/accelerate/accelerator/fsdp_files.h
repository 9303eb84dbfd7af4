// accelerate/accelerator/fsdp_files.h - one sharded model, or its optimizer, in files.
//
//     save_fsdp_model(plugin, model, "out");            // out/pytorch_model_fsdp_0/...
//     save_fsdp_optimizer(plugin, optimizer, "out");    // out/optimizer_0/...
//
// `Accelerator::save_state` and `load_state` do this for all objects of a run, and check what they
// load. Part of accelerate/accelerate.h.
#pragma once

#include <cstddef>
#include <filesystem>
#include <source_location>

#include "accelerate/api.h"
#include "accelerate/kwargs/plugins.h"
#include "accelerate/optimizer.h"
#include "accelerate/prepared_model.h"

namespace accelerate {

struct FsdpFileOptions {
  /// Which model or optimizer of the run it is; a part of the names.
  std::size_t index = 0;
  /// SHARDED_STATE_DICT as a folder that torch.distributed.checkpoint loads. Off: a file of each
  /// process, without communication, that as many processes must load.
  bool use_dcp = true;
};

namespace detail::accelerator {

ACCELERATE_API void save_fsdp_model(const FullyShardedDataParallelPlugin& plugin,
                                    const ModelCore* model, const std::filesystem::path& folder,
                                    const FsdpFileOptions& options, std::source_location where);
ACCELERATE_API void load_fsdp_model(const FullyShardedDataParallelPlugin& plugin,
                                    const ModelCore* model, const std::filesystem::path& folder,
                                    const FsdpFileOptions& options, std::source_location where);

}  // namespace detail::accelerator

/// Collective. Writes the weights of a model that its engine shards, by the state dict type of the
/// plugin: FULL_STATE_DICT as pytorch_model_fsdp.bin on the first process, LOCAL_STATE_DICT as a
/// file per process, SHARDED_STATE_DICT as the folder pytorch_model_fsdp_0. If a process fails, all
/// throw, and what was there before stays.
///
/// Throws `ArgumentError` for a model that is not sharded.
template <class Holder>
void save_fsdp_model(const FullyShardedDataParallelPlugin& plugin,
                     const PreparedModel<Holder>& model, const std::filesystem::path& output_dir,
                     const FsdpFileOptions& options = {},
                     std::source_location where = std::source_location::current()) {
  detail::accelerator::save_fsdp_model(plugin, model._core().get(), output_dir, options, where);
}

/// Collective. Loads them again, with any number of processes but for files per process; each reads
/// what it holds. `input_dir` may also be the folder of the shards itself. Without the files of the
/// state dict type it takes those of another one, model.safetensors or pytorch_model.bin.
///
/// Throws `StateDictMismatch` for names that are missing and for other sizes, `CheckpointError` if
/// there are no weights. Names that the model does not have are a warning.
template <class Holder>
void load_fsdp_model(const FullyShardedDataParallelPlugin& plugin,
                     const PreparedModel<Holder>& model, const std::filesystem::path& input_dir,
                     const FsdpFileOptions& options = {},
                     std::source_location where = std::source_location::current()) {
  detail::accelerator::load_fsdp_model(plugin, model._core().get(), input_dir, options, where);
}

/// Collective. The same for the optimizer of such a model: optimizer.bin, or the folder
/// optimizer_0. The state is by names of parameters: {"state": {name: {"exp_avg": ...}},
/// "param_groups": [...]}.
ACCELERATE_API void save_fsdp_optimizer(
    const FullyShardedDataParallelPlugin& plugin, const AcceleratedOptimizer& optimizer,
    const std::filesystem::path& output_dir, const FsdpFileOptions& options = {},
    std::source_location where = std::source_location::current());
ACCELERATE_API void load_fsdp_optimizer(
    const FullyShardedDataParallelPlugin& plugin, const AcceleratedOptimizer& optimizer,
    const std::filesystem::path& input_dir, const FsdpFileOptions& options = {},
    std::source_location where = std::source_location::current());

}  // namespace accelerate
