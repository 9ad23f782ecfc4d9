// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a sequence of rounds must do on every strategy, layout and number of ranks: no order of
// calls, delay or change of size may spoil a round. Instantiate AllToAllConformance to run it.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "api/conformance_case.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "support/random_bits.h"
#include "support/schedule.h"

namespace fanfold {

/// Long sequences of rounds.
class RoundsConformance : public AllToAllConformance {
 protected:
  static int num_rounds() {
    if (GetParam().num_gpus > 0) return 8;
    return testing::kIsSanitizer ? 12 : 40;
  }

  static AllToAllConfig small_config(int max_in_flight) {
    AllToAllConfig small = config();
    small.hidden = 9;
    small.extra_bytes_per_token = 16;
    small.max_in_flight = max_in_flight;
    small.test_knobs.delay_seed = 77;
    return small;
  }

  /// Round `index` of a sequence: routing, m, payload set and results in place all change.
  static testing::RoundPlan changing_plan(const AllToAllConfig& config, int index,
                                          std::uint64_t seed) {
    testing::RandomBits random(testing::mix(seed, static_cast<std::uint64_t>(index)));
    const auto& kinds = testing::all_routings();
    const auto kind =
        kinds[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(kinds.size())))];
    std::int64_t m = 1 + random.below(config.max_tokens_per_rank);
    if (kind == testing::RoutingKind::kZeroTokens) m = random.below(2);
    testing::RoundPlan plan = testing::make_round(config, num_ranks(), kind, m, random.next());
    switch (random.below(4)) {
      case 0:
        plan.payloads = {{DType::kUInt8, {1}}};
        break;
      case 1:
        plan.payloads = {{DType::kInt32, {2}}, {DType::kUInt8, {3}}, plan.payloads[0]};
        break;
      default:
        break;
    }
    plan.zero_copy = random.below(2) == 0;
    return plan;
  }

  static testing::ScheduleSpec schedule(std::uint64_t seed, bool combines_more_than_once = false) {
    testing::ScheduleSpec spec;
    spec.combines_more_than_once = combines_more_than_once;
    spec.seed = seed;
    return spec;
  }

  static void take_step(const testing::Step& step, testing::RoundRun& round) {
    switch (step.phase) {
      case testing::Phase::kDispatch:
        return round.dispatch();
      case testing::Phase::kDispatchSend:
        return round.dispatch_send();
      case testing::Phase::kDispatchRecv:
        return round.dispatch_recv();
      case testing::Phase::kCombine:
        return round.combine();
      case testing::Phase::kCombineKeep:
        return round.combine(/*release=*/false);
      case testing::Phase::kCombineSend:
        return round.combine_send();
      case testing::Phase::kCombineRecv:
        return round.combine_recv();
      case testing::Phase::kRelease:
        return round.release();
    }
  }

  /// Every rank takes the same steps, each at its own pace.
  static void run_schedule(const AllToAllConfig& config, testing::ScheduleSpec spec) {
    spec.num_rounds = num_rounds();
    spec.max_in_flight = config.max_in_flight;
    run(config, [&](AllToAll& all_to_all) {
      testing::ScheduleSpec own = spec;
      own.two_phase = all_to_all.capabilities().two_phase;
      follow(all_to_all, own);
    });
  }

  static void follow(AllToAll& all_to_all, const testing::ScheduleSpec& spec) {
    testing::RandomBits pace(
        testing::mix(spec.seed, static_cast<std::uint64_t>(all_to_all.rank())));
    std::vector<std::unique_ptr<testing::RoundRun>> rounds(
        static_cast<std::size_t>(spec.num_rounds));
    for (const testing::Step& step : testing::random_schedule(spec)) {
      auto& round = rounds[static_cast<std::size_t>(step.round)];
      if (round == nullptr) {
        round = std::make_unique<testing::RoundRun>(
            all_to_all, changing_plan(all_to_all.config(), step.round, spec.seed));
      }
      if (pace.below(8) == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(pace.below(300)));
      take_step(step, *round);
      if (::testing::Test::HasFailure()) return;  // one message is enough
    }
  }
};

TEST_P(RoundsConformance, ManyRoundsWithoutSynchronisationStayIntact) {
  run_schedule(small_config(1), schedule(11));
}

TEST_P(RoundsConformance, TwoRoundsInFlightStayApart) {
  run_schedule(small_config(2), schedule(12));
}

TEST_P(RoundsConformance, ThreeRoundsInFlightStayApart) {
  run_schedule(small_config(3), schedule(13));
}

TEST_P(RoundsConformance, RoundsMayCombineMoreThanOnce) {
  run_schedule(small_config(2), schedule(14, /*combines_more_than_once=*/true));
}

TEST_P(RoundsConformance, ReleaseAloneEndsRounds) {
  const AllToAllConfig small = small_config(2);
  run(small, [&](AllToAll& all_to_all) {
    for (int i = 0; i < num_rounds(); ++i) {
      testing::RoundRun round(all_to_all, changing_plan(small, i, 21));
      round.dispatch();
      round.release();
      EXPECT_FALSE(round.received().is_open());
    }
  });
}

TEST_P(RoundsConformance, ARoundKeptOpenCombinesAgain) {
  run(config(), [&](AllToAll& all_to_all) {
    testing::RoundRun round(all_to_all, plan_of(config(), testing::RoutingKind::kUneven));
    round.dispatch();
    round.combine(/*release=*/false);
    round.check_received();
    round.combine(/*release=*/false);
    round.combine();
    EXPECT_FALSE(round.received().is_open());
  });
}

TEST_P(RoundsConformance, OneThreadMaySendForAllRanksAndThenReceiveForAll) {
  const AllToAllConfig small = small_config(2);
  if (!exchange::capabilities_of(small.strategy, small.device).two_phase) return;
  std::vector<Communicator> communicators = Communicator::threads(num_ranks());
  std::vector<std::unique_ptr<AllToAll>> ranks(communicators.size());
  const auto on_threads = [&](const std::function<void(std::size_t)>& rank_body) {
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ranks.size(); ++r) threads.emplace_back(rank_body, r);
    for (std::thread& thread : threads) thread.join();
  };
  on_threads([&](std::size_t r) {
    ranks[r] = std::make_unique<AllToAll>(communicators[r], of_rank(small, static_cast<int>(r)));
  });
  for (int i = 0; i < 8; ++i) {
    std::vector<std::unique_ptr<testing::RoundRun>> rounds;
    for (const auto& rank : ranks) {
      rounds.push_back(std::make_unique<testing::RoundRun>(*rank, changing_plan(small, i, 31)));
    }
    for (auto& round : rounds) round->dispatch_send();
    for (auto& round : rounds) round->dispatch_recv();
    for (auto& round : rounds) round->combine_send();
    for (auto& round : rounds) round->combine_recv();
  }
  on_threads([&](std::size_t r) { ranks[r]->close(); });
}

TEST_P(RoundsConformance, NewPayloadsFollowAnEarlierRouting) {
  run(config(), [&](AllToAll& all_to_all) {
    const auto plan = plan_of(config(), testing::RoutingKind::kDuplicates, 41);
    testing::RoundRun first(all_to_all, plan);
    first.dispatch();
    const Routing routing = first.received().routing();
    first.combine();
    EXPECT_EQ(routing.num_tokens(), plan.exchange.tokens_of(all_to_all.rank()).num_tokens);
    EXPECT_EQ(routing.round_max_tokens(), plan.exchange.round_max_tokens);
    EXPECT_EQ(routing.rank_counts(),
              testing::expected_rows(plan.exchange, all_to_all.rank()).rank_counts);
    // A round in between leaves other ids and counts in the same slot.
    testing::RoundRun between(all_to_all, plan_of(config(), testing::RoutingKind::kUneven, 42));
    between.dispatch();
    between.combine();
    for (std::uint64_t seed = 43; seed < 46; ++seed) {
      testing::RoundPlan again = plan;
      again.seed = seed;
      testing::RoundRun round(all_to_all, again);
      round.inputs.topk_ids = TensorView();
      round.inputs.topk_weights = TensorView();
      round.inputs.routing = routing;
      round.dispatch();
      round.combine();
    }
  });
}

TEST_P(RoundsConformance, GapsBetweenRowsAreNeverWritten) {
  const bool travels_whole = GetParam().num_gpus > 0 && GetParam().strategy == Strategy::kBatched;
  if (travels_whole && !is_per_expert(GetParam().layout)) return;  // gaps included
  AllToAllConfig guarded = config();
  guarded.test_knobs.row_guard_bytes = 64;
  static constexpr std::byte kPattern{0x5a};
  const auto plan = plan_of(guarded, testing::RoutingKind::kUniform);
  const auto for_each_gap = [&](const Received& received, const auto& visit) {
    for (std::size_t i = 0; i < plan.payloads.size(); ++i) {
      const TensorView& view = received.payloads()[i];
      const std::int64_t num_rows = testing::num_rows_of(view, guarded.layout);
      const std::int64_t row_bytes = plan.payloads[i].row_shape[0] * size_of(view.dtype);
      for (std::int64_t row = 0; row < num_rows; ++row) {
        visit(testing::row_of(view, guarded.layout, row) + row_bytes);
      }
    }
  };
  run(guarded, [&](AllToAll& all_to_all) {
    std::vector<std::byte*> painted;
    for (std::uint64_t i = 0; i < 3; ++i) {
      testing::RoundPlan next = plan;
      next.seed = i;
      testing::RoundRun round(all_to_all, next);
      round.dispatch();
      std::size_t num_gaps = 0;
      for_each_gap(round.received(), [&](std::byte* gap) {
        if (i == 0) {
          painted.push_back(gap);
          std::fill_n(gap, 64, kPattern);
        }
        EXPECT_EQ(gap, painted.at(num_gaps++));
        const bool is_intact =
            std::all_of(gap, gap + 64, [](std::byte b) { return b == kPattern; });
        EXPECT_TRUE(is_intact) << "round " << i << ", gap " << num_gaps;
      });
      round.combine();
    }
  });
}

TEST_P(RoundsConformance, EndedRowsArePoisonedWhereSoConfigured) {
  AllToAllConfig poisoned = config();
  poisoned.debug_poison = true;
  poisoned.max_in_flight = 2;
  run(poisoned, [&](AllToAll& all_to_all) {
    for (int i = 0; i < 6; ++i) {
      testing::RoundRun round(all_to_all, changing_plan(poisoned, i, 51));
      round.dispatch();
      const TensorView payload = round.received().payloads().front();
      const auto num_rows =
          testing::expected_rows(round.plan().exchange, all_to_all.rank()).num_rows;
      round.combine();
      // The memory belongs to round i + 2, which no peer can have begun: it needs this rank's i
      // + 1.
      if (payload.num_elements() == 0 || num_rows == 0) continue;
      const auto* bytes = static_cast<const std::byte*>(payload.data);
      EXPECT_TRUE(
          std::all_of(bytes, bytes + payload.row_bytes(),
                      [](std::byte b) { return b == std::byte{0xcd} || b == std::byte{0xff}; }))
          << "round " << i;
    }
  });
}

TEST_P(RoundsConformance, EpochsGrowPastThirtyTwoBits) {
  AllToAllConfig late = small_config(2);
  late.test_knobs.first_epoch = (std::uint64_t{1} << 32) - 3;
  run_schedule(late, schedule(61, /*combines_more_than_once=*/true));
}

TEST_P(RoundsConformance, ExchangesOfOneCommunicatorAreIndependent) {
  GetParam().spawn(num_ranks(), [&](Communicator& communicator) {
    AllToAllConfig other_config = config();
    other_config.num_experts += 3;
    other_config.dtype = DType::kFloat32;
    AllToAll one(communicator, of_rank(config(), communicator.rank()));
    AllToAll other(communicator, of_rank(other_config, communicator.rank()));
    for (std::uint64_t seed = 1; seed < 4; ++seed) {
      testing::RoundRun a(one, plan_of(config(), testing::RoutingKind::kUniform, seed));
      testing::RoundRun b(other, plan_of(other_config, testing::RoutingKind::kUneven, seed));
      a.dispatch();
      b.dispatch();
      a.combine();
      b.combine();
    }
    one.close();
    other.close();
  });
}

}  // namespace fanfold
