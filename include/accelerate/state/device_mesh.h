// accelerate/state/device_mesh.h - the processes of a run on a grid, with a process group for each
// line.
//
//     auto mesh = accelerator.torch_device_mesh();         // dp_shard 2 x tp 2
//     mesh->get_local_rank("tp");                          // 0 or 1
//     auto sums = mesh->get_group("tp");                   // a c10d group of two processes
//
// Part of accelerate/parallelism_config.h: `ParallelismConfig::build_device_mesh` makes it.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/fwd.h"
#include "accelerate/parallelism_config.h"

namespace accelerate {

/// A name is that of a dimension, or of several dimensions flattened into one ("dp", "dp_shard_cp",
/// "dp_cp"). Functions that take one throw `ArgumentError` for a name that the mesh does not have.
class ACCELERATE_API DeviceMesh {
 public:
  /// Collective. Splits the process group of the run into one group per line of each dimension.
  /// Dimensions with the same processes share a group, and one with all processes has the group of
  /// the run. All groups are guarded as that one is: a process that strays is named.
  ///
  /// Throws `ArgumentError` if the layout has another size than the run.
  DeviceMesh(std::string device_type, MeshLayout layout);
  ~DeviceMesh();
  DeviceMesh(const DeviceMesh&) = delete;
  DeviceMesh& operator=(const DeviceMesh&) = delete;

  /// "cpu", "cuda": where the tensors of the collectives are.
  [[nodiscard]] const std::string& device_type() const noexcept { return device_type_; }
  [[nodiscard]] const MeshLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] const std::vector<std::string>& mesh_dim_names() const noexcept {
    return layout_.names();
  }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const noexcept { return layout_.shape(); }
  [[nodiscard]] bool has(std::string_view name) const noexcept { return layout_.has(name); }
  [[nodiscard]] std::int64_t size() const noexcept { return layout_.size(); }
  [[nodiscard]] std::int64_t size(std::string_view name) const { return layout_.size(name); }

  /// The place of this process in the mesh, one index per dimension.
  [[nodiscard]] std::vector<std::int64_t> get_coordinate() const;
  /// The rank of this process in its group of a dimension.
  [[nodiscard]] std::int64_t get_local_rank(std::string_view name) const;
  /// The processes of that group, by their rank in the run; their order is that of local ranks.
  [[nodiscard]] std::vector<std::int64_t> members(std::string_view name) const;
  /// The group. Throws `StateError` if that of the run was destroyed, which ends all of them.
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> get_group(std::string_view name) const;

 private:
  std::string device_type_;
  MeshLayout layout_;
  std::int64_t rank_;
  /// By their members. The group of the run is not among them: it can be destroyed.
  std::vector<std::pair<std::vector<std::int64_t>, c10::intrusive_ptr<c10d::ProcessGroup>>> groups_;
};

}  // namespace accelerate
