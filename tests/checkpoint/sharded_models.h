// tests/checkpoint/sharded_models.h - a model and an optimizer of which each process holds a part.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/state.h"
#include "checkpoint/sharded_state.h"

namespace accelerate::test {

using detail::checkpoint::LocalShard;
using detail::checkpoint::ShardedModel;

struct ShardedTensor {
  std::string name;
  std::vector<std::int64_t> sizes;
  torch::ScalarType dtype = torch::kFloat;
};

/// Sizes that no number of processes divides, and the odd ones.
inline const std::vector<ShardedTensor> kShardedTensors = {{"first.weight", {5, 3}},
                                                           {"first.bias", {7}, torch::kDouble},
                                                           {"deep", {2, 3, 4}, torch::kBFloat16},
                                                           {"scalar", {}},
                                                           {"empty", {0, 2}},
                                                           {"one", {1, 1}, torch::kHalf},
                                                           {"wide", {3, 70}, torch::kLong},
                                                           {"flags", {9}, torch::kBool}};

/// What element i of a tensor is: no two tensors of a test look alike.
inline torch::Tensor expected_values(const ShardedTensor& tensor, std::int64_t begin,
                                     std::int64_t end, double base) {
  const auto salt = static_cast<double>(tensor.name.size());
  auto values = torch::arange(begin, end, torch::kDouble) + base + salt;
  if (tensor.dtype == torch::kBool) values = values.remainder(2);
  return values.to(tensor.dtype);
}

/// Each process holds one part of each tensor. `skew` moves the borders.
class FlatModel : public ShardedModel {
 public:
  explicit FlatModel(double base, std::int64_t skew = 0,
                     std::vector<ShardedTensor> tensors = kShardedTensors)
      : tensors_(std::move(tensors)), skew_(skew) {
    const PartialState state;
    rank_ = state.process_index();
    world_ = state.num_processes();
    for (const auto& tensor : tensors_) {
      const auto count = torch::numel(torch::empty(tensor.sizes, torch::kMeta));
      const auto border = [&](std::int64_t at) {
        return at == 0        ? 0
               : at >= world_ ? count
                              : std::min<std::int64_t>(count, count * at / world_ + skew_);
      };
      LocalShard shard{.name = tensor.name,
                       .sizes = tensor.sizes,
                       .dtype = tensor.dtype,
                       .begin = border(rank_),
                       .end = border(rank_ + 1)};
      shard.values = expected_values(tensor, shard.begin, shard.end, base);
      shards.push_back(std::move(shard));
    }
    buffers.insert("mean", torch::full({3}, base));
    buffers.insert("count", torch::tensor(static_cast<std::int64_t>(base)));
  }

  std::vector<LocalShard> local_shards() override { return shards; }
  StateDict whole_tensors() override { return buffers; }
  void loaded() override { ++loads; }
  std::vector<std::string> names_in(const torch::optim::Optimizer&) override { return names(); }
  StateDictType state_dict_type() const override { return type; }

  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& tensor : tensors_) names.push_back(tensor.name);
    return names;
  }
  /// Whether this process has exactly the values of `FlatModel(base)`.
  [[nodiscard]] bool has_values(double base) const {
    const FlatModel other(base, skew_, tensors_);
    for (std::size_t i = 0; i < shards.size(); ++i) {
      if (!torch::equal(shards[i].values, other.shards[i].values)) return false;
    }
    for (const auto& entry : buffers) {
      if (!torch::equal(entry.value(), other.buffers[entry.key()])) return false;
    }
    return true;
  }

  std::vector<LocalShard> shards;
  StateDict buffers{"Tensor"};
  int loads = 0;
  StateDictType type = StateDictType::kShardedStateDict;

 private:
  std::vector<ShardedTensor> tensors_;
  std::int64_t skew_;
  std::int64_t rank_ = 0;
  std::int64_t world_ = 1;
};

/// What an optimizer on the shards of a model has, by number.
class FlatOptimizer : public Stateful {
 public:
  FlatOptimizer(const FlatModel& model, double base) {
    Value::Dict states;
    Value::List ids;
    for (std::size_t i = 0; i < model.shards.size(); ++i) {
      ids.emplace_back(i);
      const auto& shard = model.shards[i];
      states.set(i, Value::Dict{{"step", torch::tensor(static_cast<float>(base))},
                                {"exp_avg", shard.values.to(torch::kFloat) * 2},
                                {"skipped", Value(false)}});
    }
    state =
        Value::Dict{{"state", std::move(states)},
                    {"param_groups", Value::List{Value::Dict{{"lr", base},
                                                             {"betas", Value::tuple({0.9, 0.999})},
                                                             {"fused", nullptr},
                                                             {"params", std::move(ids)}}}}};
  }
  [[nodiscard]] Value state_dict() override { return state; }
  void load_state_dict(const Value& loaded) override { state = loaded; }

  Value state;
};

inline std::shared_ptr<detail::checkpoint::ShardedState> optimizer_state(
    const std::shared_ptr<FlatModel>& model, const std::shared_ptr<FlatOptimizer>& optimizer) {
  return detail::checkpoint::sharded_optimizer_state(model, optimizer, model->names());
}

}  // namespace accelerate::test
