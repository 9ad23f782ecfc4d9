// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "cpu/numbers.h"
#include "gtest/gtest.h"
#include "plan/wire.h"
#include "support/fp8_rows.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {
namespace {

using testing::Bytes;
using testing::same_bytes;

constexpr std::uint64_t kSeed = 20240312;
constexpr WireScale kWireScales[] = {WireScale::kFloat32, WireScale::kUe8m0};

std::vector<float> numbers_of(const std::byte* row, DType dtype, std::int64_t hidden) {
  std::vector<float> numbers;
  for (std::int64_t i = 0; i < hidden; ++i) numbers.push_back(number_at(row, dtype, i));
  return numbers;
}

void write_scales(std::byte* to, const std::vector<float>& scales, WireScale wire_scale) {
  for (std::size_t i = 0; i < scales.size(); ++i) {
    if (wire_scale == WireScale::kUe8m0) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &scales[i], sizeof bits);
      to[i] = static_cast<std::byte>(bits >> 23);
    } else {
      std::memcpy(to + 4 * i, &scales[i], sizeof(float));
    }
  }
}

std::string describe(DType dtype, std::int64_t hidden, WireScale wire_scale) {
  return std::string(name_of(dtype)) + ", hidden " + std::to_string(hidden) + ", scales " +
         name_of(wire_scale) + ", seed " + std::to_string(kSeed);
}

TEST(PackRowsTest, RowsPackOneByOneAndTheirScalesApart) {
  constexpr std::int64_t kNumRows = 3;
  base::StepHook hook(TestKnobs{}, 0);
  for (const WireScale wire_scale : kWireScales) {
    for (const DType dtype : kSummable) {
      for (const std::int64_t hidden : {1, 130, 300}) {
        const std::int64_t stride = (hidden + 5) * size_of(dtype);
        const Bytes rows = random_numbers(dtype, kNumRows * (hidden + 5), kSeed);
        const std::int64_t scale_bytes = plan::num_wire_blocks(hidden) * plan::size_of(wire_scale);
        Bytes packed = testing::untouched_bytes(kNumRows * hidden + 8);
        Bytes scales = testing::untouched_bytes(kNumRows * scale_bytes + 8);
        Bytes expected_packed = packed;
        Bytes expected_scales = scales;
        for (std::int64_t i = 0; i < kNumRows; ++i) {
          const testing::Fp8Row row =
              testing::pack_row(numbers_of(rows.data() + i * stride, dtype, hidden), wire_scale);
          std::memcpy(expected_packed.data() + i * hidden, row.elements.data(),
                      row.elements.size());
          write_scales(expected_scales.data() + i * scale_bytes, row.scales, wire_scale);
        }
        exec::PackRowsParams params{};
        params.rows = rows.data();
        params.row_stride_bytes = stride;
        params.dtype = dtype;
        params.hidden = hidden;
        params.num_rows = kNumRows;
        params.wire_scale = wire_scale;
        params.packed = packed.data();
        params.scales = scales.data();
        pack_rows(context_alone(hook, 1), params);
        EXPECT_TRUE(same_bytes(packed, expected_packed)) << describe(dtype, hidden, wire_scale);
        EXPECT_TRUE(same_bytes(scales, expected_scales)) << describe(dtype, hidden, wire_scale);
      }
    }
  }
}

TEST(PackRowsTest, NoRowsNeedNoMemory) {
  base::StepHook hook(TestKnobs{}, 0);
  exec::PackRowsParams params{};
  params.dtype = DType::kBFloat16;
  params.hidden = 7;
  pack_rows(context_alone(hook, 1), params);
}

TEST(PackRowsTest, APackedRowTakesLittleMoreThanHalfOfItsBFloat16) {
  for (const WireScale wire_scale : kWireScales) {
    for (const std::int64_t hidden : {1024, 2048, 4096, 7168}) {
      const auto bytes = static_cast<double>(plan::packed_row_bytes(hidden, wire_scale));
      EXPECT_LE(bytes / static_cast<double>(2 * hidden), 0.55);
    }
  }
}

}  // namespace
}  // namespace fanfold::cpu
