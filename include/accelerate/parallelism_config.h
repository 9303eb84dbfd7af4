// accelerate/parallelism_config.h - how the processes of a run divide data, model and sequence.
//
//     ParallelismConfig config = resolved(ParallelismConfig{.dp_shard_size = 4, .tp_size = 2});
//     config.total_size();                                  // 8
//     auto mesh = config.mesh();                            // 4 x 2: dp_shard, tp
//     mesh->members("tp", /*rank=*/5);                      // {4, 5}
//
// `get_device_mesh` (accelerate/state/device_mesh.h) makes the process groups of a mesh.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs/options.h"
#include "accelerate/kwargs/parallelism_handlers.h"

namespace accelerate {

/// The arithmetic of a mesh of ranks: who stands where, and who forms a group with whom. Ranks are
/// laid out row by row, so that neighbours in the last dimension have neighbouring ranks.
///
/// A name is that of a dimension, or of several of them flattened into one. All throw
/// `ArgumentError` for a name that the mesh does not have and for a rank outside of it.
class ACCELERATE_API MeshLayout {
 public:
  /// Throws `ArgumentError` unless there is one positive size for each name.
  MeshLayout(std::vector<std::string> names, std::vector<std::int64_t> shape);

  /// Lets `name` stand for these dimensions together, which must be in the order of the mesh.
  void flatten(std::string name, const std::vector<std::string>& dimensions);

  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  /// The names that stand for several dimensions, in the order in which they were added.
  [[nodiscard]] std::vector<std::string> flattened_names() const;
  [[nodiscard]] bool has(std::string_view name) const noexcept;

  /// The number of ranks, and that of a dimension.
  [[nodiscard]] std::int64_t size() const noexcept;
  [[nodiscard]] std::int64_t size(std::string_view name) const;

  /// Where a rank stands, one index per dimension.
  [[nodiscard]] std::vector<std::int64_t> coordinates(std::int64_t rank) const;
  /// The ranks that share all other coordinates with `rank`, itself among them, ascending.
  [[nodiscard]] std::vector<std::int64_t> members(std::string_view name, std::int64_t rank) const;
  /// The place of `rank` among its members.
  [[nodiscard]] std::int64_t local_rank(std::string_view name, std::int64_t rank) const;
  /// All groups of a dimension, by ascending first rank: the order in which every process must
  /// create them.
  [[nodiscard]] std::vector<std::vector<std::int64_t>> groups(std::string_view name) const;

  bool operator==(const MeshLayout&) const = default;

 private:
  [[nodiscard]] std::vector<std::size_t> axes(std::string_view name) const;

  std::vector<std::string> names_;
  std::vector<std::int64_t> shape_;
  std::vector<std::pair<std::string, std::vector<std::size_t>>> flattened_;
};

/// What the sizes of a `ParallelismConfig` are checked against.
struct ParallelismFacts {
  std::int64_t num_processes = 1;
  /// Whether the run has several processes.
  bool distributed = false;
  /// The version of the sharding plugin; unset without one.
  std::optional<std::int64_t> fsdp_version = std::nullopt;
  /// Whether ACCELERATE_ALLOW_CP_STANDALONE is set.
  bool allow_cp_standalone = false;
};

/// The sizes of the dimensions. Variables are PARALLELISM_CONFIG_<FIELD>; every size is 1 unless
/// given. Only sizes above 1 become dimensions of the mesh.
struct ACCELERATE_API ParallelismConfig {
  static constexpr std::string_view kOptionsName = "ParallelismConfig";

  std::optional<std::int64_t> dp_replicate_size = std::nullopt;
  std::optional<std::int64_t> dp_shard_size = std::nullopt;
  std::optional<std::int64_t> tp_size = std::nullopt;
  std::optional<std::int64_t> cp_size = std::nullopt;
  /// torch.
  std::optional<std::string> cp_backend = std::nullopt;
  std::optional<std::int64_t> sp_size = std::nullopt;
  /// deepspeed.
  std::optional<std::string> sp_backend = std::nullopt;
  // Made by `resolved` for sizes above 1.
  std::optional<TorchTensorParallelConfig> tp_handler = std::nullopt;
  std::optional<TorchContextParallelConfig> cp_handler = std::nullopt;
  std::optional<DeepSpeedSequenceParallelConfig> sp_handler = std::nullopt;
  /// Ours. The stages of a pipeline: the outermost dimension.
  std::optional<std::int64_t> pp_size = std::nullopt;
  /// What `get_device_mesh` has made. Copies share it; it does not count when configs are compared.
  std::shared_ptr<DeviceMesh> device_mesh = nullptr;

  // A size that is unset counts as 1 in all of these. Throw `ConfigError` beyond 64 bits.
  [[nodiscard]] std::int64_t total_size() const;
  [[nodiscard]] std::int64_t data_parallel_size() const;
  [[nodiscard]] std::int64_t non_data_parallel_size() const;
  [[nodiscard]] bool dp_replicate_enabled() const { return dp_replicate_size.value_or(1) > 1; }
  [[nodiscard]] bool dp_shard_enabled() const { return dp_shard_size.value_or(1) > 1; }
  [[nodiscard]] bool tp_enabled() const { return tp_size.value_or(1) > 1; }
  [[nodiscard]] bool cp_enabled() const { return cp_size.value_or(1) > 1; }
  [[nodiscard]] bool sp_enabled() const { return sp_size.value_or(1) > 1; }
  [[nodiscard]] bool pp_enabled() const { return pp_size.value_or(1) > 1; }

  /// The enabled dimensions over which data is divided.
  [[nodiscard]] std::vector<std::string> dp_dim_names() const;
  /// The enabled dimensions whose ranks get the same batch.
  [[nodiscard]] std::vector<std::string> non_dp_dim_names() const;
  /// The enabled dimensions over which a model is sharded.
  [[nodiscard]] std::vector<std::string> dp_shard_cp_dim_names() const;
  /// The enabled dimensions over which the loss is averaged.
  [[nodiscard]] std::vector<std::string> dp_cp_dim_names() const;
  /// The dimensions of a sharded model, replication first.
  [[nodiscard]] std::vector<std::string> fsdp_dim_names() const;
  [[nodiscard]] std::vector<std::string> active_mesh_dims() const;

  /// The mesh of the enabled dimensions in the order pp, dp_replicate, dp_shard, cp, sp, tp, with
  /// the flattened "dp", "dp_shard_cp" and "dp_cp" where they have a member, with sequence
  /// parallelism also "dp_shard_sp" and "dp_sp". nullopt if no dimension is enabled.
  [[nodiscard]] std::optional<MeshLayout> mesh() const;
  /// Collective. Makes the process groups of `mesh()`, also with sequence parallelism, for which
  /// Python makes none. Null if no dimension is enabled. Throws `ArgumentError` if the sizes do not
  /// multiply to the number of processes of the run.
  [[nodiscard]] std::shared_ptr<DeviceMesh> build_device_mesh(std::string_view device_type) const;
  /// Collective if there is no `device_mesh` yet: builds it. Throws `ArgumentError` if it was built
  /// for another device type, and if there is neither a mesh nor a device type.
  [[nodiscard]] std::shared_ptr<DeviceMesh> get_device_mesh(
      std::optional<std::string_view> device_type = std::nullopt);

  /// JSON that `from_json` reads again. That throws `ConfigError` for a key that is not known.
  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] static ParallelismConfig from_json(std::string_view text);

  bool operator==(const ParallelismConfig& other) const;
};

/// The resolved config as a run has it: a total of 1 in a distributed run replicates the model over
/// all processes. Throws `ConfigError` when the sizes do not multiply to the number of processes,
/// or when context parallelism lacks a sharding plugin of version 2.
[[nodiscard]] ACCELERATE_API ParallelismConfig validated_for(const ParallelismConfig& config,
                                                             const ParallelismFacts& facts);

/// What the deprecated plugin becomes.
[[nodiscard]] ACCELERATE_API ParallelismConfig
to_parallelism_config(const TorchTensorParallelPlugin& plugin);

/// ParallelismConfig(dp_replicate_size=1, ..., total_size=8).
ACCELERATE_API std::ostream& operator<<(std::ostream& out, const ParallelismConfig& config);

}  // namespace accelerate
