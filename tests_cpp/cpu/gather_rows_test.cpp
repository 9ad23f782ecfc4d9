// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "gtest/gtest.h"
#include "support/number_codec.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {
namespace {

using testing::Bytes;
using testing::copy_bytes;
using testing::same_bytes;

constexpr std::uint64_t kSeed = 20240306;
constexpr std::int32_t kPicked[] = {3, 0, 4, 4, 1};
constexpr std::int64_t kNumSourceRows = 5;

void gather(exec::GatherRowsParams params) {
  base::StepHook hook(TestKnobs{}, 0);
  params.indices = kPicked;
  params.num_rows = static_cast<std::int64_t>(std::size(kPicked));
  gather_rows(context_alone(hook, 1), params);
}

TEST(GatherRowsTest, PickedRowsLieOneAfterAnother) {
  for (const std::int64_t row_bytes : {1, 3, 16, 33, 130}) {
    for (const std::int64_t source_gap : {0, 5}) {
      for (const std::int64_t target_gap : {0, 7}) {
        const std::int64_t source_stride = row_bytes + source_gap;
        const std::int64_t target_stride = row_bytes + target_gap;
        const Bytes source =
            testing::random_bytes(kNumSourceRows * source_stride - source_gap, kSeed);
        Bytes target = testing::untouched_bytes(
            static_cast<std::int64_t>(std::size(kPicked)) * target_stride - target_gap);
        Bytes expected = target;
        for (std::size_t i = 0; i < std::size(kPicked); ++i) {
          copy_bytes(expected.data() + static_cast<std::int64_t>(i) * target_stride,
                     source.data() + kPicked[i] * source_stride, row_bytes);
        }
        exec::GatherRowsParams params{};
        params.source = source.data();
        params.source_stride_bytes = source_stride;
        params.target = target.data();
        params.target_stride_bytes = target_stride;
        params.row_bytes = row_bytes;
        gather(params);
        EXPECT_TRUE(same_bytes(target, expected)) << row_bytes << " bytes, seed " << kSeed;
      }
    }
  }
}

TEST(GatherRowsTest, RowsAreRoundedToAnotherType) {
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  constexpr std::int64_t kHidden = 37;
  for (const DType from : dtypes) {
    for (const DType to : dtypes) {
      const std::int64_t source_row = kHidden * size_of(from);
      const std::int64_t target_row = kHidden * size_of(to);
      Bytes source(static_cast<std::size_t>(kNumSourceRows * source_row));
      for (std::int64_t i = 0; i < kNumSourceRows * kHidden; ++i) {
        testing::encode(from, 1.0F + static_cast<float>(i * i) / 4099.0F,
                        source.data() + i * size_of(from));
      }
      Bytes target(std::size(kPicked) * static_cast<std::size_t>(target_row));
      Bytes expected = target;
      std::byte* out = expected.data();
      for (const std::int32_t row : kPicked) {
        for (std::int64_t i = 0; i < kHidden; ++i, out += size_of(to)) {
          const std::byte* element = source.data() + row * source_row + i * size_of(from);
          testing::encode(to, testing::decode(from, element), out);
        }
      }
      gather(
          {source.data(), source_row, nullptr, 0, target.data(), target_row, source_row, from, to});
      EXPECT_TRUE(same_bytes(target, expected)) << name_of(from) << " to " << name_of(to);
    }
  }
}

TEST(GatherRowsTest, NoRowsNeedNoMemory) {
  base::StepHook hook(TestKnobs{}, 0);
  exec::GatherRowsParams params{};
  params.row_bytes = 8;
  gather_rows(context_alone(hook, 1), params);
}

}  // namespace
}  // namespace fanfold::cpu
