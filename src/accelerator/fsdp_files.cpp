#include "accelerate/accelerator/fsdp_files.h"

#include <memory>
#include <string>
#include <string_view>

#include "accelerate/errors.h"
#include "accelerator/registry.h"
#include "checkpoint/sharded_state.h"
#include "core/text.h"

namespace accelerate {
namespace detail::accelerator {
namespace {

namespace fs = std::filesystem;
using checkpoint::ShardedState;

checkpoint::ShardedFileOptions file_options(const FullyShardedDataParallelPlugin& plugin,
                                            const ShardedState& state,
                                            const FsdpFileOptions& options) {
  return {.index = options.index,
          .type = plugin.state_dict_type.value_or(state.state_dict_type()),
          .use_dcp = options.use_dcp};
}

std::shared_ptr<ShardedState> checked(std::shared_ptr<ShardedState> state, std::string_view what) {
  if (state) return state;
  throw ArgumentError(str("The ", what, " is not sharded: it was not prepared with a plugin that ",
                          "shards models. Call save_state and load_state, which save it whole."));
}

std::shared_ptr<ShardedState> state_of(const ModelCore* model) {
  return checked(model == nullptr ? nullptr : sharded_state_of(*model), "model");
}
std::shared_ptr<ShardedState> state_of(const AcceleratedOptimizer& optimizer) {
  return checked(optimizer ? sharded_state_of(optimizer._core()) : nullptr,
                 "model of the optimizer");
}

void save(const std::shared_ptr<ShardedState>& state, const FullyShardedDataParallelPlugin& plugin,
          const fs::path& folder, const FsdpFileOptions& options, const char* operation,
          std::source_location where) {
  checkpoint::save_sharded_files(*state, folder, file_options(plugin, *state, options), operation,
                                 where);
}

void load(const std::shared_ptr<ShardedState>& state, const FullyShardedDataParallelPlugin& plugin,
          const fs::path& folder, const FsdpFileOptions& options, const char* operation,
          std::source_location where) {
  checkpoint::exchange_by_collective(operation, where)([&] {
    checkpoint::load_sharded_files(*state, folder, file_options(plugin, *state, options));
    return std::string();
  });
}

}  // namespace

void save_fsdp_model(const FullyShardedDataParallelPlugin& plugin, const ModelCore* model,
                     const fs::path& folder, const FsdpFileOptions& options,
                     std::source_location where) {
  save(state_of(model), plugin, folder, options, "save_fsdp_model", where);
}

void load_fsdp_model(const FullyShardedDataParallelPlugin& plugin, const ModelCore* model,
                     const fs::path& folder, const FsdpFileOptions& options,
                     std::source_location where) {
  load(state_of(model), plugin, folder, options, "load_fsdp_model", where);
}

}  // namespace detail::accelerator

void save_fsdp_optimizer(const FullyShardedDataParallelPlugin& plugin,
                         const AcceleratedOptimizer& optimizer,
                         const std::filesystem::path& output_dir, const FsdpFileOptions& options,
                         std::source_location where) {
  using namespace detail::accelerator;
  save(state_of(optimizer), plugin, output_dir, options, "save_fsdp_optimizer", where);
}

void load_fsdp_optimizer(const FullyShardedDataParallelPlugin& plugin,
                         const AcceleratedOptimizer& optimizer,
                         const std::filesystem::path& input_dir, const FsdpFileOptions& options,
                         std::source_location where) {
  using namespace detail::accelerator;
  load(state_of(optimizer), plugin, input_dir, options, "load_fsdp_optimizer", where);
}

}  // namespace accelerate
