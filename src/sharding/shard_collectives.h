// src/sharding/shard_collectives.h - the collectives of a sharded model, named and counted.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "accelerate/api.h"

namespace accelerate::detail::sharding {

using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// The processes that train a model.
struct ShardProcesses {
  /// Each of these has another shard; null if there is one only.
  GroupHandle shard = nullptr;
  /// Each of these has the same shard; null if there is one only.
  GroupHandle replicate = nullptr;
  /// All of them, in any number of dimensions; null if there is one only.
  GroupHandle all = nullptr;

  [[nodiscard]] std::int64_t shards() const;
  /// Among those with other shards.
  [[nodiscard]] std::int64_t rank() const;
};

struct CallCount {
  std::int64_t calls = 0;
  /// Of the larger side: what a gather returns, what a reduction takes.
  std::int64_t bytes = 0;

  bool operator==(const CallCount&) const = default;
};

/// What a model has sent since it was prepared, and what it had in memory at most.
struct ShardStats {
  CallCount all_gather = {};
  CallCount reduce_scatter = {};
  CallCount all_reduce = {};
  /// Also scatters.
  CallCount broadcast = {};
  /// Bytes of whole parameters of level 3, gathered or on the way.
  std::int64_t full_bytes = 0;
  std::int64_t peak_full_bytes = 0;
  /// Gathers that no operator used.
  std::int64_t wasted_gathers = 0;
};

/// All functions are collective in one of the groups. `what` is part of the name that processes
/// compare, beside shape and type: units of equal size must not be mistaken for one another.
class ShardCollectives {
 public:
  /// `divide_before` is that of `ShardSpec`.
  ShardCollectives(ShardProcesses groups, c10::Device device, double divide_before = 0);

  [[nodiscard]] const ShardProcesses& groups() const { return groups_; }
  [[nodiscard]] c10::Device device() const { return device_; }
  [[nodiscard]] std::int64_t shards() const { return groups_.shards(); }
  [[nodiscard]] std::int64_t replicas() const {
    return groups_.replicate ? groups_.replicate->getSize() : 1;
  }

  /// Returned before it is complete.
  [[nodiscard]] WorkPtr all_gather(const std::string& what, at::Tensor out, at::Tensor in);
  /// The same, complete.
  void gather_now(const std::string& what, const at::Tensor& out, const at::Tensor& in);
  /// Towards the mean over shards and replicas: `finish_mean` completes it. Changes `in`.
  [[nodiscard]] WorkPtr start_mean(const std::string& what, at::Tensor out, at::Tensor in);
  /// After the work of `start_mean`.
  void finish_mean(const std::string& what, at::Tensor& out);

  /// Over all processes.
  void all_reduce(const std::string& what, at::Tensor& tensor, c10d::ReduceOp::RedOpType reduction);
  /// Over the processes that have other shards.
  void all_reduce_shards(const std::string& what, at::Tensor& tensor,
                         c10d::ReduceOp::RedOpType reduction);
  /// From a rank of `groups().all`.
  void broadcast(const std::string& what, const at::Tensor& tensor, int from);
  /// The shards of `whole`, of the first process, to all processes.
  void scatter_from_first(const std::string& what, const at::Tensor& whole, at::Tensor& shard);
  [[nodiscard]] bool is_first() const { return !groups_.all || groups_.all->getRank() == 0; }

  ShardStats stats = {};

 private:
  void reduce_in(const GroupHandle& group, const std::string& what, at::Tensor& tensor,
                 c10d::ReduceOp::RedOpType reduction);
  /// What gradients of a type are divided by before they are summed; 0 if that comes after it.
  [[nodiscard]] double divided_before(at::ScalarType dtype) const;

  ShardProcesses groups_;
  c10::Device device_;
  double divide_before_;
  // Whether a group takes means by itself.
  bool shards_average_;
  bool replicas_average_;
};

/// What gradients of float16 are divided by before they are summed over `processes`; the rest of
/// the division comes after it. So neither the terms nor the sum leave the range.
[[nodiscard]] ACCELERATE_API std::int64_t division_before(std::int64_t processes);

}  // namespace accelerate::detail::sharding
