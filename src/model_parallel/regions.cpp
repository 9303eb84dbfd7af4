#include "model_parallel/regions.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "comm/peers.h"
#include "core/call_site.h"
#include "core/text.h"

namespace accelerate::detail::model_parallel {
namespace {

constexpr std::size_t kNameBytes = 30;
constexpr std::size_t kBroadcastBytes = std::size_t{250} << 20;

std::int64_t wrapped(std::int64_t dim, const at::Tensor& x) {
  const auto result = dim < 0 ? dim + x.dim() : dim;
  if (result >= 0 && result < x.dim()) return result;
  throw ArgumentError(
      detail::str("A tensor of shape ", x.sizes(), " has no dimension ", dim, " to be divided."));
}

std::int64_t share_of(const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group) {
  const auto size = x.size(dim);
  const std::int64_t processes = group->getSize();
  if (size % processes == 0) return size / processes;
  throw ArgumentError(detail::str("Dimension ", dim, " of a tensor of shape ", x.sizes(),
                                  " cannot be divided among ", processes, " processes: ", size,
                                  " is no multiple of ", processes, ". Pad it."));
}

// Results of a custom autograd function must not be views: the next operator may write to them.

at::Tensor gathered(const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group) {
  auto own = x.contiguous().view({-1});
  auto sizes = x.sizes().vec();
  sizes.insert(sizes.begin(), group->getSize());
  if (dim == 0) {
    sizes.erase(sizes.begin());
    sizes[0] *= group->getSize();
  }
  const auto all = at::empty(sizes, own.options());
  auto flat = all.view({-1});
  comm::all_gather_into(*group, flat, own, c10d::AllgatherOptions())->wait();
  return dim == 0 ? all : at::cat(all.unbind(0), dim);
}

at::Tensor summed_and_taken(const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group) {
  const auto share = share_of(x, dim, group);
  auto all = dim == 0 ? x.contiguous().view({-1}) : at::stack(x.split(share, dim)).view({-1});
  auto sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = share;
  const auto own = at::empty(sizes, all.options());
  auto flat = own.view({-1});
  group->_reduce_scatter_base(flat, all, c10d::ReduceScatterOptions())->wait();
  return own;
}

at::Tensor moved(const at::Tensor& x, Move move, std::int64_t dim, const ProcessGroupPtr& group) {
  switch (move) {
    case Move::kKeep:
      return x;
    case Move::kSum: {
      std::vector<at::Tensor> tensors{x.clone(at::MemoryFormat::Contiguous)};
      group->allreduce(tensors, c10d::AllreduceOptions())->wait();
      return tensors[0];
    }
    case Move::kGather:
      return gathered(x, dim, group);
    case Move::kTake: {
      const auto share = share_of(x, dim, group);
      return x.narrow(dim, group->getRank() * share, share).clone(at::MemoryFormat::Contiguous);
    }
    case Move::kSumAndTake:
      return summed_and_taken(x, dim, group);
  }
  return {};
}

class RegionFunction : public torch::autograd::Function<RegionFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const Region& region, const ProcessGroupPtr& group,
                            const std::string& name) {
    context->saved_data["backward"] = static_cast<std::int64_t>(region.backward);
    context->saved_data["dim"] = region.dim;
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    context->saved_data["name"] = name;
    return moved(x, region.forward, region.dim, group);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(
        context->saved_data["group"].toCapsule());
    const NamedCollectives named("grad of " + context->saved_data["name"].toStringRef());
    const NamedInBackward in_backward;
    const auto move = static_cast<Move>(context->saved_data["backward"].toInt());
    return {moved(gradients[0], move, context->saved_data["dim"].toInt(), group), at::Tensor(),
            at::Tensor(), at::Tensor()};
  }
};

/// The place in the program counts in forward.
at::Tensor pass_here(const at::Tensor& x, Region region, const ProcessGroupPtr& group,
                     const char* name, std::source_location where) {
  if (is_alone(group)) return x;
  if (region.forward != Move::kSum && region.backward != Move::kSum) {
    region.dim = wrapped(region.dim, x);
  }
  const AtCallSite here(where);
  return RegionFunction::apply(x, region, group, std::string(name));
}

}  // namespace

at::Tensor pass(const at::Tensor& x, const Region& region, const ProcessGroupPtr& group,
                std::string_view name) {
  const auto text = detail::str(name.substr(0, kNameBytes));
  const NamedCollectives named(text);
  return pass_here(x, region, group, text.c_str(), std::source_location::current());
}

void all_reduce(at::Tensor x, const ProcessGroupPtr& group, std::string_view name,
                c10d::ReduceOp::RedOpType reduction) {
  if (is_alone(group)) return;
  const NamedCollectives named(name);
  const NamedInBackward in_backward;
  std::vector<at::Tensor> tensors{std::move(x)};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction;
  group->allreduce(tensors, options)->wait();
}

void broadcast_from_first(const std::vector<at::Tensor>& tensors, const ProcessGroupPtr& group,
                          std::string_view name) {
  if (is_alone(group) || tensors.empty()) return;
  const NamedCollectives named(name);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> detached;
  for (const auto& tensor : tensors) detached.push_back(tensor.detach());
  c10d::broadcast_coalesced(group, detached, kBroadcastBytes, 0);
}

}  // namespace accelerate::detail::model_parallel

namespace accelerate::nn {

using detail::model_parallel::pass_here;

at::Tensor copy_to_region(const at::Tensor& x, const ProcessGroupPtr& group,
                          std::source_location where) {
  return pass_here(x, detail::model_parallel::kCopy, group, "copy_to_region", where);
}

at::Tensor reduce_from_region(const at::Tensor& x, const ProcessGroupPtr& group,
                              std::source_location where) {
  return pass_here(x, detail::model_parallel::kReduce, group, "reduce_from_region", where);
}

at::Tensor gather_from_region(const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group,
                              std::source_location where) {
  return pass_here(x, detail::model_parallel::gather_along(dim), group, "gather_from_region",
                   where);
}

at::Tensor scatter_to_region(const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group,
                             std::source_location where) {
  return pass_here(x, detail::model_parallel::scatter_along(dim), group, "scatter_to_region",
                   where);
}

at::Tensor gather_from_sequence(const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group,
                                std::source_location where) {
  return pass_here(x, detail::model_parallel::gather_sequence_along(dim), group,
                   "gather_from_sequence", where);
}

at::Tensor reduce_scatter_to_sequence(const at::Tensor& x, std::int64_t dim,
                                      const ProcessGroupPtr& group, std::source_location where) {
  return pass_here(x, detail::model_parallel::reduce_scatter_along(dim), group,
                   "reduce_scatter_to_sequence", where);
}

}  // namespace accelerate::nn
