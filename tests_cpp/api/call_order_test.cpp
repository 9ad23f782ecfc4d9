// SPDX-License-Identifier: Apache-2.0
// Calls in a wrong order, handles in the wrong place, calls at the same time: InvalidState, and
// nothing has changed.

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/round_run.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;
using testing::RoundRun;
using testing::spawn_ranks;

AllToAllConfig small_config(const char* name = "moe", int max_in_flight = 1) {
  AllToAllConfig config;
  config.num_experts = 6;
  config.top_k = 2;
  config.max_tokens_per_rank = 4;
  config.hidden = 8;
  config.dtype = DType::kFloat32;
  config.strategy = Strategy::kOneSided;
  config.max_in_flight = max_in_flight;
  config.name = name;
  return config;
}

testing::RoundPlan plan_of(const AllToAll& all_to_all, std::uint64_t seed = 1) {
  return testing::make_round(all_to_all.config(), all_to_all.num_ranks(),
                             testing::RoutingKind::kUniform, 4, seed);
}

/// Runs `body` on the only rank of a group: every order of calls is its own.
void run_alone(const AllToAllConfig& config, const std::function<void(AllToAll&)>& body) {
  spawn_ranks(1, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    body(all_to_all);
    RoundRun after(all_to_all, plan_of(all_to_all));
    after.dispatch();
    after.combine();
    all_to_all.close();
  });
}

TEST(CallOrderTest, CombineBeforeAnyDispatchIsRefused) {
  run_alone(small_config(), [](AllToAll& all_to_all) {
    expect_error<InvalidState>({"moe"}, [&] { all_to_all.combine({}, Round()); });
    expect_error<InvalidState>({"moe"}, [&] { all_to_all.release(Round()); });
    expect_error<InvalidState>({"moe"}, [&] { (void)all_to_all.combine_buffer(Round()); });
    expect_error<InvalidState>({"moe"}, [&] { (void)all_to_all.dispatch_recv(Round()); });
  });
}

TEST(CallOrderTest, DispatchWhileAllSlotsAreOpenIsRefused) {
  run_alone(small_config("moe", 2), [](AllToAll& all_to_all) {
    RoundRun first(all_to_all, plan_of(all_to_all, 1));
    RoundRun second(all_to_all, plan_of(all_to_all, 2));
    RoundRun third(all_to_all, plan_of(all_to_all, 3));
    first.dispatch();
    second.dispatch_send();
    expect_error<InvalidState>({"moe", "round 2", "round 0", "max_in_flight is 2"},
                               [&] { third.dispatch(); });
    expect_error<InvalidState>({"round 2", "round 0"}, [&] { third.dispatch_send(); });
    second.dispatch_recv();
    second.combine();
    expect_error<InvalidState>({"round 2", "round 0"}, [&] { third.dispatch(); });
    first.combine();
    third.dispatch();
    third.combine();
  });
}

TEST(CallOrderTest, ARoundEndsOnce) {
  run_alone(small_config(), [](AllToAll& all_to_all) {
    RoundRun combined(all_to_all, plan_of(all_to_all));
    combined.dispatch();
    const CombineInputs inputs = combined.prepare_combine();
    combined.combine();
    expect_error<InvalidState>({"round 0", "ended"},
                               [&] { all_to_all.combine(inputs, combined.handle()); });
    expect_error<InvalidState>({"round 0", "ended"}, [&] { combined.release(); });
    RoundRun released(all_to_all, plan_of(all_to_all));
    released.dispatch();
    released.release();
    expect_error<InvalidState>({"round 1", "released"}, [&] { released.release(); });
    expect_error<InvalidState>({"round 1", "released"},
                               [&] { all_to_all.combine(inputs, released.handle()); });
    RoundRun next(all_to_all, plan_of(all_to_all));
    next.dispatch();
    expect_error<InvalidState>({"round 0", "round 2"}, [&] { combined.release(); });
    next.combine();
  });
}

TEST(CallOrderTest, ReceivedRowsEndWithTheirRound) {
  run_alone(small_config(), [](AllToAll& all_to_all) {
    RoundRun round(all_to_all, plan_of(all_to_all));
    round.dispatch();
    const Received received = round.received();
    const Routing routing = received.routing();
    EXPECT_TRUE(received.is_open());
    round.combine();
    EXPECT_FALSE(received.is_open());
    EXPECT_EQ(received.handle().number, 0);
    const std::vector<std::string> words = {"round 0", "moe", "ended"};
    expect_error<InvalidState>(words, [&] { (void)received.payloads(); });
    expect_error<InvalidState>(words, [&] { (void)received.rank_counts(); });
    expect_error<InvalidState>(words, [&] { (void)received.expert_counts(); });
    expect_error<InvalidState>(words, [&] { (void)received.num_rows(); });
    expect_error<InvalidState>(words, [&] { (void)received.offsets(); });
    expect_error<InvalidState>(words, [&] { (void)received.host_counts(); });
    expect_error<InvalidState>(words, [&] { (void)received.topk_ids(); });
    expect_error<InvalidState>(words, [&] { (void)received.topk_weights(); });
    expect_error<InvalidState>(words, [&] { (void)received.source_rank(); });
    expect_error<InvalidState>(words, [&] { (void)received.source_token(); });
    expect_error<InvalidState>(words, [&] { (void)received.routing(); });
    expect_error<InvalidState>(words, [&] { (void)received.round_max_tokens(); });
    EXPECT_EQ(routing.num_tokens(), 4);  // a routing has no end
  });
}

TEST(CallOrderTest, ARoundOfAnotherAllToAllIsRefusedByBothNames) {
  spawn_ranks(1, [](Communicator& communicator) {
    AllToAll one(communicator, small_config("one"));
    AllToAll other(communicator, small_config("other"));
    RoundRun round(one, plan_of(one));
    round.dispatch();
    const CombineInputs inputs = round.prepare_combine();
    expect_error<InvalidState>({"other", "another AllToAll"},
                               [&] { other.combine(inputs, round.handle()); });
    expect_error<InvalidState>({"other"}, [&] { other.release(round.handle()); });
    round.combine();
    other.close();
    one.close();
  });
}

TEST(CallOrderTest, ResultsInAnotherRoundsBufferAreRefusedByBothRounds) {
  run_alone(small_config("moe", 2), [](AllToAll& all_to_all) {
    RoundRun first(all_to_all, plan_of(all_to_all, 1));
    RoundRun second(all_to_all, plan_of(all_to_all, 2));
    first.dispatch();
    second.dispatch();
    CombineInputs inputs = first.prepare_combine();
    inputs.y = all_to_all.combine_buffer(second.handle());
    expect_error<InvalidArgument>({"y", "round 0", "round 1"},
                                  [&] { all_to_all.combine(inputs, first.handle()); });
    first.combine();
    second.combine();
  });
}

TEST(CallOrderTest, ReceivedRowsAreNoPayload) {
  run_alone(small_config("moe", 2), [](AllToAll& all_to_all) {
    RoundRun first(all_to_all, plan_of(all_to_all, 1));
    RoundRun second(all_to_all, plan_of(all_to_all, 2));
    first.dispatch();
    const DispatchInputs good = second.inputs;
    second.inputs.payloads[0] =
        TensorView(first.received().payloads()[0].data, DType::kFloat32, {4, 8});
    expect_error<InvalidArgument>({"payloads[0]", "outside this AllToAll"},
                                  [&] { second.dispatch(); });
    second.inputs = good;
    second.dispatch();
    first.combine();
    second.combine();
  });
}

TEST(CallOrderTest, RoundsBeforeAResetAreRefusedAfterIt) {
  run_alone(small_config(), [](AllToAll& all_to_all) {
    RoundRun before(all_to_all, plan_of(all_to_all));
    before.dispatch();
    const CombineInputs inputs = before.prepare_combine();
    all_to_all.reset();
    EXPECT_FALSE(before.received().is_open());
    expect_error<InvalidState>({"round 0", "generation 0"},
                               [&] { all_to_all.combine(inputs, before.handle()); });
    RoundRun after(all_to_all, plan_of(all_to_all));
    after.dispatch();
    EXPECT_EQ(after.handle().generation, 1U);
    expect_error<InvalidState>({"round 0", "generation 0"}, [&] { before.release(); });
    after.combine();
  });
}

TEST(CallOrderTest, NothingWorksAfterClose) {
  spawn_ranks(1, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    RoundRun round(all_to_all, plan_of(all_to_all));
    round.dispatch();
    all_to_all.close();
    all_to_all.close();  // idempotent
    EXPECT_TRUE(all_to_all.is_closed());
    const std::vector<std::string> words = {"moe", "closed"};
    expect_error<InvalidState>(words, [&] { all_to_all.dispatch(round.inputs); });
    expect_error<InvalidState>(words, [&] { all_to_all.combine({}, round.handle()); });
    expect_error<InvalidState>(words, [&] { round.release(); });
    expect_error<InvalidState>(words, [&] { all_to_all.reset(); });
    expect_error<InvalidState>(words, [&] { all_to_all.check(); });
    expect_error<InvalidState>(words, [&] { all_to_all.abort("late"); });
    expect_error<InvalidState>(words, [&] { all_to_all.set_active_mask({true}); });
  });
}

TEST(CallOrderTest, SplitCallsNeedAStrategyWithTwoPhases) {
  AllToAllConfig broadcast = small_config();
  broadcast.strategy = Strategy::kBroadcast;
  run_alone(broadcast, [](AllToAll& all_to_all) {
    RoundRun round(all_to_all, plan_of(all_to_all));
    expect_error<Unsupported>({"broadcast", "dispatch_send"}, [&] { round.dispatch_send(); });
    round.dispatch();
    expect_error<Unsupported>({"broadcast", "combine_send"}, [&] { round.combine_send(); });
    round.combine();
    expect_error<Unsupported>({"broadcast"}, [&] { all_to_all.set_active_mask({true}); });
  });
}

TEST(CallOrderTest, TheMaskChangesBetweenRoundsOnly) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    expect_error<InvalidArgument>({"mask", "2", "3"},
                                  [&] { all_to_all.set_active_mask({true, true, true}); });
    std::vector<bool> without_me(2, true);
    without_me[static_cast<std::size_t>(all_to_all.rank())] = false;
    expect_error<InvalidArgument>({"mask", "rank"},
                                  [&] { all_to_all.set_active_mask(without_me); });
    RoundRun round(all_to_all, plan_of(all_to_all));
    round.dispatch();
    expect_error<InvalidState>({"set_active_mask", "round 0"},
                               [&] { all_to_all.set_active_mask({true, true}); });
    round.combine();
    all_to_all.set_active_mask({true, true});
    all_to_all.close();
  });
}

TEST(CallOrderTest, OneCallAtATimePerObject) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    RoundRun round(all_to_all, plan_of(all_to_all));
    if (all_to_all.rank() == 1) {
      communicator.barrier();  // until rank 0 has seen the refusal
      round.dispatch();
      round.combine();
      all_to_all.close();
      return;
    }
    std::thread dispatcher([&] {
      for (bool is_inside = false; !is_inside;) {
        try {
          round.dispatch();
          is_inside = true;
        } catch (const InvalidState&) {
          std::this_thread::yield();  // the calls below were inside just then
        }
      }
    });
    // Refused for the empty handle until the other thread is inside, for that thread afterwards.
    std::string text;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (text.find("another thread") == std::string::npos &&
           std::chrono::steady_clock::now() < limit) {
      text = expect_error<InvalidState>({"moe"}, [&] { all_to_all.release(Round()); });
    }
    EXPECT_THAT(text, HasSubstr("another thread"));
    communicator.barrier();
    dispatcher.join();
    round.combine();
    all_to_all.close();
  });
}

}  // namespace
}  // namespace fanfold
