// SPDX-License-Identifier: Apache-2.0
#pragma once

// Copies and sums as fast as this machine does them; compiled for the processor it runs on.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fanfold_bench {

using std::int64_t;
using std::uint32_t;

// ---- copies --------------------------------------------------------------------------------

// Stores past the caches; the caller fences. Destination lines that a peer holds are then
// overwritten without being fetched first.
inline void copy_non_temporal(char* to, const char* from, int64_t bytes) {
  int64_t at = 0;
#if defined(__AVX512F__)
  const int64_t lead = (64 - reinterpret_cast<std::intptr_t>(to) % 64) % 64;
  at = std::min(lead, bytes);
  std::memcpy(to, from, static_cast<std::size_t>(at));
  for (; at + 128 <= bytes; at += 128) {
    const __m512i a = _mm512_loadu_si512(from + at);
    const __m512i b = _mm512_loadu_si512(from + at + 64);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 64), b);
  }
#elif defined(__x86_64__)
  const int64_t lead = (16 - reinterpret_cast<std::intptr_t>(to) % 16) % 16;
  at = std::min(lead, bytes);
  std::memcpy(to, from, static_cast<std::size_t>(at));
  for (; at + 64 <= bytes; at += 64) {
    for (int64_t i = 0; i < 64; i += 16) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + i), a);
    }
  }
#endif
  std::memcpy(to + at, from + at, static_cast<std::size_t>(bytes - at));
}

inline void copy(char* to, const char* from, int64_t bytes, bool non_temporal) {
  if (non_temporal) {
    copy_non_temporal(to, from, bytes);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

inline void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// ---- sums ----------------------------------------------------------------------------------

// Vectors of the widest kind this machine has: the library is built where it runs.
#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#else
constexpr std::size_t kVectorBytes = 32;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

template <typename To, typename From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// One vector of bfloat16 as two of float, elements with even and with odd index: that takes a shift
// and a mask, and no element changes its place. Rounds to nearest even (finite input).
struct BFloat16 {
  static constexpr int64_t kBytes = 2;
  Floats even, odd;

  static BFloat16 load(const char* p) {
    Words raw;
    std::memcpy(&raw, p, sizeof raw);
    return {bits_of<Floats>(raw << 16), bits_of<Floats>(raw & 0xffff0000U)};
  }
  void add(const BFloat16& other) {
    even += other.even;
    odd += other.odd;
  }
  void store(char* p) const {
    const Words low = rounded(bits_of<Words>(even)) >> 16;
    const Words high = rounded(bits_of<Words>(odd)) & 0xffff0000U;
    const Words raw = low | high;
    std::memcpy(p, &raw, sizeof raw);
  }
  static Words rounded(const Words& bits) { return bits + 0x7fffU + ((bits >> 16) & 1U); }
};

struct Float32 {
  static constexpr int64_t kBytes = 4;
  Floats value;

  static Float32 load(const char* p) {
    Float32 out;
    std::memcpy(&out.value, p, sizeof out.value);
    return out;
  }
  void add(const Float32& other) { value += other.value; }
  void store(char* p) const { std::memcpy(p, &value, sizeof value); }
};

// out = rows[0] + ... + rows[count - 1]; `hidden` elements each, the last ones through a buffer.
template <typename Vector>
void sum_rows(char* out, const char* const* rows, int64_t count, int64_t hidden) {
  constexpr auto kStep = static_cast<int64_t>(kVectorBytes);
  constexpr int64_t kUnroll = 4;
  const int64_t bytes = hidden * Vector::kBytes;
  int64_t at = 0;
  for (; at + kUnroll * kStep <= bytes; at += kUnroll * kStep) {
    Vector sum[kUnroll];
    for (int64_t u = 0; u < kUnroll; ++u) sum[u] = Vector::load(rows[0] + at + u * kStep);
    for (int64_t r = 1; r < count; ++r) {
      for (int64_t u = 0; u < kUnroll; ++u) sum[u].add(Vector::load(rows[r] + at + u * kStep));
    }
    for (int64_t u = 0; u < kUnroll; ++u) sum[u].store(out + at + u * kStep);
  }
  for (; at < bytes; at += kStep) {
    const auto part = static_cast<std::size_t>(std::min(kStep, bytes - at));
    char buffer[kVectorBytes] = {};
    std::memcpy(buffer, rows[0] + at, part);
    Vector sum = Vector::load(buffer);
    for (int64_t r = 1; r < count; ++r) {
      std::memcpy(buffer, rows[r] + at, part);
      sum.add(Vector::load(buffer));
    }
    sum.store(buffer);
    std::memcpy(out + at, buffer, part);
  }
}

}  // namespace fanfold_bench
