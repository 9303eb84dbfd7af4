// tests/sharding/sharded_run.h - a training run, by data parallelism or sharded in any way.
#pragma once

#include <accelerate/accelerate.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "sharding/sharded_engine.h"
#include "sharding/sharded_nets.h"
#include "sharding/spec.h"

namespace accelerate::test {

using detail::sharding::OffloadTarget;
using detail::sharding::ShardedEngine;
using detail::sharding::ShardLevel;
using detail::sharding::ShardSpec;

enum class Step { kSgd, kMomentum, kAdamW, kTorchAdamW };

struct RunOptions {
  /// Unset: data parallelism.
  std::optional<ShardSpec> spec = std::nullopt;
  Step step = Step::kAdamW;
  int steps = 4;
  /// Batches per step; all but the last under `no_sync`.
  int batches = 1;
  std::int64_t width = 64;
  double max_norm = 0;
  bool find_unused = false;
  /// Called before each step with its number.
  std::function<void(TinyGpt&, int step)> before_step = {};
  /// Called with the module before it is prepared.
  std::function<void(TinyGpt&)> change_net = {};
};

/// What training came to, on this process.
struct Result {
  std::vector<double> losses;
  std::vector<torch::Tensor> parameters;  // whole
  /// Of the optimizer, whole; on the first process.
  std::vector<std::vector<torch::Tensor>> states;
  detail::sharding::ShardStats stats;
};

/// The blocks as units.
[[nodiscard]] ShardSpec sharded(ShardLevel level, std::int64_t prefetch = 1);

/// A sharded model with its accelerator, for tests that look into the engine.
struct ShardedRun {
  explicit ShardedRun(const RunOptions& options);
  /// Forward and backward of one batch of this process.
  double train(int step, int batch, bool synchronizes);
  void take_step();
  [[nodiscard]] std::vector<torch::Tensor> whole_parameters();

  RunOptions options;
  Accelerator accelerator;
  TinyGpt net;
  PreparedModel<TinyGpt> model;
  AcceleratedOptimizer optimizer;
  /// Null for data parallelism.
  std::shared_ptr<ShardedEngine> engine = nullptr;
};

/// A prepared model that is sharded in a given way; by data parallelism if `shards` is false.
template <class Holder>
struct Sharded {
  Sharded(Holder made, const ShardSpec& spec, bool shards = true) : net(std::move(made)) {
    if (!shards) {
      model = accelerator.prepare_model(net);
      return;
    }
    model = accelerator.prepare_model(net, {.device_placement = false, .evaluation_mode = true});
    const auto group = accelerator.state().process_group();
    engine = std::make_shared<ShardedEngine>(
        *net, spec, detail::sharding::ShardProcesses{.shard = group, .all = group},
        accelerator.device());
    model._core()->use(engine);
  }
  Accelerator accelerator{anew()};
  Holder net;
  PreparedModel<Holder> model;
  std::shared_ptr<ShardedEngine> engine = nullptr;
};

[[nodiscard]] Result run(const RunOptions& options);

/// All bits are the same.
void expect_equal(const Result& result, const Result& wanted, const std::string& what);

}  // namespace accelerate::test
