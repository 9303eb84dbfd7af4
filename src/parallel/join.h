// src/parallel/join.h - processes that run out of data before others do.
//
// The work of `join_uneven_inputs`. While a scope lives, a process that begins a backward in which
// gradients are synchronized announces it. A process without data answers with zeros:
//
//     JoinScope scope({&model});
//     while (has_data) {
//       scope.announce({&reached, 1}, leaves);   // then before_backward, backward, after_backward
//     }
//     scope.finish();
//
// Means are over all processes, also those that have finished: a gradient g of the only active one
// of two counts as g / 2, as in Python.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "accelerate/api.h"
#include "parallel/engine.h"

namespace accelerate::detail::parallel {

class ACCELERATE_API JoinScope {
 public:
  /// All processes list the same models in the same order; they must outlive the scope. Throws
  /// `ArgumentError` for an empty list, and for models of different process groups.
  explicit JoinScope(std::vector<Joinable*> models);
  /// Does not communicate: after an error the others must learn of it in another way.
  ~JoinScope();
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  /// Collective. Called before `before_backward` of the models that a loss reaches, for backward
  /// passes that synchronize gradients only. Several models call `after_backward` in the order of
  /// the scope. Models that are not of the scope are ignored. Throws `CommError`, on all processes,
  /// if active processes announce different models.
  void announce(std::span<Joinable* const> reached, const ReachedLeaves& leaves);

  /// Collective. Answers the announcements of others until all have come here, then gives all
  /// processes the parameters and buffers of the last to finish (of several the highest rank).
  void finish();

 private:
  using Row = std::vector<std::int64_t>;

  /// Collective. Exchanges one row per process. Returns true if a process is active.
  bool exchange(const Row& own);

  std::vector<Joinable*> models_;
  std::vector<Row> rows_;
  int last_active_;
};

}  // namespace accelerate::detail::parallel
