#include "sharding/shard_collectives.h"

#include <ATen/ATen.h>

#include <chrono>
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

bool averages(const GroupHandle& group, c10::Device device) {
  if (!group) return true;
  const auto name = group->getBackend(device.type())->getBackendName();
  return name == "shm" || name == "two_level" || name == "nccl";
}

/// What a process does alone is complete when it returns.
class CompletedWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  [[nodiscard]] bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

/// For one process, whose part is the whole.
WorkPtr copy_alone(const at::Tensor& out, const at::Tensor& in) {
  if (!out.is_alias_of(in)) out.copy_(in, /*non_blocking=*/true);
  return c10::make_intrusive<CompletedWork>();
}

}  // namespace

std::int64_t ShardProcesses::shards() const { return shard ? shard->getSize() : 1; }
std::int64_t ShardProcesses::rank() const { return shard ? shard->getRank() : 0; }

std::int64_t division_before(std::int64_t processes) {
  std::int64_t before = 1;
  while (processes % before == 0 && processes / before > before) before *= 2;
  return before;
}

ShardCollectives::ShardCollectives(ShardProcesses groups, c10::Device device, double divide_before)
    : groups_(std::move(groups)),
      device_(device),
      divide_before_(divide_before),
      shards_average_(averages(groups_.shard, device)),
      replicas_average_(averages(groups_.replicate, device)) {}

double ShardCollectives::divided_before(at::ScalarType dtype) const {
  if (divide_before_ > 0) return divide_before_;
  return dtype == at::kHalf ? static_cast<double>(division_before(shards() * replicas())) : 0;
}

WorkPtr ShardCollectives::all_gather(const std::string& what, at::Tensor out, at::Tensor in) {
  if (!groups_.shard) return copy_alone(out, in);
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
  const auto before = divided_before(in.scalar_type());
  if (before > 0) in.div_(before);
  if (!groups_.shard) return copy_alone(out, in);
  const NamedCollectives named("reduce " + what);
  const NamedInBackward in_backward;
  count(stats.reduce_scatter, in);
  c10d::ReduceScatterOptions options;
  if (before == 0 && shards_average_) options.reduceOp = c10d::ReduceOp::AVG;
  return groups_.shard->_reduce_scatter_base(out, in, options);
}

void ShardCollectives::finish_mean(const std::string& what, at::Tensor& out) {
  const auto before = divided_before(out.scalar_type());
  const bool split = before > 0;
  if (groups_.replicate) {
    const bool mean = !split && replicas_average_;
    reduce_in(groups_.replicate, "reduce replicas of " + what, out,
              mean ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
    if (!split && !mean) out.div_(replicas());
  }
  if (split) {
    out.div_(static_cast<double>(shards() * replicas()) / before);
  } else if (!shards_average_) {
    out.div_(shards());
  }
}

void ShardCollectives::reduce_in(const GroupHandle& group, const std::string& what,
                                 at::Tensor& tensor, c10d::ReduceOp::RedOpType reduction) {
  if (!group) return;
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
  if (!groups_.all) return;
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
  if (!groups_.shard) {
    if (is_first()) shard.copy_(whole);
  } else if (!groups_.replicate || groups_.replicate->getRank() == 0) {
    const bool sends = groups_.rank() == 0;
    std::vector<at::Tensor> outputs{shard};
    std::vector<std::vector<at::Tensor>> inputs;
    if (sends) inputs.push_back(whole.chunk(shards()));
    count(stats.broadcast, sends ? whole : shard);
    groups_.shard->scatter(outputs, inputs, c10d::ScatterOptions())->wait();
  }
  if (!groups_.replicate) return;
  std::vector<at::Tensor> tensors{shard};
  count(stats.broadcast, shard);
  groups_.replicate->broadcast(tensors, c10d::BroadcastOptions())->wait();
}

}  // namespace accelerate::detail::sharding
