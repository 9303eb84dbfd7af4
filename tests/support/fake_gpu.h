// tests/support/fake_gpu.h - a GPU of any kind, for what is decided before it computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "state/accelerator_backend.h"

namespace accelerate::test {

/// While it lives, the library believes in one CUDA device of this compute capability.
class FakeGpu : public detail::state::AcceleratorBackend {
 public:
  explicit FakeGpu(detail::state::DeviceCapability capability) : capability_(capability) {
    detail::state::replace_accelerator_backend(this);
  }
  ~FakeGpu() override { detail::state::replace_accelerator_backend(nullptr); }
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  int device_count() const override { return 1; }
  void set_device(int) override {}
  int current_device() const override { return 0; }
  std::string device_name(int) const override { return "fake"; }
  std::string pci_bus_id(int) const override { return "0000:01:00.0"; }
  detail::state::DeviceCapability capability(int) const override { return capability_; }
  void empty_cache() override {}
  void synchronize(int) override {}
  std::int64_t allocated_bytes(int) const override { return 0; }
  bool pin_memory(void*, std::size_t) noexcept override { return false; }
  void unpin_memory(void*) noexcept override {}
  bool is_capturing() const override { return false; }
  std::int64_t free_bytes(int) const override { return 1000; }
  bool context_exists() const override { return false; }
  c10::intrusive_ptr<c10d::Backend> make_nccl(
      const c10::intrusive_ptr<c10d::Store>&, const detail::state::ProcessGroupOptions&,
      std::shared_ptr<detail::comm::DeviceCallGuard>) override {
    return {};
  }

 private:
  detail::state::DeviceCapability capability_;
};

}  // namespace accelerate::test
