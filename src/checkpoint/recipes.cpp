#include "checkpoint/recipes.h"

#include <ATen/ATen.h>

#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::checkpoint {
namespace {

using formats::TensorRecipe;
using Shape = std::vector<std::int64_t>;

std::size_t dimension(std::int64_t dim, const Shape& shape, const char* what) {
  const auto rank = static_cast<std::int64_t>(shape.size());
  if (dim < -rank || dim >= rank) {
    throw ConfigError(str("The key mapping has a ", what, " along dimension ", dim,
                          ", and the tensor has the shape [", join(shape), "]."));
  }
  return static_cast<std::size_t>(dim < 0 ? dim + rank : dim);
}

/// Where a part begins and how long it is.
std::pair<std::int64_t, std::int64_t> extent(const TensorRecipe::Part& part, std::int64_t whole) {
  if (part.sizes.empty()) {
    const auto count = static_cast<std::int64_t>(part.count);
    if (whole % count != 0) {
      throw ConfigError(str("The key mapping splits a dimension of ", whole, " into ", count,
                            " equal parts, which is not possible. Give the sizes of the parts."));
    }
    return {whole / count * static_cast<std::int64_t>(part.index), whole / count};
  }
  std::int64_t begin = 0;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < part.sizes.size(); ++i) {
    if (part.sizes[i] > whole - total) total = whole + 1;  // too much, without overflow
    if (total > whole) break;
    if (i < part.index) begin += part.sizes[i];
    total += part.sizes[i];
  }
  if (total != whole) {
    throw ConfigError(str("The key mapping splits a dimension of ", whole, " into parts of ",
                          join(part.sizes), ", which are not the whole of it."));
  }
  return {begin, part.sizes[part.index]};
}

Shape joined(const std::vector<Shape>& parts, std::int64_t along) {
  const auto dim = dimension(along, parts.front(), "join");
  Shape whole = parts.front();
  for (std::size_t i = 1; i < parts.size(); ++i) {
    Shape expected = whole;
    if (parts[i].size() == whole.size()) expected[dim] = parts[i][dim];
    if (parts[i] != expected) {
      throw ConfigError(str("The key mapping joins tensors of the shapes [", join(parts.front()),
                            "] and [", join(parts[i]), "] along dimension ", along,
                            ", which do not fit together."));
    }
    whole[dim] += parts[i][dim];
  }
  return whole;
}

}  // namespace

TensorSources::TensorSources(const std::vector<CheckpointFile>& files) {
  for (const auto& file : files) {
    for (auto& name : file.names()) {
      if (files_.insert_or_assign(name, &file).second) names_.push_back(std::move(name));
    }
  }
}

const CheckpointFile& TensorSources::file_of(const std::string& name) const {
  return *files_.at(name);
}

Shape TensorSources::shape_of(const TensorRecipe& recipe) const {
  if (const auto* file = std::get_if<TensorRecipe::FromFile>(&recipe.step)) {
    return file_of(file->key).shape(file->key);
  }
  if (const auto* swap = std::get_if<TensorRecipe::Transpose>(&recipe.step)) {
    auto shape = shape_of(*swap->of);
    const auto first = dimension(swap->dim0, shape, "transpose");
    std::swap(shape[first], shape[dimension(swap->dim1, shape, "transpose")]);
    return shape;
  }
  if (const auto* part = std::get_if<TensorRecipe::Part>(&recipe.step)) {
    auto shape = shape_of(*part->of);
    auto& length = shape[dimension(part->dim, shape, "split")];
    length = extent(*part, length).second;
    return shape;
  }
  const auto& join = std::get<TensorRecipe::Join>(recipe.step);
  std::vector<Shape> parts;
  for (const auto& one : join.of) parts.push_back(shape_of(*one));
  return joined(parts, join.dim);
}

at::Tensor TensorSources::make(const TensorRecipe& recipe) const {
  if (const auto* file = std::get_if<TensorRecipe::FromFile>(&recipe.step)) {
    return file_of(file->key).get(file->key);
  }
  if (const auto* swap = std::get_if<TensorRecipe::Transpose>(&recipe.step)) {
    return make(*swap->of).transpose(swap->dim0, swap->dim1);
  }
  if (const auto* part = std::get_if<TensorRecipe::Part>(&recipe.step)) {
    const auto whole = make(*part->of);
    const auto [begin, length] = extent(*part, whole.size(part->dim));
    return whole.narrow(part->dim, begin, length);
  }
  const auto& join = std::get<TensorRecipe::Join>(recipe.step);
  std::vector<at::Tensor> parts;
  for (const auto& one : join.of) parts.push_back(make(*one));
  return at::cat(parts, join.dim);
}

void TensorSources::make_into(const Destinations& destinations,
                              const std::function<void(std::int64_t bytes)>& done) const {
  std::unordered_map<const CheckpointFile*, CheckpointFile::Destinations> together;
  std::unordered_set<const c10::StorageImpl*> storages;
  Destinations later;
  for (const auto& [recipe, destination] : destinations) {
    const auto* file = std::get_if<TensorRecipe::FromFile>(&recipe->step);
    const bool is_first = storages.insert(destination.storage().unsafeGetStorageImpl()).second;
    if (file != nullptr && is_first) {
      together[&file_of(file->key)].emplace_back(file->key, destination);
    } else {
      later.emplace_back(recipe, destination);
    }
  }
  for (const auto& [file, tensors] : together) file->read_into(tensors, done);
  for (const auto& [recipe, destination] : later) {
    destination.copy_(make(*recipe));
    done(static_cast<std::int64_t>(destination.nbytes()));
  }
}

}  // namespace accelerate::detail::checkpoint
