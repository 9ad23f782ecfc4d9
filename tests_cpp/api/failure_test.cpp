// SPDX-License-Identifier: Apache-2.0
// Ranks that are late, abort, leave or close: every wait ends with an error that names the rank,
// the phase and the round, and the communicator stays usable unless a rank is gone.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/random_bits.h"
#include "support/round_run.h"
#include "support/sanitizer.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using testing::expect_error;
using testing::RoundRun;
using testing::spawn_ranks;

AllToAllConfig small_config(Strategy strategy) {
  AllToAllConfig config;
  config.num_experts = 6;
  config.top_k = 2;
  config.max_tokens_per_rank = 4;
  config.hidden = 8;
  config.dtype = DType::kFloat32;
  config.strategy = strategy;
  config.name = "moe";
  return config;
}

testing::RoundPlan plan_of(const AllToAll& all_to_all, std::uint64_t seed = 1) {
  return testing::make_round(all_to_all.config(), all_to_all.num_ranks(),
                             testing::RoutingKind::kUniform, 4, seed);
}

void run_round(AllToAll& all_to_all, std::uint64_t seed = 1) {
  RoundRun round(all_to_all, plan_of(all_to_all, seed));
  round.dispatch();
  round.combine();
}

void expect_healed(AllToAll& all_to_all) {
  all_to_all.reset();
  EXPECT_FALSE(all_to_all.is_failed());
  all_to_all.check();
  for (std::uint64_t seed = 5; seed < 8; ++seed) run_round(all_to_all, seed);
}

struct FailureCase {
  Strategy strategy;
  testing::GroupKind group;
};

/// All of them fail alike.
class FailureTest : public ::testing::TestWithParam<FailureCase> {
 protected:
  static AllToAllConfig config() { return small_config(GetParam().strategy); }
  static void spawn(int num_ranks, const std::function<void(Communicator&)>& body) {
    spawn_ranks(GetParam().group, num_ranks, body);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Groups, FailureTest,
    ::testing::Values(FailureCase{Strategy::kOneSided, testing::GroupKind::kThreads},
                      FailureCase{Strategy::kBroadcast, testing::GroupKind::kThreads},
                      FailureCase{Strategy::kBroadcast, testing::GroupKind::kLoopback},
                      FailureCase{Strategy::kBatched, testing::GroupKind::kLoopback}),
    [](const auto& param) {
      return std::string(name_of(param.param.strategy)) + "_" + name_of(param.param.group);
    });

TEST_P(FailureTest, ALateRankIsNamedWithPhaseAndRound) {
  spawn(3, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, config());
    run_round(all_to_all);
    RoundRun round(all_to_all, plan_of(all_to_all));
    if (all_to_all.rank() != 1) {
      round.inputs.timeout = milliseconds(40);
      try {
        round.dispatch();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const PeerTimeout& error) {
        EXPECT_EQ(error.rank(), 1);
        expect_error<PeerTimeout>({"moe", "dispatch of round 1", "rank 1", "40", "reset"},
                                  [&] { throw; });
      }
      EXPECT_TRUE(all_to_all.is_failed());
      expect_error<PeerTimeout>({"rank 1"}, [&] { all_to_all.check(); });
      expect_error<InvalidState>({"failed", "reset"}, [&] { round.dispatch(); });
    }
    communicator.barrier();
    expect_healed(all_to_all);
    all_to_all.close();
  });
}

TEST(OneSidedFailureTest, ALateCombineIsNamedWithPhaseAndRound) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config(Strategy::kOneSided));
    run_round(all_to_all);
    RoundRun round(all_to_all, plan_of(all_to_all));
    round.dispatch();
    if (all_to_all.rank() == 0) {
      CombineInputs inputs = round.prepare_combine();
      inputs.timeout = milliseconds(30);
      expect_error<PeerTimeout>({"moe", "combine of round 1", "rank 1"},
                                [&] { all_to_all.combine(inputs, round.handle()); });
    }
    communicator.barrier();
    expect_healed(all_to_all);
    all_to_all.close();
  });
}

TEST(OneSidedFailureTest, ARankThatHoldsAReleasedRoundIsNamedWithPhaseAndRound) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config(Strategy::kOneSided));
    RoundRun round(all_to_all, plan_of(all_to_all));
    round.dispatch();
    if (all_to_all.rank() == 0) {
      round.release();
      RoundRun next(all_to_all, plan_of(all_to_all));
      next.inputs.timeout = milliseconds(30);
      expect_error<PeerTimeout>({"moe", "release of round 0", "rank 1"},
                                [&] { next.dispatch_send(); });
    }
    communicator.barrier();
    expect_healed(all_to_all);
    all_to_all.close();
  });
}

TEST_P(FailureTest, AbortEndsThePeersWaitsWithItsReason) {
  spawn(3, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, config());
    run_round(all_to_all);
    RoundRun round(all_to_all, plan_of(all_to_all));
    if (all_to_all.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(20));
      all_to_all.abort("out of memory");
    } else {
      const auto start = std::chrono::steady_clock::now();
      try {
        round.dispatch();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const PeerAborted& error) {
        EXPECT_EQ(error.rank(), 2);
        EXPECT_EQ(error.reason(), "out of memory");
        expect_error<PeerAborted>({"moe", "dispatch of round 1", "rank 2", "out of memory"},
                                  [&] { throw; });
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    }
    EXPECT_THROW(all_to_all.check(), PeerAborted);
    communicator.barrier();
    expect_healed(all_to_all);
    all_to_all.close();
  });
}

TEST_P(FailureTest, AnotherThreadMayAbortItsOwnRanksWait) {
  spawn(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, config());
    if (all_to_all.rank() == 0) {
      std::thread watchdog([&] {
        std::this_thread::sleep_for(milliseconds(20));
        all_to_all.abort("watchdog");
      });
      expect_error<PeerAborted>({"rank 0", "watchdog"}, [&] { run_round(all_to_all); });
      watchdog.join();
    }
    communicator.barrier();
    expect_healed(all_to_all);
    all_to_all.close();
  });
}

TEST_P(FailureTest, ResetBringsBackAnyMixtureOfStages) {
  for (std::uint64_t seed = 0; seed < (testing::kIsSanitizer ? 4 : 16); ++seed) {
    spawn(3, [&](Communicator& communicator) {
      AllToAllConfig two = config();
      two.max_in_flight = 2;
      AllToAll all_to_all(communicator, two);
      testing::RandomBits random(testing::mix(seed, static_cast<std::uint64_t>(all_to_all.rank())));
      // Each rank gives up after another number of calls, some of them before the first.
      try {
        for (std::int64_t rounds = random.below(4); rounds > 0; --rounds) run_round(all_to_all);
        RoundRun open(all_to_all, plan_of(all_to_all));
        if (random.below(2) == 0) open.dispatch();
      } catch (const PeerAborted&) {
        EXPECT_TRUE(all_to_all.is_failed());  // a peer is in its reset already
      }
      expect_healed(all_to_all);
      all_to_all.close();
    });
  }
}

TEST_P(FailureTest, ARankThatLeftIsLost) {
  spawn(2, [](Communicator& communicator) {
    auto all_to_all = std::make_unique<AllToAll>(communicator, config());
    run_round(*all_to_all);
    if (all_to_all->rank() == 1) {
      all_to_all.reset();  // destroyed without close
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    expect_error<PeerLost>({"moe", "rank 1"}, [&] { run_round(*all_to_all); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    expect_error<PeerLost>({"rank 1"}, [&] { all_to_all->check(); });
    all_to_all->close();
  });
}

TEST_P(FailureTest, CloseWaitsForNoRankThatNeverComes) {
  spawn(2, [](Communicator& communicator) {
    auto all_to_all = std::make_unique<AllToAll>(communicator, config());
    if (all_to_all->rank() == 0) {
      expect_error<PeerTimeout>({"moe", "close", "rank 1"},
                                [&] { all_to_all->close(milliseconds(30)); });
      EXPECT_TRUE(all_to_all->is_closed());
    }
    communicator.barrier();
    all_to_all.reset();
  });
}

TEST_P(FailureTest, RanksMayCloseOrVanishInAnyOrder) {
  for (std::uint64_t seed = 0; seed < (testing::kIsSanitizer ? 6 : 30); ++seed) {
    spawn(4, [&](Communicator& communicator) {
      testing::RandomBits random(
          testing::mix(seed, static_cast<std::uint64_t>(communicator.rank()), 0xc105eULL));
      const auto pause = [&] {
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(1500)));
      };
      std::vector<std::unique_ptr<AllToAll>> objects;
      for (int i = 0; i < 2; ++i) {
        objects.push_back(std::make_unique<AllToAll>(communicator, config()));
      }
      run_round(*objects[seed % 2]);
      for (std::unique_ptr<AllToAll>& object : objects) {  // closed by some, dropped by others
        pause();
        if (random.below(2) == 0) object->close();
        pause();
        object.reset();
      }
      if (random.below(2) == 0) communicator.close();
    });
  }
}

}  // namespace
}  // namespace fanfold
