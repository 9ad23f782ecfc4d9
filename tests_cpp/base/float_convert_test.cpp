// SPDX-License-Identifier: Apache-2.0
#include "base/float_convert.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "fanfold/dtype.h"
#include "gtest/gtest.h"
#include "support/number_codec.h"
#include "support/random_bits.h"

namespace fanfold::base {
namespace {

constexpr std::uint64_t kSeed = 20240229;
constexpr std::uint32_t kNumHalves = 0x10000;
constexpr int kNumRandom = 2'000'000;
constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

float widen(DType dtype, std::uint16_t bits) {
  return dtype == DType::kFloat16 ? float_from_float16(bits) : float_from_bfloat16(bits);
}

std::uint16_t narrow(DType dtype, float value) {
  return dtype == DType::kFloat16 ? float16_from_float(value) : bfloat16_from_float(value);
}

float expected_wide(DType dtype, std::uint16_t bits) {
  return testing::decode(dtype, reinterpret_cast<const std::byte*>(&bits));
}

::testing::AssertionResult rounds_to_nearest_even(DType dtype, float value) {
  const std::uint16_t got = narrow(dtype, value);
  std::byte expected[2];
  testing::encode(dtype, value, expected);
  if (testing::same_number(dtype, reinterpret_cast<const std::byte*>(&got), expected)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << value << " became " << name_of(dtype) << " " << widen(dtype, got) << ", not "
         << testing::decode(dtype, expected) << ", seed " << kSeed;
}

TEST(FloatConvertTest, EveryHalfWidensExactly) {
  for (const DType dtype : kHalves) {
    for (std::uint32_t i = 0; i < kNumHalves; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      const float got = widen(dtype, bits);
      const float expected = expected_wide(dtype, bits);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(got)) << name_of(dtype) << " bits " << i;
      } else {
        ASSERT_EQ(float_bits(got), float_bits(expected)) << name_of(dtype) << " bits " << i;
      }
    }
  }
}

TEST(FloatConvertTest, EveryHalfSurvivesTheRoundTrip) {
  for (const DType dtype : kHalves) {
    for (std::uint32_t i = 0; i < kNumHalves; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      const float wide = widen(dtype, bits);
      if (std::isnan(wide)) {
        ASSERT_TRUE(std::isnan(widen(dtype, narrow(dtype, wide)))) << name_of(dtype) << " " << i;
      } else {
        ASSERT_EQ(narrow(dtype, wide), bits) << name_of(dtype);
      }
    }
  }
}

TEST(FloatConvertTest, MidpointsAndTheirNeighboursRoundToNearestEven) {
  for (const DType dtype : kHalves) {
    for (std::uint32_t i = 0; i < kNumHalves; ++i) {
      const float here = expected_wide(dtype, static_cast<std::uint16_t>(i));
      const float next = expected_wide(dtype, static_cast<std::uint16_t>(i + 1));
      if (!std::isfinite(here) || !std::isfinite(next)) continue;
      const float middle = here + (next - here) / 2;
      for (const float value :
           {middle, std::nextafter(middle, here), std::nextafter(middle, next)}) {
        ASSERT_TRUE(rounds_to_nearest_even(dtype, value));
      }
    }
  }
}

TEST(FloatConvertTest, Float16OverflowsFromHalfAStepAboveTheLargest) {
  EXPECT_EQ(float16_from_float(65504.0F), 0x7bff);
  EXPECT_EQ(float16_from_float(std::nextafter(65520.0F, 0.0F)), 0x7bff);
  EXPECT_EQ(float16_from_float(65520.0F), 0x7c00);
  EXPECT_EQ(float16_from_float(-65520.0F), 0xfc00);
}

TEST(FloatConvertTest, BFloat16OverflowsFromHalfAStepAboveTheLargest) {
  EXPECT_EQ(bfloat16_from_float(float_from_bits(0x7f7f7fffU)), 0x7f7f);
  EXPECT_EQ(bfloat16_from_float(float_from_bits(0x7f7f8000U)), 0x7f80);
  EXPECT_EQ(bfloat16_from_float(float_from_bits(0xff7f8000U)), 0xff80);
}

TEST(FloatConvertTest, NanWithExtremePayloadsStaysNan) {
  for (const DType dtype : kHalves) {
    for (const std::uint32_t bits : {0x7f800001U, 0xff800001U, 0x7fffffffU, 0xffffffffU}) {
      EXPECT_TRUE(std::isnan(widen(dtype, narrow(dtype, float_from_bits(bits))))) << bits;
    }
  }
}

TEST(FloatConvertTest, RandomFloatsRoundToNearestEven) {
  testing::RandomBits random(kSeed);
  for (int i = 0; i < kNumRandom; ++i) {
    const float any = float_from_bits(static_cast<std::uint32_t>(random.next()));
    // Most random exponents lie outside float16's range: the second value lies inside.
    const float inside = std::ldexp(static_cast<float>(random.next() % (1U << 24)), -8 - i % 40);
    for (const DType dtype : kHalves) {
      ASSERT_TRUE(rounds_to_nearest_even(dtype, any));
      ASSERT_TRUE(rounds_to_nearest_even(dtype, inside));
      ASSERT_TRUE(rounds_to_nearest_even(dtype, -inside));
    }
  }
}

}  // namespace
}  // namespace fanfold::base
