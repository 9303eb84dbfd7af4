#include "sharding/shard_collectives.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "accelerate/logging/name_collectives.h"
#include "comm/peers.h"
#include "core/call_site.h"

namespace accelerate::detail::sharding {
namespace {

void count(CallCount& of, const at::Tensor& larger) {
  ++of.calls;
  of.bytes += static_cast<std::int64_t>(larger.nbytes());
}

bool averages(c10d::ProcessGroup& group, c10::Device device) {
  const auto name = group.getBackend(device.type())->getBackendName();
  return name == "shm" || name == "two_level" || name == "nccl";
}

}  // namespace

std::int64_t division_before(std::int64_t processes) {
  std::int64_t before = 1;
  while (processes % before == 0 && processes / before > before) before *= 2;
  return before;
}

ShardCollectives::ShardCollectives(ShardProcesses groups, c10::Device device)
    : groups_(std::move(groups)),
      device_(device),
      shards_average_(averages(*groups_.shard, device)),
      replicas_average_(groups_.replicate && averages(*groups_.replicate, device)) {}

WorkPtr ShardCollectives::all_gather(const std::string& what, at::Tensor out, at::Tensor in) {
  const NamedCollectives named("gather " + what);
  const NamedInBackward in_backward;
  count(stats.all_gather, out);
  return comm::all_gather_into(*groups_.shard, out, in, c10d::AllgatherOptions());
}

void ShardCollectives::gather_now(const std::string& what, const at::Tensor& out,
                                  const at::Tensor& in) {
  all_gather(what, out, in)->wait();
}

WorkPtr ShardCollectives::start_mean(const std::string& what, at::Tensor out, at::Tensor in) {
  const NamedCollectives named("reduce " + what);
  const NamedInBackward in_backward;
  count(stats.reduce_scatter, in);
  c10d::ReduceScatterOptions options;
  if (in.scalar_type() == at::kHalf) {
    in.div_(division_before(shards() * replicas()));
  } else if (shards_average_) {
    options.reduceOp = c10d::ReduceOp::AVG;
  }
  return groups_.shard->_reduce_scatter_base(out, in, options);
}

void ShardCollectives::finish_mean(const std::string& what, at::Tensor& out) {
  const bool split = out.scalar_type() == at::kHalf;
  const auto processes = shards() * replicas();
  if (groups_.replicate) {
    const bool mean = !split && replicas_average_;
    reduce_in(groups_.replicate, "reduce replicas of " + what, out,
              mean ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
    if (!split && !mean) out.div_(replicas());
  }
  if (split) {
    out.div_(static_cast<double>(processes) / static_cast<double>(division_before(processes)));
  } else if (!shards_average_) {
    out.div_(shards());
  }
}

void ShardCollectives::reduce_in(const GroupHandle& group, const std::string& what,
                                 at::Tensor& tensor, c10d::ReduceOp::RedOpType reduction) {
  const NamedCollectives named(what);
  const NamedInBackward in_backward;
  count(stats.all_reduce, tensor);
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction;
  group->allreduce(tensors, options)->wait();
}

void ShardCollectives::all_reduce(const std::string& what, at::Tensor& tensor,
                                  c10d::ReduceOp::RedOpType reduction) {
  reduce_in(groups_.all, what, tensor, reduction);
}

void ShardCollectives::all_reduce_shards(const std::string& what, at::Tensor& tensor,
                                         c10d::ReduceOp::RedOpType reduction) {
  reduce_in(groups_.shard, what, tensor, reduction);
}

void ShardCollectives::broadcast(const std::string& what, const at::Tensor& tensor, int from) {
  const NamedCollectives named(what);
  count(stats.broadcast, tensor);
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  groups_.all->broadcast(tensors, options)->wait();
}

void ShardCollectives::scatter_from_first(const std::string& what, const at::Tensor& whole,
                                          at::Tensor& shard) {
  const NamedCollectives named("prepare " + what);
  if (!groups_.replicate || groups_.replicate->getRank() == 0) {
    std::vector<at::Tensor> outputs{shard};
    std::vector<std::vector<at::Tensor>> inputs;
    if (rank() == 0) inputs.push_back(whole.chunk(shards()));
    count(stats.broadcast, rank() == 0 ? whole : shard);
    groups_.shard->scatter(outputs, inputs, c10d::ScatterOptions())->wait();
  }
  if (!groups_.replicate) return;
  std::vector<at::Tensor> tensors{shard};
  count(stats.broadcast, shard);
  groups_.replicate->broadcast(tensors, c10d::BroadcastOptions())->wait();
}

}  // namespace accelerate::detail::sharding
