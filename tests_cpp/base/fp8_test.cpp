// SPDX-License-Identifier: Apache-2.0
#include "base/fp8.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/float_convert.h"
#include "gtest/gtest.h"
#include "support/fp8_rows.h"
#include "support/random_bits.h"

namespace fanfold::base {
namespace {

using testing::RandomBits;

constexpr std::uint64_t kSeed = 20240311;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargestFloat = std::numeric_limits<float>::max();

// --- One number -------------------------------------------------------------------------------

TEST(E4M3Test, KnownNumbers) {
  EXPECT_EQ(e4m3_from_float(1.0F), 0x38);
  EXPECT_EQ(e4m3_from_float(-1.0F), 0xb8);
  EXPECT_EQ(e4m3_from_float(448.0F), 0x7e);
  EXPECT_EQ(e4m3_from_float(0x1p-6F), 0x08);  // the smallest normal
  EXPECT_EQ(e4m3_from_float(0x1p-9F), 0x01);  // the smallest subnormal
  EXPECT_EQ(float_from_e4m3(0x7e), 448.0F);
  EXPECT_EQ(float_from_e4m3(0x01), 0x1p-9F);
  EXPECT_TRUE(std::isnan(float_from_e4m3(0x7f)));
  EXPECT_TRUE(std::isnan(float_from_e4m3(0xff)));
}

TEST(E4M3Test, EveryCodeWidensExactlyAndSurvivesTheRoundTrip) {
  for (unsigned i = 0; i < 256; ++i) {
    const auto code = static_cast<std::uint8_t>(i);
    const float value = float_from_e4m3(code);
    if (!std::isnan(value)) {
      EXPECT_EQ(float_bits(value), float_bits(testing::decode_e4m3(code))) << i;
    }
    EXPECT_EQ(e4m3_from_float(value), code) << i;
  }
}

TEST(E4M3Test, RoundsToNearestEven) {
  std::vector<float> values;
  for (std::uint8_t code = 0; code < 0x7e; ++code) {
    const float here = float_from_e4m3(code);
    const float next = float_from_e4m3(static_cast<std::uint8_t>(code + 1));
    const float middle = here + (next - here) / 2;
    const bool is_even = code % 2 == 0;
    EXPECT_EQ(e4m3_from_float(middle), is_even ? code : code + 1) << middle;
    EXPECT_EQ(e4m3_from_float(std::nextafter(middle, 0.0F)), code) << middle;
    EXPECT_EQ(e4m3_from_float(std::nextafter(middle, kInfinity)), code + 1) << middle;
  }
  RandomBits random(kSeed);
  for (int i = 0; i < 2'000'000; ++i) {
    const float value = float_from_bits(static_cast<std::uint32_t>(random.next()));
    ASSERT_EQ(e4m3_from_float(value), testing::encode_e4m3(value)) << value << ", seed " << kSeed;
  }
}

TEST(E4M3Test, LargeNumbersSaturateAndInfinitiesAreNaN) {
  for (const float value : {448.0F, 449.0F, 464.0F, 480.0F, 1e30F, kLargestFloat}) {
    EXPECT_EQ(e4m3_from_float(value), 0x7e) << value;
    EXPECT_EQ(e4m3_from_float(-value), 0xfe) << value;
  }
  EXPECT_EQ(e4m3_from_float(kInfinity), 0x7f);
  EXPECT_EQ(e4m3_from_float(-kInfinity), 0xff);
  EXPECT_EQ(e4m3_from_float(kNaN) & 0x7f, 0x7f);
}

TEST(E4M3Test, ZerosAndWhatRoundsToThemKeepTheirSign) {
  for (const float value : {0.0F, 0x1p-149F, 0x1p-126F, 0x1p-10F}) {
    EXPECT_EQ(e4m3_from_float(value), 0x00) << value;
    EXPECT_EQ(e4m3_from_float(-value), 0x80) << value;
  }
}

// --- Scales -----------------------------------------------------------------------------------

TEST(Fp8ScaleTest, Ue8m0IsAPowerOfTwo) {
  EXPECT_EQ(float_from_ue8m0(127), 1.0F);
  EXPECT_EQ(float_from_ue8m0(0), 0x1p-127F);
  EXPECT_EQ(float_from_ue8m0(254), 0x1p127F);
  EXPECT_TRUE(std::isnan(float_from_ue8m0(255)));
  for (unsigned i = 0; i < 255; ++i) {
    EXPECT_EQ(float_from_ue8m0(static_cast<std::uint8_t>(i)),
              std::ldexp(1.0F, static_cast<int>(i) - 127));
  }
}

TEST(Fp8ScaleTest, ScalesKeepTheLargestNumberInRange) {
  EXPECT_EQ(fp8_scale(0, false), 1.0F);
  EXPECT_EQ(fp8_scale(0, true), 1.0F);
  EXPECT_EQ(fp8_scale(448, false), 1.0F);
  EXPECT_EQ(fp8_scale(448, true), 1.0F);
  EXPECT_EQ(fp8_scale(std::nextafter(448.0F, kInfinity), true), 2.0F);
  EXPECT_EQ(fp8_scale(0x1p-149F, false), 0x1p-126F);
  EXPECT_EQ(fp8_scale(0x1p-149F, true), 0x1p-126F);
  EXPECT_EQ(fp8_scale(kLargestFloat, true), 0x1p120F);
  RandomBits random(kSeed);
  for (int i = 0; i < 1'000'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.next()) & 0x7fffffffU;
    if (bits >= 0x7f800000U || bits == 0) continue;
    const float amax = float_from_bits(bits);
    for (const bool power_of_two : {false, true}) {
      const float scale = fp8_scale(amax, power_of_two);
      ASSERT_LT(amax / scale, 448.001F) << amax;
      if (amax > 0x1p-117F) {
        ASSERT_GT(amax / scale, power_of_two ? 224.0F : 447.999F) << amax;
      }
    }
  }
}

}  // namespace
}  // namespace fanfold::base
