// SPDX-License-Identifier: Apache-2.0

// Layouts with a limit of rows, and what happens when memory ends.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "api/flat_round.h"
#include "fanfold/all_to_all.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/routing_generators.h"
#include "support/sanitizer.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::FlatRound;
using testing::RoutingKind;

AllToAllConfig limited_config(Strategy strategy, Layout layout, int num_ranks) {
  AllToAllConfig config;
  config.num_experts = 2 * num_ranks + 1;
  config.top_k = 3;
  config.max_tokens_per_rank = 12;
  config.hidden = 5;
  config.dtype = DType::kFloat32;
  config.extra_bytes_per_token = 1;
  config.strategy = strategy;
  config.layout = layout;
  config.timeout = std::chrono::seconds(20);
  if (layout == Layout::kFlatByExpert) config.expert_alignment = 4;
  return config;
}

void run(int num_ranks, const AllToAllConfig& config, const std::function<void(AllToAll&)>& body) {
  testing::spawn_ranks(num_ranks, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    body(all_to_all);
    all_to_all.close();
  });
}

using CapacityCase = std::tuple<Strategy, Layout, int>;

class CapacityTest : public ::testing::TestWithParam<CapacityCase> {
 protected:
  static int num_ranks() { return std::get<2>(GetParam()); }
  static AllToAllConfig config() {
    return limited_config(std::get<0>(GetParam()), std::get<1>(GetParam()), num_ranks());
  }
};

TEST_P(CapacityTest, ExactRoundsHaveAsManyRowsAsCome) {
  run(num_ranks(), config(), [](AllToAll& all_to_all) {
    std::uint64_t seed = 0;
    for (const RoutingKind kind : testing::all_routings()) {
      ++seed;
      FlatRound round(all_to_all, kind, 1 + static_cast<std::int64_t>(seed % 12), seed);
      round.dispatch();
      round.combine(/*zero_copy=*/seed % 2 == 0);
    }
    EXPECT_EQ(all_to_all.num_dropped_rows(), 0);
  });
}

TEST_P(CapacityTest, RowsBeyondTheLimitAreDroppedCountedAndMissingFromTheSums) {
  for (const std::int64_t limit : {1, 7, 13, 200}) {
    AllToAllConfig limited = config();
    limited.max_recv_rows = limit;
    limited.max_in_flight = 2;
    limited.test_knobs.row_guard_bytes = 16;
    limited.debug_poison = limit == 7;
    run(num_ranks(), limited, [&](AllToAll& all_to_all) {
      std::uint64_t seed = 0;
      std::int64_t dropped = 0;
      for (const RoutingKind kind : testing::all_routings()) {
        FlatRound round(all_to_all, kind, 12, ++seed);
        round.dispatch();
        const std::int64_t rows = round.num_rows(all_to_all.rank());
        dropped += std::max<std::int64_t>(0, rows - limit);
        EXPECT_EQ(all_to_all.num_dropped_rows(), dropped);
        if (seed % 3 == 0) round.combine(/*zero_copy=*/false, /*release=*/false);
        round.combine(/*zero_copy=*/seed % 2 == 0);
        if (::testing::Test::HasFailure()) return;
      }
    });
  }
}

TEST_P(CapacityTest, ARoutingOfARoundThatDroppedRowsDropsThemAgain) {
  AllToAllConfig limited = config();
  limited.max_recv_rows = 9;
  run(num_ranks(), limited, [&](AllToAll& all_to_all) {
    FlatRound first(all_to_all, RoutingKind::kUniform, 12, 1);
    first.dispatch();
    const Routing routing = first.received().routing();
    first.combine();
    const std::int64_t dropped = all_to_all.num_dropped_rows();
    for (int again = 1; again < 4; ++again) {
      FlatRound other(all_to_all, RoutingKind::kUneven, 5, 2);
      other.dispatch();
      other.combine();
      const std::int64_t before = all_to_all.num_dropped_rows();
      FlatRound round(all_to_all, RoutingKind::kUniform, 12, 1);
      round.dispatch(routing);
      EXPECT_EQ(all_to_all.num_dropped_rows() - before, dropped);
      round.combine(again % 2 == 0);
      EXPECT_EQ(round.out(), first.out());
    }
  });
}

std::string name_of_case(const ::testing::TestParamInfo<CapacityCase>& info) {
  return std::string(name_of(std::get<0>(info.param))) + "_" + name_of(std::get<1>(info.param)) +
         "_" + std::to_string(std::get<2>(info.param)) + "_ranks";
}

INSTANTIATE_TEST_SUITE_P(Strategies, CapacityTest,
                         ::testing::Combine(::testing::Values(Strategy::kOneSided,
                                                              Strategy::kHighThroughput),
                                            ::testing::Values(Layout::kFlat, Layout::kFlatByExpert),
                                            ::testing::Values(1, 2, 3, 4)),
                         name_of_case);

// --- Memory that is not there -----------------------------------------------------------------

/// The bytes that `max_store_bytes` allows on `short_rank`, everywhere else any number.
void run_short(int num_ranks, const AllToAllConfig& config, int short_rank,
               std::int64_t max_store_bytes,
               const std::function<void(AllToAll&, Communicator&)>& body) {
  testing::spawn_ranks(num_ranks, [&, config](Communicator& communicator) {
    AllToAllConfig own = config;
    if (communicator.rank() == short_rank) own.test_knobs.max_store_bytes = max_store_bytes;
    AllToAll all_to_all(communicator, own);
    body(all_to_all, communicator);
    all_to_all.close();
  });
}

/// A configuration whose large rounds need about 400 kB and whose small ones need 16 kB; by expert
/// more, since rows are kept once for each expert, and groups are filled up.
AllToAllConfig wide_config(int num_ranks, Layout layout) {
  AllToAllConfig config = limited_config(Strategy::kHighThroughput, layout, num_ranks);
  config.hidden = 1000;
  return config;
}

TEST(CapacityExceededTest, IsTheSameOnEveryRankAndTheNextDispatchWorks) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    for (const Layout layout : {Layout::kFlat, Layout::kFlatByExpert}) {
      std::mutex mutex;  // guards texts
      std::vector<std::string> texts;
      const std::int64_t limit = layout == Layout::kFlat ? 60'000 : 210'000;
      run_short(num_ranks, wide_config(num_ranks, layout), num_ranks / 2, limit,
                [&](AllToAll& all_to_all, Communicator&) {
                  FlatRound small(all_to_all, RoutingKind::kUniform, 1, 1);
                  small.dispatch();
                  small.combine();
                  FlatRound large(all_to_all, RoutingKind::kUniform, 12, 1);
                  const std::string text = testing::expect_error<CapacityExceeded>(
                      {"AllToAll: dispatch of round 1: expected memory for ",
                       std::to_string(large.max_layout_rows()) + " rows (", " bytes) on every rank",
                       "rank " + std::to_string(num_ranks / 2) + " has not got it"},
                      [&] { large.dispatch(); });
                  EXPECT_FALSE(all_to_all.is_failed());
                  FlatRound next(all_to_all, RoutingKind::kUniform, 1, 3);
                  next.dispatch();
                  next.combine();
                  const std::lock_guard<std::mutex> lock(mutex);
                  texts.push_back(text);
                });
      for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
    }
  }
}

TEST(CapacityExceededTest, LeavesOpenRoundsAndTheNumberOfTheNextAsTheyWere) {
  AllToAllConfig config = wide_config(3, Layout::kFlat);
  config.max_in_flight = 3;
  config.test_knobs.delay_seed = 3;
  run_short(3, config, 1, 60'000, [&](AllToAll& all_to_all, Communicator& communicator) {
    FlatRound first(all_to_all, RoutingKind::kUniform, 2, 1);
    FlatRound second(all_to_all, RoutingKind::kUneven, 1, 2);
    first.dispatch();
    second.dispatch();
    for (int attempt = 0; attempt < 5; ++attempt) {
      FlatRound large(all_to_all, RoutingKind::kUniform, 11, 3);
      testing::expect_error<CapacityExceeded>({"dispatch of round 2", "rank 1 has not got it"},
                                              [&] { large.dispatch(); });
    }
    FlatRound third(all_to_all, RoutingKind::kUniform, 1, 4);
    third.dispatch();
    EXPECT_EQ(third.received().handle().number, 2);
    second.combine();
    third.combine();
    first.combine();
    all_to_all.check();
    // And through a reset.
    FlatRound large(all_to_all, RoutingKind::kUniform, 12, 3);
    testing::expect_error<CapacityExceeded>({"dispatch of round 3"}, [&] { large.dispatch(); });
    communicator.barrier();  // a reset ends the calls of ranks that are still waiting
    all_to_all.reset();
    FlatRound last(all_to_all, RoutingKind::kUniform, 2, 5);
    last.dispatch();
    last.combine();
  });
}

TEST(CapacityExceededTest, HitsARoutingThatNeedsMoreMemoryInAnotherSlot) {
  AllToAllConfig config = wide_config(2, Layout::kFlat);
  config.max_in_flight = 2;
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    Routing routing;
    {
      AllToAll roomy(communicator, config);
      FlatRound round(roomy, RoutingKind::kUniform, 12, 1);
      round.dispatch();
      routing = round.received().routing();
      round.combine();
      roomy.close();
    }
    AllToAllConfig own = config;
    if (communicator.rank() == 0) own.test_knobs.max_store_bytes = 60'000;
    AllToAll all_to_all(communicator, own);
    FlatRound round(all_to_all, RoutingKind::kUniform, 12, 1);
    testing::expect_error<CapacityExceeded>({"dispatch of round 0", "rank 0 has not got it"},
                                            [&] { round.dispatch(routing); });
    FlatRound small(all_to_all, RoutingKind::kUniform, 1, 2);
    small.dispatch();
    small.combine();
    all_to_all.close();
  });
}

TEST(CapacityExceededTest, GrowthTakesWhatIsNeededWhereTheReserveDoesNotFit) {
  // 26 rows of 8 kB fit on rank 0, a quarter on top of 22 rows does not.
  AllToAllConfig config = wide_config(2, Layout::kFlat);
  run_short(2, config, 0, 215'000, [&](AllToAll& all_to_all, Communicator&) {
    for (const std::int64_t m : {11, 12}) {
      FlatRound round(all_to_all, RoutingKind::kUniform, m, 1);
      EXPECT_LE(round.max_received(), 2 * m);
      round.dispatch();
      round.combine();
    }
  });
}

}  // namespace
}  // namespace fanfold
