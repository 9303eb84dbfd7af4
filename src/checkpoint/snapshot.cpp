#include "checkpoint/snapshot.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "core/copy_past_cache.h"
#include "core/run_in_parallel.h"

namespace accelerate::detail::checkpoint {
namespace {

/// Storages of the same rounded size take the same buffers in every save.
std::int64_t rounded(std::int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto size = static_cast<std::int64_t>(tensor.storage().nbytes());
  return at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false))
      .set_(tensor.storage(), 0, {size}, {1});
}

}  // namespace

void SnapshotBuffers::copy(std::span<StateFile> files) {
  const at::NoGradGuard no_grad;
  used_ = 0;
  devices_.clear();
  copies_.clear();
  host_copies_.clear();
  for (auto& file : files) {
    if (auto* value = std::get_if<Value>(&file.content)) {
      *value = copied(*value);
      continue;
    }
    if (auto* items = std::get_if<ShardItems>(&file.content)) {
      for (auto& shard : items->shards) shard.values = copied(shard.values);
      items->values = copied(items->values);
      continue;
    }
    if (std::holds_alternative<std::string>(file.content)) continue;
    StateDict state("Tensor");
    for (const auto& entry : std::get<StateDict>(file.content)) {
      state.insert(entry.key(), copied(entry.value()));
    }
    file.content = std::move(state);
  }
  copy_host_memory();
  for (const auto& device : devices_) {
    c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }
  copies_.clear();
}

/// Training waits for it: on all cores, whatever OMP_NUM_THREADS says.
void SnapshotBuffers::copy_host_memory() {
  std::vector<std::size_t> sizes;
  for (const auto& [to, from] : host_copies_) sizes.push_back(from.nbytes());
  run_in_chunks(sizes, [&](std::size_t i, std::size_t begin, std::size_t length) {
    const auto& [to, from] = host_copies_[i];
    copy_past_cache(static_cast<std::byte*>(to.data_ptr()) + begin,
                    static_cast<const std::byte*>(from.const_data_ptr()) + begin, length);
  });
  host_copies_.clear();
}

Value SnapshotBuffers::copied(const Value& value) {
  const auto items = [&] {
    Value::List result;
    for (const auto& item : value.items()) result.push_back(copied(item));
    return result;
  };
  switch (value.kind()) {
    case Value::Kind::kList:
      return Value(items());
    case Value::Kind::kTuple:
      return Value::tuple(items());
    case Value::Kind::kDict: {
      Value::Dict dict;
      for (const auto& [key, item] : value.as_dict()) dict.set(key, copied(item));
      return Value(std::move(dict));
    }
    case Value::Kind::kTensor:
      return Value(copied(value.as_tensor()));
    default:
      return value;
  }
}

at::Tensor SnapshotBuffers::copied(const at::Tensor& tensor) {
  // What has no storage is refused when it is written.
  if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta()) return tensor;
  const auto bytes = copied_storage(tensor);
  auto copy = at::empty({0}, tensor.options().device(at::kCPU).requires_grad(false))
                  .set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  copy._set_conj(tensor.is_conj());
  copy._set_neg(tensor.is_neg());
  return copy.set_requires_grad(tensor.requires_grad());
}

at::Tensor SnapshotBuffers::copied_storage(const at::Tensor& tensor) {
  const auto [found, is_new] = copies_.try_emplace(tensor.storage().unsafeGetStorageImpl());
  if (!is_new) return found->second;
  const auto source = bytes_of(tensor);
  const auto size = source.numel();
  if (used_ == buffers_.size()) buffers_.emplace_back();
  auto& buffer = buffers_[used_++];
  if (!buffer.defined() || buffer.numel() < size) {
    const auto options = at::TensorOptions(at::kByte).pinned_memory(!source.is_cpu());
    buffer = at::empty({rounded(std::max<std::int64_t>(size, 1))}, options);
  }
  // A storage of the exact size: archives hold whole storages.
  found->second =
      at::from_blob(buffer.data_ptr(), {size}, [buffer](void*) {}, at::TensorOptions(at::kByte));
  if (source.is_cpu()) {
    host_copies_.emplace_back(found->second, source);
  } else {
    found->second.copy_(source, /*non_blocking=*/true);
    devices_.insert(source.device());
  }
  return found->second;
}

}  // namespace accelerate::detail::checkpoint
