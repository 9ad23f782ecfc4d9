// SPDX-License-Identifier: Apache-2.0

// The combine kernels on simulated devices, bit by bit as the CPU's portable kernels.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "exec/flag_fields.h"
#include "gpu/combine_ranks.h"
#include "gtest/gtest.h"

namespace fanfold {
namespace {

using exec::DeviceFailure;
using testing::Bytes;
using testing::CombineRanks;
using testing::CombineShape;
using testing::expect_no_reports;
using testing::Fold;

constexpr DType kSummable[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr WireScale kScales[] = {WireScale::kFloat32, WireScale::kUe8m0};
constexpr Fold kFolds[] = {Fold::kStaged, Fold::kPlain, Fold::kCarried, Fold::kOrigin};

void start(int num_devices, const std::function<void(cudasim::Config&)>& change = {}) {
  cudasim::Config config;
  config.devices = num_devices;
  config.random_schedule = false;
  if (change) change(config);
  cudasim::configure(config);
  cudasim::clear_reports();
}

/// One combine of all ranks, as expected.
void expect_combine(const CombineShape& shape, int max_blocks = 3) {
  CombineRanks ranks(shape, max_blocks);
  ranks.combine();
  ranks.wait();
  ranks.expect_results();
  for (const int rank : ranks.active()) {
    const exec::DeviceSlot slot = ranks.slot(rank);
    EXPECT_EQ(slot.num_combines, 1U);
    EXPECT_EQ(slot.num_done, 0U);
    EXPECT_EQ(slot.next_tile, 0U);
  }
  expect_no_reports(shape.describe());
}

TEST(CombineKernelsTest, AllTypesRoundAndAddAsTheCpu) {
  start(3);
  for (const DType y : kSummable) {
    for (const DType combine : kSummable) {
      for (const DType out : kSummable) {
        for (const std::int64_t hidden : {1, 7, 64}) {
          CombineShape shape;
          shape.y = y;
          shape.combine = combine;
          shape.out = out;
          shape.hidden = hidden;
          expect_combine(shape);
        }
      }
    }
  }
}

TEST(CombineKernelsTest, EveryHiddenSizeAndNumberOfRanksAndKindOfSum) {
  for (const int num_ranks : {1, 2, 3, 5}) {
    start(num_ranks);
    for (const std::int64_t hidden : {1, 37, 450, 1344}) {
      for (const Fold fold : kFolds) {
        CombineShape shape;
        shape.num_ranks = num_ranks;
        shape.round_max_tokens = 3;
        shape.hidden = hidden;
        shape.fold = fold;
        expect_combine(shape);
      }
    }
  }
}

TEST(CombineKernelsTest, StagedRowsOfEveryTypeAreCopiedOrRounded) {
  start(2);
  for (const DType y : kSummable) {
    for (const DType combine : kSummable) {
      for (const std::int64_t hidden : {5, 72, 2048}) {
        CombineShape shape;
        shape.num_ranks = 2;
        shape.round_max_tokens = 2;
        shape.fold = Fold::kStaged;
        shape.y = y;
        shape.combine = combine;
        shape.hidden = hidden;
        expect_combine(shape);
      }
    }
  }
}

TEST(CombineKernelsTest, SpecialNumbersComeOutAsOnTheCpu) {
  start(3);
  for (const DType y : kSummable) {
    for (const DType combine : kSummable) {
      for (const Fold fold : kFolds) {
        CombineShape shape;
        shape.specials = true;
        shape.y = y;
        shape.combine = combine;
        shape.out = y;
        shape.fold = fold;
        shape.hidden = 72;
        expect_combine(shape);
      }
    }
  }
}

TEST(CombineKernelsTest, RowsThatTravelAsFp8) {
  for (const int num_ranks : {1, 3}) {
    start(num_ranks);
    for (const std::int64_t hidden : {1, 7, 128, 328, 450, 1344}) {
      for (const WireScale scale : kScales) {
        for (const Fold fold : {Fold::kPlain, Fold::kCarried, Fold::kOrigin}) {
          CombineShape shape;
          shape.num_ranks = num_ranks;
          shape.round_max_tokens = 2;
          shape.wire = Wire::kFp8E4M3;
          shape.wire_scale = scale;
          shape.fold = fold;
          shape.hidden = hidden;
          expect_combine(shape);
        }
      }
    }
  }
}

TEST(CombineKernelsTest, Fp8OfAllTypesWithSpecialNumbers) {
  start(2);
  for (const DType y : kSummable) {
    for (const DType out : kSummable) {
      for (const WireScale scale : kScales) {
        CombineShape shape;
        shape.num_ranks = 2;
        shape.round_max_tokens = 3;
        shape.specials = true;
        shape.y = y;
        shape.out = out;
        shape.wire = Wire::kFp8E4M3;
        shape.wire_scale = scale;
        shape.hidden = 300;
        expect_combine(shape);
      }
    }
  }
}

TEST(CombineKernelsTest, ResultsAndOutNeedOnlyTheAlignmentOfTheirElements) {
  start(2);
  for (const DType dtype : kSummable) {
    for (const Fold fold : kFolds) {
      CombineShape shape;
      shape.num_ranks = 2;
      shape.misaligned = true;
      shape.y = dtype;
      shape.combine = dtype;
      shape.out = dtype;
      shape.fold = fold;
      shape.hidden = 264;
      expect_combine(shape);
    }
  }
}

TEST(CombineKernelsTest, RowsWithoutATokenBecomeZeros) {
  start(2);
  for (const Fold fold : kFolds) {
    for (const int num_tokens : {0, 1, 4}) {
      CombineShape shape;
      shape.num_ranks = 2;
      shape.num_tokens = num_tokens;
      shape.rows_behind = 3;
      shape.fold = fold;
      shape.hidden = 40;
      expect_combine(shape);
      shape.rows_behind = 0;
      expect_combine(shape);
    }
  }
}

TEST(CombineKernelsTest, ARankThatIsLeftOutHasNoPart) {
  start(3);
  for (const Fold fold : kFolds) {
    for (const int left_out : {0, 1, 2}) {
      CombineShape shape;
      shape.left_out = left_out;
      shape.fold = fold;
      expect_combine(shape);
    }
  }
}

TEST(CombineKernelsTest, MoreExpertsThanLanesOfAWarp) {
  for (const int num_ranks : {1, 2}) {
    start(num_ranks);
    for (const int top_k : {33, 70, 128}) {
      for (const Fold fold : {Fold::kCarried, Fold::kOrigin}) {
        CombineShape shape;
        shape.num_ranks = num_ranks;
        shape.round_max_tokens = 2;
        shape.top_k = top_k;
        shape.num_local_experts = 100;
        shape.fold = fold;
        shape.hidden = 16;
        expect_combine(shape);
      }
    }
  }
}

// Forty windows that lie on one device: there a single rank only adds what others have left.
TEST(SumRowsKernelTest, ATokenWithMoreTargetsThanLanesOfAWarp) {
  start(1);
  constexpr int kNumRanks = 40;
  constexpr std::int64_t kHidden = 24;
  constexpr std::int64_t kRowBytes = kHidden * 4;
  std::vector<float> numbers;
  testing::RandomBits random(5);
  for (int i = 0; i < kNumRanks * kHidden; ++i) numbers.push_back(random.unit() - 0.5F);
  const testing::DeviceMemory rows(0, numbers);
  std::vector<std::byte*> windows;
  std::vector<plan::Target> targets;
  std::vector<float> expected(kHidden, 0.0F);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    windows.push_back(rows.at(rank * kRowBytes));
    if (rank % 13 == 5) continue;
    targets.push_back({rank, 0});
    for (std::size_t i = 0; i < kHidden; ++i) {
      expected[i] =
          testing::add(expected[i], numbers[static_cast<std::size_t>(rank) * kHidden + i]);
    }
  }
  targets.resize(kNumRanks, {-1, -1});
  const testing::DeviceMemory device_windows(0, windows);
  const testing::DeviceMemory device_targets(0, targets);
  const testing::DeviceMemory active(0, std::vector<std::int32_t>(kNumRanks, 1));
  const testing::DeviceMemory control(0, std::vector<exec::DeviceControl>(1));
  std::vector<exec::DeviceSlot> slots(1);
  slots[0].num_tokens = 1;
  const testing::DeviceMemory slot(0, slots);
  const testing::DeviceMemory out(0, kRowBytes);
  exec::DeviceSumParams params{};
  params.round.windows = device_windows.at<std::byte*>();
  params.round.is_active = active.at<std::int32_t>();
  params.round.control = control.at<exec::DeviceControl>();
  params.round.slot = slot.at<exec::DeviceSlot>();
  params.round.round_max_tokens = 1;
  params.round.num_ranks = kNumRanks;
  params.round.top_k = 64;
  params.targets = device_targets.at<plan::Target>();
  params.num_tokens = 1;
  params.combine_dtype = DType::kFloat32;
  params.out_dtype = DType::kFloat32;
  params.hidden = kHidden;
  params.rows_per_token = 1;
  params.row_bytes = kRowBytes;
  params.out = out.at();
  params.out_stride_bytes = kRowBytes;
  ASSERT_EQ(gpu::sum_rows(params, {2}, nullptr), cudaSuccess);
  const Bytes got = out.get(0, kRowBytes);
  std::vector<float> sums(kHidden);
  testing::copy_bytes(reinterpret_cast<std::byte*>(sums.data()), got.data(), kRowBytes);
  EXPECT_EQ(sums, expected);
  expect_no_reports("forty ranks");
}

TEST(CombineKernelsTest, AnyGridSharesTheRows) {
  start(2);
  for (const int max_blocks : {1, 2, 7, 40}) {
    for (const std::int64_t hidden : {8, 3000}) {
      CombineShape shape;
      shape.num_ranks = 2;
      shape.round_max_tokens = hidden == 8 ? 70 : 3;
      shape.hidden = hidden;
      expect_combine(shape, max_blocks);
    }
  }
}

TEST(CombineKernelsTest, AnyScheduleGivesTheSameBits) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    start(3, [&](cudasim::Config& config) {
      config.seed = seed;
      config.random_schedule = true;
      config.resident_blocks = seed % 3 == 0 ? 1 : 3;
      config.shuffle_blocks = seed % 2 == 0;
      config.stale = seed % 4 == 1 ? 0.3 : 0.0;
      config.preempt = seed % 4 == 3 ? 0.05 : 0.0;
    });
    CombineShape shape;
    shape.seed = seed;
    shape.hidden = 264;
    shape.fold = kFolds[seed % 4];
    CombineRanks ranks(shape, 4);
    // The round stays open, and has a second combine of other results.
    for (const int rank : ranks.active()) ranks.sum_params(rank).acks = true;
    ranks.combine();
    ranks.wait();
    ranks.expect_results();
    ranks.make_results(seed + 100);
    for (const int rank : ranks.active()) ranks.sum_params(rank).acks = false;
    ranks.combine();
    ranks.wait();
    ranks.expect_results();
    EXPECT_EQ(ranks.slot(0).num_combines, 2U);
    expect_no_reports(shape.describe());
  }
}

// Without a host that waits in between: what a rank sends again meets no peer that still pulls.
TEST(CombineKernelsTest, CombinesOfAnOpenRoundFollowEachOtherOnTheDevice) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    start(3, [&](cudasim::Config& config) {
      config.seed = seed;
      config.random_schedule = true;
    });
    CombineShape shape;
    shape.seed = seed;
    shape.hidden = 64;
    CombineRanks ranks(shape, 2);
    for (const int rank : ranks.active()) ranks.sum_params(rank).acks = true;
    for (const int rank : ranks.active()) {
      for (int i = 0; i < 3; ++i) {
        ranks.send(rank);
        ranks.sum(rank);
      }
    }
    ranks.wait();
    ranks.expect_results();
    EXPECT_EQ(ranks.slot(1).num_combines, 3U);
    expect_no_reports(shape.describe());
  }
}

// A rank that waits holds one block, so that the others' blocks find room.
TEST(CombineKernelsTest, RanksThatShareADeviceDoNotStarveEachOther) {
  constexpr int kNumRanks = 3;
  for (const int resident_blocks : {kNumRanks, 4}) {
    start(1, [&](cudasim::Config& config) { config.resident_blocks = resident_blocks; });
    CombineShape shape;
    shape.one_device = true;
    shape.num_ranks = kNumRanks;
    shape.hidden = 2048;
    CombineRanks ranks(shape, 6);
    for (const int rank : ranks.active()) ranks.sum_params(rank).acks = true;
    for (const int rank : ranks.active()) {
      ranks.send(rank);
      ranks.sum(rank);
      ranks.send(rank);
      ranks.sum(rank);
      ranks.run_a_while(rank);  // what is enqueued takes all the room that it can get
    }
    ranks.wait();
    ranks.expect_results();
    expect_no_reports("one device");
  }
}

TEST(CombineKernelsTest, AnAnnouncementAndAWaitOfTheirOwnDoTheSame) {
  start(3);
  CombineShape shape;
  CombineRanks ranks(shape);
  for (const int rank : ranks.active()) {
    ranks.send_params(rank).waits = false;
    ranks.send(rank);
  }
  for (const int rank : ranks.active()) {
    ranks.signal(rank, ranks.send_params(rank).flags, false, true);
    ranks.sum(rank);
  }
  ranks.wait();
  ranks.expect_results();
  expect_no_reports(shape.describe());
}

// --- Failures ---------------------------------------------------------------------------------

TEST(CombineKernelsTest, ALatePeerIsReportedAndNothingIsAdded) {
  start(3);
  CombineRanks ranks(CombineShape{});
  const Bytes before = ranks.out(0);
  for (const int rank : {0, 2}) {
    ranks.send(rank);
    ranks.sum(rank);
  }
  ranks.wait();
  EXPECT_EQ(ranks.report(0).failure, static_cast<std::uint32_t>(DeviceFailure::kTimeout));
  EXPECT_EQ(ranks.report(0).phase, static_cast<std::uint32_t>(exec::DevicePhase::kCombine));
  EXPECT_EQ(ranks.report(0).peer, 1U);
  EXPECT_EQ(ranks.report(0).epoch, CombineRanks::kEpoch);
  EXPECT_EQ(ranks.out(0), before);
  EXPECT_EQ(ranks.slot(0).num_combines, 0U);
  EXPECT_EQ(ranks.slot(0).num_done, 0U);
  expect_no_reports("late");
}

TEST(CombineKernelsTest, AMissingAcknowledgementIsReported) {
  start(2);
  CombineShape shape;
  shape.num_ranks = 2;
  CombineRanks ranks(shape);
  ranks.sum_params(0).acks = true;
  ranks.combine();
  ranks.wait();
  EXPECT_EQ(ranks.report(0).failure, static_cast<std::uint32_t>(DeviceFailure::kTimeout));
  EXPECT_EQ(ranks.report(0).phase, static_cast<std::uint32_t>(exec::DevicePhase::kAck));
  EXPECT_EQ(ranks.report(0).peer, 1U);
  EXPECT_EQ(ranks.report(1).failure, 0U);
  expect_no_reports("ack");
}

TEST(CombineKernelsTest, AnotherHiddenSizeIsReportedOnBothSides) {
  start(2);
  CombineShape shape;
  shape.num_ranks = 2;
  CombineRanks ranks(shape);
  ranks.send_params(1).flags.fields.num_payloads = 65;
  ranks.combine();
  ranks.wait();
  for (const int rank : {0, 1}) {
    const exec::DeviceReport& report = ranks.report(rank);
    EXPECT_EQ(report.failure, static_cast<std::uint32_t>(DeviceFailure::kDiffers));
    EXPECT_EQ(report.peer, static_cast<std::uint32_t>(1 - rank));
    EXPECT_EQ(exec::flag_fields(report.mine).num_payloads, rank == 0 ? 64U : 65U);
    EXPECT_EQ(exec::flag_fields(report.got).num_payloads, rank == 0 ? 65U : 64U);
  }
  expect_no_reports("hidden");
}

// --- Packing ----------------------------------------------------------------------------------

TEST(PackRowsKernelTest, RowsArePackedAsOnTheCpu) {
  start(1);
  for (const DType dtype : kSummable) {
    for (const WireScale scale : kScales) {
      for (const std::int64_t hidden : {1, 7, 37, 64, 128, 450, 1344, 2056}) {
        for (const std::int64_t gap : {0, 1, 8}) {  // elements between rows
          constexpr std::int64_t kRows = 3;
          const std::int64_t stride = (hidden + gap) * size_of(dtype);
          Bytes rows(static_cast<std::size_t>(kRows * stride));
          testing::RandomBits random(static_cast<std::uint64_t>(hidden + gap));
          const float specials[] = {0.0F, -0.0F, 1e38F, -1e38F * 1e10F, 0x1p-140F};
          for (std::int64_t i = 0; i < kRows * (hidden + gap); ++i) {
            const float number = random.below(30) == 0
                                     ? specials[random.below(5)]
                                     : 100.0F * (random.unit() - 0.5F) * random.unit();
            testing::encode(dtype, number, rows.data() + i * size_of(dtype));
          }
          const std::int64_t scales_row = plan::num_wire_blocks(hidden) * plan::size_of(scale);
          Bytes packed = testing::untouched_bytes(kRows * hidden);
          Bytes scales = testing::untouched_bytes(kRows * scales_row);
          for (std::int64_t row = 0; row < kRows; ++row) {
            base::portable_kernels()->pack_fp8(
                packed.data() + row * hidden, scales.data() + row * scales_row,
                scale == WireScale::kUe8m0, rows.data() + row * stride, dtype, hidden);
          }
          const testing::DeviceMemory source(0, rows);
          const testing::DeviceMemory device_packed(0, kRows * hidden);
          const testing::DeviceMemory device_scales(0, kRows * scales_row);
          const exec::DevicePackParams params{
              source.at(),       stride, dtype, hidden, kRows, nullptr, scale, device_packed.at(),
              device_scales.at()};
          ASSERT_EQ(gpu::pack_rows(params, {2}, nullptr), cudaSuccess);
          const std::string what = std::string(name_of(dtype)) + ", hidden " +
                                   std::to_string(hidden) + ", gap " + std::to_string(gap);
          EXPECT_TRUE(testing::same_bytes(device_packed.get(0, kRows * hidden), packed)) << what;
          EXPECT_TRUE(testing::same_bytes(device_scales.get(0, kRows * scales_row), scales))
              << what;
          expect_no_reports(what);
        }
      }
    }
  }
}

TEST(PackRowsKernelTest, NoMoreRowsThanTheWordOfTheDeviceSays) {
  constexpr std::int64_t kRows = 4;
  constexpr std::int64_t kHidden = 130;
  const testing::DeviceMemory source(0, Bytes(kRows * kHidden * 4, std::byte{0x3f}));
  for (const std::int32_t count : {-1, 0, 3, 4, 5}) {
    start(1);
    const testing::DeviceMemory word(0, std::vector<std::int32_t>{count});
    const Bytes before = testing::untouched_bytes(kRows * kHidden);
    const testing::DeviceMemory packed(0, before);
    const testing::DeviceMemory scales(0, kRows * 8);
    const exec::DevicePackParams params{
        source.at(),         kHidden * 4, DType::kFloat32, kHidden, kRows, word.at<std::int32_t>(),
        WireScale::kFloat32, packed.at(), scales.at()};
    ASSERT_EQ(gpu::pack_rows(params, {2}, nullptr), cudaSuccess);
    const Bytes after = packed.get(0, kRows * kHidden);
    for (std::int64_t row = 0; row < kRows; ++row) {
      const auto at = static_cast<std::size_t>(row * kHidden);
      EXPECT_EQ(after[at] == before[at], row >= count) << count << ", row " << row;
    }
    expect_no_reports("count");
  }
}

TEST(PackRowsKernelTest, NoRowsAreNoWork) {
  start(1);
  exec::DevicePackParams params{};
  params.dtype = DType::kBFloat16;
  params.hidden = 64;
  ASSERT_EQ(gpu::pack_rows(params, {2}, nullptr), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  expect_no_reports("no rows");
}

}  // namespace
}  // namespace fanfold
