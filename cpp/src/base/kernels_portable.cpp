// SPDX-License-Identifier: Apache-2.0
// Plain C++ for every processor: the definition that the other instruction sets are compared with.
#include "base/float_convert.h"
#include "base/fp8.h"
#include "base/kernels.h"
#include "base/kernels_fp8_inl.h"

namespace fanfold::base {

namespace {

struct Portable {
  static constexpr Isa kIsa = Isa::kPortable;
  static constexpr const char* kName = "portable";
  static constexpr std::int64_t kLanes = 16;
  static constexpr int kBlockVecs = 1;

  struct Vec {
    float lanes[kLanes];
  };

  static Vec zero() { return {}; }
  static Vec broadcast(float value) {
    Vec result;
    for (float& lane : result.lanes) lane = value;
    return result;
  }
  static Vec add(const Vec& a, const Vec& b) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result.lanes[i] = a.lanes[i] + b.lanes[i];
    return result;
  }
  static Vec multiply(const Vec& a, const Vec& b) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result.lanes[i] = a.lanes[i] * b.lanes[i];
    return result;
  }

  template <DType kType, Order>
  static Vec load(const std::byte* from) {
    return load_first<kType, Order::kSequential>(from, kLanes);
  }

  template <DType kType, Order>
  static Vec load_first(const std::byte* from, std::int64_t num_lanes) {
    const auto num_bytes = static_cast<std::size_t>(num_lanes * kElementBytes<kType>);
    Vec result = {};
    if constexpr (kType == DType::kFloat32) {
      std::memcpy(result.lanes, from, num_bytes);
    } else {
      std::uint16_t halves[kLanes] = {};
      std::memcpy(halves, from, num_bytes);
      for (int i = 0; i < kLanes; ++i) result.lanes[i] = float_from_half<kType>(halves[i]);
    }
    return result;
  }

  template <DType kType, Order>
  static void store(std::byte* to, const Vec& values) {
    store_first<kType, Order::kSequential>(to, values, kLanes);
  }

  template <DType kType, Order>
  static void store_first(std::byte* to, const Vec& values, std::int64_t num_lanes) {
    const auto num_bytes = static_cast<std::size_t>(num_lanes * kElementBytes<kType>);
    if constexpr (kType == DType::kFloat32) {
      std::memcpy(to, values.lanes, num_bytes);
    } else {
      std::uint16_t halves[kLanes];
      for (int i = 0; i < kLanes; ++i) halves[i] = half_from_float<kType>(values.lanes[i]);
      std::memcpy(to, halves, num_bytes);
    }
  }

  static Vec divide(const Vec& a, const Vec& b) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result.lanes[i] = a.lanes[i] / b.lanes[i];
    return result;
  }

  template <std::size_t kNumVecs>
  static std::uint32_t max_magnitude(const Vec (&vecs)[kNumVecs]) {
    std::uint32_t result = 0;
    for (const Vec& vec : vecs) {
      for (const float lane : vec.lanes) {
        const std::uint32_t magnitude = float_bits(lane) & 0x7fffffffU;
        result = magnitude > result ? magnitude : result;
      }
    }
    return result;
  }

  template <Order>
  static constexpr std::int64_t lane_of(std::int64_t element) {
    return element;
  }

  template <Order>
  static void store_e4m3(std::byte* to, const Vec& values) {
    for (int i = 0; i < kLanes; ++i) {
      to[i] = static_cast<std::byte>(e4m3_from_float(values.lanes[i]));
    }
  }

  static Vec load_e4m3(const std::byte* from) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) {
      result.lanes[i] = float_from_e4m3(static_cast<std::uint8_t>(from[i]));
    }
    return result;
  }

  template <std::size_t kNumLines>
  static void store_lines(std::byte* dst, const std::byte* src) {
    std::memcpy(dst, src, kNumLines * kLineBytes);
  }

  static constexpr auto* kCopyStreaming = &copy_ordinary<Portable>;
  // Ordinary stores: the release store of a flag orders them.
  static void store_fence() {}

 private:
  template <DType kType>
  static float float_from_half(std::uint16_t bits) {
    return kType == DType::kFloat16 ? float_from_float16(bits) : float_from_bfloat16(bits);
  }
  template <DType kType>
  static std::uint16_t half_from_float(float value) {
    return kType == DType::kFloat16 ? float16_from_float(value) : bfloat16_from_float(value);
  }
};

}  // namespace

const Kernels* portable_kernels() noexcept { return &kKernelsOf<Portable>; }

}  // namespace fanfold::base
