#include "comm/peers.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

#include "accelerate/detail/state/reused_memory.h"
#include "accelerate/errors.h"
#include "comm/call_facts.h"
#include "comm/call_log.h"
#include "comm/shm_backend.h"
#include "core/exception_text.h"
#include "core/text.h"
#include "state/pending_messages.h"

namespace accelerate::detail::comm {
namespace {

// Complex numbers of two doubles are the largest elements.
constexpr std::int64_t kAlignment = 16;

/// Reports cut the text anyway.
constexpr std::size_t kPlacesShown = 8;

UserCall described(const char* operation, const Tensors& leaves,
                   const std::vector<std::string>& places) {
  const auto first = facts_of(operation, leaves.front());
  UserCall call{.operation = operation,
                .dtype = first.dtype,
                .sizes = first.sizes,
                .tensors = static_cast<int>(leaves.size())};
  for (const auto& leaf : leaves) {
    call.content = call.content * 31 + signature_of(facts_of(operation, leaf), {});
  }
  call.content = call.content * 31 + hash_of(places);
  return call;
}

/// What is pending is no part of the call, so it goes out before the call is described.
const char* after_pending(const char* operation) {
  state::send_pending();
  return operation;
}

std::string device_list(const c10d::ProcessGroup& group) {
  std::vector<std::string> names;
  for (const auto& device : group.getDeviceTypes()) names.push_back(device.str());
  std::sort(names.begin(), names.end());
  return join(names);
}

}  // namespace

Peers::Peers(const char* operation, const Call& call)
    : operation_(after_pending(operation)),
      where_(call.where),
      site_(call.where),
      call_{.operation = operation},
      as_call_(call_) {
  group_ = call.group != nullptr ? *call.group : state_.process_group();
  if (!group_) {
    if (call.group == nullptr && state_.num_processes() > 1) {
      throw StateError(str(call_site(), ": there are ", state_.num_processes(),
                           " processes but no process group any more; it was destroyed."));
    }
    return;
  }
  size_ = group_->getSize();
  rank_ = group_->getRank();
}

std::uint64_t hash_of(const std::vector<std::string>& places) {
  std::uint64_t hash = places.size();
  for (const auto& place : places) hash = hash * 31 + signature_of({.kind = place.c_str()}, {});
  return hash;
}

std::string Peers::call_site() const {
  return str(operation_, " at ", where_.file_name(), ":", where_.line());
}

bool Peers::serves(c10::DeviceType device) const {
  const auto devices = group_->getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [&](const c10::Device& served) { return served.type() == device; });
}

void Peers::check(const Tensors& leaves, const TreeView& view) const {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (const auto what = not_dense(leaves[i]); !what.empty()) {
      throw ArgumentError(str(operation_, ": the tensor", leaf_place(view, i), " is ", what,
                              ", and only dense tensors can be sent. Convert it first."));
    }
    if (serves(leaves[i].device().type())) continue;
    throw ArgumentError(str(operation_, ": the tensor", leaf_place(view, i), " is on ",
                            leaves[i].device().str(), ", but the process group serves ",
                            device_list(*group_), ". Move it there first: send_to_device(tree, ",
                            state_.device().str(), ")."));
  }
  if (leaves.empty()) return;
  auto places = view.places();
  call_ = described(operation_, leaves, places);
  if (places.empty()) return;
  const bool cut = places.size() > kPlacesShown;
  if (cut) places.resize(kPlacesShown);
  places_ = str(": ", join(places), cut ? ", ..." : "");
  call_.more = places_.c_str();
}

void Peers::check_rank(int rank, const char* what) const {
  if (rank >= 0 && rank < std::max(size_, 1)) return;
  throw ArgumentError(
      str(operation_, ": ", what, " is ", rank, ", but there are processes 0 to ", size_ - 1, "."));
}

void Peers::guarded(const std::function<void()>& communicate) const {
  try {
    communicate();
  } catch (const Error&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;  // a caller may try again with less
  } catch (const std::exception&) {
    throw CommError(str(call_site(), " failed on rank ", rank_, " of ", size_, ": ",
                        current_exception_text().message));
  }
}

c10::intrusive_ptr<c10d::Work> start_all_gather(c10d::ProcessGroup& group, at::Tensor& out,
                                                at::Tensor& in, bool asynchronous) {
  c10d::AllgatherOptions options;
  options.asyncOp = asynchronous;
  return all_gather_into(group, out, in, options);
}

void Peers::all_gather(at::Tensor out, at::Tensor in) const {
  // On the host the caller's thread does it all. NCCL gives no work back for such a call, and a
  // collective without a work cannot be watched.
  const bool asynchronous = !in.is_cpu();
  guarded([&] { start_all_gather(*group_, out, in, asynchronous)->wait(); });
}

bool Peers::share_memory() const { return shared_memory() != nullptr; }

ShmBackend* Peers::shared_memory() const {
  return dynamic_cast<ShmBackend*>(group_->getBackend(c10::kCPU).get());
}

void Peers::all_reduce_into(const at::Tensor& out, const at::Tensor& in,
                            c10d::ReduceOp::RedOpType operation) const {
  guarded([&] { shared_memory()->all_reduce_into(out, in, operation); });
}

void Peers::broadcast(at::Tensor tensor, int root) const {
  guarded([&] {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{std::move(tensor)};
    group_->broadcast(tensors, options)->wait();
  });
}

void Peers::all_reduce(const std::vector<AllReduce>& messages) const {
  guarded([&] {
    std::vector<c10::intrusive_ptr<c10d::Work>> under_way;
    for (const auto& message : messages) {
      c10d::AllreduceOptions options;
      options.reduceOp = message.operation;
      options.asyncOp = messages.size() > 1 || !message.tensor.is_cpu();
      std::vector<at::Tensor> tensors{message.tensor};
      under_way.push_back(group_->allreduce(tensors, options));
    }
    for (const auto& work : under_way) work->wait();
  });
}

at::Device Peers::message_device() const {
  return serves(c10::kCPU) ? at::Device(at::kCPU) : state_.device();
}

std::string leaf_place(const TreeView& view, std::size_t leaf) {
  const auto paths = view.paths();
  return leaf < paths.size() && !paths[leaf].empty() ? str(" at ", paths[leaf]) : "";
}

at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return state::ReusedMemory::of_results().empty(sizes, options.requires_grad(false));
}

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

Packing::Packing(const Tensors& leaves, std::vector<std::size_t> which) : which_(std::move(which)) {
  for (const auto i : which_) {
    offsets_.push_back(bytes_);
    const auto size = static_cast<std::int64_t>(leaves[i].nbytes());
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
  }
}

at::Tensor Packing::part(const at::Tensor& buffer, std::size_t slot, const at::Tensor& like) const {
  const auto size = static_cast<std::int64_t>(like.nbytes());
  if (size == 0) return at::empty(like.sizes(), like.options());
  return buffer.narrow(0, offsets_[slot], size).view(like.scalar_type()).view(like.sizes());
}

at::Tensor Packing::packed(const Tensors& leaves) const {
  const auto& first = leaves[which_.front()];
  auto buffer = empty_result({bytes_}, at::TensorOptions(at::kByte).device(first.device()));
  for (std::size_t slot = 0; slot < which_.size(); ++slot) {
    const auto& leaf = leaves[which_[slot]];
    if (leaf.numel() == 0) continue;
    if (leaf.is_cpu() && leaf.is_contiguous() && !leaf.is_conj() && !leaf.is_neg()) {
      std::memcpy(buffer.mutable_data_ptr<std::uint8_t>() + offsets_[slot], leaf.const_data_ptr(),
                  leaf.nbytes());
    } else {
      part(buffer, slot, leaf).copy_(leaf.detach());
    }
  }
  return buffer;
}

std::vector<std::vector<std::size_t>> by_device(const Tensors& leaves) {
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return leaves[group.front()].device() == leaves[i].device();
    });
    if (same != groups.end()) {
      same->push_back(i);
    } else {
      groups.push_back({i});
    }
  }
  return groups;
}

}  // namespace accelerate::detail::comm
