// SPDX-License-Identifier: Apache-2.0
// Strategy low_latency: rows packed for the wire, two phases, masks, changing widths. What it
// shares with one_sided is in the conformance suites.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fanfold/all_to_all.h"
#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/routing_generators.h"
#include "support/spawn_ranks.h"
#include "support/wire_run.h"

namespace fanfold {
namespace {

using testing::make_wire_plan;
using testing::RoutingKind;
using testing::spawn_ranks;
using testing::WirePlan;
using testing::WireRun;

constexpr std::uint64_t kSeed = 20240313;
constexpr std::int64_t kMaxTokens = 6;

AllToAllConfig packed_config(Wire dispatch_wire = Wire::kFp8E4M3,
                             Wire combine_wire = Wire::kFp8E4M3) {
  AllToAllConfig config;
  config.num_experts = 7;
  config.top_k = 3;
  config.max_tokens_per_rank = kMaxTokens;
  config.hidden = 300;
  config.dtype = DType::kBFloat16;
  config.extra_bytes_per_token = 4;
  config.strategy = Strategy::kLowLatency;
  config.layout = Layout::kExpertMajor;
  config.weighting = Weighting::kCarried;
  config.dispatch_wire = dispatch_wire;
  config.combine_wire = combine_wire;
  config.test_knobs.row_guard_bytes = 16;
  return config;
}

/// Runs `rounds` on every rank of a group of threads.
void run(int num_ranks, const AllToAllConfig& config,
         const std::function<void(AllToAll&)>& rounds) {
  spawn_ranks(num_ranks, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    rounds(all_to_all);
    all_to_all.close();
  });
}

void run_round(AllToAll& all_to_all, const WirePlan& plan) {
  WireRun round(all_to_all, plan);
  round.dispatch();
  round.combine();
}

// --- Every pairing ----------------------------------------------------------------------------

struct WireCase {
  Wire dispatch_wire;
  Wire combine_wire;
  WireScale wire_scale;
  Weighting weighting;
  int num_ranks;
};

std::vector<WireCase> all_cases() {
  std::vector<WireCase> cases;
  for (const auto& [dispatch_wire, combine_wire] :
       {std::pair(Wire::kNone, Wire::kNone), std::pair(Wire::kFp8E4M3, Wire::kNone),
        std::pair(Wire::kNone, Wire::kFp8E4M3), std::pair(Wire::kFp8E4M3, Wire::kFp8E4M3)}) {
    const bool is_packed = dispatch_wire != Wire::kNone || combine_wire != Wire::kNone;
    for (const WireScale wire_scale : {WireScale::kFloat32, WireScale::kUe8m0}) {
      if (!is_packed && wire_scale != WireScale::kFloat32) continue;
      for (const Weighting weighting :
           {Weighting::kApplied, Weighting::kCarried, Weighting::kOrigin}) {
        for (const int num_ranks : {1, 3}) {
          cases.push_back({dispatch_wire, combine_wire, wire_scale, weighting, num_ranks});
        }
      }
    }
  }
  return cases;
}

std::string name_of_case(const ::testing::TestParamInfo<WireCase>& info) {
  const WireCase& c = info.param;
  return std::string(name_of(c.dispatch_wire)) + "_" + name_of(c.combine_wire) + "_" +
         name_of(c.wire_scale) + "_" + name_of(c.weighting) + "_" + std::to_string(c.num_ranks) +
         "_ranks";
}

class LowLatencyTest : public ::testing::TestWithParam<WireCase> {
 protected:
  AllToAllConfig config() const {
    AllToAllConfig config = packed_config(GetParam().dispatch_wire, GetParam().combine_wire);
    config.wire_scale = GetParam().wire_scale;
    config.weighting = GetParam().weighting;
    return config;
  }
  int num_ranks() const { return GetParam().num_ranks; }
};

TEST_P(LowLatencyTest, RoundsOfEveryRouting) {
  run(num_ranks(), config(), [&](AllToAll& all_to_all) {
    std::uint64_t seed = kSeed;
    for (const RoutingKind kind : testing::all_routings()) {
      WirePlan plan = make_wire_plan(config(), num_ranks(), kind, kMaxTokens, ++seed);
      plan.zero_copy = seed % 2 == 0;
      plan.specials = seed % 3 == 0;
      run_round(all_to_all, plan);
    }
  });
}

TEST_P(LowLatencyTest, EveryTypeOfRows) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    AllToAllConfig typed = config();
    typed.dtype = dtype;
    run(num_ranks(), typed, [&](AllToAll& all_to_all) {
      for (const DType out_dtype : {DType::kFloat32, DType::kBFloat16}) {
        WirePlan plan =
            make_wire_plan(typed, num_ranks(), RoutingKind::kUniform, kMaxTokens, kSeed);
        plan.out_dtype = out_dtype;
        run_round(all_to_all, plan);
      }
    });
  }
}

// Layers of different width back to back: nothing is cleaned between them, and each has other
// strides in the same memory.
TEST_P(LowLatencyTest, WidthsChangeFromRoundToRound) {
  AllToAllConfig wide = config();
  wide.max_in_flight = 2;
  run(num_ranks(), wide, [&](AllToAll& all_to_all) {
    constexpr std::int64_t kWidths[][2] = {{300, 300}, {1, 300},   {300, 1}, {127, 129},
                                           {128, 128}, {260, 100}, {5, 7},   {300, 300}};
    std::uint64_t seed = kSeed;
    for (const auto& [hidden, y_hidden] : kWidths) {
      WirePlan plan =
          make_wire_plan(wide, num_ranks(), RoutingKind::kUneven, kMaxTokens - 1, ++seed);
      plan.hidden = hidden;
      plan.y_hidden = y_hidden;
      plan.has_tags = seed % 2 == 0;
      run_round(all_to_all, plan);
    }
  });
}

TEST_P(LowLatencyTest, RoundsOverlapInTwoPhases) {
  AllToAllConfig deep = config();
  deep.max_in_flight = 2;
  run(num_ranks(), deep, [&](AllToAll& all_to_all) {
    for (std::uint64_t i = 0; i < 3; ++i) {
      WirePlan plan =
          make_wire_plan(deep, num_ranks(), RoutingKind::kSomeNone, kMaxTokens, kSeed + i);
      WireRun first(all_to_all, plan);
      plan.hidden = 129;
      plan.y_hidden = 130;
      plan.seed += 100;
      WireRun second(all_to_all, plan);
      first.dispatch_send();
      second.dispatch_send();
      first.dispatch_recv();
      second.dispatch_recv();
      first.combine_send();
      second.combine_send();
      first.combine_recv();
      second.combine_recv();
    }
  });
}

TEST_P(LowLatencyTest, ASecondCombineOfARoundPacksAnew) {
  run(num_ranks(), config(), [&](AllToAll& all_to_all) {
    WireRun round(all_to_all,
                  make_wire_plan(config(), num_ranks(), RoutingKind::kSkewed, kMaxTokens, kSeed));
    round.dispatch();
    round.combine(/*release=*/false);
    round.combine(/*release=*/false);
    round.combine();
  });
}

TEST_P(LowLatencyTest, ARoutingCarriesNewRows) {
  run(num_ranks(), config(), [&](AllToAll& all_to_all) {
    WirePlan plan =
        make_wire_plan(config(), num_ranks(), RoutingKind::kDuplicates, kMaxTokens, kSeed);
    WireRun first(all_to_all, plan);
    first.dispatch();
    const Routing routing = first.received().routing();
    first.combine();
    plan.seed += 1;
    WireRun second(all_to_all, plan);
    second.inputs.topk_ids = TensorView();
    second.inputs.topk_weights = TensorView();
    second.inputs.routing = routing;
    second.dispatch();
    second.combine();
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, LowLatencyTest, ::testing::ValuesIn(all_cases()), name_of_case);

// --- Weights, masks, layouts, phases ----------------------------------------------------------

TEST(LowLatencyWeightTest, WeightsGivenToCombineReplaceThoseOfDispatch) {
  for (const Wire combine_wire : {Wire::kNone, Wire::kFp8E4M3}) {
    AllToAllConfig config = packed_config(Wire::kFp8E4M3, combine_wire);
    config.weighting = Weighting::kOrigin;
    run(2, config, [&](AllToAll& all_to_all) {
      for (const bool at_dispatch : {true, false}) {
        WirePlan plan = make_wire_plan(config, 2, RoutingKind::kDuplicates, kMaxTokens, kSeed);
        plan.exchange.has_weights = at_dispatch;
        plan.new_weights = true;
        run_round(all_to_all, plan);
      }
    });
  }
}

TEST(LowLatencyMaskTest, RoundsGoOnWithoutAMaskedRank) {
  for (const Wire wire : {Wire::kNone, Wire::kFp8E4M3}) {
    for (const Weighting weighting :
         {Weighting::kApplied, Weighting::kCarried, Weighting::kOrigin}) {
      AllToAllConfig config = packed_config(wire, wire);
      config.weighting = weighting;
      const std::vector<bool> active = {true, false, true};
      spawn_ranks(3, [&](Communicator& communicator) {
        AllToAll all_to_all(communicator, config);
        run_round(all_to_all, make_wire_plan(config, 3, RoutingKind::kUniform, kMaxTokens, kSeed));
        if (!active[static_cast<std::size_t>(all_to_all.rank())]) return;  // it dies
        all_to_all.set_active_mask(active);
        for (std::uint64_t i = 1; i < 4; ++i) {
          WirePlan plan = make_wire_plan(config, 3, RoutingKind::kUniform, kMaxTokens, kSeed + i);
          plan.exchange.active = active;
          run_round(all_to_all, plan);
        }
        all_to_all.close();
      });
    }
  }
}

TEST(LowLatencyLayoutTest, EveryLayoutHasPackedRowsAndTheirScales) {
  for (const Layout layout :
       {Layout::kRankMajor, Layout::kExpertMajor, Layout::kFlat, Layout::kFlatByExpert}) {
    AllToAllConfig config = packed_config();
    config.layout = layout;
    if (!is_per_expert(layout)) {
      config.weighting = Weighting::kApplied;
      config.combine_wire = Wire::kNone;
    }
    if (layout == Layout::kFlatByExpert) config.expert_alignment = 4;
    run(2, config, [&](AllToAll& all_to_all) {
      for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kUneven}) {
        run_round(all_to_all, make_wire_plan(config, 2, kind, kMaxTokens, kSeed));
      }
    });
  }
}

// A thread that runs the first half for every rank, then the second half for every rank, needs no
// other thread to make progress.
TEST(LowLatencyPhaseTest, OneThreadRunsAllRanksInTwoPhases) {
  constexpr int kNumRanks = 2;
  const AllToAllConfig config = packed_config();
  std::vector<Communicator> ranks = Communicator::threads(kNumRanks);
  std::vector<std::unique_ptr<AllToAll>> exchanges(kNumRanks);
  spawn_ranks(ranks, [&](Communicator& communicator) {
    exchanges[static_cast<std::size_t>(communicator.rank())] =
        std::make_unique<AllToAll>(communicator, config);
  });
  std::vector<WireRun> rounds;
  rounds.reserve(kNumRanks);
  for (const auto& exchange : exchanges) {
    rounds.emplace_back(
        *exchange, make_wire_plan(config, kNumRanks, RoutingKind::kUniform, kMaxTokens, kSeed));
  }
  for (WireRun& round : rounds) round.dispatch_send();
  for (WireRun& round : rounds) round.dispatch_recv();
  for (WireRun& round : rounds) round.combine_send();
  for (WireRun& round : rounds) round.combine_recv();
  spawn_ranks(ranks, [&](Communicator& communicator) {
    exchanges[static_cast<std::size_t>(communicator.rank())]->close();
  });
}

TEST(LowLatencySizeTest, WorkersChangeNoBit) {
  AllToAllConfig config = packed_config();
  config.test_knobs.min_worker_bytes = 0;
  run(2, config, [&](AllToAll& all_to_all) {
    for (const int num_workers : {1, 3}) {
      all_to_all.set_num_workers(num_workers);
      run_round(all_to_all, make_wire_plan(config, 2, RoutingKind::kUniform, kMaxTokens, kSeed));
    }
  });
}

TEST(LowLatencySizeTest, PackedRowsTakeLessMemory) {
  AllToAllConfig config = packed_config();
  config.hidden = 7168;
  config.max_tokens_per_rank = 128;
  config.extra_bytes_per_token = 0;
  config.test_knobs.row_guard_bytes = 0;
  run(2, config, [&](AllToAll& all_to_all) {
    EXPECT_EQ(all_to_all.workspace_bytes(), AllToAll::required_bytes(2, config));
    const auto packed = static_cast<double>(all_to_all.metainfo().at("slot_stride"));
    const std::int64_t rows = 2 * config.max_tokens_per_rank;
    // Rows received and rows returned, at two bytes an element.
    EXPECT_LE(packed, 0.55 * static_cast<double>(2 * rows * config.hidden * 2));
  });
}

// --- Refusals ---------------------------------------------------------------------------------

TEST(LowLatencyErrorTest, AWireWantsRowsOfNumbers) {
  run(1, packed_config(), [](AllToAll& all_to_all) {
    WirePlan plan = make_wire_plan(packed_config(), 1, RoutingKind::kUniform, kMaxTokens, kSeed);
    std::vector<std::byte> bytes(4096);
    {
      WireRun round(all_to_all, plan);
      round.inputs.payloads[0] = TensorView(bytes.data(), DType::kUInt8, {kMaxTokens, 8});
      testing::expect_error<InvalidArgument>(
          {"payloads[0]: expected float32, float16 or bfloat16 [num_tokens, hidden]", "uint8"},
          [&] { all_to_all.dispatch(round.inputs); });
      round.inputs.payloads[0] = TensorView(bytes.data(), DType::kFloat32, {kMaxTokens, 4, 2});
      testing::expect_error<InvalidArgument>({"payloads[0]", "float32 [6, 4, 2]"},
                                             [&] { all_to_all.dispatch(round.inputs); });
    }
    run_round(all_to_all, plan);  // a corrected call continues
  });
}

TEST(LowLatencyErrorTest, RowsWiderThanTheConfigurationAreRefused) {
  run(1, packed_config(), [](AllToAll& all_to_all) {
    WirePlan plan = make_wire_plan(packed_config(), 1, RoutingKind::kUniform, kMaxTokens, kSeed);
    plan.hidden = 301 + 8;
    WireRun round(all_to_all, plan);
    testing::expect_error<InvalidArgument>({"payloads", "dispatch_row_bytes"},
                                           [&] { all_to_all.dispatch(round.inputs); });
  });
}

}  // namespace
}  // namespace fanfold
