// SPDX-License-Identifier: Apache-2.0

// The kernels of a dispatch on simulated devices, against the plans of the CPU: what they write,
// and that no schedule of blocks and threads shows a race.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/hand_made_ranks.h"
#include "gpu/kernels/tile_rows.h"
#include "support/routing_generators.h"

namespace fanfold::testing {
namespace {

cudasim::Config config_of(std::uint64_t seed, int resident_blocks = 3) {
  cudasim::Config config;
  config.seed = seed;
  config.resident_blocks = resident_blocks;
  return config;
}

RanksSpec ranks_of(int num_ranks, int num_experts, int top_k, std::int64_t max_tokens) {
  RanksSpec spec;
  spec.num_ranks = num_ranks;
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  spec.max_tokens = max_tokens;
  spec.row_bytes = {64};
  return spec;
}

RoundSpec round_of(const RanksSpec& spec, RoutingKind kind, std::uint64_t seed) {
  RoundSpec round;
  round.round_max_tokens = spec.max_tokens;
  RoutingSpec routing;
  routing.kind = kind;
  routing.num_ranks = spec.num_ranks;
  routing.num_experts = spec.num_experts;
  routing.top_k = spec.top_k;
  routing.round_max_tokens = spec.max_tokens;
  routing.seed = seed;
  round.tokens = make_tokens(routing);
  return round;
}

TEST(DispatchKernels, EveryRoutingOnSeveralNumbersOfRanks) {
  std::uint64_t seed = 1;
  for (const int num_ranks : {1, 2, 3, 5}) {
    for (const RoutingKind kind : all_routings()) {
      if (num_ranks == 5 && static_cast<int>(kind) % 2 == 0) continue;  // these take longest
      SCOPED_TRACE(std::to_string(num_ranks) + " ranks, " + name_of(kind));
      const RanksSpec spec = ranks_of(num_ranks, 7, 3, 6);
      HandMadeRanks ranks(spec, config_of(++seed));
      RoundSpec round = round_of(spec, kind, seed);
      round.is_expert_major = seed % 3 != 0;
      round.is_split = seed % 2 == 0;
      round.keeps_weights = seed % 5 != 0;
      ranks.run(round);
    }
  }
}

// More ranks than a warp has lanes: several words for the ranks of a token, several warps that
// announce and wait.
TEST(DispatchKernels, MoreRanksThanLanes) {
  constexpr int kRanks = 40;
  RanksSpec spec = ranks_of(kRanks, kRanks + 5, 3, 2);
  spec.row_bytes = {16};
  HandMadeRanks ranks(spec, config_of(9));
  RoundSpec round = round_of(spec, RoutingKind::kUniform, 9);
  round.is_expert_major = true;
  ranks.run(round);
}

// More tiles than blocks, more blocks than the device holds, blocks in any order, switches of
// threads anywhere, and flags that show old values.
TEST(DispatchKernels, NoScheduleChangesAnything) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    const RanksSpec spec = ranks_of(2, 6, 3, 24);
    cudasim::Config config = config_of(seed, seed % 3 == 0 ? 1 : 2);
    config.shuffle_blocks = seed % 2 == 0;
    config.preempt = seed % 4 == 1 ? 0.05 : 0.0;
    config.stale = seed % 2 == 1 ? 0.3 : 0.0;
    HandMadeRanks ranks(spec, config);
    RoundSpec round = round_of(spec, RoutingKind::kUniform, seed);
    round.max_blocks = seed % 5 == 0 ? 1 : 7;
    ranks.run(round);
    round.tokens = round_of(spec, RoutingKind::kDuplicates, seed).tokens;
    round.is_split = true;
    ranks.run(round);
  }
}

// The look-back over more tiles than a warp has lanes, which many blocks work at, so that no sum
// over all before is near.
TEST(DispatchKernels, MoreTilesThanLanes) {
  RanksSpec spec = ranks_of(1, 3, 1, 80);
  spec.row_bytes = {16};
  HandMadeRanks ranks(spec, config_of(5, 48));
  RoundSpec round = round_of(spec, RoutingKind::kUniform, 5);
  round.max_blocks = 40;
  ranks.run(round);
  round.max_blocks = 2;  // tiles of 32
  ranks.run(round);
}

TEST(DispatchKernels, EveryIdTypeAndDroppedIds) {
  for (const DType dtype : {DType::kInt16, DType::kInt32, DType::kInt64, DType::kUInt32}) {
    SCOPED_TRACE(name_of(dtype));
    RanksSpec spec = ranks_of(2, 5, 4, 5);
    spec.id_dtype = dtype;
    HandMadeRanks ranks(spec, config_of(3));
    RoundSpec round = round_of(spec, RoutingKind::kUniform, 3);
    std::vector<std::int64_t>& ids = round.tokens[0].topk_ids;
    ids[1] = 5;
    ids[6] = 32767;
    if (dtype != DType::kUInt32) ids[9] = -3;
    if (dtype == DType::kInt64) ids[3] = -(std::int64_t{1} << 40);
    if (dtype == DType::kInt64) ids[11] = (std::int64_t{1} << 32) + 1;
    if (dtype == DType::kUInt32) ids[11] = 0xffffffff;
    ranks.run(round);
    ranks.run(round);  // the count goes on
  }
}

// The host's memory is far away.
TEST(DispatchKernels, TheHostIsToldOfDroppedIdsWhenThereAreMore) {
  RanksSpec spec = ranks_of(1, 4, 2, 4);
  HandMadeRanks ranks(spec, config_of(4));
  RoundSpec round = round_of(spec, RoutingKind::kUniform, 4);
  const RoundSpec all_well = round;
  round.tokens[0].topk_ids[1] = 4;
  ranks.run(round);
  ASSERT_EQ(ranks.report(0).num_dropped_ids, 1U);
  ranks.report(0).num_dropped_ids = 0;
  ranks.prepare(all_well);
  ASSERT_EQ(gpu::dispatch_send(ranks.dispatch_params(0), {4}, ranks.stream(0)), cudaSuccess);
  ranks.sync();
  EXPECT_EQ(ranks.report(0).num_dropped_ids, 0U);
  expect_no_reports();
}

TEST(DispatchKernels, TopKFromOneToTheMost) {
  for (const int top_k : {1, 33, exec::kMaxDeviceTopK}) {
    SCOPED_TRACE(top_k);
    RanksSpec spec = ranks_of(3, 2 * top_k + 2, top_k, 5);
    HandMadeRanks ranks(spec, config_of(7));
    ranks.run(round_of(spec, RoutingKind::kSomeNone, 7));
    ranks.run(round_of(spec, RoutingKind::kDuplicates, 8));
  }
}

// More local experts than a tile handles at a time, most of them without rows.
TEST(DispatchKernels, ManyLocalExperts) {
  const RanksSpec spec = ranks_of(2, 1100, 4, 6);
  HandMadeRanks ranks(spec, config_of(8));
  ranks.run(round_of(spec, RoutingKind::kUniform, 8));
}

TEST(DispatchKernels, RowsOfAnySizeAndAlignment) {
  struct Case {
    std::vector<std::int64_t> row_bytes;
    std::int64_t gap;
    std::int64_t shift;
  };
  const std::vector<Case> cases = {{{1, 3, 7}, 0, 0},          {{16, 2, 2064}, 16, 0},
                                   {{24, 4096 + 8}, 0, 0},     {{32, 6}, 0, 2},
                                   {{4096 + 2048 + 16}, 0, 0}, {{12, 2052}, 4, 4}};
  for (const Case& rows : cases) {
    SCOPED_TRACE(rows.row_bytes[0]);
    RanksSpec spec = ranks_of(2, 4, 2, 4);
    spec.row_bytes = rows.row_bytes;
    spec.source_gap = rows.gap;
    spec.source_shift = rows.shift;
    HandMadeRanks ranks(spec, config_of(9));
    ranks.run(round_of(spec, RoutingKind::kUniform, 9));
  }
}

TEST(DispatchKernels, NoPayloadAndNoWeights) {
  RanksSpec spec = ranks_of(2, 4, 2, 4);
  spec.row_bytes = {};
  spec.has_weights = false;
  HandMadeRanks ranks(spec, config_of(9));
  ranks.run(round_of(spec, RoutingKind::kDuplicates, 9));
}

TEST(DispatchKernels, TokenCountsOnTheDevice) {
  const RanksSpec spec = ranks_of(3, 6, 2, 8);
  HandMadeRanks ranks(spec, config_of(11));
  RoundSpec round = round_of(spec, RoutingKind::kUniform, 11);
  for (const std::vector<std::int32_t>& words :
       std::vector<std::vector<std::int32_t>>{{3, 0, 8}, {8, 1, 5}, {0, 0, 0}, {9, -4, 100}}) {
    round.words = words;
    ranks.run(round);
  }
}

// Tiles of a few rows less may be longer: they have room.
TEST(DispatchKernels, MoreRowsThanOneTileForEachBlock) {
  RanksSpec spec = ranks_of(2, 4, 2, 70);
  HandMadeRanks ranks(spec, config_of(19));
  RoundSpec round = round_of(spec, RoutingKind::kUniform, 19);
  round.max_blocks = 2;
  ranks.run(round);
  for (const std::int32_t count : {64, 65, 33}) {
    round.words = {count, 70};
    ranks.run(round);
  }
}

TEST(Launches, StartEarlyWhereDeviceAndDriverCan) {
  static_assert(gpu::early_start(8, 80, 13000) == gpu::EarlyStart::kNever);
  static_assert(gpu::early_start(9, 80, 13000) == gpu::EarlyStart::kNever);
  static_assert(gpu::early_start(9, 90, 12020) == gpu::EarlyStart::kOutsideCaptures);
  static_assert(gpu::early_start(9, 90, 12030) == gpu::EarlyStart::kAlways);
  static_assert(gpu::early_start(10, 100, 13000) == gpu::EarlyStart::kAlways);
}

TEST(Tiles, BlocksHaveAsMuchToDoAsOthers) {
  EXPECT_EQ(gpu::tile_rows(8192, 228), 18);  // not 256 tiles of 32
  EXPECT_EQ(gpu::tile_rows(64, 2), 32);
  EXPECT_EQ(gpu::tile_rows(65, 2), 17);
  EXPECT_EQ(gpu::tile_rows(1, 2), 1);
  EXPECT_EQ(gpu::tile_rows(0, 2), 1);
  for (const std::int64_t num_blocks : {1, 2, 7, 228}) {
    for (std::int64_t rows = 1; rows < 2000; ++rows) {
      const int of_tile = gpu::tile_rows(rows, num_blocks);
      ASSERT_LE(of_tile, gpu::max_tile_rows(rows, num_blocks));
      ASSERT_LE((rows + of_tile - 1) / of_tile, num_blocks + (rows + 31) / 32);
    }
  }
}

TEST(DispatchKernels, Placements) {
  RanksSpec spec = ranks_of(3, 8, 3, 6);
  spec.placement.kind = Placement::Kind::kTable;
  spec.placement.table = {2, 0, 2, 0, 0, 2, 2, 2};  // rank 1 has none
  {
    HandMadeRanks ranks(spec, config_of(12));
    ranks.run(round_of(spec, RoutingKind::kUniform, 12));
  }
  spec.placement.table = {};
  spec.placement.kind = Placement::Kind::kRoundRobin;
  spec.placement.logical_of_expert = {0, 1, 2, 3, 0, 0, 2, 3};  // replicas
  HandMadeRanks ranks(spec, config_of(13));
  RoundSpec round = round_of(spec, RoutingKind::kUniform, 13);
  for (RankTokens& tokens : round.tokens) {
    for (std::int64_t& id : tokens.topk_ids) id %= 5;  // 4 is dropped
  }
  ranks.run(round);
}

TEST(DispatchKernels, MaskedRanksGetNothing) {
  RanksSpec spec = ranks_of(5, 10, 4, 6);
  spec.active = {true, false, true, true, false};
  HandMadeRanks ranks(spec, config_of(14));
  ranks.run(round_of(spec, RoutingKind::kUniform, 14));
}

TEST(DispatchKernels, AlongAnEarlierRouting) {
  for (const bool is_expert_major : {false, true}) {
    const RanksSpec spec = ranks_of(3, 6, 3, 7);
    HandMadeRanks ranks(spec, config_of(15));
    RoundSpec round = round_of(spec, RoutingKind::kSkewed, 15);
    round.is_expert_major = is_expert_major;
    ranks.run(round);
    round.is_routed = true;
    ranks.run(round);
  }
}

// Rows of a round with another m lie elsewhere in the same regions, which stay where they are.
TEST(DispatchKernels, RoundsOfAnyLengthInOneSlot) {
  RanksSpec spec = ranks_of(3, 6, 2, 16);
  HandMadeRanks ranks(spec, config_of(16), /*slices=*/false);
  for (const std::int64_t m : {1, 16, 5, 16, 2}) {
    SCOPED_TRACE(m);
    spec.max_tokens = m;
    ranks.run(round_of(spec, RoutingKind::kUniform, 16));
  }
}

// --- Rounds that fail ---------------------------------------------------------------------------

class FailingRound : public ::testing::Test {
 protected:
  FailingRound() {
    spec_ = ranks_of(2, 4, 2, 4);
    spec_.timeout_ns = 2'000'000;
  }
  exec::DeviceFailure failure(const HandMadeRanks& ranks, int rank) const {
    return static_cast<exec::DeviceFailure>(ranks.report(rank).failure);
  }
  /// Leaves the first tile of the slot's next kernel to nobody, in a round of `epoch`.
  static void skip_tile(const exec::DeviceRound& round, std::uint64_t epoch) {
    exec::DeviceSlot slot{};
    slot.epoch = epoch;
    slot.num_tokens = 4;
    slot.next_tile = 1;
    ASSERT_EQ(cudaMemcpy(round.slot, &slot, sizeof(slot), cudaMemcpyDefault), cudaSuccess);
  }
  RanksSpec spec_;
};

TEST_F(FailingRound, APeerThatDoesNotComeIsNamed) {
  HandMadeRanks ranks(spec_, config_of(20));
  ranks.prepare(round_of(spec_, RoutingKind::kUniform, 20));
  ASSERT_EQ(gpu::dispatch_send(ranks.dispatch_params(0), {4}, ranks.stream(0)), cudaSuccess);
  // These must not touch counts that nobody wrote.
  ASSERT_EQ(gpu::arrange(ranks.arrange_params(0), {4}, ranks.stream(0)), cudaSuccess);
  ASSERT_EQ(gpu::describe_rows(ranks.describe_params(0), {4}, ranks.stream(0)), cudaSuccess);
  ranks.sync();
  EXPECT_EQ(failure(ranks, 0), exec::DeviceFailure::kTimeout);
  EXPECT_EQ(ranks.report(0).peer, 1U);
  EXPECT_EQ(ranks.report(0).phase, static_cast<std::uint32_t>(exec::DevicePhase::kDispatch));
  EXPECT_EQ(ranks.report(0).slot, 1U);
  EXPECT_EQ(ranks.report(0).epoch, 1U);
  EXPECT_EQ(ranks.slot(0).epoch, 1U);
  EXPECT_EQ(ranks.control(0).has_failed, 1U);
  // Once failed, nothing is sent: the peer, which comes late, waits for round 2 in vain.
  ASSERT_EQ(gpu::dispatch_send(ranks.dispatch_params(0), {4}, ranks.stream(0)), cudaSuccess);
  ranks.sync();
  EXPECT_EQ(ranks.slot(0).epoch, 1U);
  ASSERT_EQ(gpu::dispatch_send(ranks.dispatch_params(1), {4}, ranks.stream(1)), cudaSuccess);
  ranks.sync();
  EXPECT_EQ(failure(ranks, 1), exec::DeviceFailure::kNone);  // its peer's flag had been raised
  ASSERT_EQ(gpu::dispatch_send(ranks.dispatch_params(1), {4}, ranks.stream(1)), cudaSuccess);
  ranks.sync();
  EXPECT_EQ(failure(ranks, 1), exec::DeviceFailure::kTimeout);
  EXPECT_EQ(ranks.report(1).epoch, 2U);
  expect_no_reports();
}

TEST_F(FailingRound, AFlagThatDiffersIsToldOnBothSides) {
  HandMadeRanks ranks(spec_, config_of(21));
  ranks.prepare(round_of(spec_, RoutingKind::kUniform, 21));
  for (int r = 0; r < 2; ++r) {
    exec::DeviceDispatchSendParams params = ranks.dispatch_params(r);
    params.flags.fields.digest = r == 0 ? 11 : 22;
    ASSERT_EQ(gpu::dispatch_send(params, {4}, ranks.stream(r)), cudaSuccess);
  }
  ranks.sync();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(failure(ranks, r), exec::DeviceFailure::kDiffers);
    EXPECT_EQ(ranks.report(r).peer, 1U - static_cast<unsigned>(r));
    EXPECT_EQ(exec::flag_fields(ranks.report(r).mine).digest, r == 0 ? 11U : 22U);
    EXPECT_EQ(exec::flag_fields(ranks.report(r).got).digest, r == 0 ? 22U : 11U);
  }
  expect_no_reports();
}

TEST_F(FailingRound, AnAbortEndsTheWait) {
  spec_.timeout_ns = 3'600'000'000'000;
  HandMadeRanks ranks(spec_, config_of(22));
  ranks.prepare(round_of(spec_, RoutingKind::kUniform, 22));
  ranks.abort_word(0) = 1 + ranks.control(0).generation;
  ASSERT_EQ(gpu::dispatch_send(ranks.dispatch_params(0), {4}, ranks.stream(0)), cudaSuccess);
  ranks.sync();
  EXPECT_EQ(failure(ranks, 0), exec::DeviceFailure::kAborted);
  expect_no_reports();
}

// No kernel waits for ever for a block of its own.
TEST_F(FailingRound, ATileThatNobodyTookEndsTheWait) {
  HandMadeRanks ranks(spec_, config_of(23));
  ranks.prepare(round_of(spec_, RoutingKind::kUniform, 23));
  const exec::DeviceDispatchSendParams params = ranks.dispatch_params(0);
  constexpr std::uint64_t kEpoch = std::uint64_t{5} << 31;  // more than a tag has bits for
  skip_tile(params.round, kEpoch);
  ASSERT_EQ(gpu::dispatch_send(params, {4}, ranks.stream(0)), cudaSuccess);
  ranks.sync();
  EXPECT_EQ(failure(ranks, 0), exec::DeviceFailure::kStuck);
  EXPECT_EQ(ranks.report(0).epoch, kEpoch + 1);
  EXPECT_EQ(ranks.report(0).timeout_ns, 2'000'000U);
  EXPECT_EQ(ranks.slot(0).epoch, kEpoch);
  expect_no_reports();
}

// Without a limit of its own the wait ends with the failure of another kernel.
TEST_F(FailingRound, AnArrangeWithoutALimitWaitsUntilKernelsHaveFailed) {
  HandMadeRanks ranks(spec_, config_of(24));
  ranks.prepare(round_of(spec_, RoutingKind::kUniform, 24));
  for (int r = 0; r < 2; ++r) {
    ASSERT_EQ(gpu::dispatch_send(ranks.dispatch_params(r), {4}, ranks.stream(r)), cudaSuccess);
  }
  ranks.sync();
  ASSERT_EQ(failure(ranks, 0), exec::DeviceFailure::kNone);
  exec::DeviceArrangeParams params = ranks.arrange_params(0);
  params.round.timeout_ns = 0;
  skip_tile(params.round, 2);
  ASSERT_EQ(gpu::arrange(params, {2}, ranks.stream(0)), cudaSuccess);  // not all the room
  // The peer does not come to round 2.
  exec::DeviceSignalParams signal = ranks.signal_params(0);
  signal.round.timeout_ns = 20'000'000;
  signal.counts = {};
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(gpu::signal(signal, {1}, other), cudaSuccess);
  ranks.sync();
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  EXPECT_EQ(failure(ranks, 0), exec::DeviceFailure::kTimeout);
  EXPECT_EQ(ranks.report(0).peer, 1U);
  EXPECT_EQ(ranks.report(0).timeout_ns, 20'000'000U);
  expect_no_reports();
}

// --- Sanitize -----------------------------------------------------------------------------------

template <typename Id>
void expect_sanitized(DType dtype, SanitizePolicy policy, bool in_place) {
  cudasim::configure(config_of(30));
  cudasim::clear_reports();
  constexpr std::int64_t kSources = 2;
  constexpr std::int64_t kRows = 3;
  constexpr int kTopK = 3;
  constexpr std::int64_t kStride = 4;  // of rows
  constexpr std::int64_t kSourceStride = 13;
  const Id invalid = static_cast<Id>(99);
  const std::vector<std::int32_t> rank_of{0, 1, 0, 1};
  const std::vector<std::int32_t> local_of{0, 0, 1, 1};
  const std::vector<std::int32_t> counts{2, 0};
  std::vector<Id> ids(kSources * kSourceStride, static_cast<Id>(55));
  const std::vector<std::int64_t> some{0, 1, 2, 3, -1, 7};
  std::vector<Id> want = ids;
  for (std::int64_t source = 0; source < kSources; ++source) {
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (int k = 0; k < kTopK; ++k) {
        const auto at = static_cast<std::size_t>(source * kSourceStride + row * kStride + k);
        const std::int64_t id = some[static_cast<std::size_t>((row * kTopK + k) % 6)];
        ids[at] = static_cast<Id>(id);
        const bool is_local = id >= 0 && id < 4 && rank_of[static_cast<std::size_t>(id)] == 0;
        const bool has_token = row < counts[static_cast<std::size_t>(source)];
        want[at] = invalid;
        if (has_token && policy == SanitizePolicy::kPadding) want[at] = ids[at];
        if (has_token && is_local && policy == SanitizePolicy::kPaddingAndNonLocal) {
          want[at] = ids[at];
        }
        if (has_token && is_local && policy == SanitizePolicy::kToLocal) {
          want[at] = static_cast<Id>(local_of[static_cast<std::size_t>(id)]);
        }
      }
    }
  }
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  std::vector<void*> owned;
  const auto put = [&](const auto& values) {
    void* memory = nullptr;
    const std::size_t bytes = values.size() * sizeof(values[0]);
    EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(memory, values.data(), bytes, cudaMemcpyDefault), cudaSuccess);
    owned.push_back(memory);
    return memory;
  };
  exec::DeviceSanitizeParams params{};
  params.ids = put(ids);
  params.out = in_place ? const_cast<void*>(params.ids)
                        : put(std::vector<Id>(ids.size(), static_cast<Id>(55)));
  params.dtype = dtype;
  params.source_stride = kSourceStride;
  params.row_stride = kStride;
  params.out_source_stride = kSourceStride;
  params.out_row_stride = kStride;
  params.num_sources = kSources;
  params.num_rows = kRows;
  params.top_k = kTopK;
  params.counts = static_cast<const std::int32_t*>(put(counts));
  params.invalid_expert_id = 99;
  params.policy = policy;
  params.rank_of = static_cast<const std::int32_t*>(put(rank_of));
  params.local_of = static_cast<const std::int32_t*>(put(local_of));
  params.num_experts = 4;
  params.rank = 0;
  ASSERT_EQ(gpu::sanitize(params, {4}, nullptr), cudaSuccess);
  std::vector<Id> got(ids.size());
  ASSERT_EQ(cudaMemcpy(got.data(), params.out, got.size() * sizeof(Id), cudaMemcpyDefault),
            cudaSuccess);
  EXPECT_EQ(got, want);
  for (void* const memory : owned) EXPECT_EQ(cudaFree(memory), cudaSuccess);
  expect_no_reports();
}

TEST(SanitizeKernel, EveryPolicyAndIdType) {
  for (const SanitizePolicy policy :
       {SanitizePolicy::kPadding, SanitizePolicy::kPaddingAndNonLocal, SanitizePolicy::kToLocal}) {
    for (const bool in_place : {false, true}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(policy) << in_place);
      expect_sanitized<std::int16_t>(DType::kInt16, policy, in_place);
      expect_sanitized<std::int32_t>(DType::kInt32, policy, in_place);
      expect_sanitized<std::int64_t>(DType::kInt64, policy, in_place);
      expect_sanitized<std::uint32_t>(DType::kUInt32, policy, in_place);
    }
  }
}

}  // namespace
}  // namespace fanfold::testing
