// The arithmetic of a mesh of ranks.
#include <algorithm>
#include <functional>
#include <numeric>

#include "accelerate/errors.h"
#include "accelerate/parallelism_config.h"
#include "core/text.h"

namespace accelerate {

using detail::join;
using detail::str;

MeshLayout::MeshLayout(std::vector<std::string> names, std::vector<std::int64_t> shape)
    : names_(std::move(names)), shape_(std::move(shape)) {
  if (names_.size() != shape_.size() || names_.empty() ||
      std::ranges::any_of(shape_, [](std::int64_t size) { return size < 1; })) {
    throw ArgumentError(str("A mesh needs one positive size for each name. The names are (",
                            join(names_), "), the sizes (", join(shape_), ")."));
  }
}

void MeshLayout::flatten(std::string name, const std::vector<std::string>& dimensions) {
  std::vector<std::size_t> indices;
  for (const auto& dimension : dimensions) {
    const auto found = std::ranges::find(names_, dimension);
    const auto index = static_cast<std::size_t>(found - names_.begin());
    if (found == names_.end() || (!indices.empty() && index <= indices.back())) {
      throw ArgumentError(str("The dimensions (", join(dimensions), ") cannot be flattened into '",
                              name, "': they must be of the mesh (", join(names_),
                              "), and in its order."));
    }
    indices.push_back(index);
  }
  if (indices.empty() || has(name)) {
    throw ArgumentError(
        str("'", name, "' ", indices.empty() ? "has no dimensions." : "is there already."));
  }
  flattened_.emplace_back(std::move(name), std::move(indices));
}

std::vector<std::string> MeshLayout::flattened_names() const {
  std::vector<std::string> names;
  for (const auto& [name, indices] : flattened_) names.push_back(name);
  return names;
}

bool MeshLayout::has(std::string_view name) const noexcept {
  return std::ranges::find(names_, name) != names_.end() ||
         std::ranges::any_of(flattened_, [&](const auto& entry) { return entry.first == name; });
}

std::vector<std::size_t> MeshLayout::axes(std::string_view name) const {
  if (const auto found = std::ranges::find(names_, name); found != names_.end()) {
    return {static_cast<std::size_t>(found - names_.begin())};
  }
  for (const auto& [flattened, indices] : flattened_) {
    if (flattened == name) return indices;
  }
  throw ArgumentError(str("The mesh has no dimension '", name, "'. It has: ", join(names_),
                          flattened_.empty() ? "" : ", ", join(flattened_names()), "."));
}

std::int64_t MeshLayout::size() const noexcept {
  return std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t MeshLayout::size(std::string_view name) const {
  std::int64_t result = 1;
  for (const auto axis : axes(name)) result *= shape_[axis];
  return result;
}

std::vector<std::int64_t> MeshLayout::coordinates(std::int64_t rank) const {
  if (rank < 0 || rank >= size()) {
    throw ArgumentError(str("Rank ", rank, " is not in a mesh of ", size(), " ranks."));
  }
  std::vector<std::int64_t> result(shape_.size());
  for (std::size_t axis = shape_.size(); axis-- > 0;) {
    result[axis] = rank % shape_[axis];
    rank /= shape_[axis];
  }
  return result;
}

std::vector<std::int64_t> MeshLayout::members(std::string_view name, std::int64_t rank) const {
  const auto moving = axes(name);
  std::vector<std::int64_t> strides(shape_.size(), 1);
  for (std::size_t axis = shape_.size() - 1; axis-- > 0;) {
    strides[axis] = strides[axis + 1] * shape_[axis + 1];
  }
  const auto own = coordinates(rank);
  for (const auto axis : moving) rank -= own[axis] * strides[axis];  // now the first of the group
  std::vector<std::int64_t> result(static_cast<std::size_t>(size(name)), rank);
  for (std::size_t i = 0; i < result.size(); ++i) {
    auto place = static_cast<std::int64_t>(i);
    for (auto axis = moving.rbegin(); axis != moving.rend(); ++axis) {
      result[i] += place % shape_[*axis] * strides[*axis];
      place /= shape_[*axis];
    }
  }
  return result;
}

std::int64_t MeshLayout::local_rank(std::string_view name, std::int64_t rank) const {
  const auto own = coordinates(rank);
  std::int64_t result = 0;
  for (const auto axis : axes(name)) result = result * shape_[axis] + own[axis];
  return result;
}

std::vector<std::vector<std::int64_t>> MeshLayout::groups(std::string_view name) const {
  std::vector<std::vector<std::int64_t>> result;
  for (std::int64_t rank = 0; rank < size(); ++rank) {
    if (local_rank(name, rank) == 0) result.push_back(members(name, rank));
  }
  return result;
}

}  // namespace accelerate
