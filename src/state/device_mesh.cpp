#include "accelerate/state/device_mesh.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/state/partial_state.h"
#include "core/text.h"

namespace accelerate {

using detail::str;

namespace {

c10::intrusive_ptr<c10d::ProcessGroup> group_of_the_run() {
  if (auto group = PartialState().process_group()) return group;
  throw StateError(
      "The mesh has no process group: the run has one process, or its group has been destroyed.");
}

}  // namespace

DeviceMesh::DeviceMesh(std::string device_type, MeshLayout layout)
    : device_type_(std::move(device_type)), layout_(std::move(layout)) {
  const PartialState state;
  rank_ = state.process_index();
  if (layout_.size() != state.num_processes()) {
    throw ArgumentError(str("The mesh (", detail::join(layout_.shape(), " x "), ") has ",
                            layout_.size(), " processes, but the run has ", state.num_processes(),
                            "."));
  }
  auto names = layout_.names();
  const auto flattened = layout_.flattened_names();
  names.insert(names.end(), flattened.begin(), flattened.end());
  // All processes take the dimensions in this order, so none waits for a group of a later one.
  for (const auto& name : names) {
    auto ranks = layout_.members(name, rank_);
    const auto known = [&](const auto& entry) { return entry.first == ranks; };
    if (layout_.size(name) == layout_.size() || std::ranges::any_of(groups_, known)) continue;
    auto group = group_of_the_run()->splitGroup({ranks.begin(), ranks.end()}, std::nullopt,
                                                std::nullopt, std::nullopt, name);
    groups_.emplace_back(std::move(ranks), std::move(group));
  }
}

DeviceMesh::~DeviceMesh() = default;

std::vector<std::int64_t> DeviceMesh::get_coordinate() const { return layout_.coordinates(rank_); }

std::int64_t DeviceMesh::get_local_rank(std::string_view name) const {
  return layout_.local_rank(name, rank_);
}

std::vector<std::int64_t> DeviceMesh::members(std::string_view name) const {
  return layout_.members(name, rank_);
}

c10::intrusive_ptr<c10d::ProcessGroup> DeviceMesh::get_group(std::string_view name) const {
  const auto ranks = members(name);
  auto whole = group_of_the_run();  // it was ended, then the groups that were split off were too
  for (const auto& [of, group] : groups_) {
    if (of == ranks) return group;
  }
  return whole;
}

std::shared_ptr<DeviceMesh> ParallelismConfig::build_device_mesh(
    std::string_view device_type) const {
  auto layout = mesh();
  if (!layout) return nullptr;
  return std::make_shared<DeviceMesh>(std::string(device_type), *std::move(layout));
}

std::shared_ptr<DeviceMesh> ParallelismConfig::get_device_mesh(
    std::optional<std::string_view> device_type) {
  if (!device_mesh) {
    if (!device_type) {
      throw ArgumentError(
          "You need to pass a device_type, e.g. cuda, to build the device mesh: there is none "
          "yet.");
    }
    device_mesh = build_device_mesh(*device_type);
  } else if (device_type && device_mesh->device_type() != *device_type) {
    throw ArgumentError(
        str("The device_mesh is already created with device type ", device_mesh->device_type(),
            ". However, you are trying to get a device mesh with device_type ", *device_type, "."));
  }
  return device_mesh;
}

}  // namespace accelerate
