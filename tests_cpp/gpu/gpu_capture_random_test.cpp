// SPDX-License-Identifier: Apache-2.0

// Captures on a GPU hold the same bytes as those on the CPU.

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "capture/capture_case.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_capture_case.h"
#include "gtest/gtest.h"
#include "support/random_bits.h"

namespace fanfold {
namespace {

using testing::DeviceIds;
using testing::GpuCaptureTest;
using testing::Ids;
using ::testing::IsEmpty;
using testing::Numbers;
using testing::numbers_of;
using testing::on_gpu;
using testing::RandomBits;
using testing::small_capture;

struct RandomCase {
  RoutingCaptureConfig config;
  DType dtype;
  std::int64_t num_rows;
  std::int64_t gap;  // elements between rows
  CaptureLayout layout;
};

template <class T>
T one_of(RandomBits& random, const std::vector<T>& choices) {
  return choices[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(choices.size())))];
}

CaptureLayout random_layout(RandomBits& random, std::int64_t num_rows, std::int64_t max_tokens) {
  const std::int64_t half = num_rows / 2;
  const auto rank = static_cast<int>(random.below(2));
  switch (random.below(4)) {
    case 0:
      return CaptureLayout::local(max_tokens - num_rows);
    case 1:
      return CaptureLayout::concatenated({half, num_rows - half}, rank, random.below(3));
    case 2:
      if (num_rows % 2 == 0) return CaptureLayout::padded({half, half / 2}, rank, half);
      return CaptureLayout::local();
    default: {
      std::vector<std::int64_t> tokens;
      for (std::int64_t i = 0; i < num_rows; ++i) {
        tokens.push_back(random.below(4) == 0 ? -1 : num_rows - 1 - i);
      }
      return CaptureLayout::row_map(tokens, max_tokens - num_rows);
    }
  }
}

RandomCase random_case(RandomBits& random) {
  RandomCase made;
  RoutingCaptureConfig& config = made.config;
  config.num_layers = 1 + static_cast<int>(random.below(4));
  config.num_experts = one_of<int>(random, {8, 100, 127});
  config.top_k = one_of<int>(random, {1, 2, 3, 6, 8, 11, 16, 24});
  config.num_shared_experts = static_cast<int>(random.below(3));
  config.dtype = one_of<std::optional<DType>>(
      random, {std::nullopt, DType::kInt16, DType::kInt32, DType::kUInt8, DType::kUInt16});
  made.num_rows = one_of<std::int64_t>(random, {1, 2, 5, 40, 300});
  config.max_tokens = made.num_rows + 3 + random.below(4);
  if (random.below(2) == 0) {
    for (int i = 0; i < 120; ++i) {
      config.logical_of_expert.push_back(static_cast<std::int32_t>(random.below(8)));
    }
  }
  made.dtype = one_of<DType>(random, {DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64,
                                      DType::kUInt8, DType::kUInt16, DType::kUInt32});
  made.gap = one_of<std::int64_t>(random, {0, 0, 1, 8});
  made.layout = random_layout(random, made.num_rows, config.max_tokens);
  return made;
}

/// Random ids in a type; a tenth is negative, or the maximum of an unsigned type.
std::vector<std::byte> random_ids(RandomBits& random, DType dtype, std::int64_t num_ids,
                                  std::int64_t num_experts) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(num_ids * size_of(dtype)));
  for (std::int64_t i = 0; i < num_ids; ++i) {
    const std::int64_t id = random.below(10) == 0 ? -1 : random.below(num_experts);
    std::memcpy(bytes.data() + i * size_of(dtype), &id, static_cast<std::size_t>(size_of(dtype)));
  }
  return bytes;
}

TEST_F(GpuCaptureTest, SnapshotsAreThoseOfTheCpuBitForBit) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomBits random(seed);
    const RandomCase c = random_case(random);
    RoutingCapture cpu(c.config);
    RoutingCapture gpu(on_gpu(c.config));
    const int columns = c.config.top_k + (random.below(2) == 0 ? 0 : c.config.num_shared_experts);
    const std::int64_t stride = columns + c.gap;
    const auto num_ids = static_cast<std::int64_t>(
        c.config.logical_of_expert.empty() ? static_cast<std::size_t>(c.config.num_experts)
                                           : c.config.logical_of_expert.size());
    std::vector<std::shared_ptr<std::byte>> kept;
    for (int step = 0; step < 2; ++step) {
      cpu.begin_step(step);
      gpu.begin_step(step, stream());
      for (int layer = 0; layer < c.config.num_layers; ++layer) {
        if (random.below(4) == 0) continue;
        const std::vector<std::byte> ids =
            random_ids(random, c.dtype, c.num_rows * stride, num_ids);
        TensorView view(static_cast<const void*>(ids.data()), c.dtype, {c.num_rows, columns});
        view.strides[0] = stride;
        RecordOptions replaces;
        replaces.overwrite = true;  // some rows of the step before, and some twice
        cpu.record(layer, view, c.layout, replaces);
        const auto bytes = static_cast<std::int64_t>(ids.size());
        kept.push_back(testing::test_device()->allocate(0, bytes));
        testing::test_device()->upload(0, kept.back().get(), ids.data(), bytes, stream());
        view.data = kept.back().get();
        view.device = DeviceType::kGpu;
        gpu.record(layer, view, c.layout, options(true));
        if (random.below(2) == 0) gpu.record(layer, view, c.layout, options());  // equal: ordinary
      }
      const std::int64_t num_tokens = random.below(c.config.max_tokens + 1);
      const RoutingSnapshot expected = cpu.snapshot(num_tokens);
      const RoutingSnapshot got = gpu.snapshot(num_tokens, stream());
      EXPECT_EQ(got.missing_layers(), expected.missing_layers());
      EXPECT_EQ(got.missing_rows(), expected.missing_rows());
      EXPECT_EQ(got.array().describe(), expected.array().describe());
      EXPECT_EQ(numbers_of(got.array()), numbers_of(expected.array()));
      EXPECT_EQ(got.expert_histogram(), expected.expert_histogram());
      for (std::int64_t token = 0; token < num_tokens; token += 7) {
        const auto rows = [&](const RoutingSnapshot& of) -> std::optional<RoutingRows> {
          try {
            return of.rows(token, 1);
          } catch (const InvalidState&) {
            return std::nullopt;
          }
        };
        EXPECT_EQ(rows(got).has_value(), rows(expected).has_value()) << "token " << token;
      }
    }
    gpu.check();
  }
}

TEST_F(GpuCaptureTest, ScatteredRowsNeedSeveralLaunches) {
  constexpr int kRows = 700;  // 350 runs
  RoutingCaptureConfig config = on_gpu(small_capture(1, kRows));
  config.num_experts = kRows;
  RoutingCapture capture(config);
  Ids ids;
  std::vector<std::int64_t> tokens;
  for (int row = 0; row < kRows; ++row) {
    ids.insert(ids.end(), {row, kRows - 1 - row});
    tokens.push_back(row % 2 == 0 ? row + 1 : row - 1);
  }
  const DeviceIds rows = device_ids(ids);
  capture.begin_step(1, stream());
  capture.record(0, rows.view(), CaptureLayout::row_map(tokens), options());
  const RoutingSnapshot snapshot = capture.snapshot(kRows, stream());
  EXPECT_THAT(snapshot.missing_layers(), IsEmpty());
  const Numbers got = numbers_of(snapshot.array());
  for (std::size_t token = 0; token < kRows; ++token) {
    const auto row = static_cast<std::int64_t>(token % 2 == 0 ? token + 1 : token - 1);
    ASSERT_EQ(got[2 * token], row) << "token " << token;
    ASSERT_EQ(got[2 * token + 1], kRows - 1 - row);
  }
}

}  // namespace
}  // namespace fanfold
