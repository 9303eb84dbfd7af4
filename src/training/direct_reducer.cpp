#include "training/direct_reducer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

// From here on a message of its own costs less than two copies.
constexpr std::int64_t kLargeBytes = 64 << 10;

bool is_large(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes()) >= kLargeBytes;
}

}  // namespace

bool DirectReducer::suits(const std::vector<at::Tensor>& parameters,
                          const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const bool all_here = std::ranges::all_of(parameters, [&](const at::Tensor& one) {
    return one.is_cpu() && one.layout() == at::kStrided && at::isFloatingType(one.scalar_type()) &&
           one.scalar_type() == parameters[0].scalar_type();
  });
  if (!all_here) return false;
  const auto name = group->getBackend(at::kCPU)->getBackendName();
  return name == "shm" || name == "two_level";
}

DirectReducer::DirectReducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                             c10::intrusive_ptr<c10d::ProcessGroup> group, std::int64_t first_bytes,
                             std::int64_t cap_bytes)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      group_(std::move(group)),
      bucket_of_(parameters_.size()),
      is_there_(parameters_.size()) {
  // Gradients come from the last layer to the first.
  std::int64_t bytes = 0;
  std::vector<std::int64_t> together;
  for (std::size_t i = parameters_.size(); i-- > 0;) {
    const std::int64_t limit = buckets_.size() <= 1 ? first_bytes : cap_bytes;
    if (buckets_.empty() || bytes >= limit) {
      buckets_.emplace_back();
      together.push_back(0);
      bytes = 0;
    }
    auto& bucket = buckets_.back();
    const bool large = is_large(parameters_[i]);
    (large ? bucket.large : bucket.small).push_back(i);
    if (!large) together.back() += parameters_[i].numel();
    bucket_of_[i] = buckets_.size() - 1;
    bytes += static_cast<std::int64_t>(parameters_[i].nbytes());
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (together[b] > 0) buckets_[b].together = at::empty({together[b]}, parameters_[0].options());
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto node = torch::autograd::impl::grad_accumulator(parameters_[i]);
    const auto tell = [this, i](const torch::autograd::variable_list& outputs,
                                const torch::autograd::variable_list& inputs) {
      arrived(i, inputs[0]);
      return outputs;
    };
    const auto key =
        node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(tell));
    hooks_.emplace_back(std::move(node), key);
  }
}

DirectReducer::~DirectReducer() {
  for (const auto& [node, key] : hooks_) node->del_post_hook(key);
}

void DirectReducer::arm() {
  const std::lock_guard lock(mutex_);
  armed_ = true;
  next_ = 0;
  is_there_.assign(is_there_.size(), false);
  for (auto& bucket : buckets_) {
    bucket.missing = bucket.small.size() + bucket.large.size();
    bucket.sent.clear();
    bucket.work = nullptr;
  }
}

void DirectReducer::arrived(std::size_t index, const at::Tensor& incoming) {
  const std::lock_guard lock(mutex_);
  if (!armed_) return;
  if (is_there_[index]) {
    throw ArgumentError(
        str("backward: a gradient of ", names_[index],
            " came twice in one backward, after it was sent to be averaged. Where a part of the "
            "model is computed again in backward set static_graph of "
            "DistributedDataParallelKwargs."));
  }
  is_there_[index] = true;
  --buckets_[bucket_of_[index]].missing;
  incoming_ = incoming;
  for (; next_ < buckets_.size() && buckets_[next_].missing == 0; ++next_) send(buckets_[next_]);
  incoming_ = at::Tensor();
}

bool DirectReducer::is_ours_alone(std::size_t index) const {
  const auto& gradient = parameters_[index].grad();
  if (gradient.requires_grad()) return false;  // a graph goes through it
  // Autograd may hand one piece of memory to several nodes, some of which have yet to read it.
  const bool is_incoming = incoming_.defined() && incoming_.is_alias_of(gradient);
  return gradient.storage().use_count() == (is_incoming ? 2 : 1);
}

template <class F>
void DirectReducer::for_each_small(const Bucket& bucket, F&& f) {
  std::int64_t begin = 0;
  for (const auto i : bucket.small) {
    const auto& gradient = parameters_[i].grad();
    const auto length = parameters_[i].numel();
    f(gradient, bucket.together.narrow(0, begin, length).view(gradient.sizes()));
    begin += length;
  }
}

void DirectReducer::send(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  if (bucket.together.defined()) {
    for_each_small(
        bucket, [](const at::Tensor& gradient, const at::Tensor& part) { part.copy_(gradient); });
    bucket.sent.push_back(bucket.together);
  }
  for (const auto i : bucket.large) {
    const auto& gradient = parameters_[i].grad();
    bucket.sent.push_back(is_ours_alone(i) ? gradient : gradient.detach().clone());
  }
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  options.asyncOp = true;
  bucket.work = group_->allreduce_coalesced(bucket.sent, options);
}

void DirectReducer::finish() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(armed_, false)) return;
  if (next_ < buckets_.size()) {
    const auto missed = std::ranges::find(is_there_, false) - is_there_.begin();
    throw ArgumentError(str("backward: no gradient came to ",
                            names_[static_cast<std::size_t>(missed)],
                            ", for which the other processes wait. Set find_unused_parameters of "
                            "DistributedDataParallelKwargs."));
  }
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    bucket.work->wait();
    if (bucket.together.defined()) {
      for_each_small(
          bucket, [](const at::Tensor& gradient, const at::Tensor& part) { gradient.copy_(part); });
    }
    const std::size_t first = bucket.together.defined() ? 1 : 0;
    for (std::size_t l = 0; l < bucket.large.size(); ++l) {
      const auto& gradient = parameters_[bucket.large[l]].grad();
      if (!gradient.is_same(bucket.sent[first + l])) gradient.copy_(bucket.sent[first + l]);
    }
    bucket.sent.clear();
    bucket.work = nullptr;
  }
}

}  // namespace accelerate::detail
