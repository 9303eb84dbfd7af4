// Sum, mean and maximum over processes.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "accelerate/errors.h"
#include "accelerate/value/to_value.h"
#include "comm/peers.h"
#include "core/log.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

/// Up to this many bytes in all, one all-gather and a local sum beat an all-reduce, and one message
/// serves all dtypes.
constexpr std::int64_t kSmallBytes = 256 * 1024;

void check_reducible(const at::Tensor& leaf, std::size_t index, const TreeView& view,
                     Reduction reduction) {
  const auto dtype = leaf.scalar_type();
  const auto refuse = [&](const char* remedy) {
    const auto place = leaf_place(view, index);
    throw ArgumentError(str("reduce: the ", to_string(reduction), " of ", dtype_name(dtype),
                            " is not defined", place.empty() ? "" : str(" (the tensor", place, ")"),
                            ". ", remedy));
  };
  if (c10::isFloat8Type(dtype)) refuse("Convert it to bfloat16 or float first.");
  if (c10::isComplexType(dtype)) {
    if (reduction == Reduction::kMax) refuse("Complex numbers have no order.");
    return;
  }
  if (reduction == Reduction::kMean && !c10::isFloatingType(dtype)) {
    refuse("Convert it to float first, or take the sum.");
  }
}

/// The dtype in which the elements of a tensor are combined. Backends lack the short and the
/// unsigned ones; sums in a wider type, cut off again, are the same.
at::ScalarType work_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return at::kByte;
    case at::kShort:
    case at::kUInt16:
      return at::kInt;
    case at::kUInt32:
    case at::kUInt64:
      return at::kLong;
    default:
      return c10::isComplexType(dtype) ? c10::toRealValueType(dtype) : dtype;
  }
}

constexpr auto kSignBit = std::numeric_limits<std::int64_t>::min();

/// A contiguous tensor of the work dtype with the same content. May share memory with the leaf.
at::Tensor to_work(const at::Tensor& leaf, bool maximum) {
  const auto dtype = leaf.scalar_type();
  const auto elements = dense(leaf);
  if (c10::isComplexType(dtype)) return at::view_as_real(elements).view({-1});
  if (dtype == at::kUInt64) {
    // As signed numbers of the same bits; for the maximum, shifted so that the order is kept.
    const auto bits = elements.view({-1}).view(at::kLong);
    return maximum ? bits.bitwise_xor(kSignBit) : bits;
  }
  return elements.view({-1}).to(work_dtype(dtype));
}

/// Reverses `to_work`. `owned` means that the work tensor has no other owner.
at::Tensor from_work(const at::Tensor& work, const at::Tensor& leaf, bool maximum, bool owned) {
  const auto dtype = leaf.scalar_type();
  auto result = owned ? work : work.clone();
  if (c10::isComplexType(dtype)) {
    result = at::view_as_complex(result.view({-1, 2}));
  } else if (dtype == at::kUInt64) {
    result = (maximum ? result.bitwise_xor(kSignBit) : result).view(at::kUInt64);
  } else if (dtype == at::kBool) {
    result = result.ne(0);
  } else {
    result = result.to(dtype);
  }
  return result.view(leaf.sizes());
}

/// Tensors that are combined as one: of one work dtype, by one operation.
struct Bucket {
  at::ScalarType dtype;
  bool maximum;
  std::vector<std::size_t> which = {};
  std::vector<at::Tensor> work = {};
  std::int64_t elements = 0;
  at::Tensor combined = {};  // [elements]
};

std::vector<Bucket> make_buckets(const Tensors& leaves, const std::vector<std::size_t>& which,
                                 Reduction reduction) {
  std::vector<Bucket> buckets;
  for (const auto i : which) {
    const auto dtype = work_dtype(leaves[i].scalar_type());
    const bool maximum = reduction == Reduction::kMax || leaves[i].scalar_type() == at::kBool;
    auto same = std::find_if(buckets.begin(), buckets.end(), [&](const Bucket& bucket) {
      return bucket.dtype == dtype && bucket.maximum == maximum;
    });
    if (same == buckets.end()) same = buckets.insert(same, Bucket{dtype, maximum});
    same->which.push_back(i);
    same->work.push_back(to_work(leaves[i], maximum));
    same->elements += same->work.back().numel();
  }
  return buckets;
}

/// One message for all buckets; then each process combines all parts in rank order, so that all get
/// the same bits.
void combine_small(const Peers& peers, std::vector<Bucket>& buckets) {
  Tensors work;
  for (const auto& bucket : buckets) {
    work.push_back(bucket.work.size() == 1 ? bucket.work.front() : at::cat(bucket.work));
  }
  std::vector<std::size_t> all(work.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  const Packing packing(work, all);
  const auto in = packing.packed(work);
  auto out = at::empty({peers.size(), packing.bytes()}, in.options());
  if (packing.bytes() > 0) peers.all_gather(out.view({-1}), in);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    auto& bucket = buckets[i];
    bucket.combined = packing.part(out[0], i, work[i]).clone();
    for (int rank = 1; rank < peers.size(); ++rank) {
      const auto part = packing.part(out[rank], i, work[i]);
      if (bucket.maximum) {
        at::maximum_out(bucket.combined, bucket.combined, part);
      } else {
        bucket.combined.add_(part);
      }
    }
  }
}

/// Whether one all-gather for all buckets beats an all-reduce for each. In shared memory it does
/// not for a single sum, which is formed in rank order there too. Numbers of 16 bits would be
/// rounded at another point.
bool is_small(const Peers& peers, const std::vector<Bucket>& buckets) {
  std::int64_t bytes = 0;
  for (const auto& bucket : buckets) {
    bytes += bucket.elements * static_cast<std::int64_t>(c10::elementSize(bucket.dtype));
  }
  if (bytes > kSmallBytes) return false;
  const auto& first = buckets.front();
  const bool one_sum = buckets.size() == 1 && !first.maximum &&
                       !c10::isReducedFloatingType(first.dtype) && first.work.front().is_cpu();
  return !(one_sum && peers.share_memory());
}

/// The tensors of a bucket in one, in memory of our own: the message overwrites what it sends.
at::Tensor joined(const Bucket& bucket, const Tensors& leaves) {
  if (bucket.work.size() > 1) return at::cat(bucket.work);
  const auto& work = bucket.work.front();
  return work.is_alias_of(leaves[bucket.which.front()]) ? work.clone() : work;
}

/// One all-reduce per bucket, all at a time. Backends lose NaN in a maximum, so that where NaN was
/// travels beside it.
void combine_large(const Peers& peers, const Tensors& leaves, std::vector<Bucket>& buckets) {
  std::vector<Peers::AllReduce> messages;
  std::vector<std::pair<Bucket*, at::Tensor>> nans;
  for (auto& bucket : buckets) {
    bucket.combined = joined(bucket, leaves);
    bucket.work.clear();
    if (bucket.elements == 0) continue;
    if (bucket.maximum && c10::isFloatingType(bucket.dtype)) {
      nans.emplace_back(&bucket, bucket.combined.isnan().to(at::kByte));
      messages.push_back({nans.back().second, c10d::ReduceOp::MAX});
    }
    messages.push_back(
        {bucket.combined, bucket.maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM});
  }
  peers.all_reduce(messages);
  for (const auto& [bucket, mask] : nans) {
    bucket->combined.masked_fill_(mask.to(at::kBool), std::numeric_limits<double>::quiet_NaN());
  }
}

/// `combined`, attached to the graph of the leaf where that has one. A mean passes on its part of
/// the gradient.
at::Tensor attached(const at::Tensor& leaf, at::Tensor combined, int divisor) {
  if (!leaf.requires_grad() || !at::GradMode::is_enabled()) return combined;
  auto result = divisor > 1 ? leaf.div(divisor) : leaf.clone();
  result.detach().copy_(combined);
  return result;
}

void put_back(Tensors& leaves, Bucket& bucket, int divisor) {
  if (divisor > 1) bucket.combined.div_(divisor);
  std::int64_t start = 0;
  for (const auto i : bucket.which) {
    auto& leaf = leaves[i];
    const auto length = leaf.numel() * (c10::isComplexType(leaf.scalar_type()) ? 2 : 1);
    const auto piece = bucket.combined.narrow(0, start, length);
    start += length;
    const bool owned = bucket.which.size() == 1;
    leaf = attached(leaf, from_work(piece, leaf, bucket.maximum, owned), divisor);
  }
}

/// One tensor of the host whose elements are summed as they are, which is what most calls are
/// about: there is nothing to join, to convert or to take apart. Decided by what all processes
/// agree on.
bool is_one_sum(const Peers& peers, const Tensors& leaves, Reduction reduction) {
  if (leaves.size() != 1 || reduction == Reduction::kMax) return false;
  const auto dtype = leaves.front().scalar_type();
  return leaves.front().is_cpu() && work_dtype(dtype) == dtype &&
         !c10::isReducedFloatingType(dtype) && peers.share_memory();
}

void reduce_one(const Peers& peers, at::Tensor& leaf, Reduction reduction) {
  const bool mean = reduction == Reduction::kMean;
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = empty_result(leaf.sizes(), leaf.options());
    const auto operation = mean ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    if (leaf.numel() > 0) peers.all_reduce_into(result, leaf, operation);
  }
  leaf = attached(leaf, std::move(result), mean ? peers.size() : 1);
}

}  // namespace

void LeafCollectives::reduce(Tensors& leaves, const TreeView& view, Reduction reduction,
                             double scale, const Call& call) {
  const Peers peers("reduce", call);
  if (scale != 1.0) {
    warn_once(
        str("reduce: scale is ", scale,
            ", but it only acts on TPUs, which this library does not run on. It is ignored."));
  }
  const bool talks = !peers.alone() && reduction != Reduction::kNone;
  if (talks) {
    verify(peers, leaves, view, {.operation = "reduce", .arguments = [=] {
                                   return str("reduction=", to_string(reduction));
                                 }});
  }
  view.refuse_others(peers.operation());
  if (!talks) {
    for (auto& leaf : leaves) leaf = leaf.clone();
    return;
  }
  for (std::size_t i = 0; i < leaves.size(); ++i) check_reducible(leaves[i], i, view, reduction);
  peers.check(leaves, view);
  if (is_one_sum(peers, leaves, reduction)) {
    return reduce_one(peers, leaves.front(), reduction);
  }
  const int divisor = reduction == Reduction::kMean ? peers.size() : 1;
  for (const auto& which : by_device(leaves)) {
    std::vector<Bucket> buckets;
    {
      const at::NoGradGuard no_grad;
      buckets = make_buckets(leaves, which, reduction);
      if (is_small(peers, buckets)) {
        combine_small(peers, buckets);
      } else {
        combine_large(peers, leaves, buckets);
      }
    }
    for (auto& bucket : buckets) put_back(leaves, bucket, divisor);
  }
}

}  // namespace accelerate::detail::comm
