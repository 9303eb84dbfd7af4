#include "comm/shm_reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <type_traits>

#include "core/for_each_processor.h"

#define ACCELERATE_INLINE __attribute__((always_inline)) inline

namespace accelerate::detail::comm {
namespace {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
struct Truth {
  std::uint8_t bits;
};

// One of two numbers without a branch, which would keep the compiler from working on many at once.
ACCELERATE_INLINE std::uint32_t choose(bool first, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0U - static_cast<std::uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

// The exponent is moved into place by a multiplication, which also gets infinities right;
// subnormals by a subtraction.
ACCELERATE_INLINE float widen(Half half) {
  const std::uint32_t word = static_cast<std::uint32_t>(half.bits) << 16;
  const std::uint32_t magnitude = word + word;
  const float normal = std::bit_cast<float>((magnitude >> 4) + (0xE0U << 23)) * 0x1.0p-112F;
  const float subnormal = std::bit_cast<float>((magnitude >> 17) | (126U << 23)) - 0.5F;
  const auto bits = choose(magnitude < (1U << 27), std::bit_cast<std::uint32_t>(subnormal),
                           std::bit_cast<std::uint32_t>(normal));
  return std::bit_cast<float>((word & 0x8000'0000U) | bits);
}

// Adding a number of the right exponent rounds the mantissa, to even, as the processor does.
ACCELERATE_INLINE void narrow(float value, Half& out) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = word + word;
  const std::uint32_t exponent = magnitude & 0xFF00'0000U;
  const std::uint32_t bias = choose(exponent < 0x7100'0000U, 0x7100'0000U, exponent);
  const float absolute = std::bit_cast<float>(word & 0x7FFF'FFFFU);
  const float scaled = absolute * 0x1.0p+112F * 0x1.0p-110F;
  const auto sum =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>((bias >> 1) + 0x0780'0000U) + scaled);
  const std::uint32_t rounded = ((sum >> 13) & 0x7C00U) + (sum & 0x0FFFU);
  const std::uint32_t nan = 0x7E00U;
  out.bits = static_cast<std::uint16_t>(((word & 0x8000'0000U) >> 16) |
                                        choose(magnitude > 0xFF00'0000U, nan, rounded));
}

ACCELERATE_INLINE float widen(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

ACCELERATE_INLINE void narrow(float value, BFloat16& out) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (word + ((word >> 16) & 1U) + 0x7FFFU) >> 16;
  const std::uint32_t nan = 0x7FC0U;
  out.bits = static_cast<std::uint16_t>(value != value ? nan : rounded);
}

ACCELERATE_INLINE std::uint8_t widen(Truth value) { return value.bits; }
ACCELERATE_INLINE void narrow(std::uint8_t value, Truth& out) { out.bits = value; }

template <class T>
ACCELERATE_INLINE T widen(T value) {
  return value;
}
template <class Wide, class T>
ACCELERATE_INLINE void narrow(Wide value, T& out) {
  out = static_cast<T>(value);
}

template <class T>
using WideOf = decltype(widen(T{}));

// Integers wrap: signed ones are added without their sign. Small ones would become int otherwise.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) > 4), std::uint64_t, std::uint32_t>;

template <class F>
struct Wrapped {
  template <class T>
  ACCELERATE_INLINE static T of(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(F()(static_cast<Wrapping<T>>(a), static_cast<Wrapping<T>>(b)));
    } else {
      return F()(a, b);
    }
  }
};

using Sum = Wrapped<std::plus<>>;
using Product = Wrapped<std::multiplies<>>;
using And = Wrapped<std::bit_and<>>;
using Or = Wrapped<std::bit_or<>>;
using Xor = Wrapped<std::bit_xor<>>;

// The comparison with itself is true for NaN alone, which wins on either side.
struct Minimum {
  template <class T>
  ACCELERATE_INLINE static T of(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Maximum {
  template <class T>
  ACCELERATE_INLINE static T of(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct Job {
  ShmReduction reduction;
  std::span<const std::byte* const> sources;
  std::byte* out;
  std::byte* also;
  std::size_t count;
};

// A block of results stays in the first cache until all ranks have been added.
constexpr std::size_t kBlockBytes = 8192;

template <class Operation, class T, class Wide>
ACCELERATE_INLINE void reduce_blocks(const Job& job) {
  constexpr std::size_t kBlock = kBlockBytes / sizeof(Wide);
  alignas(64) Wide sum[kBlock];
  const auto ranks = job.sources.size();
  for (std::size_t begin = 0; begin < job.count; begin += kBlock) {
    const auto n = std::min(kBlock, job.count - begin);
    const auto source = [&](std::size_t rank) __attribute__((always_inline)) {
      return reinterpret_cast<const T*>(job.sources[rank]) + begin;
    };
    const T* first = source(0);
    if (ranks == 1) {
      for (std::size_t i = 0; i < n; ++i) sum[i] = static_cast<Wide>(widen(first[i]));
    } else {
      const T* second = source(1);
      for (std::size_t i = 0; i < n; ++i) {
        sum[i] =
            Operation::of(static_cast<Wide>(widen(first[i])), static_cast<Wide>(widen(second[i])));
      }
    }
    for (std::size_t rank = 2; rank < ranks; ++rank) {
      const T* next = source(rank);
      for (std::size_t i = 0; i < n; ++i) {
        sum[i] = Operation::of(sum[i], static_cast<Wide>(widen(next[i])));
      }
    }
    if (job.reduction == ShmReduction::kAverage) {
      const auto divisor = static_cast<Wide>(ranks);
      for (std::size_t i = 0; i < n; ++i) sum[i] = static_cast<Wide>(sum[i] / divisor);
    }
    T* out = reinterpret_cast<T*>(job.out) + begin;
    for (std::size_t i = 0; i < n; ++i) narrow(sum[i], out[i]);
    if (job.also != nullptr) {
      std::memcpy(job.also + begin * sizeof(T), out, n * sizeof(T));
    }
  }
}

template <class Operation, class T>
ACCELERATE_INLINE void reduce_as(const Job& job) {
  reduce_blocks<Operation, T, WideOf<T>>(job);
}

template <class T>
ACCELERATE_INLINE void reduce_float(const Job& job) {
  switch (job.reduction) {
    case ShmReduction::kProduct:
      return reduce_as<Product, T>(job);
    case ShmReduction::kMinimum:
      return reduce_as<Minimum, T>(job);
    case ShmReduction::kMaximum:
      return reduce_as<Maximum, T>(job);
    default:
      return reduce_as<Sum, T>(job);
  }
}

// What depends on the sign. The sum of which the average is a part may not fit where that does.
template <class T>
ACCELERATE_INLINE void reduce_signed(const Job& job) {
  using Widest = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  switch (job.reduction) {
    case ShmReduction::kAverage:
      return reduce_blocks<Sum, T, Widest>(job);
    case ShmReduction::kMinimum:
      return reduce_as<Minimum, T>(job);
    default:
      return reduce_as<Maximum, T>(job);
  }
}

template <class T>
ACCELERATE_INLINE void reduce_unsigned(const Job& job) {
  switch (job.reduction) {
    case ShmReduction::kSum:
      return reduce_as<Sum, T>(job);
    case ShmReduction::kProduct:
      return reduce_as<Product, T>(job);
    case ShmReduction::kAnd:
      return reduce_as<And, T>(job);
    case ShmReduction::kOr:
      return reduce_as<Or, T>(job);
    case ShmReduction::kXor:
      return reduce_as<Xor, T>(job);
    default:
      return reduce_signed<T>(job);
  }
}

ACCELERATE_INLINE void reduce_truth(const Job& job) {
  switch (job.reduction) {
    case ShmReduction::kProduct:
    case ShmReduction::kMinimum:
    case ShmReduction::kAnd:
      return reduce_as<And, Truth>(job);
    case ShmReduction::kXor:
      return reduce_as<Xor, Truth>(job);
    default:
      return reduce_as<Or, Truth>(job);
  }
}

ACCELERATE_FOR_EACH_PROCESSOR void reduce_job(Element element, const Job& job) {
  switch (element) {
    case Element::kBool:
      return reduce_truth(job);
    case Element::kInt8:
      return reduce_signed<std::int8_t>(job);
    case Element::kUInt8:
      return reduce_unsigned<std::uint8_t>(job);
    case Element::kInt16:
      return reduce_signed<std::int16_t>(job);
    case Element::kUInt16:
      return reduce_unsigned<std::uint16_t>(job);
    case Element::kInt32:
      return reduce_signed<std::int32_t>(job);
    case Element::kUInt32:
      return reduce_unsigned<std::uint32_t>(job);
    case Element::kInt64:
      return reduce_signed<std::int64_t>(job);
    case Element::kUInt64:
      return reduce_unsigned<std::uint64_t>(job);
    case Element::kFloat16:
      return reduce_float<Half>(job);
    case Element::kBFloat16:
      return reduce_float<BFloat16>(job);
    case Element::kFloat32:
      return reduce_float<float>(job);
    case Element::kFloat64:
      return reduce_float<double>(job);
  }
}

bool sign_matters(ShmReduction reduction) {
  return reduction == ShmReduction::kAverage || reduction == ShmReduction::kMinimum ||
         reduction == ShmReduction::kMaximum;
}

Element without_sign(Element element) {
  switch (element) {
    case Element::kInt8:
      return Element::kUInt8;
    case Element::kInt16:
      return Element::kUInt16;
    case Element::kInt32:
      return Element::kUInt32;
    case Element::kInt64:
      return Element::kUInt64;
    default:
      return element;
  }
}

bool is_float(Element element) {
  return element == Element::kFloat16 || element == Element::kBFloat16 ||
         element == Element::kFloat32 || element == Element::kFloat64;
}

}  // namespace

std::size_t bytes_of(Element element) noexcept {
  constexpr std::uint8_t kBytes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};  // as in Element
  return kBytes[static_cast<std::size_t>(element)];
}

bool can_reduce(Element element, ShmReduction reduction) noexcept {
  switch (reduction) {
    case ShmReduction::kAnd:
    case ShmReduction::kOr:
    case ShmReduction::kXor:
      return !is_float(element);
    case ShmReduction::kAverage:
      return element != Element::kBool;
    default:
      return true;
  }
}

void reduce_elements(Element element, ShmReduction reduction,
                     std::span<const std::byte* const> sources, std::byte* out, std::byte* also,
                     std::size_t count) noexcept {
  if (count == 0) return;
  if (!sign_matters(reduction)) element = without_sign(element);
  reduce_job(element, {reduction, sources, out, also, count});
}

}  // namespace accelerate::detail::comm
