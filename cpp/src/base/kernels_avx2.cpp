// SPDX-License-Identifier: Apache-2.0
// Compiled with -mavx2 -mf16c; entered only where the processor has them.
#include <immintrin.h>

#include "base/kernels.h"
#include "base/kernels_fp8_inl.h"

namespace fanfold::base {

namespace {

struct Avx2 {
  static constexpr Isa kIsa = Isa::kAvx2;
  static constexpr const char* kName = "avx2";
  static constexpr std::int64_t kLanes = 16;
  static constexpr int kBlockVecs = 4;

  struct Vec {
    __m256 first, second;
  };

  static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vec broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Vec add(Vec a, Vec b) {
    return {_mm256_add_ps(a.first, b.first), _mm256_add_ps(a.second, b.second)};
  }
  static Vec multiply(Vec a, Vec b) {
    return {_mm256_mul_ps(a.first, b.first), _mm256_mul_ps(a.second, b.second)};
  }

  template <DType kType, Order kOrder>
  static Vec load(const std::byte* from) {
    if constexpr (kType == DType::kFloat32) {
      return {_mm256_castsi256_ps(load_bits(from)), _mm256_castsi256_ps(load_bits(from + 32))};
    } else {
      return widen<kType, kOrder>(load_bits(from));
    }
  }

  template <DType kType, Order kOrder>
  static Vec load_first(const std::byte* from, std::int64_t num_lanes) {
    // By way of a buffer: AVX2 has no masked access to 16-bit elements.
    alignas(32) std::byte padded[kLanes * sizeof(float)] = {};
    std::memcpy(padded, from, static_cast<std::size_t>(num_lanes * kElementBytes<kType>));
    return load<kType, kOrder>(padded);
  }

  template <DType kType, Order kOrder>
  static void store(std::byte* to, Vec values) {
    if constexpr (kType == DType::kFloat32) {
      store_bits(to, _mm256_castps_si256(values.first));
      store_bits(to + 32, _mm256_castps_si256(values.second));
    } else {
      store_bits(to, narrow<kType, kOrder>(values));
    }
  }

  template <DType kType, Order kOrder>
  static void store_first(std::byte* to, Vec values, std::int64_t num_lanes) {
    alignas(32) std::byte padded[kLanes * sizeof(float)];
    store<kType, kOrder>(padded, values);
    std::memcpy(to, padded, static_cast<std::size_t>(num_lanes * kElementBytes<kType>));
  }

  static Vec divide(Vec a, Vec b) {
    return {_mm256_div_ps(a.first, b.first), _mm256_div_ps(a.second, b.second)};
  }

  template <std::size_t kNumVecs>
  static std::uint32_t max_magnitude(const Vec (&vecs)[kNumVecs]) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i result = _mm256_setzero_si256();
    for (const Vec& vec : vecs) {
      for (const __m256 part : {vec.first, vec.second}) {
        result = _mm256_max_epu32(result, _mm256_and_si256(_mm256_castps_si256(part), magnitude));
      }
    }
    __m128i half =
        _mm_max_epu32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(half));
  }

  template <Order kOrder>
  static constexpr std::int64_t lane_of(std::int64_t element) {
    if constexpr (kOrder == Order::kSequential) return element;
    return element / 2 + element % 2 * (kLanes / 2);
  }

  template <Order kOrder>
  static void store_e4m3(std::byte* to, Vec values) {
    const __m256i second = _mm256_slli_epi32(biased_e4m3(values.second), 16);
    const __m256i pairs = _mm256_blend_epi16(biased_e4m3(values.first), second, 0xaa);
    const __m256i code = _mm256_and_si256(_mm256_sub_epi16(pairs, _mm256_set1_epi16(kE4M3Bias)),
                                          _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), _mm256_set1_epi16(0x80));
    const __m256i halves = _mm256_or_si256(code, sign);
    __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    if constexpr (kOrder == Order::kSequential) {
      bytes = _mm_shuffle_epi8(bytes,
                               _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), bytes);
  }

  static Vec load_e4m3(const std::byte* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from));
    const __m256i wide = _mm256_cvtepi8_epi16(bytes);
    // As float16 the number is 2^-8 of itself, subnormals included. What is NaN becomes NaN.
    __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(-0x4001));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_slli_epi16(wide, 9), _mm256_set1_epi16(-0x200));
    halves = _mm256_or_si256(halves, _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)));
    return multiply(widen<DType::kFloat16, Order::kSequential>(halves), broadcast(256));
  }

  template <std::size_t kNumLines>
  static void stream_lines(std::byte* dst, const std::byte* src) {
    constexpr std::size_t kNumParts = 2 * kNumLines;
    __m256i parts[kNumParts];
    for (std::size_t i = 0; i < kNumParts; ++i) parts[i] = load_bits(src + i * sizeof(__m256i));
    for (std::size_t i = 0; i < kNumParts; ++i) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i * sizeof(__m256i)), parts[i]);
    }
  }

  template <std::size_t kNumLines>
  static void store_lines(std::byte* dst, const std::byte* src) {
    constexpr std::size_t kNumParts = 2 * kNumLines;
    __m256i parts[kNumParts];
    for (std::size_t i = 0; i < kNumParts; ++i) parts[i] = load_bits(src + i * sizeof(__m256i));
    for (std::size_t i = 0; i < kNumParts; ++i) store_bits(dst + i * sizeof(__m256i), parts[i]);
  }

  static constexpr auto* kCopyStreaming =
      kSeesOnlyOrdinaryStores ? &copy_ordinary<Avx2> : &copy_by_lines<Avx2>;
  static void store_fence() { _mm_sfence(); }

 private:
  static __m256i load_bits(const std::byte* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from));
  }
  static void store_bits(std::byte* to, __m256i bits) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), bits);
  }
  static __m256 float_from_upper_bits(__m256i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }

  template <DType kType, Order kOrder>
  static Vec widen(__m256i halves) {
    if constexpr (kOrder == Order::kEvenOdd) {
      const __m256i odd = _mm256_and_si256(halves, _mm256_set1_epi32(-0x10000));
      return {float_from_upper_bits(halves), _mm256_castsi256_ps(odd)};
    } else {
      const __m128i first = _mm256_castsi256_si128(halves);
      const __m128i second = _mm256_extracti128_si256(halves, 1);
      if constexpr (kType == DType::kFloat16) {
        return {_mm256_cvtph_ps(first), _mm256_cvtph_ps(second)};
      } else {
        return {float_from_upper_bits(_mm256_cvtepu16_epi32(first)),
                float_from_upper_bits(_mm256_cvtepu16_epi32(second))};
      }
    }
  }

  template <DType kType, Order kOrder>
  static __m256i narrow(Vec values) {
    if constexpr (kType == DType::kFloat16) {
      // The rounding is in the instruction, whatever the thread's mode.
      constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
      const __m128i first = _mm256_cvtps_ph(values.first, kNearestEven);
      const __m128i second = _mm256_cvtps_ph(values.second, kNearestEven);
      return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
    } else {
      // Measured: with the NaN case out of the way the sums of few rows run half as fast again.
      if (has_nan(values)) values = {settle_nan(values.first), settle_nan(values.second)};
      const __m256i first = _mm256_srli_epi32(round_to_upper_bits(values.first), 16);
      const __m256i second = round_to_upper_bits(values.second);
      if constexpr (kOrder == Order::kEvenOdd) {
        return _mm256_blend_epi16(first, second, 0xaa);
      } else {
        // Packing works within 128-bit halves; the permutation puts the quarters in order.
        const __m256i packed = _mm256_packus_epi32(first, _mm256_srli_epi32(second, 16));
        return _mm256_permute4x64_epi64(packed, 0xd8);
      }
    }
  }

  // One E4M3 in bits 0 to 6 of each lane, 1128 too large, and its sign in bit 11; no bits between
  // 12 and 15. With E the exponent of a number, but not below that of the smallest normal E4M3,
  // adding 2^(E + 20) leaves its multiple of 2^(E - 3), rounded to even, in the lowest bits of the
  // sum: 8 to 16 for normal E4M3, less for subnormal ones. 8 (E + 7) + that many - 8 is the code;
  // the upper bits of the sum hold 8 (E + 147).
  static __m256i biased_e4m3(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i exponent = _mm256_max_epu32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000)),
                                              _mm256_set1_epi32(0x3c800000));
    const __m256i large = _mm256_or_si256(_mm256_add_epi32(exponent, _mm256_set1_epi32(20 << 23)),
                                          _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN)));
    const __m256i sum = _mm256_castps_si256(_mm256_add_ps(values, _mm256_castsi256_ps(large)));
    return _mm256_add_epi32(sum, _mm256_srli_epi32(sum, 20));
  }

  // bfloat16 in the upper half of each lane, the lower half is left over from rounding. Not for
  // NaN, which the carry could turn into infinity or zero.
  static __m256i round_to_upper_bits(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
  }

  static bool has_nan(Vec values) {
    const __m256 unordered = _mm256_cmp_ps(values.first, values.second, _CMP_UNORD_Q);
    return _mm256_movemask_ps(unordered) != 0;
  }

  // Makes each NaN a quiet one that rounding keeps: no bits below a bfloat16's.
  static __m256 settle_nan(__m256 values) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_set1_epi32(-0x10000));
    const __m256 quiet_bit = _mm256_castsi256_ps(_mm256_set1_epi32(0x400000));
    const __m256 settled = _mm256_or_ps(_mm256_and_ps(values, upper), quiet_bit);
    return _mm256_blendv_ps(values, settled, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  }
};

}  // namespace

const Kernels* avx2_kernels() noexcept { return &kKernelsOf<Avx2>; }

}  // namespace fanfold::base
