// SPDX-License-Identifier: Apache-2.0

// Strategy high_throughput: exact counts, memory that grows with them, routings that need neither.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "api/flat_round.h"
#include "fanfold/all_to_all.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/random_bits.h"
#include "support/routing_generators.h"
#include "support/sanitizer.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using testing::FlatRound;
using testing::RoutingKind;

constexpr int kNumRounds = testing::kIsSanitizer ? 12 : 40;

AllToAllConfig flat_config(int num_ranks, Layout layout = Layout::kFlat) {
  AllToAllConfig config;
  config.num_experts = 2 * num_ranks + 1;
  config.top_k = 3;
  config.max_tokens_per_rank = 64;
  config.hidden = 5;
  config.dtype = DType::kFloat32;
  config.extra_bytes_per_token = 1;
  config.strategy = Strategy::kHighThroughput;
  config.layout = layout;
  config.timeout = std::chrono::seconds(20);
  if (layout == Layout::kFlatByExpert) config.expert_alignment = 4;
  return config;
}

/// `body` on every rank with an AllToAll of `config`, which is closed afterwards.
void run(int num_ranks, const AllToAllConfig& config, const std::function<void(AllToAll&)>& body) {
  testing::spawn_ranks(num_ranks, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    body(all_to_all);
    all_to_all.close();
  });
}

/// m of round `index`: small and large in turn, so that memory grows again and again.
std::int64_t changing_size(std::uint64_t seed, int index) {
  testing::RandomBits random(testing::mix(seed, static_cast<std::uint64_t>(index)));
  return 1 + random.below(1 + std::min<std::int64_t>(63, 4 * index));
}

RoutingKind changing_kind(std::uint64_t seed, int index) {
  const auto& kinds = testing::all_routings();
  const std::uint64_t draw = testing::mix(seed, static_cast<std::uint64_t>(index), 1U);
  return kinds[static_cast<std::size_t>(draw % kinds.size())];
}

class HighThroughputTest : public ::testing::TestWithParam<std::tuple<int, Layout>> {
 protected:
  static int num_ranks() { return std::get<0>(GetParam()); }
  static AllToAllConfig config() { return flat_config(num_ranks(), std::get<1>(GetParam())); }
};

TEST_P(HighThroughputTest, ManyRoundsOfChangingSizeWithoutSynchronisationStayIntact) {
  AllToAllConfig changing = config();
  changing.test_knobs.delay_seed = 5;
  changing.test_knobs.row_guard_bytes = 16;
  changing.debug_poison = true;
  run(num_ranks(), changing, [](AllToAll& all_to_all) {
    for (int i = 0; i < kNumRounds; ++i) {
      FlatRound round(all_to_all, changing_kind(1, i), changing_size(1, i),
                      static_cast<std::uint64_t>(i));
      round.dispatch();
      if (i % 7 == 3) {
        all_to_all.release(round.received().handle());
        continue;
      }
      if (i % 5 == 4) round.combine(/*zero_copy=*/true, /*release=*/false);
      round.combine(/*zero_copy=*/i % 2 == 0);
      if (::testing::Test::HasFailure()) return;
    }
  });
}

TEST_P(HighThroughputTest, ThreeRoundsInFlightGrowApart) {
  AllToAllConfig changing = config();
  changing.max_in_flight = 3;
  changing.test_knobs.delay_seed = 6;
  run(num_ranks(), changing, [](AllToAll& all_to_all) {
    std::vector<std::unique_ptr<FlatRound>> open;
    for (int i = 0; i < kNumRounds; ++i) {
      open.push_back(std::make_unique<FlatRound>(
          all_to_all, changing_kind(2, i), changing_size(2, i), static_cast<std::uint64_t>(i)));
      open.back()->dispatch();
      if (open.size() < 3) continue;
      open.front()->combine(i % 2 == 0);  // round n ends before round n + 3 begins
      open.erase(open.begin());
      if (::testing::Test::HasFailure()) return;
    }
    for (const auto& round : open) round->combine();
  });
}

TEST_P(HighThroughputTest, RoutingsAreReusedInEverySlotWithTheSameResults) {
  AllToAllConfig changing = config();
  changing.max_in_flight = 2;
  changing.test_knobs.delay_seed = 7;
  run(num_ranks(), changing, [](AllToAll& all_to_all) {
    for (int i = 0; i < kNumRounds / 4; ++i) {
      const auto seed = static_cast<std::uint64_t>(i);
      FlatRound first(all_to_all, changing_kind(3, i), changing_size(3, i), seed);
      first.dispatch();
      const Routing routing = first.received().routing();
      first.combine();
      // The first of them in the other slot, which may be too small; rounds of other sizes between.
      for (int again = 0; again < 3; ++again) {
        FlatRound round(all_to_all, changing_kind(3, i), changing_size(3, i), seed);
        round.dispatch(routing);
        round.combine(again % 2 == 0);
        EXPECT_EQ(round.out(), first.out());
        if (::testing::Test::HasFailure()) return;
      }
      FlatRound other(all_to_all, RoutingKind::kUneven, changing_size(4, i), seed);
      other.dispatch();
      other.combine();
    }
  });
}

TEST_P(HighThroughputTest, RanksThatAreMaskedOutTakeNoPartInGrowth) {
  if (num_ranks() < 2) return;
  const AllToAllConfig changing = config();
  testing::spawn_ranks(num_ranks(), [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, changing);
    FlatRound with_all(all_to_all, RoutingKind::kUniform, 3, 1);
    with_all.dispatch();
    with_all.combine();
    communicator.barrier();  // nobody waits until a rank that is masked out has pulled its results
    std::vector<bool> active(static_cast<std::size_t>(num_ranks()), true);
    active.back() = false;
    if (communicator.rank() == num_ranks() - 1) {
      communicator.barrier();  // idle: nobody may need it
    } else {
      all_to_all.set_active_mask(active);
      for (int i = 0; i < 10; ++i) {
        FlatRound round(all_to_all, RoutingKind::kUniform, 5 * (i + 1),
                        static_cast<std::uint64_t>(i));
        round.dispatch();
        const Routing routing = round.received().routing();
        round.combine();
        FlatRound again(all_to_all, RoutingKind::kUniform, 5 * (i + 1),
                        static_cast<std::uint64_t>(i));
        again.dispatch(routing);
        again.combine();
      }
      communicator.barrier();
      all_to_all.set_active_mask(std::vector<bool>(active.size(), true));
    }
    // Back in the group: its memory has grown less than the others know of each other.
    all_to_all.reset();
    for (int i = 0; i < 4; ++i) {
      FlatRound round(all_to_all, RoutingKind::kUniform, 16 * (i + 1),
                      static_cast<std::uint64_t>(i));
      round.dispatch();
      const Routing routing = round.received().routing();
      round.combine();
      FlatRound again(all_to_all, RoutingKind::kUniform, 16 * (i + 1),
                      static_cast<std::uint64_t>(i));
      again.dispatch(routing);
      again.combine();
    }
    all_to_all.close();
  });
}

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<int, Layout>>& info) {
  return std::string(name_of(std::get<1>(info.param))) + "_" +
         std::to_string(std::get<0>(info.param)) + "_ranks";
}

INSTANTIATE_TEST_SUITE_P(Layouts, HighThroughputTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(Layout::kFlat,
                                                              Layout::kFlatByExpert)),
                         name_of_case);

// --- Steps before rows move -------------------------------------------------------------------

// Rank 0 is done before rank 1 begins: had it waited for counts, rank 1 would miss its rows.
TEST(HighThroughputRoutingTest, ARoutedDispatchPushesItsRowsWithoutWaitingForAnyone) {
  const AllToAllConfig config = flat_config(2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    FlatRound first(all_to_all, RoutingKind::kUniform, 9, 1);
    first.dispatch();
    const Routing routing = first.received().routing();
    first.combine();
    FlatRound again(all_to_all, RoutingKind::kUniform, 9, 1);
    DispatchInputs in = again.inputs();
    in.topk_ids = TensorView();
    in.routing = routing;
    in.timeout = milliseconds(100);
    if (communicator.rank() == 0) {
      // Times out for want of rank 1's rows; its own are on their way.
      testing::expect_error<PeerTimeout>({"dispatch of round 1", "rank 1"},
                                         [&] { (void)all_to_all.dispatch(in); });
      communicator.barrier();
    } else {
      communicator.barrier();
      // Rank 0 has stopped long ago, yet nothing is missing here.
      again.dispatch(routing);
    }
    communicator.barrier();
    all_to_all.reset();
    FlatRound last(all_to_all, RoutingKind::kUniform, 20, 2);
    last.dispatch();
    last.combine();
    all_to_all.close();
  });
}

TEST(HighThroughputRoutingTest, ANewRoutingWaitsForTheCountsOfEveryRank) {
  const AllToAllConfig config = flat_config(2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    FlatRound round(all_to_all, RoutingKind::kUniform, 9, 1);
    if (communicator.rank() == 0) {
      DispatchInputs in = round.inputs();
      in.timeout = milliseconds(100);
      testing::expect_error<PeerTimeout>({"dispatch of round 0", "rank 1"},
                                         [&] { (void)all_to_all.dispatch(in); });
      EXPECT_TRUE(all_to_all.is_failed());
      communicator.barrier();
    } else {
      communicator.barrier();
    }
    all_to_all.reset();
    // The flags of the dispatch that failed are not taken for those of this one.
    FlatRound next(all_to_all, RoutingKind::kUneven, 12, 2);
    next.dispatch();
    next.combine();
    all_to_all.close();
  });
}

/// `change` makes rank 1's call another one; both ranks must name the difference.
void expect_difference(const std::string& what,
                       const std::function<void(DispatchInputs&, const Routing&)>& change) {
  for (const int odd_rank : {0, 1, 2}) {
    testing::spawn_ranks(3, [&](Communicator& communicator) {
      AllToAll all_to_all(communicator, flat_config(3));
      FlatRound first(all_to_all, RoutingKind::kUniform, 9, 1);
      first.dispatch();
      const Routing routing = first.received().routing();
      first.combine();
      FlatRound again(all_to_all, RoutingKind::kUniform, 9, 1);
      DispatchInputs in = again.inputs();
      if (communicator.rank() == odd_rank) change(in, routing);
      testing::expect_error<InvalidArgument>(
          {"dispatch of round 1 differs between ranks", what, "reset()"},
          [&] { (void)all_to_all.dispatch(in); });
      communicator.barrier();  // a reset would stop ranks that have not met the difference yet
      all_to_all.reset();
      FlatRound next(all_to_all, RoutingKind::kUneven, 30, 2);
      next.dispatch();
      next.combine();
      all_to_all.close();
    });
  }
}

TEST(HighThroughputDifferenceTest, OfRoundMaxTokensIsNamedOnEveryRank) {
  expect_difference("round_max_tokens",
                    [](DispatchInputs& in, const Routing&) { in.round_max_tokens = 10; });
}

TEST(HighThroughputDifferenceTest, OfThePayloadSetIsNamedOnEveryRank) {
  expect_difference("number of payloads",
                    [](DispatchInputs& in, const Routing&) { in.payloads.pop_back(); });
}

TEST(HighThroughputDifferenceTest, BetweenANewRoutingAndAnOldOneIsNamedOnEveryRank) {
  expect_difference("dispatch(routing=)", [](DispatchInputs& in, const Routing& routing) {
    in.topk_ids = TensorView();
    in.routing = routing;
  });
}

TEST(HighThroughputRoutingTest, AnotherRoutingOnOneRankIsNamedOnEveryRank) {
  AllToAllConfig config = flat_config(2);
  config.max_in_flight = 2;
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    std::vector<Routing> routings;
    // Into slot 0 a small round, into slot 1 a large one.
    for (const std::int64_t m : {std::int64_t{2}, std::int64_t{60}}) {
      FlatRound round(all_to_all, RoutingKind::kUniform, m, 1);
      round.dispatch();
      routings.push_back(round.received().routing());
      round.combine();
    }
    // Rank 1 takes the one that needs more memory in slot 0: the other does not wait for that.
    const auto mine = static_cast<std::size_t>(communicator.rank());
    FlatRound again(all_to_all, RoutingKind::kUniform, mine == 0 ? 2 : 60, 1);
    testing::expect_error<InvalidArgument>({"dispatch of round 2 differs between ranks", "rank 1"},
                                           [&] { again.dispatch(routings[mine]); });
    communicator.barrier();
    all_to_all.reset();
    FlatRound next(all_to_all, RoutingKind::kUneven, 30, 2);
    next.dispatch();
    next.combine();
    all_to_all.close();
  });
}

// --- Memory -----------------------------------------------------------------------------------

TEST(HighThroughputMemoryTest, HoldsWhatTheFullestRankReceivesNotWhatItMight) {
  AllToAllConfig config = flat_config(2);
  config.hidden = 1000;
  config.max_tokens_per_rank = 4096;
  run(2, config, [&](AllToAll& all_to_all) {
    const std::int64_t at_creation = all_to_all.workspace_bytes();
    EXPECT_EQ(at_creation, AllToAll::required_bytes(2, config));
    const std::int64_t row_bytes = 4000 + 1 + 4000 + 4 + 8 * 3;
    std::int64_t before = at_creation;
    for (const std::int64_t m : {10, 10, 100, 50}) {
      FlatRound round(all_to_all, RoutingKind::kUniform, m, 1);
      round.dispatch();
      round.combine();
      const std::int64_t rows = all_to_all.workspace_bytes() - at_creation;
      EXPECT_GE(rows, round.max_received() * row_bytes);
      EXPECT_GE(all_to_all.workspace_bytes(), before);
      if (m == 10) {
        EXPECT_LE(rows, round.max_received() * row_bytes + 8192);
      }
      before = all_to_all.workspace_bytes();
    }
    EXPECT_EQ(AllToAll::required_bytes(2, config), at_creation);
    // Far below what one_sided keeps for the same rounds.
    AllToAllConfig other = config;
    other.strategy = Strategy::kOneSided;
    EXPECT_LT(20 * all_to_all.workspace_bytes(), AllToAll::required_bytes(2, other));
  });
}

TEST(HighThroughputMemoryTest, ViewsOfAnEndedRoundStayMappedWhileMemoryGrows) {
  const AllToAllConfig config = flat_config(2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    std::shared_ptr<const void> memory;
    const volatile std::byte* view = nullptr;
    {
      AllToAll all_to_all(communicator, config);
      FlatRound small(all_to_all, RoutingKind::kUniform, 2, 1);
      small.dispatch();
      memory = small.received().memory();
      EXPECT_EQ(memory, all_to_all.memory()) << "costs nothing to ask for again";
      view = static_cast<const std::byte*>(small.received().payloads()[0].data);
      small.combine();
      FlatRound large(all_to_all, RoutingKind::kUniform, 64, 1);
      large.dispatch();
      large.combine();
      (void)*view;
      all_to_all.close();
    }
    (void)*view;
  });
}

TEST(HighThroughputMemoryTest, CapacitiesSayThatRowsAreAsARoundBringsThem) {
  AllToAllConfig config = flat_config(2);
  run(2, config, [](AllToAll& all_to_all) {
    EXPECT_EQ(all_to_all.capacities().rows, 0);
    EXPECT_FALSE(all_to_all.capabilities().two_phase);
  });
  config.max_recv_rows = 12;
  run(2, config, [&](AllToAll& all_to_all) {
    EXPECT_EQ(all_to_all.capacities().rows, 12);
    const std::int64_t bytes = all_to_all.workspace_bytes();
    EXPECT_EQ(bytes, AllToAll::required_bytes(2, config));
    FlatRound round(all_to_all, RoutingKind::kUniform, 64, 1);
    round.dispatch();
    round.combine();
    EXPECT_EQ(all_to_all.workspace_bytes(), bytes);
  });
}

}  // namespace
}  // namespace fanfold
