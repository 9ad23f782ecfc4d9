// SPDX-License-Identifier: Apache-2.0
#include "base/kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "base/float_convert.h"
#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "support/number_codec.h"
#include "support/random_bits.h"

namespace fanfold::base {
namespace {

using testing::RandomBits;
using testing::same_number;

constexpr std::uint64_t kSeed = 20240229;
constexpr std::byte kGuard{0xa5};
constexpr DType kSummable[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

std::size_t element_bytes(DType dtype) { return static_cast<std::size_t>(size_of(dtype)); }

float read_element(const std::byte* from, DType dtype, std::size_t i) {
  return testing::decode(dtype, from + i * element_bytes(dtype));
}

template <class T>
const std::byte* bytes_of(const T& value) {
  return reinterpret_cast<const std::byte*>(&value);
}

void write_element(std::byte* to, DType dtype, std::size_t i, float value) {
  testing::encode(dtype, value, to + i * element_bytes(dtype));
}

/// The contract of sum_rows, one element at a time.
float naive_sum(const std::vector<const void*>& rows, DType row_dtype, const float* weights,
                std::size_t column) {
  float sum = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    float term = read_element(static_cast<const std::byte*>(rows[i]), row_dtype, column);
    if (weights != nullptr) term = testing::multiply(weights[i], term);
    sum = testing::add(sum, term);
  }
  return sum;
}

/// Bytes at a chosen distance from an aligned address and nothing behind them, so that
/// AddressSanitizer sees the first byte read too far.
class Bytes {
 public:
  Bytes(std::size_t misalignment, std::size_t size)
      : storage_(misalignment + size), at_(misalignment) {}
  std::byte* data() { return storage_.data() + at_; }

 private:
  std::vector<std::byte> storage_;
  std::size_t at_;
};

/// Mostly numbers of like size, so that sums round; now and then a value of any bits.
float random_value(RandomBits& random, unsigned one_special_in) {
  const auto bits = static_cast<std::uint32_t>(random.next());
  if (random.next() % one_special_in != 0) {
    return float_from_bits((bits & 0x83ffffffU) | 0x3c000000U);  // 2^-7 to 2
  }
  switch (random.next() % 6) {
    case 0:
      return float_from_bits(bits & 0x80000000U);
    case 1:
      return float_from_bits(bits & 0x807fffffU);  // subnormal
    case 2:
      return float_from_bits((bits & 0x80000000U) | 0x7f800000U);
    case 3:
      return std::ldexp(static_cast<float>(bits & 0xffffU), -28);  // float16's subnormals
    default:
      return float_from_bits(bits);
  }
}

struct SumCase {
  DType row_dtype;
  DType out_dtype;
  std::size_t hidden;
  std::size_t num_rows;
  bool has_weights;
  unsigned one_special_in;
};

std::ostream& operator<<(std::ostream& out, const SumCase& c) {
  return out << "row dtype " << static_cast<int>(c.row_dtype) << ", out dtype "
             << static_cast<int>(c.out_dtype) << ", hidden " << c.hidden << ", " << c.num_rows
             << " rows, weights " << c.has_weights << ", seed " << kSeed;
}

class KernelsTest : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) {
      GTEST_SKIP() << "this processor or build lacks "
                   << (GetParam() == Isa::kAvx512 ? "AVX-512" : "AVX2");
    }
    kernels_ = &kernels(GetParam());
  }

  void sum(void* out, DType out_dtype, const std::vector<const void*>& rows, DType row_dtype,
           const float* weights, std::size_t hidden) const {
    kernels_->sum_rows(out, out_dtype, rows.data(), weights, static_cast<std::int64_t>(rows.size()),
                       row_dtype, static_cast<std::int64_t>(hidden));
  }

  void expect_copies(bool through_cache) const;

  void check_sum(const SumCase& c, RandomBits& random) const {
    std::vector<Bytes> storage;
    std::vector<const void*> rows;
    std::vector<float> weights;
    storage.reserve(c.num_rows);
    for (std::size_t i = 0; i < c.num_rows; ++i) {
      const std::size_t row_bytes = c.hidden * element_bytes(c.row_dtype);
      storage.emplace_back(random.next() % 32 * element_bytes(c.row_dtype), row_bytes);
      for (std::size_t h = 0; h < c.hidden; ++h) {
        write_element(storage[i].data(), c.row_dtype, h, random_value(random, c.one_special_in));
      }
      rows.push_back(storage[i].data());
      weights.push_back(random_value(random, 64));
    }
    const float* weights_or_null = c.has_weights ? weights.data() : nullptr;

    constexpr std::size_t kGuardBytes = 64;
    const std::size_t out_bytes = c.hidden * element_bytes(c.out_dtype);
    Bytes out(random.next() % 32 * element_bytes(c.out_dtype), out_bytes + 2 * kGuardBytes);
    std::fill_n(out.data(), out_bytes + 2 * kGuardBytes, kGuard);
    std::byte* sums = out.data() + kGuardBytes;
    sum(sums, c.out_dtype, rows, c.row_dtype, weights_or_null, c.hidden);

    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      ASSERT_EQ(out.data()[i], kGuard) << c << ", before";
      ASSERT_EQ(sums[out_bytes + i], kGuard) << c << ", behind";
    }
    for (std::size_t h = 0; h < c.hidden; ++h) {
      std::byte expected[4];
      write_element(expected, c.out_dtype, 0, naive_sum(rows, c.row_dtype, weights_or_null, h));
      ASSERT_TRUE(same_number(c.out_dtype, sums + h * element_bytes(c.out_dtype), expected))
          << c << ", column " << h << ": " << read_element(sums, c.out_dtype, h) << ", not "
          << read_element(expected, c.out_dtype, 0);
    }
  }

  void check_all_dtypes(std::size_t hidden, std::size_t num_rows, unsigned one_special_in,
                        RandomBits& random) const {
    for (const DType row_dtype : kSummable) {
      for (const DType out_dtype : kSummable) {
        for (const bool has_weights : {false, true}) {
          check_sum({row_dtype, out_dtype, hidden, num_rows, has_weights, one_special_in}, random);
          if (HasFatalFailure()) return;
        }
      }
    }
  }

  const Kernels* kernels_ = nullptr;
};

TEST_P(KernelsTest, TableNamesItsInstructionSet) {
  EXPECT_EQ(kernels_->isa, GetParam());
  EXPECT_EQ(isa_from_name(kernels_->name), GetParam());
}

TEST_P(KernelsTest, SumsAreBitEqualToANaiveLoopForEveryHidden) {
  RandomBits random(kSeed);
  for (std::size_t hidden = 0; hidden <= 130; ++hidden) {
    for (const std::size_t num_rows : {std::size_t{1}, std::size_t{2}, 3 + hidden % 6}) {
      check_all_dtypes(hidden, num_rows, 64, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(KernelsTest, SumsAreBitEqualToANaiveLoopForEveryRowCount) {
  RandomBits random(kSeed);
  for (std::size_t num_rows = 0; num_rows <= 17; ++num_rows) {
    for (const std::size_t hidden : {1U, 31U, 64U, 257U}) {
      check_all_dtypes(hidden, num_rows, 256, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(KernelsTest, SumsAreBitEqualToANaiveLoopForLongRows) {
  RandomBits random(kSeed);
  for (const std::size_t hidden : {2047U, 7168U}) {
    for (const std::size_t num_rows : {1U, 2U, 8U}) {
      check_all_dtypes(hidden, num_rows, 1024, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(KernelsTest, SumsOfSpecialValuesAreBitEqualToANaiveLoop) {
  RandomBits random(kSeed);
  for (int i = 0; i < 50; ++i) {
    for (const std::size_t num_rows : {1U, 2U, 3U}) {
      check_all_dtypes(197, num_rows, 2, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(KernelsTest, NoRowsGivePositiveZeros) {
  const float weight = 1;
  for (const DType dtype : kSummable) {
    for (const float* weights : {static_cast<const float*>(nullptr), &weight}) {
      std::vector<std::byte> out(77 * element_bytes(dtype), kGuard);
      kernels_->sum_rows(out.data(), dtype, nullptr, weights, 0, DType::kBFloat16, 77);
      EXPECT_EQ(std::count(out.begin(), out.end(), std::byte{0}),
                static_cast<std::ptrdiff_t>(out.size()));
    }
  }
}

TEST_P(KernelsTest, NegativeZeroBecomesPositiveZero) {
  constexpr std::size_t kHidden = 77;
  for (const DType dtype : kSummable) {
    std::vector<std::byte> row(kHidden * element_bytes(dtype));
    for (std::size_t h = 0; h < kHidden; ++h) write_element(row.data(), dtype, h, -0.0F);
    std::vector<std::byte> out(row.size(), kGuard);
    sum(out.data(), dtype, {row.data()}, dtype, nullptr, kHidden);
    EXPECT_EQ(std::count(out.begin(), out.end(), std::byte{0}),
              static_cast<std::ptrdiff_t>(out.size()));
  }
}

// (1 + 2^-7) * (1 + 2^-17) ends in 2^-24, which rounding to float32 drops and a fused multiply-add
// keeps. The first row takes the rest away.
TEST_P(KernelsTest, ProductsAreRoundedBeforeTheyAreAdded) {
  constexpr std::size_t kHidden = 333;
  const float x = 1 + 0x1p-7F;
  const float weights[] = {-(1 + 0x1p-7F + 0x1p-17F), 1 + 0x1p-17F};
  ASSERT_EQ(std::fma(x, weights[1], weights[0]), 0x1p-24F);
  for (const DType dtype : kSummable) {
    Bytes ones(0, kHidden * element_bytes(dtype));
    Bytes xs(0, kHidden * element_bytes(dtype));
    for (std::size_t h = 0; h < kHidden; ++h) {
      write_element(ones.data(), dtype, h, 1);
      write_element(xs.data(), dtype, h, x);
    }
    for (const DType out_dtype : kSummable) {
      Bytes out(0, kHidden * element_bytes(out_dtype));
      sum(out.data(), out_dtype, {ones.data(), xs.data()}, dtype, weights, kHidden);
      for (std::size_t h = 0; h < kHidden; ++h) {
        ASSERT_EQ(read_element(out.data(), out_dtype, h), 0.0F) << "column " << h;
      }
    }
  }
}

TEST_P(KernelsTest, OutMayBeExactlyRowZero) {
  RandomBits random(kSeed);
  for (const DType dtype : kSummable) {
    for (const std::size_t hidden : {1U, 15U, 33U, 130U, 513U}) {
      Bytes first(0, hidden * element_bytes(dtype));
      Bytes second(0, hidden * element_bytes(dtype));
      for (std::size_t h = 0; h < hidden; ++h) {
        write_element(first.data(), dtype, h, random_value(random, 64));
        write_element(second.data(), dtype, h, random_value(random, 64));
      }
      const std::vector<const void*> rows = {first.data(), second.data()};
      Bytes apart(0, hidden * element_bytes(dtype));
      sum(apart.data(), dtype, rows, dtype, nullptr, hidden);
      sum(first.data(), dtype, rows, dtype, nullptr, hidden);
      for (std::size_t h = 0; h < hidden; ++h) {
        const std::size_t at = h * element_bytes(dtype);
        ASSERT_TRUE(same_number(dtype, first.data() + at, apart.data() + at))
            << "hidden " << hidden << ", column " << h << ", seed " << kSeed;
      }
    }
  }
}

TEST_P(KernelsTest, EveryHalfWidensExactlyAndSurvivesTheRoundTrip) {
  for (const DType dtype : kHalves) {
    std::vector<std::uint16_t> halves(0x10000);
    for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
    std::vector<float> widened(halves.size());
    std::vector<std::uint16_t> copied(halves.size());
    sum(widened.data(), DType::kFloat32, {halves.data()}, dtype, nullptr, halves.size());
    sum(copied.data(), dtype, {halves.data()}, dtype, nullptr, halves.size());
    halves[0x8000] = 0;  // the sum starts at +0, so that -0 does not survive
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const float value = testing::decode(dtype, bytes_of(halves[i]));
      ASSERT_TRUE(same_number(DType::kFloat32, bytes_of(widened[i]), bytes_of(value))) << i;
      ASSERT_TRUE(same_number(dtype, bytes_of(copied[i]), bytes_of(halves[i]))) << i;
    }
  }
}

TEST_P(KernelsTest, FloatsRoundToNearestEven) {
  std::vector<float> values;
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    for (const std::uint32_t low : {0x7fffU, 0x8000U, 0x8001U}) {
      values.push_back(float_from_bits((i << 16) | low));
    }
    const auto half = static_cast<std::uint16_t>(i);
    const auto next_half = static_cast<std::uint16_t>(i + 1);
    const float here = testing::decode(DType::kFloat16, bytes_of(half));
    const float next = testing::decode(DType::kFloat16, bytes_of(next_half));
    if (!std::isfinite(here) || !std::isfinite(next)) continue;
    const float middle = here + (next - here) / 2;
    values.push_back(middle);
    values.push_back(std::nextafter(middle, here));
    values.push_back(std::nextafter(middle, next));
  }
  for (const float edge : {65504.0F, std::nextafter(65520.0F, 0.0F), 65520.0F, 65536.0F,
                           std::numeric_limits<float>::max()}) {
    values.push_back(edge);
    values.push_back(-edge);
  }
  RandomBits random(kSeed);
  for (int i = 0; i < 500'000; ++i) {
    values.push_back(float_from_bits(static_cast<std::uint32_t>(random.next())));
  }
  for (const DType dtype : kHalves) {
    std::vector<std::uint16_t> narrowed(values.size());
    sum(narrowed.data(), dtype, {values.data()}, DType::kFloat32, nullptr, values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::byte expected[2];
      testing::encode(dtype, values[i] + 0.0F, expected);
      ASSERT_TRUE(same_number(dtype, bytes_of(narrowed[i]), expected))
          << values[i] << ", seed " << kSeed;
    }
  }
}

void KernelsTest::expect_copies(bool through_cache) const {
  RandomBits random(kSeed);
  std::vector<std::size_t> sizes = {511, 512, 513, 1000, 4096, 14336, 100'003};
  for (std::size_t size = 0; size <= 330; ++size) sizes.push_back(size);
  std::vector<std::byte> content(101'000);
  for (std::byte& byte : content)
    byte = static_cast<std::byte>(random.next() & 0x7fU);  // never kGuard
  std::vector<std::byte> area(content.size() + 256);
  for (const std::size_t size : sizes) {
    const std::size_t step = size > 4096 ? 21 : 1;
    for (std::size_t head = 0; head < 64; head += step) {
      for (const std::size_t source : {std::size_t{0}, std::size_t{1}, head, std::size_t{63}}) {
        void* aligned = area.data();
        std::size_t space = area.size();
        ASSERT_NE(std::align(64, size + 192, aligned, space), nullptr);
        std::byte* dst = static_cast<std::byte*>(aligned) + 64 + head;
        std::fill_n(dst - 64, size + 128, kGuard);
        const auto bytes = static_cast<std::int64_t>(size);
        if (through_cache) {
          kernels_->copy_fetching(dst, content.data() + source, bytes, content.data());
        } else {
          kernels_->copy_streaming(dst, content.data() + source, bytes);
        }
        kernels_->store_fence();
        ASSERT_TRUE(std::equal(dst, dst + size, content.data() + source))
            << size << " bytes from offset " << source << " to " << head << ", seed " << kSeed;
        ASSERT_EQ(std::count(dst - 64, dst, kGuard), 64) << size << " bytes to " << head;
        ASSERT_EQ(std::count(dst + size, dst + size + 64, kGuard), 64) << size << " to " << head;
      }
    }
  }
}

TEST_P(KernelsTest, CopyPastTheCacheWritesItsBytesAndNothingElse) { expect_copies(false); }

TEST_P(KernelsTest, CopyThroughTheCacheWritesItsBytesAndNothingElse) { expect_copies(true); }

TEST_P(KernelsTest, CopyOfNothingTakesNullPointers) {
  kernels_->copy_streaming(nullptr, nullptr, 0);
  kernels_->copy_fetching(nullptr, nullptr, 0, nullptr);
  kernels_->store_fence();
}

TEST_P(KernelsTest, CopiedBytesAreThereForWhoSeesTheFlagAfterTheFence) {
  constexpr std::size_t kBytes = 3 * 4096 + 17;
  std::vector<std::byte> dst(kBytes);
  std::atomic<std::uint32_t> flag{0};
  std::thread writer([&] {
    const std::vector<std::byte> src(kBytes, kGuard);
    kernels_->copy_streaming(dst.data(), src.data(), kBytes);
    kernels_->store_fence();
    flag.store(1, std::memory_order_release);  // pairs with the acquire below
  });
  while (flag.load(std::memory_order_acquire) == 0) std::this_thread::yield();
  EXPECT_EQ(std::count(dst.begin(), dst.end(), kGuard), static_cast<std::ptrdiff_t>(kBytes));
  writer.join();
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, KernelsTest,
                         ::testing::Values(Isa::kPortable, Isa::kAvx2, Isa::kAvx512),
                         [](const ::testing::TestParamInfo<Isa>& isa) -> std::string {
                           if (isa.param == Isa::kPortable) return "portable";
                           return isa.param == Isa::kAvx2 ? "avx2" : "avx512";
                         });

TEST(KernelSelectionTest, AutoIsTheWidestSupportedInstructionSet) {
  Isa widest = Isa::kPortable;
  if (is_supported(Isa::kAvx2)) widest = Isa::kAvx2;
  if (is_supported(Isa::kAvx512)) widest = Isa::kAvx512;
  EXPECT_TRUE(is_supported(Isa::kAuto));
  EXPECT_TRUE(is_supported(Isa::kPortable));
  EXPECT_EQ(kernels(Isa::kAuto).isa, widest);
}

TEST(KernelSelectionTest, NamesStandForInstructionSets) {
  EXPECT_EQ(isa_from_name("auto"), Isa::kAuto);
  EXPECT_EQ(isa_from_name("portable"), Isa::kPortable);
  EXPECT_EQ(isa_from_name("avx2"), Isa::kAvx2);
  EXPECT_EQ(isa_from_name("avx512"), Isa::kAvx512);
}

TEST(KernelSelectionTest, AnotherNameIsRefused) {
  for (const std::string name : {"", "AVX2", "neon"}) {
    try {
      isa_from_name(name.c_str());
      ADD_FAILURE() << "'" << name << "' was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()),
                "isa: expected auto, portable, avx2 or avx512, got '" + name + "'");
    }
  }
  EXPECT_THROW(isa_from_name(nullptr), InvalidArgument);
}

TEST(KernelSelectionTest, AMissingInstructionSetIsRefused) {
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (is_supported(isa)) continue;
    const std::string name = isa == Isa::kAvx2 ? "avx2" : "avx512";
    try {
      kernels(isa);
      ADD_FAILURE() << name << " was given";
    } catch (const Unsupported& error) {
      EXPECT_EQ(std::string(error.what()),
                "isa: expected an instruction set of this processor and build, got " + name);
    }
  }
}

}  // namespace
}  // namespace fanfold::base
