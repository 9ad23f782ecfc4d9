// SPDX-License-Identifier: Apache-2.0
// Rows of FP8, by the kernels of each instruction set.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/float_convert.h"
#include "base/fp8.h"
#include "base/kernels.h"
#include "gtest/gtest.h"
#include "support/fp8_rows.h"
#include "support/number_codec.h"
#include "support/random_bits.h"
#include "support/same_bytes.h"

namespace fanfold::base {
namespace {

using testing::Bytes;
using testing::RandomBits;
using testing::same_e4m3;

constexpr std::uint64_t kSeed = 20240311;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargestFloat = std::numeric_limits<float>::max();
constexpr DType kRowTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr WireScale kWireScales[] = {WireScale::kFloat32, WireScale::kUe8m0};

/// A row in memory of its own, of numbers that its type holds.
struct Row {
  DType dtype = DType::kFloat32;
  Bytes bytes;
  std::vector<float> values;
};

Row make_row(DType dtype, const std::vector<float>& values) {
  Row row{dtype, Bytes(values.size() * static_cast<std::size_t>(size_of(dtype))), values};
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::byte* at = row.bytes.data() + i * static_cast<std::size_t>(size_of(dtype));
    testing::encode(dtype, values[i], at);
    row.values[i] = testing::decode(dtype, at);
  }
  return row;
}

/// Many binades, so that some are subnormal in E4M3, and now and then something special.
std::vector<float> random_values(std::size_t count, bool specials, RandomBits& random) {
  std::vector<float> values(count);
  for (float& value : values) {
    value = std::ldexp(random.unit() - 0.5F, -static_cast<int>(random.below(20)));
    if (!specials || random.below(40) != 0) continue;
    const float choices[] = {0.0F, -0.0F, kInfinity, -kInfinity, kNaN, 0x1p-140F, 60000.0F};
    value = choices[random.below(7)];
  }
  return values;
}

class Fp8KernelsTest : public ::testing::TestWithParam<Isa> {
 protected:
  static constexpr std::int64_t kGuardBytes = 64;

  void SetUp() override {
    if (!is_supported(GetParam())) {
      GTEST_SKIP() << "this processor or build lacks "
                   << (GetParam() == Isa::kAvx512 ? "AVX-512" : "AVX2");
    }
    kernels_ = &kernels(GetParam());
  }

  struct Packed {
    Bytes elements;  // with a guard behind
    std::vector<float> scales;
    WireScale wire_scale = WireScale::kFloat32;
  };

  Packed pack(const Row& row, WireScale wire_scale) const {
    const auto hidden = static_cast<std::int64_t>(row.values.size());
    const auto num_blocks = (hidden + kFp8Block - 1) / kFp8Block;
    const bool power_of_two = wire_scale == WireScale::kUe8m0;
    Packed packed;
    packed.elements = testing::untouched_bytes(hidden + kGuardBytes);
    packed.wire_scale = wire_scale;
    packed.scales.resize(static_cast<std::size_t>(num_blocks));
    Bytes scales = testing::untouched_bytes(4 * num_blocks + kGuardBytes);
    kernels_->pack_fp8(packed.elements.data(), scales.data(), power_of_two, row.bytes.data(),
                       row.dtype, hidden);
    const std::int64_t scale_bytes = power_of_two ? num_blocks : 4 * num_blocks;
    EXPECT_EQ(std::count(scales.begin() + scale_bytes, scales.end(), testing::kUntouched),
              static_cast<std::ptrdiff_t>(scales.size()) - scale_bytes);
    EXPECT_EQ(
        std::count(packed.elements.begin() + hidden, packed.elements.end(), testing::kUntouched),
        kGuardBytes);
    for (std::int64_t i = 0; i < num_blocks; ++i) {
      packed.scales[static_cast<std::size_t>(i)] = testing::scale_at(scales.data(), wire_scale, i);
    }
    return packed;
  }

  /// Scales as they travel.
  static Bytes scale_bytes(const Packed& packed) {
    Bytes bytes;
    for (const float scale : packed.scales) {
      if (packed.wire_scale == WireScale::kUe8m0) {
        bytes.push_back(static_cast<std::byte>(std::ilogb(scale) + 127));
      } else {
        std::byte part[4];
        std::memcpy(part, &scale, sizeof part);
        bytes.insert(bytes.end(), part, part + 4);
      }
    }
    return bytes;
  }

  void expect_packed(const Row& row, const std::string& what) const {
    for (const WireScale wire_scale : kWireScales) {
      const Packed got = pack(row, wire_scale);
      const testing::Fp8Row expected = testing::pack_row(row.values, wire_scale);
      for (std::size_t i = 0; i < expected.scales.size(); ++i) {
        ASSERT_EQ(got.scales[i], expected.scales[i]) << what << ", block " << i;
      }
      for (std::size_t i = 0; i < row.values.size(); ++i) {
        ASSERT_TRUE(same_e4m3(static_cast<std::uint8_t>(got.elements[i]), expected.elements[i]))
            << what << ", " << name_of(row.dtype) << ", hidden " << row.values.size()
            << ", element " << i << " = " << row.values[i] << ", scale " << got.scales[i / 128]
            << ": " << static_cast<int>(got.elements[i]) << ", not "
            << static_cast<int>(expected.elements[i]) << ", seed " << kSeed;
      }
    }
  }

  void expect_sum_packed(std::size_t hidden, DType dtype, std::size_t num_rows, bool weighted,
                         RandomBits& random) const {
    std::vector<Row> rows;
    std::vector<const void*> pointers;
    std::vector<float> weights;
    Row sum{DType::kFloat32, {}, std::vector<float>(hidden, 0.0F)};
    for (std::size_t i = 0; i < num_rows; ++i) {
      rows.push_back(make_row(dtype, random_values(hidden, hidden > 200, random)));
      weights.push_back(random.unit() - 0.5F);
      for (std::size_t h = 0; h < hidden; ++h) {
        const float value = rows[i].values[h];
        sum.values[h] =
            testing::add(sum.values[h], weighted ? testing::multiply(weights[i], value) : value);
      }
    }
    for (const Row& row : rows) pointers.push_back(row.bytes.data());
    for (const WireScale wire_scale : kWireScales) {
      const testing::Fp8Row expected = testing::pack_row(sum.values, wire_scale);
      Bytes packed(hidden);
      Bytes scales(4 * expected.scales.size());
      kernels_->sum_pack_fp8(packed.data(), scales.data(), wire_scale == WireScale::kUe8m0,
                             pointers.data(), weighted ? weights.data() : nullptr,
                             static_cast<std::int64_t>(num_rows), dtype,
                             static_cast<std::int64_t>(hidden));
      for (std::size_t i = 0; i < expected.scales.size(); ++i) {
        ASSERT_EQ(testing::scale_at(scales.data(), wire_scale, static_cast<std::int64_t>(i)),
                  expected.scales[i]);
      }
      for (std::size_t i = 0; i < hidden; ++i) {
        ASSERT_TRUE(same_e4m3(static_cast<std::uint8_t>(packed[i]), expected.elements[i]))
            << name_of(dtype) << ", " << num_rows << " rows, hidden " << hidden << ", element " << i
            << " = " << sum.values[i] << ", seed " << kSeed;
      }
    }
  }

  /// Rows of any codes, NaN too, and of scales from the smallest to the largest.
  void expect_sum_unpacked(std::size_t hidden, DType out_dtype, std::size_t num_rows, bool weighted,
                           WireScale wire_scale, RandomBits& random) const {
    const std::size_t num_blocks = (hidden + 127) / 128;
    const std::size_t scales_offset = (hidden + 3) / 4 * 4;
    std::vector<Bytes> rows;
    std::vector<const void*> pointers;
    std::vector<float> weights;
    std::vector<float> sum(hidden, 0.0F);
    for (std::size_t i = 0; i < num_rows; ++i) {
      Packed packed;
      packed.wire_scale = wire_scale;
      packed.elements = testing::random_bytes(static_cast<std::int64_t>(hidden), random.next());
      for (std::size_t block = 0; block < num_blocks; ++block) {
        const int exponent = block == 0 ? 120 : static_cast<int>(random.below(246)) - 126;
        const float significand = wire_scale == WireScale::kUe8m0 ? 1.0F : 1 + random.unit();
        packed.scales.push_back(std::ldexp(significand, exponent));
      }
      weights.push_back(random.unit() - 0.5F);
      testing::Fp8Row row;
      row.scales = packed.scales;
      for (const std::byte element : packed.elements) {
        row.elements.push_back(static_cast<std::uint8_t>(element));
      }
      const std::vector<float> values = testing::unpack_row(row);
      for (std::size_t h = 0; h < hidden; ++h) {
        sum[h] =
            testing::add(sum[h], weighted ? testing::multiply(weights[i], values[h]) : values[h]);
      }
      Bytes bytes = packed.elements;
      bytes.resize(scales_offset);
      const Bytes scales = scale_bytes(packed);
      bytes.insert(bytes.end(), scales.begin(), scales.end());
      rows.push_back(std::move(bytes));
    }
    for (const Bytes& row : rows) pointers.push_back(row.data());
    const auto size = static_cast<std::size_t>(size_of(out_dtype));
    Bytes out = testing::untouched_bytes(static_cast<std::int64_t>(hidden * size) + kGuardBytes);
    kernels_->sum_unpack_fp8(
        out.data(), out_dtype, pointers.data(), static_cast<std::int64_t>(scales_offset),
        wire_scale == WireScale::kUe8m0, weighted ? weights.data() : nullptr,
        static_cast<std::int64_t>(num_rows), static_cast<std::int64_t>(hidden));
    for (std::size_t h = 0; h < hidden; ++h) {
      std::byte expected[4];
      testing::encode(out_dtype, sum[h], expected);
      ASSERT_TRUE(testing::same_number(out_dtype, out.data() + h * size, expected))
          << name_of(out_dtype) << ", " << num_rows << " rows, hidden " << hidden << ", element "
          << h << ", seed " << kSeed;
    }
    EXPECT_EQ(std::count(out.end() - kGuardBytes, out.end(), testing::kUntouched), kGuardBytes);
  }

  const Kernels* kernels_ = nullptr;
};

TEST_P(Fp8KernelsTest, RowsPackAsTheirElementsDo) {
  RandomBits random(kSeed);
  for (const std::size_t hidden :
       {0U, 1U, 15U, 16U, 31U, 33U, 127U, 128U, 129U, 255U, 300U, 1024U, 1027U, 7168U}) {
    for (const DType dtype : kRowTypes) {
      for (const bool specials : {false, true}) {
        expect_packed(make_row(dtype, random_values(hidden, specials, random)), "random");
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Fp8KernelsTest, MisalignedRowsPackAlike) {
  RandomBits random(kSeed);
  const Row row = make_row(DType::kBFloat16, random_values(300, false, random));
  const Packed expected = pack(row, WireScale::kFloat32);
  for (std::size_t shift = 2; shift < 64; shift += 2) {
    Bytes shifted(row.bytes.size() + shift);
    std::copy(row.bytes.begin(), row.bytes.end(),
              shifted.begin() + static_cast<std::ptrdiff_t>(shift));
    Bytes elements(300 + shift + 1);
    float scales[3];
    kernels_->pack_fp8(elements.data() + shift + 1, reinterpret_cast<std::byte*>(scales), false,
                       shifted.data() + shift, DType::kBFloat16, 300);
    EXPECT_EQ(std::memcmp(elements.data() + shift + 1, expected.elements.data(), 300), 0) << shift;
  }
}

// With 448 in its block a float is packed as it is: every rounding of the format, its ties
// included.
TEST_P(Fp8KernelsTest, EveryRoundingIsThatOfTheFormat) {
  std::vector<float> values = {448.0F};
  const auto add = [&](float value) {
    if (values.size() % kFp8Block == 0) values.push_back(448.0F);
    values.push_back(value);
  };
  for (std::uint8_t code = 0; code < 0x7e; ++code) {
    const float here = float_from_e4m3(code);
    const float next = float_from_e4m3(static_cast<std::uint8_t>(code + 1));
    const float middle = here + (next - here) / 2;
    for (const float value : {here, middle, std::nextafter(middle, 0.0F),
                              std::nextafter(middle, kInfinity), std::nextafter(here, 0.0F)}) {
      add(value);
      add(-value);
    }
  }
  RandomBits random(kSeed);
  for (int i = 0; i < 200'000; ++i) {
    const auto magnitude = static_cast<std::uint32_t>(random.below(0x43e00001));
    add(float_from_bits(magnitude | (random.below(2) == 0 ? 0x80000000U : 0U)));
  }
  expect_packed(make_row(DType::kFloat32, values), "every rounding");
}

// All significands of a row's largest number and of its others, over all the exponents that E4M3
// tells apart: that the quotient is the rounded one shows at ties.
TEST_P(Fp8KernelsTest, QuotientsAreRoundedDivisions) {
  const int step = GetParam() == Isa::kPortable ? 9 : 1;
  for (int largest = 128; largest < 256; largest += step) {
    std::vector<float> values;
    for (int exponent = 0; exponent > -20; --exponent) {
      for (int significand = 128; significand < 256; ++significand) {
        if (values.size() % kFp8Block == 0) values.push_back(static_cast<float>(largest));
        const float value = std::ldexp(static_cast<float>(significand), exponent);
        if (value < static_cast<float>(largest)) values.push_back(value);
      }
    }
    expect_packed(make_row(DType::kBFloat16, values), "amax " + std::to_string(largest));
    if (HasFatalFailure()) return;
  }
}

TEST_P(Fp8KernelsTest, ExtremeBlocksStayInRange) {
  for (const float extreme : {kLargestFloat, 0x1p127F, 0x1p-110F, 0x1p-117F, 0x1.3p-118F, 0x1p-126F,
                              0x1.8p-127F, 0x1p-149F}) {
    std::vector<float> values;
    for (int i = 0; i < 140; ++i) values.push_back(std::ldexp(extreme, -(i % 24)));
    const Row row = make_row(DType::kFloat32, values);
    expect_packed(row, "extreme " + std::to_string(std::ilogb(extreme)));
    for (const WireScale wire_scale : kWireScales) {
      const Packed packed = pack(row, wire_scale);
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_FALSE(std::isnan(float_from_e4m3(static_cast<std::uint8_t>(packed.elements[i]))));
      }
    }
  }
}

TEST_P(Fp8KernelsTest, InfinitiesAndNaNTouchNoOtherElement) {
  RandomBits random(kSeed);
  for (const DType dtype : kRowTypes) {
    std::vector<float> values = random_values(256, false, random);
    const Row clean = make_row(dtype, values);
    values[3] = kInfinity;
    values[100] = -kInfinity;
    values[200] = kNaN;
    const Row row = make_row(dtype, values);
    for (const WireScale wire_scale : kWireScales) {
      const Packed expected = pack(clean, wire_scale);
      const Packed got = pack(row, wire_scale);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (i == 3 || i == 100 || i == 200) {
          EXPECT_EQ(static_cast<int>(got.elements[i]) & 0x7f, 0x7f) << i;
        } else if (std::fabs(clean.values[i]) < 0.4F) {  // not one of the numbers left out
          EXPECT_EQ(got.elements[i], expected.elements[i]) << name_of(dtype) << " " << i;
        }
      }
    }
    const Row none = make_row(dtype, {kInfinity, kNaN, -0.0F});
    EXPECT_EQ(pack(none, WireScale::kFloat32).scales[0], 1.0F);
    expect_packed(none, "nothing finite but zero");
  }
}

TEST_P(Fp8KernelsTest, ZerosKeepTheirSignAndHaveScaleOne) {
  std::vector<float> values(200);
  for (std::size_t i = 0; i < values.size(); i += 3) values[i] = -0.0F;
  for (const DType dtype : kRowTypes) {
    const Packed packed = pack(make_row(dtype, values), WireScale::kFloat32);
    EXPECT_EQ(packed.scales[0], 1.0F);
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(packed.elements[i], i % 3 == 0 ? std::byte{0x80} : std::byte{0}) << i;
    }
  }
}

// The bound that AllToAllConfig states, with room for the two roundings to float32.
TEST_P(Fp8KernelsTest, ErrorsStayWithinTheStatedBound) {
  RandomBits random(kSeed);
  for (const WireScale wire_scale : kWireScales) {
    const double amax_part = wire_scale == WireScale::kFloat32 ? 458752.0 : 229376.0;
    double worst = 0;  // as a part of the bound
    for (int i = 0; i < 200; ++i) {
      constexpr std::size_t kHidden = 128;
      const Row row = make_row(DType::kFloat32, random_values(kHidden, false, random));
      const Packed packed = pack(row, wire_scale);
      float amax = 0;
      for (const float value : row.values) amax = std::max(amax, std::fabs(value));
      std::vector<float> back(kHidden);
      Bytes travelled(packed.elements.begin(), packed.elements.begin() + kHidden);
      const Bytes scales = scale_bytes(packed);
      travelled.insert(travelled.end(), scales.begin(), scales.end());
      const void* const packed_row = travelled.data();
      kernels_->sum_unpack_fp8(back.data(), DType::kFloat32, &packed_row, kHidden,
                               wire_scale == WireScale::kUe8m0, nullptr, 1, kHidden);
      for (std::size_t h = 0; h < kHidden; ++h) {
        const double bound = std::max(static_cast<double>(std::fabs(row.values[h])) / 16,
                                      static_cast<double>(amax) / amax_part);
        const double error = std::fabs(static_cast<double>(row.values[h]) - back[h]);
        ASSERT_LE(error, bound * (1 + 0x1p-18)) << row.values[h] << " of " << amax;
        worst = std::max(worst, error / bound);
      }
    }
    EXPECT_GT(worst, 0.9) << "the bound could be tighter";
  }
}

// The sum is packed as it is in float32, not rounded to a narrower type first.
TEST_P(Fp8KernelsTest, SumsArePackedFromFloat32) {
  RandomBits random(kSeed);
  for (const std::size_t hidden : {0U, 1U, 31U, 33U, 127U, 128U, 129U, 300U, 7168U}) {
    for (const DType dtype : kRowTypes) {
      for (const std::size_t num_rows : {0U, 1U, 3U}) {
        for (const bool weighted : {false, true}) {
          expect_sum_packed(hidden, dtype, num_rows, weighted, random);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(Fp8KernelsTest, SumsOfPackedRowsAreAddedInFloat32) {
  RandomBits random(kSeed);
  for (const std::size_t hidden :
       {0U, 1U, 15U, 16U, 17U, 33U, 63U, 127U, 128U, 129U, 300U, 7168U}) {
    for (const DType out_dtype : kRowTypes) {
      for (const std::size_t num_rows : {0U, 1U, 2U, 5U}) {
        for (const bool weighted : {false, true}) {
          for (const WireScale wire_scale : kWireScales) {
            expect_sum_unpacked(hidden, out_dtype, num_rows, weighted, wire_scale, random);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, Fp8KernelsTest,
                         ::testing::Values(Isa::kPortable, Isa::kAvx2, Isa::kAvx512),
                         [](const ::testing::TestParamInfo<Isa>& isa) -> std::string {
                           if (isa.param == Isa::kPortable) return "portable";
                           return isa.param == Isa::kAvx2 ? "avx2" : "avx512";
                         });

}  // namespace
}  // namespace fanfold::base
