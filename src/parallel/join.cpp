#include "parallel/join.h"

#include <algorithm>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/operations/objects.h"
#include "core/text.h"

namespace accelerate::detail::parallel {
namespace {

/// "0 and 2", of a row: the models that it announces.
std::string announced(const std::vector<std::int64_t>& row) {
  std::vector<std::size_t> models;
  for (std::size_t i = 1; i < row.size(); ++i) {
    if (row[i] > 0) models.push_back(i - 1);
  }
  return models.empty() ? "none of them" : str("number ", detail::join(models, " and "));
}

bool same_models(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  return std::ranges::equal(a, b, [](auto x, auto y) { return (x > 0) == (y > 0); });
}

}  // namespace

// A row: whether the process is active, then for each model 0, or 1 + its announcement.

JoinScope::JoinScope(std::vector<Joinable*> models) : models_(std::move(models)) {
  if (models_.empty()) {
    throw ArgumentError("There is no model to join. Name the prepared models.");
  }
  const auto& group = models_[0]->group();
  for (const auto* model : models_) {
    if (model->group() != group) {
      throw ArgumentError(
          "The models to join are spread over different process groups. Join those "
          "of one group.");
    }
  }
  last_active_ = group->getSize() - 1;
}

JoinScope::~JoinScope() {
  for (auto* model : models_) model->end_joined();
}

bool JoinScope::exchange(const Row& own) {
  const auto named = name_collectives("join_uneven_inputs");
  rows_ = accelerate::all_gather_object(own, models_[0]->group());
  int lowest = -1;
  for (std::size_t rank = 0; rank < rows_.size(); ++rank) {
    if (rows_[rank][0] == 0) continue;
    if (lowest < 0) lowest = static_cast<int>(rank);
    last_active_ = static_cast<int>(rank);
    const auto& first = rows_[static_cast<std::size_t>(lowest)];
    if (same_models(first, rows_[rank])) continue;
    throw CommError(
        str("Processes average gradients of different models at the same time: of the joined "
            "models rank ",
            lowest, " announces ", announced(first), ", rank ", rank, " announces ",
            announced(rows_[rank]), ". Call backward for the same models in the same order."),
        static_cast<int>(rank));
  }
  if (lowest < 0) return false;
  const auto& first = rows_[static_cast<std::size_t>(lowest)];
  const auto count = std::ranges::count_if(first.begin() + 1, first.end(),
                                           [](std::int64_t entry) { return entry > 0; });
  for (std::size_t i = 0; i < models_.size(); ++i) {
    if (first[i + 1] == 0) continue;
    models_[i]->begin_joined({.source = lowest, .several_models = count > 1});
  }
  return true;
}

void JoinScope::announce(std::span<Joinable* const> reached, const ReachedLeaves& leaves) {
  Row own(models_.size() + 1, 0);
  own[0] = 1;
  bool any = false;
  for (std::size_t i = 0; i < models_.size(); ++i) {
    if (std::ranges::find(reached, models_[i]) == reached.end()) continue;
    own[i + 1] = 1 + models_[i]->announcement(leaves);
    any = true;
  }
  if (any) exchange(own);
}

void JoinScope::finish() {
  const Row none(models_.size() + 1, 0);
  while (exchange(none)) {
    const auto active = std::ranges::find_if(rows_, [](const Row& row) { return row[0] != 0; });
    const Row row = *active;
    for (std::size_t i = 0; i < models_.size(); ++i) {
      if (row[i + 1] > 0) models_[i]->shadow(row[i + 1] - 1);
    }
  }
  const auto named = name_collectives("join_uneven_inputs");
  for (auto* model : models_) {
    model->broadcast_from(last_active_);
    model->end_joined();
  }
}

}  // namespace accelerate::detail::parallel
