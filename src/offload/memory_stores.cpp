// Stores in memory: of the host, and of the device in a dtype of fewer bytes.
#include <ATen/Functions.h>
#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "offload/store.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::offload {
namespace {

/// Whole pages of the host, so that no two pinned ranges share one. LibTorch's own pinned memory
/// comes in powers of two, which would waste up to half of it.
class HostBlock {
 public:
  HostBlock(std::size_t bytes, bool pinned) : bytes_(bytes) {
    if (bytes == 0) return;
    void* address =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    address_ = address;
    auto* backend = state::accelerator_backend();
    // Memory that cannot be pinned still works, at a lower rate.
    if (pinned && backend != nullptr && backend->pin_memory(address_, bytes_)) backend_ = backend;
  }
  ~HostBlock() {
    if (backend_ != nullptr) backend_->unpin_memory(address_);
    if (address_ != nullptr) ::munmap(address_, bytes_);
  }
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  [[nodiscard]] bool is_pinned() const { return backend_ != nullptr; }
  [[nodiscard]] at::Tensor tensor() const {
    return at::from_blob(address_, {static_cast<std::int64_t>(bytes_)}, at::kByte);
  }

 private:
  std::size_t bytes_;
  void* address_ = nullptr;
  state::AcceleratorBackend* backend_ = nullptr;
};

at::Tensor part(const at::Tensor& memory, std::size_t offset, std::size_t bytes) {
  return memory.narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(bytes));
}

/// The elements of a tensor inside the bytes of its group.
at::Tensor elements(const at::Tensor& memory, const StoragePlan& storage,
                    const TensorPlan& tensor) {
  return part(memory, storage.offset + tensor.offset, tensor.bytes).view(tensor.dtype);
}

at::Tensor flat_value(const ValueOf& value_of, const TensorPlan& tensor) {
  const auto value = value_of(tensor.name).detach();
  const auto expected = tensor.bytes / c10::elementSize(tensor.dtype);
  if (value.is_meta() || static_cast<std::size_t>(value.numel()) != expected) {
    throw StateError(str("The parameter '", tensor.name, "' has ",
                         value.is_meta() ? "no value: it is on the meta device"
                                         : str(value.numel(), " elements instead of ", expected),
                         ". Give its value in the state dict, or load a checkpoint first."));
  }
  return value.contiguous().view({-1});
}

class HostStore final : public Store {
 public:
  HostStore(GroupPlan plan, const ValueOf& value_of, bool pinned)
      : plan_(std::move(plan)), block_(plan_.bytes, pinned), memory_(block_.tensor()) {
    for (const auto& storage : plan_.storages) {
      for (const auto& tensor : storage.tensors) {
        elements(memory_, storage, tensor).copy_(flat_value(value_of, tensor));
      }
    }
  }

  [[nodiscard]] bool is_pinned() const { return block_.is_pinned(); }

  void fill(const at::Tensor& memory) override { memory.copy_(memory_, block_.is_pinned()); }
  void write_back(std::size_t storage, const at::Tensor& bytes) override {
    const auto& plan = plan_.storages[storage];
    part(memory_, plan.offset, plan.bytes).copy_(bytes, block_.is_pinned());
  }
  at::Tensor bytes(std::size_t storage) const override {
    const auto& plan = plan_.storages[storage];
    return part(memory_, plan.offset, plan.bytes).clone();
  }

 private:
  GroupPlan plan_;
  HostBlock block_;
  at::Tensor memory_;
};

class CastStore final : public Store {
 public:
  CastStore(GroupPlan plan, const ValueOf& value_of, at::ScalarType dtype)
      : plan_(std::move(plan)), dtype_(dtype) {
    for (const auto& storage : plan_.storages) {
      auto& kept = kept_.emplace_back();
      for (const auto& tensor : storage.tensors) {
        kept.push_back(
            flat_value(value_of, tensor).to(dtype, /*non_blocking=*/false, /*copy=*/true));
      }
    }
  }

  void fill(const at::Tensor& memory) override {
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      for (std::size_t j = 0; j < kept_[i].size(); ++j) {
        elements(memory, plan_.storages[i], plan_.storages[i].tensors[j]).copy_(kept_[i][j]);
      }
    }
  }
  void write_back(std::size_t storage, const at::Tensor& bytes) override {
    const auto& plan = plan_.storages[storage];
    for (std::size_t j = 0; j < plan.tensors.size(); ++j) {
      const auto& tensor = plan.tensors[j];
      kept_[storage][j].copy_(part(bytes, tensor.offset, tensor.bytes).view(tensor.dtype));
    }
  }
  at::Tensor bytes(std::size_t storage) const override {
    const auto& plan = plan_.storages[storage];
    auto all = at::zeros({static_cast<std::int64_t>(plan.bytes)}, at::kByte);
    for (std::size_t j = 0; j < plan.tensors.size(); ++j) {
      const auto& tensor = plan.tensors[j];
      part(all, tensor.offset, tensor.bytes).view(tensor.dtype).copy_(kept_[storage][j]);
    }
    return all;
  }
  at::ScalarType storage_dtype(at::ScalarType) const override { return dtype_; }

 private:
  GroupPlan plan_;
  at::ScalarType dtype_;
  std::vector<std::vector<at::Tensor>> kept_;  // by storage and tensor, flat
};

}  // namespace

c10::DataPtr Store::map(std::size_t) { throw StateError("This store cannot map its bytes."); }

std::unique_ptr<Store> make_host_store(const GroupPlan& plan, const ValueOf& value_of,
                                       PinnedBudget& budget) {
  const auto bytes = static_cast<std::int64_t>(plan.bytes);
  auto store = std::make_unique<HostStore>(plan, value_of, /*pinned=*/bytes <= budget.left);
  if (store->is_pinned()) budget.left -= bytes;
  return store;
}

std::unique_ptr<Store> make_cast_store(const GroupPlan& plan, const ValueOf& value_of,
                                       at::ScalarType dtype) {
  return std::make_unique<CastStore>(plan, value_of, dtype);
}

}  // namespace accelerate::detail::offload
