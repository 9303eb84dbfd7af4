// src/nn/fused.h - operators of modules that one kernel of the GPU computes.
//
// A module asks `fused_here` and else calls the operators of LibTorch. Kernels are variants of a
// text: dtypes, widths and choices are numbers that stand in front of it as `#define`s.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "state/device_kernel.h"

namespace accelerate::detail::nn {

/// True if the backend of the device of `tensor` makes kernels that can read it: float32, bfloat16
/// or float16, strided, not empty, with bytes that stay where they are.
[[nodiscard]] bool kernels_read(const at::Tensor& tensor);
/// `kernels_read` for all; they are contiguous and on one device. Undefined tensors do not count.
[[nodiscard]] bool fused_here(std::initializer_list<std::reference_wrapper<const at::Tensor>> all);

/// The 16-bit dtype of autocast for tensors like this one; nullopt if it does not change them.
[[nodiscard]] std::optional<at::ScalarType> autocast_dtype(const at::Tensor& tensor);

/// In it dtypes are those of the tensors.
class NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

/// Kernels are launched in it: the device of the tensor is current, autocast is off.
class KernelScope {
 public:
  explicit KernelScope(const at::Tensor& tensor) : device_(tensor.device()) {}

 private:
  NoAutocast no_autocast_;
  c10::OptionalDeviceGuard device_;
};

inline constexpr std::size_t kMaxConstants = 9;

struct KernelText {
  const char* name;
  std::string_view source;
  /// Names of the numbers of a variant; unused ones are null.
  std::array<const char*, kMaxConstants> constants;
  /// In front of the source: what several texts share.
  std::string_view shared = {};
};

/// Compiled when it is first asked for, for the device of `tensor`, in a `KernelScope`.
[[nodiscard]] const state::DeviceKernel& kernel_for(
    const KernelText& text, const at::Tensor& tensor,
    const std::array<std::int32_t, kMaxConstants>& values);

/// The number of a dtype in kernels; that of float32 for undefined tensors.
[[nodiscard]] std::int32_t number_of(at::ScalarType dtype);
[[nodiscard]] std::int32_t number_of(const at::Tensor& tensor);

/// 8 if rows of `width` elements of all tensors can be read eight elements at a time, else 1.
[[nodiscard]] std::int32_t pack_of(
    std::int64_t width, std::initializer_list<std::reference_wrapper<const at::Tensor>> all);

/// The address of the elements; null for undefined tensors.
[[nodiscard]] void* address(const at::Tensor& tensor);

[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Sums of the columns of float32 `partial` [count, width], in a fixed order, as `dtype`. The
/// second tensor may be undefined; else it has the shape of the first.
void column_sums(const at::Tensor& partial, const at::Tensor& result,
                 const at::Tensor& second_partial = {}, const at::Tensor& second_result = {});

/// For second derivatives: gradients of `f(inputs)` that autograd can differentiate. Inputs that
/// need none get undefined ones.
[[nodiscard]] std::vector<at::Tensor> differentiable_gradients(
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f,
    const std::vector<at::Tensor>& inputs, const at::Tensor& gradient);

}  // namespace accelerate::detail::nn
