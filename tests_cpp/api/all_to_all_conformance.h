// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one round must do on every strategy, layout and number of ranks: which rows arrive, in which
// order, and what their sums are. Instantiate AllToAllConformance to run it.

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "api/conformance_case.h"
#include "base/kernels.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"

namespace fanfold {

using testing::make_round;
using testing::PayloadSpec;
using testing::RoundPlan;
using testing::RoundRun;
using testing::RoutingKind;
using testing::Values;

// --- Routings ---------------------------------------------------------------------------------

TEST_P(AllToAllConformance, EachTokenGoesOnceToEachRankOfItsExperts) {
  run_kind(config(), RoutingKind::kUniform);
}

TEST_P(AllToAllConformance, SkewedRoutingIsOrdinary) { run_kind(config(), RoutingKind::kSkewed); }

TEST_P(AllToAllConformance, AllTokensOfAllRanksFitIntoOneExpert) {
  run_kind(config(), RoutingKind::kAllToOne);
}

TEST_P(AllToAllConformance, TokensWithoutAnExpertBecomeZeros) {
  run_kind(config(), RoutingKind::kAllNone);
}

TEST_P(AllToAllConformance, NegativeIdsSelectNoExpert) {
  run_kind(config(), RoutingKind::kSomeNone);
}

TEST_P(AllToAllConformance, RepeatedExpertsOfOneTokenMerge) {
  run_kind(config(), RoutingKind::kDuplicates);
}

TEST_P(AllToAllConformance, ZeroTokensEverywhereIsARound) {
  run_kind(config(), RoutingKind::kZeroTokens);
}

TEST_P(AllToAllConformance, OneTokenOnOneRankIsARound) {
  run_kind(config(), RoutingKind::kOneToken);
}

TEST_P(AllToAllConformance, UnevenAndEmptyRanksTakePart) {
  run_kind(config(), RoutingKind::kUneven);
}

TEST_P(AllToAllConformance, OneExpertPerTokenLeavesMostRanksOut) {
  run_kind(config(), RoutingKind::kOneExpertPerToken);
}

TEST_P(AllToAllConformance, RanksWithoutExpertsTakePart) {
  AllToAllConfig few = config();
  few.num_experts = 1;
  run_kind(few, RoutingKind::kSkewed);
  few.num_experts = 2;
  run_kind(few, RoutingKind::kUneven);
}

TEST_P(AllToAllConformance, ExpertsMayBePlacedInTurnOrByTable) {
  AllToAllConfig placed = config();
  placed.placement = Placement::round_robin();
  run_kind(placed, RoutingKind::kUniform);
  std::vector<std::int32_t> table;
  for (int expert = 0; expert < placed.num_experts; ++expert) {
    table.push_back((expert * expert + 1) % num_ranks());
  }
  placed.placement = Placement::from_table(table);
  run_kind(placed, RoutingKind::kUniform);
}

TEST_P(AllToAllConformance, CopiesOfAnExpertShareItsTokens) {
  AllToAllConfig placed = config();
  // Every logical expert has up to three copies, on one rank or on several; the last has one.
  std::vector<std::int32_t> ranks;
  std::vector<std::int32_t> logical;
  for (int expert = 0; expert < placed.num_experts; ++expert) {
    ranks.push_back((expert * 2 + expert / 3) % num_ranks());
    logical.push_back(expert + 1 == placed.num_experts ? placed.num_experts / 3 : expert / 3);
  }
  placed.placement = Placement::from_replicas(ranks, logical);
  for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kDuplicates,
                                 RoutingKind::kSomeNone, RoutingKind::kAllToOne}) {
    run_kind(placed, kind);
  }
}

TEST_P(AllToAllConformance, TopKIsNotLimitedToALane) {
  AllToAllConfig wide = config();
  wide.num_experts = 40;
  for (const int top_k : {1, 6, 22, 33}) {
    wide.top_k = top_k;
    wide.max_tokens_per_rank = 3;
    run_rounds(wide,
               {plan_of(wide, RoutingKind::kUniform), plan_of(wide, RoutingKind::kDuplicates)});
  }
}

// --- Shapes and types -------------------------------------------------------------------------

TEST_P(AllToAllConformance, AnyHiddenSizeTravels) {
  for (const std::int64_t hidden : {1, 7, 64, 450}) {
    AllToAllConfig sized = config();
    sized.hidden = hidden;
    run_rounds(sized, {plan_of(sized, RoutingKind::kUneven)});
  }
}

TEST_P(AllToAllConformance, LongRowsOfWholeLinesTravel) {
  // Such rows may take another way than short ones; here both kinds travel in one round.
  for (const std::int64_t guard_bytes : {0, 64}) {
    AllToAllConfig sized = config();
    sized.hidden = 1344;
    sized.test_knobs.row_guard_bytes = guard_bytes;
    RoundPlan strided = plan_of(sized, RoutingKind::kSomeNone);
    strided.row_padding = 3;
    RoundPlan reversed = plan_of(sized, RoutingKind::kUniform);
    std::swap(reversed.payloads[0], reversed.payloads[1]);
    run_rounds(sized, {plan_of(sized, RoutingKind::kUneven), strided, reversed});
  }
}

TEST_P(AllToAllConformance, EveryIdTypeAndRowStrideGivesTheSameRows) {
  std::vector<RoundPlan> plans;
  for (const DType dtype : {DType::kInt16, DType::kInt32, DType::kInt64, DType::kUInt32}) {
    for (const std::int64_t padding : {0, 5}) {
      // Unsigned ids cannot say "no expert".
      plans.push_back(plan_of(
          config(), dtype == DType::kUInt32 ? RoutingKind::kUniform : RoutingKind::kSomeNone));
      plans.back().id_dtype = dtype;
      plans.back().row_padding = padding;
    }
  }
  run_rounds(config(), plans);
}

TEST_P(AllToAllConformance, PayloadsOfAnyTypeAndSizeTravelTogether) {
  AllToAllConfig roomy = config();
  roomy.extra_bytes_per_token = 300;
  RoundPlan plan = plan_of(roomy, RoutingKind::kUneven);
  plan.payloads = {{DType::kUInt8, {1}},      {DType::kFloat8E4M3, {3}},
                   {DType::kUInt8, {5}},      {DType::kBFloat16, {roomy.hidden}},
                   {DType::kFloat32, {2, 3}}, {DType::kFloat4E2M1x2, {19}},
                   {DType::kComplex128, {1}}, {DType::kInt64, {}},
                   {DType::kBool, {2, 1, 2}}, {DType::kFloat8E8M0, {2}}};
  RoundPlan strided = plan;
  strided.row_padding = 3;
  RoundPlan single = plan_of(roomy, RoutingKind::kUneven, 3);
  single.payloads = {{DType::kUInt8, {1}}};
  run_rounds(roomy, {plan, strided, single, plan});
}

TEST_P(AllToAllConformance, SixteenPayloadsTravelTogether) {
  RoundPlan plan = plan_of(config(), RoutingKind::kUniform);
  plan.payloads.assign(AllToAll::kMaxPayloads, PayloadSpec{DType::kUInt8, {3}});
  run_rounds(config(), {plan});
}

TEST_P(AppliedConformance, WeightsAreOptional) {
  RoundPlan plan = plan_of(config(), RoutingKind::kUniform);
  plan.exchange.has_weights = false;
  run_rounds(config(), {plan, plan_of(config(), RoutingKind::kUniform), plan});
}

TEST_P(AllToAllConformance, RowsWithoutATokenCarryTheInvalidId) {
  RoundPlan plan = plan_of(config(), RoutingKind::kUneven);
  plan.exchange.invalid_expert_id = config().num_experts;
  run_rounds(config(), {plan, plan_of(config(), RoutingKind::kUneven)});
}

TEST_P(AllToAllConformance, LargeIdsAreDroppedAndCountedWhereSoConfigured) {
  AllToAllConfig dropping = config();
  dropping.check_ids = CheckIds::kDrop;
  RoundPlan plan = plan_of(dropping, RoutingKind::kUniform);
  std::vector<std::int64_t> num_large;
  for (testing::RankTokens& tokens : plan.exchange.ranks) {
    num_large.push_back(0);
    for (std::size_t i = 0; i < tokens.topk_ids.size(); i += 4) {
      tokens.topk_ids[i] =
          i % 8 == 0 ? dropping.num_experts : std::numeric_limits<std::int32_t>::max();
      ++num_large.back();
    }
  }
  run(dropping, [&](AllToAll& all_to_all) {
    RoundRun round(all_to_all, plan);
    round.dispatch();
    round.combine();
    EXPECT_EQ(all_to_all.num_dropped_ids(), num_large[static_cast<std::size_t>(all_to_all.rank())]);
  });
}

TEST_P(AllToAllConformance, OnlyTheFirstNumTokensRowsAreTokens) {
  if (GetParam().num_gpus > 0) {
    GTEST_SKIP() << "kernels read the number, and `out` has all rows: gpu/gpu_graph_test.cpp";
  }
  const RoundPlan plan = plan_of(config(), RoutingKind::kUniform);
  RoundPlan fewer = plan;
  for (testing::RankTokens& tokens : fewer.exchange.ranks) tokens.num_tokens = 4;
  run(config(), [&](AllToAll& all_to_all) {
    RoundRun whole(all_to_all, plan);
    RoundRun round(all_to_all, fewer);
    std::int32_t num_tokens = 4;
    round.inputs = whole.inputs;
    round.inputs.num_tokens = TensorView(&num_tokens, DType::kInt32, {1});
    round.dispatch();
    round.combine();
  });
}

TEST_P(AllToAllConformance, TokenCountsThatTheCallerKnowsAreAccepted) {
  const RoundPlan plan = plan_of(config(), RoutingKind::kUneven);
  run(config(), [&](AllToAll& all_to_all) {
    RoundRun round(all_to_all, plan);
    std::vector<std::int64_t> counts;
    for (const testing::RankTokens& tokens : plan.exchange.ranks) {
      counts.push_back(tokens.num_tokens);
    }
    round.inputs.num_tokens_per_rank = counts;
    round.dispatch();
    round.combine();
  });
}

TEST_P(FlatConformance, RowsPastTheLimitAreDroppedCountedAndMissingFromTheSums) {
  for (const std::int64_t limit : {1, 5, 16, 500}) {
    AllToAllConfig limited = config();
    limited.max_recv_rows = limit;
    limited.debug_poison = limit == 5;  // what nobody wrote is NaN
    std::vector<RoundPlan> plans;
    for (const RoutingKind kind :
         {RoutingKind::kUniform, RoutingKind::kAllNone, RoutingKind::kDuplicates,
          RoutingKind::kUneven, RoutingKind::kAllToOne}) {
      plans.push_back(plan_of(limited, kind, 3));
      plans.back().zero_copy = kind != RoutingKind::kDuplicates;
    }
    run(limited, [&](AllToAll& all_to_all) {
      std::int64_t num_dropped = 0;
      EXPECT_EQ(all_to_all.capacities().rows, limit);
      for (const RoundPlan& plan : plans) {
        RoundRun round(all_to_all, plan);
        round.dispatch();
        num_dropped += testing::expected_rows(plan.exchange, all_to_all.rank()).num_dropped;
        EXPECT_EQ(all_to_all.num_dropped_rows(), num_dropped);
        round.combine(/*release=*/false);
        round.combine();
      }
    });
  }
}

TEST_P(GroupConformance, GroupsAreFilledUpWithZeroRows) {
  for (const std::int64_t alignment : {2, 8, 128}) {
    for (const bool is_limited : {false, true}) {
      AllToAllConfig aligned = config();
      aligned.expert_alignment = alignment;
      if (is_limited) aligned.max_recv_rows = 11;
      std::vector<RoundPlan> plans;
      // Full rounds leave rows behind where later ones must have zeros.
      for (const RoutingKind kind :
           {RoutingKind::kUniform, RoutingKind::kOneToken, RoutingKind::kAllToOne,
            RoutingKind::kSomeNone, RoutingKind::kZeroTokens, RoutingKind::kUneven}) {
        plans.push_back(plan_of(aligned, kind, 4));
      }
      run_rounds(aligned, plans);
    }
  }
}

TEST_P(GatheredConformance, RowsNeedNoIds) {
  RoundPlan plan = plan_of(config(), RoutingKind::kUneven);
  plan.exchange.has_ids = false;
  plan.exchange.has_weights = false;
  run_rounds(config(), {plan, plan_of(config(), RoutingKind::kUniform), plan});
}

// --- Sums -------------------------------------------------------------------------------------

TEST_P(AllToAllConformance, SumsOfEveryTypeAreExact) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    AllToAllConfig typed = config();
    typed.dtype = dtype;
    run_rounds(typed,
               {plan_of(typed, RoutingKind::kUniform), plan_of(typed, RoutingKind::kSkewed)});
  }
}

TEST_P(AllToAllConformance, SubnormalsInfinitiesNanAndOverflowAddUpAsStated) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    AllToAllConfig typed = config();
    typed.dtype = dtype;
    typed.hidden = testing::kIsSanitizer ? 50 : 300;
    std::vector<RoundPlan> plans;
    for (const DType out : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      plans.push_back(plan_of(typed, RoutingKind::kUniform, 5));
      plans.back().values = Values::kSpecial;
      plans.back().out_dtype = out;
    }
    run_rounds(typed, plans);
  }
}

TEST_P(AllToAllConformance, ResultPartialAndOutMayDifferInType) {
  constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  for (const DType combine_dtype : kTypes) {
    AllToAllConfig typed = config();
    typed.combine_dtype = combine_dtype;
    typed.combine_row_bytes = 4 * typed.hidden;
    std::vector<RoundPlan> plans;
    for (const DType y : kTypes) {
      for (const DType out : kTypes) {
        plans.push_back(plan_of(typed, RoutingKind::kSkewed));
        plans.back().y_dtype = y;
        plans.back().out_dtype = out;
        plans.back().zero_copy = y == combine_dtype || !testing::results_travel_in_place(typed);
      }
    }
    run_rounds(typed, plans);
  }
}

TEST_P(AllToAllConformance, TheResultMayBeNarrowerThanThePayload) {
  RoundPlan plan = plan_of(config(), RoutingKind::kUniform);
  plan.hidden = config().hidden - 6;
  RoundPlan staged = plan;
  staged.zero_copy = false;
  run_rounds(config(), {plan, staged});
}

TEST_P(AllToAllConformance, StagedResultsGiveTheBitsOfResultsInPlace) {
  RoundPlan in_place = plan_of(config(), RoutingKind::kUneven);
  RoundPlan staged = in_place;
  staged.zero_copy = false;
  run_rounds(config(), {in_place, staged});
}

TEST_P(OriginConformance, WeightsGivenToCombineReplaceThoseOfDispatch) {
  RoundPlan plan = plan_of(config(), RoutingKind::kDuplicates);
  plan.new_weights_at_combine = true;
  RoundPlan strided = plan;
  strided.row_padding = 2;
  run_rounds(config(), {plan, strided, plan_of(config(), RoutingKind::kDuplicates)});
}

TEST_P(KernelConformance, EveryInstructionSetGivesTheSameBits) {
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    if (!base::is_supported(base::isa_from_name(isa))) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      AllToAllConfig forced = config();
      forced.test_knobs.isa = isa;
      forced.test_knobs.streaming_stores = dtype != DType::kFloat16;
      forced.dtype = dtype;
      forced.hidden = testing::kIsSanitizer ? 50 : 333;
      std::vector<RoundPlan> plans;
      for (const Values values : {Values::kOrdinary, Values::kSpecial}) {
        plans.push_back(plan_of(forced, RoutingKind::kUniform, 7));
        plans.back().values = values;
      }
      run_rounds(forced, plans);
    }
  }
}

TEST_P(MaskConformance, MaskedRanksAreLeftOut) {
  std::vector<bool> active(static_cast<std::size_t>(num_ranks()), true);
  active.back() = false;
  RoundPlan masked = plan_of(config(), RoutingKind::kUniform);
  masked.exchange.active = active;
  GetParam().spawn(num_ranks(), [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(config(), communicator.rank()));
    RoundRun before(all_to_all, plan_of(config(), RoutingKind::kUniform));
    before.dispatch();
    before.combine();
    // A rank that is left out is not waited for any more: it must be through with its last round.
    communicator.barrier();
    if (all_to_all.rank() != num_ranks() - 1) {
      all_to_all.set_active_mask(active);
      EXPECT_EQ(all_to_all.active_mask(), active);
      for (int i = 0; i < 3; ++i) {
        RoundRun after(all_to_all, masked);
        after.dispatch();
        after.combine();
      }
    }
    all_to_all.close();
  });
}

TEST_P(MaskConformance, AReleasedRoundMayComeBeforeANewMask) {
  std::vector<bool> active(static_cast<std::size_t>(num_ranks()), true);
  active.back() = false;
  RoundPlan masked = plan_of(config(), RoutingKind::kUniform);
  masked.exchange.active = active;
  GetParam().spawn(num_ranks(), [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(config(), communicator.rank()));
    RoundRun before(all_to_all, plan_of(config(), RoutingKind::kUniform));
    before.dispatch();
    before.release();
    communicator.barrier();
    if (all_to_all.rank() != num_ranks() - 1) {
      all_to_all.set_active_mask(active);
      RoundRun after(all_to_all, masked);
      after.dispatch();
      after.combine();
    }
    all_to_all.close();
  });
}

}  // namespace fanfold
