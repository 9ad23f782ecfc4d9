// SPDX-License-Identifier: Apache-2.0
// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c; entered only where the processor
// has them.

// GCC 12 takes the "undefined" operands inside its own intrinsics for uses of uninitialised values.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "base/kernels.h"
#include "base/kernels_fp8_inl.h"

namespace fanfold::base {

namespace {

struct Avx512 {
  static constexpr Isa kIsa = Isa::kAvx512;
  static constexpr const char* kName = "avx512";
  static constexpr std::int64_t kLanes = 32;
  static constexpr int kBlockVecs = 4;

  struct Vec {
    __m512 first, second;
  };

  static Vec zero() { return {_mm512_setzero_ps(), _mm512_setzero_ps()}; }
  static Vec broadcast(float value) { return {_mm512_set1_ps(value), _mm512_set1_ps(value)}; }
  static Vec add(Vec a, Vec b) {
    return {_mm512_add_ps(a.first, b.first), _mm512_add_ps(a.second, b.second)};
  }
  static Vec multiply(Vec a, Vec b) {
    return {_mm512_mul_ps(a.first, b.first), _mm512_mul_ps(a.second, b.second)};
  }

  template <DType kType, Order kOrder>
  static Vec load(const std::byte* from) {
    if constexpr (kType == DType::kFloat32) {
      return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 64)};
    } else {
      return widen<kType, kOrder>(_mm512_loadu_si512(from));
    }
  }

  template <DType kType, Order kOrder>
  static Vec load_first(const std::byte* from, std::int64_t num_lanes) {
    const __mmask32 mask = mask_of(num_lanes);
    if constexpr (kType == DType::kFloat32) {
      return {_mm512_maskz_loadu_ps(low(mask), from), _mm512_maskz_loadu_ps(high(mask), from + 64)};
    } else {
      return widen<kType, kOrder>(_mm512_maskz_loadu_epi16(mask, from));
    }
  }

  template <DType kType, Order kOrder>
  static void store(std::byte* to, Vec values) {
    if constexpr (kType == DType::kFloat32) {
      _mm512_storeu_ps(to, values.first);
      _mm512_storeu_ps(to + 64, values.second);
    } else {
      _mm512_storeu_si512(to, narrow<kType, kOrder>(values));
    }
  }

  template <DType kType, Order kOrder>
  static void store_first(std::byte* to, Vec values, std::int64_t num_lanes) {
    const __mmask32 mask = mask_of(num_lanes);
    if constexpr (kType == DType::kFloat32) {
      _mm512_mask_storeu_ps(to, low(mask), values.first);
      _mm512_mask_storeu_ps(to + 64, high(mask), values.second);
    } else {
      _mm512_mask_storeu_epi16(to, mask, narrow<kType, kOrder>(values));
    }
  }

  static Vec divide(Vec a, Vec b) {
    return {_mm512_div_ps(a.first, b.first), _mm512_div_ps(a.second, b.second)};
  }

  template <std::size_t kNumVecs>
  static std::uint32_t max_magnitude(const Vec (&vecs)[kNumVecs]) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i result = _mm512_setzero_si512();
    for (const Vec& vec : vecs) {
      for (const __m512 part : {vec.first, vec.second}) {
        result = _mm512_max_epu32(result, _mm512_and_si512(_mm512_castps_si512(part), magnitude));
      }
    }
    return _mm512_reduce_max_epu32(result);
  }

  template <Order kOrder>
  static constexpr std::int64_t lane_of(std::int64_t element) {
    if constexpr (kOrder == Order::kSequential) return element;
    return element / 2 + element % 2 * (kLanes / 2);
  }

  template <Order kOrder>
  static void store_e4m3(std::byte* to, Vec values) {
    constexpr int kSelect = 0xca;  // a ? b : c
    const __m512i second = _mm512_slli_epi32(biased_e4m3(values.second), 16);
    const __m512i pairs = _mm512_mask_blend_epi16(0xaaaaaaaaU, biased_e4m3(values.first), second);
    const __m512i codes =
        _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x80), _mm512_srli_epi16(pairs, 4),
                                  _mm512_sub_epi16(pairs, _mm512_set1_epi16(kE4M3Bias)), kSelect);
    __m256i bytes = _mm512_cvtepi16_epi8(codes);
    if constexpr (kOrder == Order::kSequential) {
      const __m256i apart =
          _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                         0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
      bytes = _mm256_permute4x64_epi64(apart, 0xd8);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), bytes);
  }

  static Vec load_e4m3(const std::byte* from) {
    const __m512i wide =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from)));
    // As float16 the number is 2^-8 of itself, subnormals included. What is NaN becomes NaN.
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(-0x4001));
    const __mmask32 nan =
        _mm512_cmpeq_epi16_mask(_mm512_slli_epi16(wide, 9), _mm512_set1_epi16(-0x200));
    const __m512i settled = _mm512_mask_mov_epi16(halves, nan, _mm512_set1_epi16(0x7e00));
    return multiply(widen<DType::kFloat16, Order::kSequential>(settled), broadcast(256));
  }

  template <std::size_t kNumLines>
  static void stream_lines(std::byte* dst, const std::byte* src) {
    __m512i lines[kNumLines];
    for (std::size_t i = 0; i < kNumLines; ++i) {
      lines[i] = _mm512_loadu_si512(src + i * sizeof(__m512i));
    }
    for (std::size_t i = 0; i < kNumLines; ++i) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i * sizeof(__m512i)), lines[i]);
    }
  }

  template <std::size_t kNumLines>
  static void store_lines(std::byte* dst, const std::byte* src) {
    __m512i lines[kNumLines];
    for (std::size_t i = 0; i < kNumLines; ++i) {
      lines[i] = _mm512_loadu_si512(src + i * sizeof(__m512i));
    }
    for (std::size_t i = 0; i < kNumLines; ++i) {
      _mm512_storeu_si512(dst + i * sizeof(__m512i), lines[i]);
    }
  }

  static constexpr auto* kCopyStreaming =
      kSeesOnlyOrdinaryStores ? &copy_ordinary<Avx512> : &copy_by_lines<Avx512>;
  static void store_fence() { _mm_sfence(); }

 private:
  static __mmask32 mask_of(std::int64_t num_lanes) {
    return static_cast<__mmask32>((std::uint64_t{1} << num_lanes) - 1);
  }
  static __mmask16 low(__mmask32 mask) { return static_cast<__mmask16>(mask & 0xffffU); }
  static __mmask16 high(__mmask32 mask) { return static_cast<__mmask16>(mask >> 16); }

  static __m512 float_from_upper_bits(__m512i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }

  template <DType kType, Order kOrder>
  static Vec widen(__m512i halves) {
    if constexpr (kOrder == Order::kEvenOdd) {
      const __m512i odd = _mm512_and_si512(halves, _mm512_set1_epi32(-0x10000));
      return {float_from_upper_bits(halves), _mm512_castsi512_ps(odd)};
    } else {
      const __m256i first = _mm512_castsi512_si256(halves);
      const __m256i second = _mm512_extracti64x4_epi64(halves, 1);
      if constexpr (kType == DType::kFloat16) {
        return {_mm512_cvtph_ps(first), _mm512_cvtph_ps(second)};
      } else {
        return {float_from_upper_bits(_mm512_cvtepu16_epi32(first)),
                float_from_upper_bits(_mm512_cvtepu16_epi32(second))};
      }
    }
  }

  template <DType kType, Order kOrder>
  static __m512i narrow(Vec values) {
    if constexpr (kType == DType::kFloat16) {
      // The rounding is in the instruction, whatever the thread's mode.
      constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
      // With a mask of all lanes, as GCC's macro for the plain form narrows a -1 at -O0.
      return join(_mm512_maskz_cvtps_ph(0xffffU, values.first, kNearestEven),
                  _mm512_maskz_cvtps_ph(0xffffU, values.second, kNearestEven));
    } else {
      if (has_nan(values)) values = {settle_nan(values.first), settle_nan(values.second)};
      const __m512i first = _mm512_srli_epi32(round_to_upper_bits(values.first), 16);
      const __m512i second = round_to_upper_bits(values.second);
      if constexpr (kOrder == Order::kEvenOdd) {
        return _mm512_mask_blend_epi16(0xaaaaaaaaU, first, second);
      } else {
        return join(_mm512_cvtepi32_epi16(first),
                    _mm512_cvtepi32_epi16(_mm512_srli_epi32(second, 16)));
      }
    }
  }

  static __m512i join(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }

  // One E4M3 in bits 0 to 6 of each lane, 1128 too large, and its sign in bit 11; no bits between
  // 12 and 15. With E the exponent of a number, but not below that of the smallest normal E4M3,
  // adding 2^(E + 20) leaves its multiple of 2^(E - 3), rounded to even, in the lowest bits of the
  // sum: 8 to 16 for normal E4M3, less for subnormal ones. 8 (E + 7) + that many - 8 is the code;
  // the upper bits of the sum hold 8 (E + 147).
  static __m512i biased_e4m3(__m512 values) {
    constexpr int kLargerMagnitude = 0b0011;  // with the sign of the first
    const __m512 at_least_normal =
        _mm512_range_ps(values, _mm512_set1_ps(0x1p-6F), kLargerMagnitude);
    const __m512i exponent =
        _mm512_and_si512(_mm512_castps_si512(at_least_normal), _mm512_set1_epi32(-0x800000));
    const __m512i large = _mm512_add_epi32(exponent, _mm512_set1_epi32(20 << 23));
    const __m512i sum = _mm512_castps_si512(_mm512_add_ps(values, _mm512_castsi512_ps(large)));
    return _mm512_add_epi32(sum, _mm512_srli_epi32(sum, 20));
  }

  // bfloat16 in the upper half of each lane, the lower half is left over from rounding. Not for
  // NaN, which the carry could turn into infinity or zero. The hardware's own conversion would
  // flush subnormals.
  static __m512i round_to_upper_bits(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
  }

  static bool has_nan(Vec values) {
    return _mm512_cmp_ps_mask(values.first, values.second, _CMP_UNORD_Q) != 0;
  }

  // Makes each NaN a quiet one that rounding keeps: no bits below a bfloat16's.
  static __m512 settle_nan(__m512 values) {
    const __m512 upper = _mm512_castsi512_ps(_mm512_set1_epi32(-0x10000));
    const __m512 quiet_bit = _mm512_castsi512_ps(_mm512_set1_epi32(0x400000));
    const __m512 settled = _mm512_or_ps(_mm512_and_ps(values, upper), quiet_bit);
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(nan, values, settled);
  }
};

}  // namespace

const Kernels* avx512_kernels() noexcept { return &kKernelsOf<Avx512>; }

}  // namespace fanfold::base
