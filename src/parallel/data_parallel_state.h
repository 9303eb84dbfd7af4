// src/parallel/data_parallel_state.h - the state of a DataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "accelerate/operations/objects.h"
#include "modeling/stand_in.h"
#include "parallel/data_parallel.h"
#include "parallel/drift_watch.h"
#include "parallel/gradient_hooks.h"
#include "parallel/in_place_average.h"

namespace accelerate::detail::parallel {

/// Counts, between `start` and `stop`, how many gradients each of some tensors gets.
class GradientCounts {
 public:
  explicit GradientCounts(const std::vector<at::Tensor>& tensors);
  ~GradientCounts();
  GradientCounts(const GradientCounts&) = delete;
  GradientCounts& operator=(const GradientCounts&) = delete;

  void start();
  void stop() { shared_->counting = false; }
  [[nodiscard]] int of(std::size_t index) const { return shared_->counts[index]; }

 private:
  /// Shared with the hooks: a graph may keep a hook longer than this object lives.
  struct Shared {
    explicit Shared(std::size_t size) : counts(size) {}
    std::atomic<bool> counting = false;
    std::vector<std::atomic<int>> counts;
  };
  std::shared_ptr<Shared> shared_;
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;
};

struct DataParallel::State {
  Parameters all;         // of the module, frozen ones too
  Parameters parameters;  // those that require a gradient
  AddressSet addresses;   // of `parameters`
  Parameters buffers;
  /// Packed weights with a value: their large tensors are in `all`.
  std::vector<modeling::NamedStandIn> packed;
  comm::GroupHandle group;
  DistributedDataParallelKwargs options;
  std::int64_t drift_check = 0;

  /// Null if parameters are not compared.
  std::unique_ptr<DriftWatch> drift;
  GradientHook hook;
  /// Weights with sparse gradients. A bucket cannot hold these: they are averaged separately.
  std::vector<at::Tensor> sparse_weights;
  std::vector<std::size_t> sparse;  // the trained ones, in `parameters`
  // Exactly one of them exists; none while a static graph is learned, and none if it has no dense
  // gradient to average.
  std::unique_ptr<InPlaceAverage> in_place;
  std::shared_ptr<c10d::Reducer> reducer;
  /// The Reducer needs it: it logs when the set of unused parameters changes.
  std::shared_ptr<c10d::Logger> reducer_log;
  std::vector<std::size_t> in_reducer;
  /// Indices in `all` of parameters that required no gradient when the model was prepared.
  std::vector<std::size_t> frozen;
  /// Indices of parameters that every averaged loss must reach.
  std::vector<std::size_t> checked;
  bool averages = false;
  /// Gradients since the last averaged step; null unless unused parameters are searched for.
  std::unique_ptr<GradientCounts> local;

  // For a static graph.
  std::unique_ptr<GradientCounts> learning;  // until its first averaged backward has ended
  std::vector<bool> reachable;               // in that backward, through the graph
  std::vector<std::size_t> late;             // averaged when backward has ended
  GradientHook late_hook;
  std::vector<std::size_t> unused;  // by every process: they never get a gradient

  // For uneven inputs.
  int buffers_from = 0;
  bool shadows = false;
  bool in_one_go = false;  // averaged when backward has ended, not bucket by bucket

  [[nodiscard]] bool searches() const {
    return options.find_unused_parameters && !options.static_graph;
  }
  /// The index of the first parameter that is reached, or the number of parameters.
  [[nodiscard]] std::size_t first_reached(const ReachedLeaves& leaves) const;
  /// Collective.
  void begin();
  void make_reducer(std::vector<std::size_t> indices);
  void arm(const std::vector<at::Tensor>& outputs);
  [[nodiscard]] bool is_sparse(std::size_t index) const;
  void check_reach(const ReachedLeaves& leaves) const;
  void check_frozen() const;
  void check_unused() const;
  void check_discarded(const ReachedLeaves& leaves) const;
  /// Collective. Evaluates the first backward of a static graph.
  void learn();
  /// Collective. Averages the gradients that at least one process has.
  void average_those_there(const std::vector<std::size_t>& indices);
  /// Collective. Averages gradients at once; a missing one counts as zeros.
  void average_now(const std::vector<std::size_t>& indices, const GradientHook& how);
  /// Collective.
  void average_sparse();
  /// Collective.
  void broadcast_all(int from) const;
  /// Collective. What belongs to packed weights beside their large tensors.
  void broadcast_packed(int from) const;
};

}  // namespace accelerate::detail::parallel
