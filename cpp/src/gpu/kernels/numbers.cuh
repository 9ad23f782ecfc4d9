// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers as rows hold them, and as float32. By integers and exact products, so that every bit is
// that of base/float_convert.h and base/fp8.h: subnormals stay, ties go to even. NaN stays NaN.
//
// Vectors are eight numbers of a row that begin where they can be loaded at once: the row's first
// byte lies on 16 bytes (FP8: on 4).

#include <cstddef>
#include <cstdint>

#include "fanfold/dtype.h"
#include "gpu/device/device.cuh"
#include "gpu/kernels/faults.cuh"
#include "plan/wire.h"

namespace fanfold::gpu {

constexpr int kVector = 8;                                  // numbers
constexpr int kBlock = static_cast<int>(plan::kWireBlock);  // numbers that share a scale

constexpr std::uint32_t kInfinityBits = 0x7f800000U;
constexpr std::uint32_t kMagnitudeBits = 0x7fffffffU;
constexpr std::uint32_t kQuietBit = 0x00400000U;

/// Bytes of a number of the types that rows may have.
__device__ constexpr std::int64_t number_bytes(DType dtype) {
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kFloat8E4M3 ? 1 : 2;
}

// --- From float32 -----------------------------------------------------------------------------

__device__ inline std::uint32_t bfloat16_from(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if ((bits & kMagnitudeBits) > kInfinityBits) return (bits >> 16) | 0x40U;
  return (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
}

/// `magnitude`, bits of a float32 below a narrower format's normal numbers, in units of its
/// subnormal ones: the significand, shifted by `max_shift` less the exponent.
__device__ inline std::uint32_t subnormal_from(std::uint32_t magnitude, std::uint32_t max_shift) {
  const std::uint32_t significand = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t shift = max_shift - (magnitude >> 23);
  const std::uint32_t floor = significand >> shift;
  const std::uint32_t rest = significand & ((1U << shift) - 1);
  const std::uint32_t half = 1U << (shift - 1);
  const bool is_up = rest > half || (rest == half && (floor & 1U) != 0);
  return floor + (is_up ? 1U : 0U);
}

__device__ inline std::uint32_t float16_from(float value) {
  constexpr std::uint32_t kRoundsToInfinity = 0x477ff000U;  // 65520
  constexpr std::uint32_t kSmallestNormal = 0x38800000U;    // 2^-14
  constexpr std::uint32_t kHalfSubnormal = 0x33000000U;     // 2^-25
  const std::uint32_t bits = __float_as_uint(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & kMagnitudeBits;
  if (magnitude > kInfinityBits) return sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU);
  if (magnitude >= kRoundsToInfinity) return sign | 0x7c00U;
  if (magnitude >= kSmallestNormal) {
    return sign | ((magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13);
  }
  if (magnitude <= kHalfSubnormal) return sign;
  return sign | subnormal_from(magnitude, 126);
}

__device__ inline std::uint32_t e4m3_from(float value) {
  constexpr std::uint32_t kSaturates = 0x43e00000U;       // 448
  constexpr std::uint32_t kSmallestNormal = 0x3c800000U;  // 2^-6
  constexpr std::uint32_t kHalfSubnormal = 0x3a800000U;   // 2^-10
  const std::uint32_t bits = __float_as_uint(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & kMagnitudeBits;
  if (magnitude >= kInfinityBits) return sign | 0x7fU;
  if (magnitude >= kSaturates) return sign | 0x7eU;
  if (magnitude >= kSmallestNormal) {
    return sign | ((magnitude - (120U << 23) + 0x7ffffU + ((magnitude >> 20) & 1U)) >> 20);
  }
  if (magnitude <= kHalfSubnormal) return sign;
  return sign | subnormal_from(magnitude, 141);
}

// --- To float32 -------------------------------------------------------------------------------

__device__ inline float from_bfloat16(std::uint32_t bits) { return __uint_as_float(bits << 16); }

/// The exponent is moved by a product, which is exact, so that subnormals need no case.
__device__ inline float from_float16(std::uint32_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t magnitude = (bits & 0x7fffU) << 13;
  const std::uint32_t number = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), 0x1p112F));
  const bool is_special = (bits & 0x7c00U) == 0x7c00U;
  return __uint_as_float(sign | (is_special ? magnitude | kInfinityBits : number));
}

__device__ inline float from_e4m3(std::uint32_t bits) {
  const std::uint32_t sign = (bits & 0x80U) << 24;
  const std::uint32_t magnitude = (bits & 0x7fU) << 20;
  const std::uint32_t number = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), 0x1p120F));
  const bool is_nan = (bits & 0x7fU) == 0x7fU;
  return __uint_as_float(sign | (is_nan ? kInfinityBits | kQuietBit : number));
}

// --- Scales of 128 numbers --------------------------------------------------------------------

/// As base::fp8_scale of the finite number whose bits are `max_bits`.
__device__ inline float scale_of(std::uint32_t max_bits, bool power_of_two) {
  if (max_bits == 0) return 1.0F;
  float scale = __fdiv_rn(__uint_as_float(max_bits), 448.0F);
  if (scale < 0x1p-126F) scale = 0x1p-126F;
  if (!power_of_two) return scale;
  return __uint_as_float((__float_as_uint(scale) + 0x7fffffU) & kInfinityBits);
}

__device__ inline void store_scale(std::byte* scales, int block, float scale, bool power_of_two) {
  if (power_of_two) {
    scales[block] = static_cast<std::byte>(__float_as_uint(scale) >> 23);
  } else {
    reinterpret_cast<float*>(scales)[block] = scale;
  }
}

__device__ inline float load_scale(const std::byte* scales, int block, bool power_of_two) {
  if (!power_of_two) return reinterpret_cast<const float*>(scales)[block];
  const auto exponent = static_cast<std::uint32_t>(scales[block]);
  std::uint32_t bits = exponent << 23;
  if (exponent == 0 || exponent == 0xff) bits |= kQuietBit;  // 2^-127 is subnormal; NaN
  return __uint_as_float(bits);
}

// --- Rows -------------------------------------------------------------------------------------

/// What a kernel knows of all rows of one kind.
struct RowFormat {
  int hidden;
  int scales_offset;  // FP8: from a row's first byte
  bool power_of_two;
};

/// The number in `column`.
template <DType kType>
__device__ float load_number(const std::byte* row, int column, const RowFormat& format) {
  if constexpr (kType == DType::kFloat32) {
    return reinterpret_cast<const float*>(row)[column];
  } else if constexpr (kType == DType::kFloat8E4M3) {
    const float scale =
        load_scale(row + format.scales_offset, column / kBlock, format.power_of_two);
    return __fmul_rn(from_e4m3(static_cast<std::uint32_t>(row[column])), scale);
  } else {
    const std::uint32_t bits = reinterpret_cast<const std::uint16_t*>(row)[column];
    return kType == DType::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
  }
}

/// A vector as it lies in memory, so that many can be on their way.
template <DType kType>
struct Vector {
  uint4 words;
};
template <>
struct Vector<DType::kFloat32> {
  uint4 words;
  uint4 more_words;
};
template <>
struct Vector<DType::kFloat8E4M3> {
  std::uint64_t bytes;
  float scale;
};

/// Eight bytes that lie on 4: rows of FP8 end with their scales, often in the middle of eight.
__device__ inline std::uint64_t load_bytes(const std::byte* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % 8 == 0) {
    return *reinterpret_cast<const std::uint64_t*>(at);
  }
  const auto* const words = reinterpret_cast<const std::uint32_t*>(at);
  return words[0] | (std::uint64_t{words[1]} << 32);
}

/// Whether vectors of the row can be loaded.
template <DType kType>
__device__ bool is_aligned(const std::byte* row) {
  constexpr std::uintptr_t kBytes = kType == DType::kFloat8E4M3 ? 4 : 16;
  return reinterpret_cast<std::uintptr_t>(row) % kBytes == 0;
}

template <DType kType>
__device__ Vector<kType> load_vector(const std::byte* row, int column, const RowFormat& format) {
  const std::byte* const at = row + std::int64_t{column} * number_bytes(kType);
  if constexpr (kType == DType::kFloat32) {
    return {ld16(at), ld16(at + 16)};
  } else if constexpr (kType == DType::kFloat8E4M3) {
    return {load_bytes(at),
            load_scale(row + format.scales_offset, column / kBlock, format.power_of_two)};
  } else {
    return {ld16(at)};
  }
}

__device__ inline void to_array(const uint4& words, std::uint32_t* array) {
  array[0] = words.x;
  array[1] = words.y;
  array[2] = words.z;
  array[3] = words.w;
}

template <DType kType>
__device__ void numbers_of(const Vector<kType>& vector, float* numbers) {
  if constexpr (kType == DType::kFloat8E4M3) {
    for (int i = 0; i < kVector; ++i) {
      const auto bits = static_cast<std::uint32_t>(vector.bytes >> (8 * i)) & 0xffU;
      numbers[i] = __fmul_rn(from_e4m3(bits), vector.scale);
    }
  } else if constexpr (kType == DType::kFloat32) {
    std::uint32_t words[kVector];
    to_array(vector.words, words);
    to_array(vector.more_words, words + 4);
    for (int i = 0; i < kVector; ++i) numbers[i] = __uint_as_float(words[i]);
  } else {
    std::uint32_t words[kVector / 2];
    to_array(vector.words, words);
    for (int i = 0; i < kVector; ++i) {
      const std::uint32_t bits = (words[i / 2] >> (16 * (i % 2))) & 0xffffU;
      numbers[i] = kType == DType::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
    }
  }
}

// --- Where numbers go -------------------------------------------------------------------------

template <DType kType>
__device__ std::uint32_t rounded(float number) {
  return kType == DType::kFloat16 ? float16_from(number) : bfloat16_from(number);
}

template <DType kType>
__device__ void store_numbers(std::byte* row, int column, const float* numbers, int hidden) {
  for (int i = 0; i < kVector; ++i) {
    if (column + i >= hidden) continue;
    if constexpr (kType == DType::kFloat32) {
      reinterpret_cast<float*>(row)[column + i] = numbers[i];
    } else {
      reinterpret_cast<std::uint16_t*>(row)[column + i] =
          static_cast<std::uint16_t>(rounded<kType>(numbers[i]));
    }
  }
}

template <DType kType>
__device__ void store_vector(std::byte* at, const float* numbers) {
  if constexpr (kType == DType::kFloat32) {
    st16(at, make_uint4(__float_as_uint(numbers[0]), __float_as_uint(numbers[1]),
                        __float_as_uint(numbers[2]), __float_as_uint(numbers[3])));
    st16(at + 16, make_uint4(__float_as_uint(numbers[4]), __float_as_uint(numbers[5]),
                             __float_as_uint(numbers[6]), __float_as_uint(numbers[7])));
  } else {
    std::uint32_t words[kVector / 2];
    for (int i = 0; i < kVector / 2; ++i) {
      const float* const both = numbers + std::ptrdiff_t{2} * i;
      words[i] = rounded<kType>(both[0]) | (rounded<kType>(both[1]) << 16);
    }
    st16(at, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

/// Rounds a vector's numbers once and writes those within the row. `is_vector`: the row lies on 16
/// bytes and ends with a whole vector.
template <DType kType>
__device__ void store(std::byte* row, int column, const float* numbers, int hidden,
                      bool is_vector) {
  if (is_vector) {
    if (column < hidden)
      store_vector<kType>(row + std::int64_t{column} * number_bytes(kType), numbers);
  } else {
    store_numbers<kType>(row, column, numbers, hidden);
  }
}

/// Packs 16 lanes' vectors, which are one block of 128, as base's kernels do. The whole warp calls
/// it, together; columns from `hidden` on hold zeros and are not written.
__device__ inline void pack_vector(std::byte* packed, std::byte* scales, int column,
                                   const float* numbers, const RowFormat& format) {
  std::uint32_t max_bits = 0;
  for (int i = 0; i < kVector; ++i) {
    const std::uint32_t bits = __float_as_uint(numbers[i]) & kMagnitudeBits;
    if (bits < kInfinityBits && bits > max_bits) max_bits = bits;
  }
  for (int lanes = has(Fault::kScaleOfWarp) ? 16 : 8; lanes > 0; lanes /= 2) {
    max_bits = max(max_bits, __shfl_xor_sync(0xffffffffU, max_bits, lanes,
                                             has(Fault::kScaleOfWarp) ? 32 : 16));
  }
  if (column >= format.hidden) return;
  const float scale = scale_of(max_bits, format.power_of_two);
  if (column % kBlock == 0) {
    store_scale(scales, column / kBlock, scale, format.power_of_two);
  }
  // The inverse is a power of two as well: the product is the quotient.
  const float inverse = format.power_of_two ? __fdiv_rn(1.0F, scale) : 1.0F;
  std::uint64_t bytes = 0;
  for (int i = 0; i < kVector; ++i) {
    const float quotient =
        format.power_of_two ? __fmul_rn(numbers[i], inverse) : __fdiv_rn(numbers[i], scale);
    bytes |= std::uint64_t{e4m3_from(quotient)} << (8 * i);
  }
  std::byte* const at = packed + column;
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  if (column + kVector <= format.hidden && address % 4 == 0) {
    if (address % 8 == 0) {
      *reinterpret_cast<std::uint64_t*>(at) = bytes;
    } else {
      reinterpret_cast<std::uint32_t*>(at)[0] = static_cast<std::uint32_t>(bytes);
      reinterpret_cast<std::uint32_t*>(at)[1] = static_cast<std::uint32_t>(bytes >> 32);
    }
    return;
  }
  for (int i = 0; i < kVector && column + i < format.hidden; ++i) {
    at[i] = static_cast<std::byte>(bytes >> (8 * i));
  }
}

}  // namespace fanfold::gpu
