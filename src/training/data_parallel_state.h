// src/training/data_parallel_state.h - what a DataParallel holds.
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

#include "accelerate/data_parallel.h"
#include "accelerate/object_operations.h"
#include "training/gradient_hooks.h"
#include "training/in_place_average.h"

namespace accelerate::detail {

struct Parameters {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;

  [[nodiscard]] std::size_t size() const { return tensors.size(); }
  void add(const std::string& name, const at::Tensor& tensor) {
    names.push_back(name);
    tensors.push_back(tensor);
  }
};

/// How often a gradient comes to each of some tensors, counted when asked for.
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
  /// A hook may outlive this, in a graph.
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
  Parameters parameters;  // those that want a gradient
  Parameters buffers;
  GroupHandle group;
  DistributedDataParallelKwargs options;

  GradientHook hook;
  /// Weights whose gradients are sparse: no bucket holds them, they are averaged by themselves.
  std::vector<at::Tensor> sparse_weights;
  std::vector<std::size_t> sparse;  // the trained ones, in `parameters`
  // One of them, but for the time in which a static graph is learned or where it leaves nothing to
  // do.
  std::unique_ptr<InPlaceAverage> in_place;
  std::shared_ptr<c10d::Reducer> reducer;
  /// The Reducer writes to it, unasked, when the set of unused parameters changes.
  std::shared_ptr<c10d::Logger> reducer_log;
  std::vector<std::size_t> in_reducer;
  /// Parameters that wanted no gradient when the model was prepared, in `all`.
  std::vector<std::size_t> frozen;
  /// Must be reached by every loss whose gradients are averaged.
  std::vector<std::size_t> checked;
  bool averages = false;
  /// Since the last step whose gradients were averaged, where unused parameters are searched for.
  std::unique_ptr<GradientCounts> local;

  // Of a static graph.
  std::unique_ptr<GradientCounts> learning;  // until its first averaged backward has ended
  std::vector<bool> reachable;               // in that backward, through the graph
  std::vector<std::size_t> late;             // averaged when backward has ended
  GradientHook late_hook;
  std::vector<std::size_t> unused;  // by every process: they never get a gradient

  // Of uneven inputs.
  int buffers_from = 0;
  bool shadows = false;
  bool in_one_go = false;  // averaged when backward has ended, not bucket by bucket

  [[nodiscard]] bool searches() const {
    return options.find_unused_parameters && !options.static_graph;
  }
  /// Collective.
  void begin();
  void make_reducer(std::vector<std::size_t> indices);
  void arm(const std::vector<at::Tensor>& outputs);
  [[nodiscard]] bool is_sparse(std::size_t index) const;
  void check_reach(const ReachedLeaves& leaves) const;
  void check_frozen() const;
  void check_unused() const;
  void check_discarded(const ReachedLeaves& leaves) const;
  /// Collective. What the first backward of a static graph has shown.
  void learn();
  /// Collective. Means of the gradients that at least one process has.
  void average_those_there(const std::vector<std::size_t>& indices);
  /// Collective.
  void average_now(const std::vector<std::size_t>& indices, const GradientHook& how);
  /// Collective.
  void average_sparse();
  /// Collective.
  void broadcast_all(int from) const;
};

}  // namespace accelerate::detail
