#include "core/copy_past_cache.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace accelerate::detail::inline core {

bool exceeds_cache(std::size_t bytes) noexcept {
  static const auto cache = [] {
    const long known = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
    return known > 0 ? static_cast<std::size_t>(known) : std::size_t{32} << 20;
  }();
  return bytes > cache;
}

#if defined(__SSE2__)

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kAhead = 2048;  // what the memory needs to be there in time
  const auto misplaced = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const auto head = std::min(misplaced == 0 ? 0 : kLine - misplaced, bytes);
  std::memcpy(to, from, head);
  const auto lines = (bytes - head) / kLine;
  auto* out = reinterpret_cast<__m128i*>(to + head);
  const auto* in = reinterpret_cast<const __m128i*>(from + head);
  for (std::size_t line = 0; line < lines; ++line, in += 4, out += 4) {
    _mm_prefetch(reinterpret_cast<const char*>(in) + kAhead, _MM_HINT_T0);
    const auto a = _mm_loadu_si128(in);
    const auto b = _mm_loadu_si128(in + 1);
    const auto c = _mm_loadu_si128(in + 2);
    const auto d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();  // such writes are not ordered with those that follow
  const auto done = head + lines * kLine;
  std::memcpy(to + done, from + done, bytes - done);
}

#else

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}

#endif

}  // namespace accelerate::detail::inline core
