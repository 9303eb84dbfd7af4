#include "accelerate/operations/collectives.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "accelerate/value/to_value.h"
#include "comm/peers.h"
#include "core/log.h"
#include "core/text.h"

namespace accelerate {
namespace detail::comm {
namespace {

/// [world * d0, d1, ...], also for tensors of no dimension.
std::vector<std::int64_t> gathered_shape(const at::Tensor& leaf, int world) {
  auto shape = leaf.sizes().vec();
  if (shape.empty()) shape.push_back(1);
  shape.front() *= world;
  return shape;
}

/// One tensor needs no packing: it is sent from where it lies into where it shall be.
void gather_one(const Peers& peers, at::Tensor& leaf) {
  auto result = empty_result(gathered_shape(leaf, peers.size()), leaf.options());
  if (leaf.numel() > 0) peers.all_gather(bytes_of(result), bytes_of(dense(leaf)));
  leaf = std::move(result);
}

void gather_packed(const Peers& peers, Tensors& leaves, const Packing& packing) {
  const auto in = packing.packed(leaves);
  const std::int64_t world = peers.size();
  auto out = empty_result({world, packing.bytes()}, in.options());
  if (packing.bytes() > 0) peers.all_gather(out.view({-1}), in);
  for (std::size_t slot = 0; slot < packing.which().size(); ++slot) {
    auto& leaf = leaves[packing.which()[slot]];
    auto result = empty_result(gathered_shape(leaf, peers.size()), leaf.options());
    const auto size = static_cast<std::int64_t>(leaf.nbytes());
    if (size > 0 && leaf.is_cpu()) {
      auto* to = static_cast<char*>(result.mutable_data_ptr());
      const auto* from = static_cast<const char*>(out.const_data_ptr()) + packing.offset(slot);
      for (std::int64_t r = 0; r < world; ++r) {
        std::memcpy(to + r * size, from + r * packing.bytes(), static_cast<std::size_t>(size));
      }
    } else if (size > 0) {
      result.view({world, -1})
          .copy_(out.narrow(1, packing.offset(slot), size).view(leaf.scalar_type()));
    }
    leaf = std::move(result);
  }
}

/// Autograd must see that the memory changed, although the message went around it.
void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

/// Copies what arrived into a tensor of the caller. Inference tensors are written in inference mode
/// only, and the caller may be outside of it.
void write_leaf(const at::Tensor& leaf, const at::Tensor& content) {
  std::optional<c10::InferenceMode> mode;
  if (leaf.is_inference()) mode.emplace();
  leaf.detach().copy_(content);
}

/// One tensor: exactly its bytes, in the order of its elements. Strides may differ between the
/// processes, so that they must not decide what is sent.
void broadcast_one(const Peers& peers, const at::Tensor& leaf, int root) {
  if (leaf.numel() == 0) return;
  const auto content = dense(leaf);  // the memory of the leaf itself where that is dense
  peers.broadcast(bytes_of(content), root);
  if (peers.rank() == root) return;
  if (content.is_alias_of(leaf)) {
    mark_written(leaf);
  } else {
    write_leaf(leaf, content);
  }
}

void broadcast_packed(const Peers& peers, Tensors& leaves, const Packing& packing, int root) {
  const bool sends = peers.rank() == root;
  const auto& first = leaves[packing.which().front()];
  auto buffer =
      sends ? packing.packed(leaves)
            : at::empty({packing.bytes()}, at::TensorOptions(at::kByte).device(first.device()));
  peers.broadcast(buffer, root);
  if (sends) return;
  for (std::size_t slot = 0; slot < packing.which().size(); ++slot) {
    const auto& leaf = leaves[packing.which()[slot]];
    if (leaf.numel() > 0) write_leaf(leaf, packing.part(buffer, slot, leaf));
  }
}

bool is_expanded(const at::Tensor& leaf) {
  return at::has_internal_overlap(leaf) == at::MemOverlap::Yes;
}

/// Why a broadcast cannot write a tensor; "" when it can.
std::string not_writable(const at::Tensor& leaf) {
  auto problem = not_dense(leaf);
  if (problem.empty() && is_expanded(leaf)) problem = "expanded";
  return problem;
}

/// Why a tensor cannot be padded. Nested ones are left as they are.
std::string not_paddable(const at::Tensor& leaf) { return leaf.is_nested() ? "" : not_dense(leaf); }

void check_writable(const Tensors& leaves, const TreeView& view) {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!is_expanded(leaves[i])) continue;
    throw ArgumentError(str("broadcast: the tensor", leaf_place(view, i),
                            " is expanded: several of its elements are one place in memory, so it "
                            "cannot be written. Pass tensor.clone()."));
  }
}

bool can_pad(const at::Tensor& leaf, std::int64_t dim) {
  return !leaf.is_nested() && dim < leaf.dim() && dim >= -leaf.dim();
}

/// Whether padding with the number gives that number back in this dtype.
bool representable(const at::Scalar& number, at::ScalarType dtype) {
  if (c10::isComplexType(dtype)) return true;
  if (number.isComplex()) return false;
  if (c10::isFloatingType(dtype)) {
    const double wanted = number.toDouble();
    if (!std::isfinite(wanted)) return true;
    return std::isfinite(
        at::scalar_tensor(wanted, at::kDouble).to(dtype).to(at::kDouble).item<double>());
  }
  if (number.isFloatingPoint() && number.toDouble() != std::trunc(number.toDouble())) return false;
  if (number.isFloatingPoint() && std::abs(number.toDouble()) >= 0x1p63) return false;
  const auto whole = number.isBoolean() ? std::int64_t{number.toBool()} : number.toLong();
  switch (dtype) {
    case at::kBool:
      return whole == 0 || whole == 1;
    case at::kByte:
      return std::in_range<std::uint8_t>(whole);
    case at::kChar:
      return std::in_range<std::int8_t>(whole);
    case at::kShort:
      return std::in_range<std::int16_t>(whole);
    case at::kUInt16:
      return std::in_range<std::uint16_t>(whole);
    case at::kInt:
      return std::in_range<std::int32_t>(whole);
    case at::kUInt32:
      return std::in_range<std::uint32_t>(whole);
    case at::kUInt64:
      return whole >= 0;
    default:
      return true;
  }
}

void warn_of_nested(const Tensors& leaves, const TreeView& view) {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].is_nested()) continue;
    warn(str("CannotPadNestedTensorWarning: the tensor", leaf_place(view, i),
             " is nested. How to pad it is not known, so it is left as it is."));
  }
}

/// Every tensor, also one that is not padded here: it may be on another process, and then either
/// all throw or none.
void check_padding(const Tensors& leaves, const TreeView& view, const Padding& padding) {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto dtype = leaves[i].scalar_type();
    if (leaves[i].is_nested() || representable(padding.pad_index, dtype)) continue;
    throw ArgumentError(detail::str("pad_across_processes: pad_index is ", padding.pad_index,
                                    ", which is no value of ", dtype_name(dtype),
                                    ", the dtype of the tensor", leaf_place(view, i), "."));
  }
}

using Shapes = std::vector<std::vector<std::int64_t>>;
/// What a process says about its tree before it is padded: a hash of its places, and the shapes.
using Layout = std::pair<std::int64_t, Shapes>;

Shapes shapes_of(const Tensors& leaves) {
  Shapes shapes;
  for (const auto& leaf : leaves) {
    shapes.push_back(leaf.is_nested() ? std::vector<std::int64_t>() : leaf.sizes().vec());
  }
  return shapes;
}

/// Collective where places differ, which all processes see. Throws on all of them.
void check_places(const Peers& peers, const std::vector<Layout>& all, const TreeView& view) {
  const auto astray =
      std::ranges::find_if(all, [&](const Layout& one) { return one.first != all.front().first; });
  if (astray == all.end()) return;
  const auto places = accelerate::all_gather_object(view.places(), peers.group(), peers.where());
  std::string lines;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    lines += str("\n  - Process ", rank, ": ", join(places[rank]));
  }
  throw CommError(str(peers.call_site(),
                      ": the processes pass trees with different keys, lengths or alternatives, so "
                      "that their tensors do not belong together. Pass the same ones on each. "
                      "Leaves:",
                      lines),
                  static_cast<int>(astray - all.begin()));
}

/// Every process has the same lists, so that all throw or none.
void check_agreement(const Peers& peers, const std::vector<Layout>& all, const TreeView& view) {
  check_places(peers, all, view);
  const auto same_dimensions = [](const auto& x, const auto& y) { return x.size() == y.size(); };
  const auto astray = std::ranges::find_if(all, [&](const Layout& one) {
    return !std::ranges::equal(one.second, all.front().second, same_dimensions);
  });
  if (astray == all.end()) return;
  std::string lines;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    lines += str("\n  - Process ", rank, ": ", to_value(all[rank].second).repr());
  }
  const auto paths = join(view.paths());
  throw CommError(str(peers.call_site(),
                      ": the processes pass different numbers of dimensions, so that the tensors "
                      "cannot be padded to one size. ",
                      paths.empty() ? "" : str("Leaves: ", paths, ". "), "Shapes:", lines),
                  static_cast<int>(astray - all.begin()));
}

at::Tensor padded(const at::Tensor& leaf, std::int64_t dim, std::int64_t target,
                  const Padding& padding) {
  auto shape = leaf.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = target;
  auto result = at::full(shape, padding.pad_index, leaf.options().requires_grad(false));
  const auto size = leaf.size(dim);
  result.narrow(dim, padding.pad_first ? target - size : 0, size).copy_(leaf);
  return result;
}

/// What the size tensor of a leaf looks like: [1, number of dimensions].
Value size_shape(const at::Tensor& leaf) {
  return Value(Value::List{Value(1), Value(leaf.is_nested() ? 0 : leaf.dim())});
}

}  // namespace

void LeafCollectives::gather(Tensors& leaves, const TreeView& view, const Call& call) {
  const Peers peers("gather", call);
  verify(peers, leaves, view, {.operation = "gather"});
  view.refuse_others(peers.operation());
  if (peers.alone()) return;
  peers.check(leaves, view);
  const at::NoGradGuard no_grad;
  for (auto& which : by_device(leaves)) {
    if (which.size() == 1) {
      gather_one(peers, leaves[which.front()]);
    } else {
      gather_packed(peers, leaves, Packing(leaves, std::move(which)));
    }
  }
}

void LeafCollectives::broadcast(Tensors& leaves, const TreeView& view, int from_process,
                                const Call& call) {
  const Peers peers("broadcast", call);
  // In debug mode first of all: a process that threw alone would leave the others waiting.
  verify(peers, leaves, view,
         {.operation = "broadcast",
          .arguments = [=] { return str("from_process=", from_process); },
          .problem = &not_writable});
  view.refuse_others(peers.operation());
  peers.check_rank(from_process, "from_process");
  if (peers.alone()) return;
  peers.check(leaves, view);
  check_writable(leaves, view);
  const at::NoGradGuard no_grad;
  for (auto& which : by_device(leaves)) {
    if (which.size() == 1) {
      broadcast_one(peers, leaves[which.front()], from_process);
      continue;
    }
    const Packing packing(leaves, std::move(which));
    if (packing.bytes() > 0) broadcast_packed(peers, leaves, packing, from_process);
  }
}

void LeafCollectives::pad_across_processes(Tensors& leaves, const TreeView& view,
                                           const Padding& padding, const Call& call) {
  const Peers peers("pad_across_processes", call);
  warn_of_nested(leaves, view);
  try {
    verify(peers, leaves, view,
           {.operation = "gather",
            .arguments =
                [&] {
                  return detail::str("dim=", padding.dim, ", pad_index=", padding.pad_index,
                                     ", pad_first=", padding.pad_first ? "true" : "false");
                },
            .of = &size_shape,
            .problem = &not_paddable});
  } catch (const DistributedOperationException& inner) {
    std::throw_with_nested(DistributedOperationException(
        "`accelerate.utils.operations.pad_across_processes` could not exchange the sizes of its "
        "tensors. The nested error has the details.",
        inner.rank()));
  }
  view.refuse_others(peers.operation());
  if (peers.alone()) return;
  check_padding(leaves, view, padding);
  const Layout mine{static_cast<std::int64_t>(hash_of(view.places())), shapes_of(leaves)};
  const auto all = accelerate::all_gather_object(mine, peers.group(), peers.where());
  check_agreement(peers, all, view);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!can_pad(leaves[i], padding.dim)) continue;
    const auto dim = padding.dim < 0 ? padding.dim + leaves[i].dim() : padding.dim;
    std::int64_t target = 0;
    for (const auto& [places, shapes] : all) {
      target = std::max(target, shapes[i][static_cast<std::size_t>(dim)]);
    }
    if (target != leaves[i].size(dim)) leaves[i] = padded(leaves[i], dim, target, padding);
  }
}

}  // namespace detail::comm

namespace {

/// What a process says about its tensor before it is sent, if it has one: why it cannot be sent (""
/// when it can), dtype and shape.
using Offer = std::optional<std::tuple<std::string, std::int64_t, std::vector<std::int64_t>>>;

Offer offer_of(const std::optional<at::Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  auto problem = !tensor->defined()  ? "not defined"
                 : tensor->is_meta() ? "on meta and has no data"
                                     : detail::comm::not_dense(*tensor);
  if (!problem.empty()) return Offer({std::move(problem), 0, {}});
  return Offer({"", static_cast<std::int64_t>(tensor->scalar_type()), tensor->sizes().vec()});
}

/// The one process that has a tensor. Depends on the offers alone, so that all throw or none.
std::size_t owner_of(const std::vector<Offer>& offers) {
  std::vector<std::size_t> owners;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    if (offers[rank]) owners.push_back(rank);
  }
  if (owners.size() != 1) {
    throw ArgumentError(
        detail::str("copy_tensor_to_devices: exactly one process must pass a tensor, but ",
                    owners.empty() ? "none did." : "processes " + detail::join(owners) + " did."));
  }
  if (const auto& problem = std::get<0>(*offers[owners.front()]); !problem.empty()) {
    throw ArgumentError(detail::str("copy_tensor_to_devices: the tensor of process ",
                                    owners.front(), " is ", problem,
                                    ", and only dense tensors can be sent. Convert it first."));
  }
  return owners.front();
}

}  // namespace

at::Tensor copy_tensor_to_devices(const std::optional<at::Tensor>& tensor,
                                  std::source_location where) {
  const detail::comm::Peers peers("copy_tensor_to_devices", {nullptr, where});
  std::vector<Offer> offers{offer_of(tensor)};
  if (!peers.alone()) offers = all_gather_object(offers.front(), peers.group(), where);
  const auto owner = owner_of(offers);

  const at::NoGradGuard no_grad;
  const auto& [problem, dtype, shape] = *offers[owner];
  const auto options =
      at::TensorOptions(static_cast<at::ScalarType>(dtype)).device(peers.state().device());
  auto copy = at::empty(shape, options);
  const auto root = static_cast<int>(owner);
  if (peers.rank() == root) copy.copy_(tensor->detach());
  if (!peers.alone() && copy.numel() > 0) peers.broadcast(detail::comm::bytes_of(copy), root);
  return copy;
}

}  // namespace accelerate
