#include "nn/fused.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/text.h"
#include "modeling/lazy_key.h"
#include "nn/kernels.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::nn {
namespace {

struct Variant {
  state::DeviceKernelMaker* maker;
  c10::DeviceIndex device;
  const KernelText* text;
  std::array<std::int32_t, kMaxConstants> values;
  auto operator<=>(const Variant&) const = default;
};

std::string source_of(const KernelText& text,
                      const std::array<std::int32_t, kMaxConstants>& values) {
  std::string source;
  for (std::size_t i = 0; i < kMaxConstants && text.constants[i] != nullptr; ++i) {
    source += str("#define ", text.constants[i], " ", values[i], "\n");
  }
  return str(source, kernels::kPrelude, text.shared, text.source);
}

}  // namespace

bool kernels_read(const at::Tensor& tensor) {
  const auto* const backend = state::accelerator_backend();
  if (backend == nullptr || tensor.device().type() != backend->type() ||
      state::device_kernel_maker() == nullptr) {
    return false;
  }
  const auto dtype = tensor.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) &&
         tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.numel() > 0 &&
         !modeling::is_marked(tensor) && !at::isTensorSubclassLike(tensor) &&
         !tensor._fw_grad(/*level=*/0).defined();
}

bool fused_here(std::initializer_list<std::reference_wrapper<const at::Tensor>> all) {
  const at::Tensor* first = nullptr;
  for (const at::Tensor& tensor : all) {
    if (!tensor.defined()) continue;
    if (first == nullptr) first = &tensor;
    if (!kernels_read(tensor) || tensor.device() != first->device() || !tensor.is_contiguous()) {
      return false;
    }
  }
  return first != nullptr;
}

std::optional<at::ScalarType> autocast_dtype(const at::Tensor& tensor) {
  const auto type = tensor.device().type();
  if (!at::autocast::is_autocast_available(type) || !at::autocast::is_autocast_enabled(type) ||
      !tensor.is_floating_point() || tensor.scalar_type() == at::kDouble) {
    return std::nullopt;
  }
  return at::autocast::get_autocast_dtype(type);
}

const state::DeviceKernel& kernel_for(const KernelText& text, const at::Tensor& tensor,
                                      const std::array<std::int32_t, kMaxConstants>& values) {
  static std::mutex mutex;
  static auto& compiled = *new std::map<Variant, std::shared_ptr<const state::DeviceKernel>>;
  const Variant variant{state::device_kernel_maker(), tensor.device().index(), &text, values};
  const std::scoped_lock lock(mutex);
  auto& kernel = compiled[variant];
  if (!kernel) kernel = variant.maker->make_kernel(source_of(text, values), text.name);
  return *kernel;
}

std::int32_t number_of(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return 1;
  return dtype == at::kHalf ? 2 : 0;
}

std::int32_t number_of(const at::Tensor& tensor) {
  return tensor.defined() ? number_of(tensor.scalar_type()) : 0;
}

std::int32_t pack_of(std::int64_t width,
                     std::initializer_list<std::reference_wrapper<const at::Tensor>> all) {
  constexpr std::uintptr_t kAlignment = 16;
  if (width % 8 != 0) return 1;
  for (const at::Tensor& tensor : all) {
    if (reinterpret_cast<std::uintptr_t>(address(tensor)) % kAlignment != 0) return 1;
  }
  return 8;
}

void* address(const at::Tensor& tensor) {
  return tensor.defined() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
}

void column_sums(const at::Tensor& partial, const at::Tensor& result,
                 const at::Tensor& second_partial, const at::Tensor& second_result) {
  const auto width = partial.size(1);
  const auto& kernel = kernel_for(kernels::kColumnSums, partial, {1, number_of(result)});
  kernel.launch({.blocks = ceil_div(width, 32),
                 .blocks_y = second_partial.defined() ? 2 : 1,
                 .threads = 1024},
                address(partial), address(result), address(second_partial), address(second_result),
                static_cast<int>(partial.size(0)), static_cast<int>(width));
}

std::vector<at::Tensor> differentiable_gradients(
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f,
    const std::vector<at::Tensor>& inputs, const at::Tensor& gradient) {
  const NoAutocast no_autocast;
  const at::AutoGradMode with_graph(true);
  std::vector<at::Tensor> wanted;
  for (const auto& input : inputs) {
    if (input.defined() && input.requires_grad()) wanted.push_back(input);
  }
  const auto found = torch::autograd::grad({f(inputs)}, wanted, {gradient}, /*retain_graph=*/true,
                                           /*create_graph=*/true, /*allow_unused=*/true);
  std::vector<at::Tensor> result(inputs.size());
  for (std::size_t i = 0, next = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && inputs[i].requires_grad()) result[i] = found[next++];
  }
  return result;
}

namespace kernels {

const std::string_view kPrelude = R"cuda(
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
template <int number> struct Number { typedef float type; };
template <> struct Number<1> { typedef bf16 type; };
template <> struct Number<2> { typedef f16 type; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(f16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}
__device__ inline void set(float& x, float value) { x = value; }
__device__ inline void set(bf16& x, float value) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(value));
#else
  const unsigned bits = __float_as_uint(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  x.bits = is_nan ? 0x7fc0 : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
#endif
}
__device__ inline void set(f16& x, float value) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(value));
}
template <class T> __device__ inline float rounded(float value) {
  T x;
  set(x, value);
  return to_float(x);
}

template <class T> struct alignas(PACK == 1 ? sizeof(T) : 16) Pack { T values[PACK]; };
template <class T> __device__ inline void load(const T* from, float (&to)[PACK]) {
  const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(from);
#pragma unroll
  for (int p = 0; p < PACK; ++p) to[p] = to_float(pack.values[p]);
}
template <class T> __device__ inline void store(T* to, const float (&from)[PACK]) {
  Pack<T> pack;
#pragma unroll
  for (int p = 0; p < PACK; ++p) set(pack.values[p], from[p]);
  *reinterpret_cast<Pack<T>*>(to) = pack;
}

// The sum over the threads of a block, for each of them. The order is fixed.
__device__ inline float block_sum(float x) {
  __shared__ float parts[32];
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  if (blockDim.x <= 32) return x;
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f;
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}
)cuda";

const KernelText kColumnSums = {"column_sums",
                                R"cuda(
typedef Number<OUT>::type Out;
// A warp of each 32 takes 32 columns of every 32nd row.
extern "C" __global__ void __launch_bounds__(1024) column_sums(
    const float* partial, Out* result, const float* second_partial, Out* second_result,
    int count, int width) {
  __shared__ float parts[32][33];
  const float* from = blockIdx.y == 0 ? partial : second_partial;
  Out* to = blockIdx.y == 0 ? result : second_result;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int row = warp; row < count; row += 32) sum += from[(long long)row * width + column];
  }
  parts[warp][lane] = sum;
  __syncthreads();
  sum = parts[lane][warp];
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  const int target = blockIdx.x * 32 + warp;
  if (lane == 0 && target < width) set(to[target], sum);
}
)cuda",
                                {"PACK", "OUT"}};

}  // namespace kernels
}  // namespace accelerate::detail::nn
