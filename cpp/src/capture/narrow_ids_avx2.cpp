// SPDX-License-Identifier: Apache-2.0
// Compiled with -mavx2; entered only where the processor has it. All but the table has internal
// linkage, so that no other file gets code of this one.
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "capture/narrow_table.h"

namespace fanfold::capture {
namespace {

constexpr std::int64_t kLanes = 32;  // ids that one step stores: a full vector of single bytes

__m256i load_vector(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
void store_vector(std::byte* to, __m256i value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
}

/// The checks of the portable loops, for eight ids at a time.
struct Check {
  __m256i largest = _mm256_set1_epi32(-1);
  __m256i upper_bits = _mm256_setzero_si256();

  bool all_below(std::int32_t num_experts) const {
    const __m256i too_large = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(num_experts - 1));
    const __m256i wrong = _mm256_or_si256(too_large, upper_bits);
    return _mm256_testz_si256(wrong, wrong) != 0;
  }
};

/// The same for sixteen ids of 2 bytes.
struct Check2 {
  __m256i largest = _mm256_set1_epi16(-1);

  bool all_below(std::int32_t num_experts) const {
    constexpr std::int32_t kMax = 32767;
    const auto last = static_cast<short>(num_experts - 1 < kMax ? num_experts - 1 : kMax);
    const __m256i too_large = _mm256_cmpgt_epi16(largest, _mm256_set1_epi16(last));
    return _mm256_testz_si256(too_large, too_large) != 0;
  }
};

struct From2 {
  static constexpr std::int64_t kBytes = 2;
  using Check = Check2;
  static __m256i take(const std::byte* ids, Check& check) {
    const __m256i id = _mm256_max_epi16(load_vector(ids), _mm256_set1_epi16(-1));
    check.largest = _mm256_max_epi16(check.largest, id);
    return id;
  }
};

struct From4 {
  using Check = capture::Check;
  static constexpr std::int64_t kBytes = 4;
  static __m256i take(const std::byte* ids, Check& check) {
    const __m256i id = _mm256_max_epi32(load_vector(ids), _mm256_set1_epi32(-1));
    check.largest = _mm256_max_epi32(check.largest, id);
    return id;
  }
};

struct From8 {
  using Check = capture::Check;
  static constexpr std::int64_t kBytes = 8;
  static __m256i take(const std::byte* ids, Check& check) {
    const __m256 first = _mm256_castsi256_ps(load_vector(ids));
    const __m256 second = _mm256_castsi256_ps(load_vector(ids + 32));
    const __m256i lower = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88));
    const __m256i upper = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd));
    const __m256i sign = _mm256_srai_epi32(upper, 31);
    const __m256i id = _mm256_or_si256(lower, sign);
    check.upper_bits =
        _mm256_or_si256(check.upper_bits,
                        _mm256_xor_si256(_mm256_or_si256(upper, sign), _mm256_srai_epi32(id, 31)));
    check.largest = _mm256_max_epi32(check.largest, id);
    return _mm256_permute4x64_epi64(id, 0xd8);  // the shuffles took turns by halves
  }
};

/// Eight ids each of four vectors, stored in `kOutBytes` bytes each.
template <int kOutBytes>
void store_ids_of(__m256i a, __m256i b, __m256i c, __m256i d, std::byte* to) {
  if constexpr (kOutBytes == 4) {
    store_vector(to, a);
    store_vector(to + 32, b);
    store_vector(to + 64, c);
    store_vector(to + 96, d);
  } else if constexpr (kOutBytes == 2) {
    // Packing saturates; with the upper bits gone it is exact. It works by halves, too.
    const __m256i bits = _mm256_set1_epi32(0xffff);
    const __m256i ab = _mm256_packus_epi32(_mm256_and_si256(a, bits), _mm256_and_si256(b, bits));
    const __m256i cd = _mm256_packus_epi32(_mm256_and_si256(c, bits), _mm256_and_si256(d, bits));
    store_vector(to, _mm256_permute4x64_epi64(ab, 0xd8));
    store_vector(to + 32, _mm256_permute4x64_epi64(cd, 0xd8));
  } else {
    const __m256i bits = _mm256_set1_epi32(0xff);
    const __m256i ab = _mm256_packus_epi32(_mm256_and_si256(a, bits), _mm256_and_si256(b, bits));
    const __m256i cd = _mm256_packus_epi32(_mm256_and_si256(c, bits), _mm256_and_si256(d, bits));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store_vector(to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
  }
}

/// Sixteen ids each of two vectors.
template <int kOutBytes>
void store_halves(__m256i a, __m256i b, std::byte* to) {
  if constexpr (kOutBytes == 4) {
    store_vector(to, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(a)));
    store_vector(to + 32, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1)));
    store_vector(to + 64, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(b)));
    store_vector(to + 96, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(b, 1)));
  } else if constexpr (kOutBytes == 2) {
    store_vector(to, a);
    store_vector(to + 32, b);
  } else {
    const __m256i bits = _mm256_set1_epi16(0xff);
    const __m256i ab = _mm256_packus_epi16(_mm256_and_si256(a, bits), _mm256_and_si256(b, bits));
    store_vector(to, _mm256_permute4x64_epi64(ab, 0xd8));
  }
}

template <class From, int kOutBytes>
void narrow_lanes(const std::byte* in, std::byte* out, typename From::Check& check) {
  if constexpr (From::kBytes == 2) {
    const __m256i a = From::take(in, check);
    const __m256i b = From::take(in + 32, check);
    store_halves<kOutBytes>(a, b, out);
    return;
  } else {
    const __m256i a = From::take(in, check);
    const __m256i b = From::take(in + 8 * From::kBytes, check);
    const __m256i c = From::take(in + 16 * From::kBytes, check);
    const __m256i d = From::take(in + 24 * From::kBytes, check);
    store_ids_of<kOutBytes>(a, b, c, d, out);
  }
}

template <class From, int kOutBytes>
bool narrow(const void* ids, std::int64_t num_ids, std::int32_t num_experts, void* to) {
  const auto* in = static_cast<const std::byte*>(ids);
  auto* out = static_cast<std::byte*>(to);
  typename From::Check check;
  for (; num_ids >= kLanes; num_ids -= kLanes) {
    narrow_lanes<From, kOutBytes>(in, out, check);
    in += kLanes * From::kBytes;
    out += kLanes * kOutBytes;
  }
  if (num_ids > 0) {
    // Zeros behind the last ids: 0 is always an expert.
    std::byte padded[static_cast<std::size_t>(kLanes * From::kBytes)] = {};
    std::byte narrowed[static_cast<std::size_t>(kLanes * kOutBytes)];
    std::memcpy(padded, in, static_cast<std::size_t>(num_ids * From::kBytes));
    narrow_lanes<From, kOutBytes>(padded, narrowed, check);
    std::memcpy(out, narrowed, static_cast<std::size_t>(num_ids * kOutBytes));
  }
  return check.all_below(num_experts);
}

}  // namespace

const NarrowTable* avx2_narrow_table() noexcept {
  static constexpr NarrowTable kTable = {{&narrow<From2, 1>, &narrow<From2, 2>, &narrow<From2, 4>},
                                         {&narrow<From4, 1>, &narrow<From4, 2>, &narrow<From4, 4>},
                                         {&narrow<From8, 1>, &narrow<From8, 2>, &narrow<From8, 4>}};
  return &kTable;
}

}  // namespace fanfold::capture
