// Written from the specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
#include "core/xxh3.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <bit>
#include <cstring>

namespace accelerate::detail::inline core {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint64_t kPrime32 = 0x9E3779B1;
constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr std::uint64_t kPrimeMx1 = 0x165667919E3779F9;
constexpr std::uint64_t kPrimeMx2 = 0x9FB21C651E98DF25;

constexpr std::size_t kSecretBytes = 192;
constexpr std::array<unsigned char, kSecretBytes> kSecret{
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

std::uint64_t read64(const std::byte* at) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::uint64_t read32(const std::byte* at) {
  std::uint32_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

const std::byte* secret(std::size_t at) {
  return reinterpret_cast<const std::byte*>(kSecret.data()) + at;
}

std::uint64_t secret64(std::size_t at) { return read64(secret(at)); }

// The halves of the 128-bit product, xored.
std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t avalanche(std::uint64_t h) {
  h ^= h >> 37;
  h *= kPrimeMx1;
  return h ^ h >> 32;
}

std::uint64_t avalanche_xxh64(std::uint64_t h) {
  h ^= h >> 33;
  h *= kPrime2;
  h ^= h >> 29;
  h *= kPrime3;
  return h ^ h >> 32;
}

std::uint64_t mix16(const std::byte* in, std::size_t secret_at) {
  return fold(read64(in) ^ secret64(secret_at), read64(in + 8) ^ secret64(secret_at + 8));
}

std::uint64_t hash_up_to_16(const std::byte* in, std::size_t size) {
  if (size > 8) {
    const auto low = read64(in) ^ secret64(24) ^ secret64(32);
    const auto high = read64(in + size - 8) ^ secret64(40) ^ secret64(48);
    return avalanche(size + __builtin_bswap64(low) + high + fold(low, high));
  }
  if (size >= 4) {
    auto h = read32(in + size - 4) + (read32(in) << 32);
    h ^= secret64(8) ^ secret64(16);
    h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
    h *= kPrimeMx2;
    h ^= (h >> 35) + size;
    h *= kPrimeMx2;
    return h ^ h >> 28;
  }
  if (size == 0) return avalanche_xxh64(secret64(56) ^ secret64(64));
  const auto byte = [&](std::size_t at) { return std::to_integer<std::uint64_t>(in[at]); };
  const auto all = byte(0) << 16 | byte(size / 2) << 24 | byte(size - 1) | size << 8;
  return avalanche_xxh64(all ^ read32(secret(0)) ^ read32(secret(4)));
}

std::uint64_t hash_up_to_128(const std::byte* in, std::size_t size) {
  std::uint64_t h = size * kPrime1;
  for (std::size_t i = (size - 1) / 32 + 1; i-- > 0;) {
    h += mix16(in + 16 * i, 32 * i) + mix16(in + size - 16 * (i + 1), 32 * i + 16);
  }
  return avalanche(h);
}

std::uint64_t hash_up_to_240(const std::byte* in, std::size_t size) {
  std::uint64_t h = size * kPrime1;
  for (std::size_t i = 0; i < 8; ++i) h += mix16(in + 16 * i, 16 * i);
  h = avalanche(h);
  for (std::size_t i = 8; i < size / 16; ++i) h += mix16(in + 16 * i, 16 * (i - 8) + 3);
  return avalanche(h + mix16(in + size - 16, 136 - 17));
}

using Lanes = std::array<std::uint64_t, 8>;

void accumulate(Lanes& lanes, const std::byte* stripe, const std::byte* key) {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const auto value = read64(stripe + 8 * i);
    const auto mixed = value ^ read64(key + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
  }
}

void consume_plainly(Lanes& all, const std::byte* block, std::size_t stripes, std::size_t stripe) {
  Lanes lanes = all;  // in registers: the input cannot alias them
  for (std::size_t i = 0; i < stripes; ++i) {
    accumulate(lanes, block + i * stripe, secret(8 * i));
  }
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i] ^= lanes[i] >> 47;
    lanes[i] ^= secret64(kSecretBytes - stripe + 8 * i);
    lanes[i] *= kPrime32;
  }
  all = lanes;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) __m256i load(const std::byte* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

// The same on two registers of four lanes.
__attribute__((target("avx2"))) void consume_with_avx2(Lanes& all, const std::byte* block,
                                                       std::size_t stripes, std::size_t stripe) {
  auto* const memory = reinterpret_cast<std::byte*>(all.data());
  __m256i lanes[2] = {load(memory), load(memory + 32)};
  for (std::size_t i = 0; i < stripes; ++i) {
    for (std::size_t half = 0; half < 2; ++half) {
      const auto value = load(block + i * stripe + 32 * half);
      const auto mixed = _mm256_xor_si256(value, load(secret(8 * i) + 32 * half));
      const auto product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
      const auto neighbour = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
      lanes[half] = _mm256_add_epi64(lanes[half], _mm256_add_epi64(product, neighbour));
    }
  }
  const auto prime = _mm256_set1_epi32(static_cast<int>(kPrime32));
  for (std::size_t half = 0; half < 2; ++half) {
    auto lane = _mm256_xor_si256(lanes[half], _mm256_srli_epi64(lanes[half], 47));
    lane = _mm256_xor_si256(lane, load(secret(kSecretBytes - stripe) + 32 * half));
    const auto low = _mm256_mul_epu32(lane, prime);
    const auto high = _mm256_mul_epu32(_mm256_srli_epi64(lane, 32), prime);
    lane = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(memory + 32 * half), lane);
  }
}
#endif

using Consume = void (*)(Lanes&, const std::byte*, std::size_t, std::size_t);
Consume best_consume() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return consume_with_avx2;
#endif
  return consume_plainly;
}

}  // namespace

void Xxh3::consume_block(const std::byte* block) {
  static const Consume consume = best_consume();
  consume(lanes_, block, kBlock / kStripe, kStripe);
}

void Xxh3::update(std::span<const std::byte> bytes) {
  total_ += bytes.size();
  std::byte* pending = buffer_.data() + kStripe;
  // A block is consumed once a byte behind it is known: the last bytes are treated differently.
  while (pending_ + bytes.size() > kBlock) {
    if (pending_ == 0) {
      consume_block(bytes.data());
      std::memcpy(buffer_.data(), bytes.data() + kBlock - kStripe, kStripe);
      bytes = bytes.subspan(kBlock);
      continue;
    }
    const auto missing = kBlock - pending_;
    std::memcpy(pending + pending_, bytes.data(), missing);
    bytes = bytes.subspan(missing);
    consume_block(pending);
    std::memcpy(buffer_.data(), pending + kBlock - kStripe, kStripe);
    pending_ = 0;
  }
  if (bytes.empty()) return;
  std::memcpy(pending + pending_, bytes.data(), bytes.size());
  pending_ += bytes.size();
}

std::uint64_t Xxh3::digest_long() const {
  Lanes lanes = lanes_;
  const std::byte* pending = buffer_.data() + kStripe;
  for (std::size_t i = 0; i < (pending_ - 1) / kStripe; ++i) {
    accumulate(lanes, pending + i * kStripe, secret(8 * i));
  }
  accumulate(lanes, pending + pending_ - kStripe, secret(kSecretBytes - kStripe - 7));
  std::uint64_t h = total_ * kPrime1;
  for (std::size_t i = 0; i < lanes.size(); i += 2) {
    h += fold(lanes[i] ^ secret64(11 + 8 * i), lanes[i + 1] ^ secret64(19 + 8 * i));
  }
  return avalanche(h);
}

std::uint64_t Xxh3::digest() const {
  const std::byte* bytes = buffer_.data() + kStripe;  // all of them, if there are few
  if (total_ <= 16) return hash_up_to_16(bytes, pending_);
  if (total_ <= 128) return hash_up_to_128(bytes, pending_);
  if (total_ <= 240) return hash_up_to_240(bytes, pending_);
  return digest_long();
}

std::uint64_t xxh3(std::span<const std::byte> bytes) {
  Xxh3 hash;
  hash.update(bytes);
  return hash.digest();
}

}  // namespace accelerate::detail::inline core
