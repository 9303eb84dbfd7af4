// The GPU behind state/accelerator_backend.h.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/errors.h"
#include "core/text.h"
#include "device_kernels.h"
#include "nccl_group.h"
#include "state/accelerator_backend.h"
#include "step_graphs.h"

namespace accelerate::detail::cuda {
namespace {

constexpr auto kAggregate = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

class CudaBackend final : public state::AcceleratorBackend,
                          public state::StepGraphMaker,
                          public state::DeviceKernelMaker {
 public:
  std::unique_ptr<state::StepGraphs> make_step_graphs(c10::Device device) override {
    return cuda::make_step_graphs(device);
  }

  bool can_compile() noexcept override { return can_compile_kernels(); }
  std::shared_ptr<const state::DeviceKernel> make_kernel(std::string source,
                                                         const std::string& name) override {
    return make_device_kernel(std::move(source), name);
  }
  int multiprocessors() override {
    return at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  }

  c10::DeviceType type() const override { return c10::kCUDA; }
  int device_count() const override { return c10::cuda::device_count(); }
  void set_device(int index) override { c10::cuda::set_device(checked(index)); }
  int current_device() const override { return c10::cuda::current_device(); }

  std::string device_name(int index) const override {
    return at::cuda::getDeviceProperties(checked(index))->name;
  }

  std::string pci_bus_id(int index) const override {
    const auto* device = at::cuda::getDeviceProperties(checked(index));
    char text[32] = {};
    std::snprintf(text, sizeof text, "%04x:%02x:%02x.0", device->pciDomainID, device->pciBusID,
                  device->pciDeviceID);
    return text;
  }

  state::DeviceCapability capability(int index) const override {
    const auto* device = at::cuda::getDeviceProperties(checked(index));
    return {device->major, device->minor};
  }

  void empty_cache() override { c10::cuda::CUDACachingAllocator::emptyCache(); }

  void synchronize(int index) override {
    const auto before = c10::cuda::ExchangeDevice(checked(index));
    c10::cuda::device_synchronize();
    c10::cuda::set_device(before);
  }

  std::int64_t allocated_bytes(int index) const override {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(checked(index));
    return stats.allocated_bytes[kAggregate].current;
  }

  std::int64_t free_bytes(int index) const override {
    const auto before = c10::cuda::ExchangeDevice(checked(index));
    std::size_t free = 0;
    std::size_t total = 0;
    const auto result = cudaMemGetInfo(&free, &total);
    c10::cuda::set_device(before);
    C10_CUDA_CHECK(result);
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(checked(index));
    return static_cast<std::int64_t>(free) + stats.reserved_bytes[kAggregate].current -
           stats.allocated_bytes[kAggregate].current;
  }

  bool pin_memory(void* address, std::size_t bytes) noexcept override {
    if (cudaHostRegister(address, bytes, cudaHostRegisterPortable) == cudaSuccess) return true;
    (void)cudaGetLastError();  // else the next call of LibTorch would report it
    return false;
  }
  void unpin_memory(void* address) noexcept override {
    if (cudaHostUnregister(address) != cudaSuccess) (void)cudaGetLastError();
  }
  bool is_capturing() const override {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }

  bool context_exists() const override {
    return c10::cuda::getDeviceIndexWithPrimaryContext().has_value();
  }

  c10::intrusive_ptr<c10d::Backend> make_nccl(
      const c10::intrusive_ptr<c10d::Store>& store, const state::ProcessGroupOptions& options,
      std::shared_ptr<comm::DeviceCallGuard> guard) override {
    return make_nccl_group(store, options, std::move(guard));
  }

 private:
  c10::DeviceIndex checked(int index) const {
    if (index < 0 || index >= device_count()) {
      throw ArgumentError(str("GPU ", index, " was asked for, but this process sees ",
                              device_count(), " (numbered from 0)."));
    }
    return static_cast<c10::DeviceIndex>(index);
  }
};

}  // namespace
}  // namespace accelerate::detail::cuda

ACCELERATE_API accelerate::detail::state::AcceleratorBackend* accelerate_cuda_backend() {
  if (c10::cuda::device_count() <= 0) return nullptr;
  static accelerate::detail::cuda::CudaBackend backend;
  return &backend;
}
