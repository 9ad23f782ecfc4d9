// SPDX-License-Identifier: Apache-2.0
#pragma once

// How rounds on GPUs fail, whatever carries them, and what comes after.

#include <chrono>
#include <string>
#include <thread>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_case.h"
#include "support/expect_error.h"

namespace fanfold::testing {

/// After a failure that every rank knows of.
inline void recover(Communicator& communicator, AllToAll& all_to_all) {
  communicator.barrier();
  all_to_all.reset();
  EXPECT_FALSE(all_to_all.is_failed());
  for (std::uint64_t seed = 5; seed < 8; ++seed) run_round(all_to_all, seed);
  communicator.barrier();
  all_to_all.close();
}

/// After three rounds of two ranks, one of them is late for the fourth.
inline void expect_that_a_late_rank_is_named(Communicator& communicator, AllToAll& all_to_all) {
  for (std::uint64_t seed = 1; seed < 4; ++seed) run_round(all_to_all, seed);
  if (communicator.rank() == 0) {
    RoundRun late(all_to_all, plan_of(all_to_all.config(), 2, 4));
    late.inputs.timeout = std::chrono::milliseconds(50);
    const Received received = all_to_all.dispatch(late.inputs);  // enqueues only
    const std::string text = expect_error<PeerTimeout>({}, [&] { (void)received.host_counts(); });
    EXPECT_EQ(text,
              "AllToAll: dispatch of round 3: rank 1 did not arrive within 50 ms; it is late or "
              "frozen; call reset() on every rank");
    expect_error<PeerTimeout>({"dispatch of round 3"}, [&] { all_to_all.check(); });
    EXPECT_TRUE(all_to_all.is_failed());
    expect_error<InvalidState>({"has failed", "call reset() on every rank"},
                               [&] { all_to_all.release(received.handle()); });
  }
  recover(communicator, all_to_all);
}

/// Of two ranks one aborts while the other's round waits for it.
inline void expect_that_an_abort_ends_waits(Communicator& communicator, AllToAll& all_to_all) {
  run_round(all_to_all, 1);
  communicator.barrier();
  if (communicator.rank() == 0) {
    RoundRun round(all_to_all, plan_of(all_to_all.config(), 2, 4));
    const Received received = all_to_all.dispatch(round.inputs);
    const std::string text = expect_error<PeerAborted>({}, [&] { (void)received.host_counts(); });
    EXPECT_EQ(text,
              "AllToAll: dispatch of round 1: rank 1 aborted: no more of this; call reset() on "
              "every rank");
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    all_to_all.abort("no more of this");
  }
  recover(communicator, all_to_all);
}

}  // namespace fanfold::testing
