// SPDX-License-Identifier: Apache-2.0

// What the processes do that gpu_round_processes_test.cpp starts: rounds on GPUs, one for each
// process. Those that lose a rank are in gpu_loss_scenarios.cpp.

#include <chrono>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/format.h"
#include "cudasim/control.h"
#include "fanfold/error.h"
#include "gpu/graphed_round.h"
#include "gpu/process_rank.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using namespace std::chrono_literals;
using base::str;
using testing::allocator_of;
using testing::config_of;
using testing::expect;
using testing::expect_error;
using testing::listen;
using testing::make_run;
using testing::on_gpu;
using testing::plan_of;
using testing::RankArguments;
using testing::recover;
using testing::RoundRun;
using testing::run_varied_round;
using testing::say;

// --- All goes well ----------------------------------------------------------------------------

/// Every way through a round; two are open at once.
void run_all_ways(AllToAll& all_to_all) {
  RoundRun whole = make_run(all_to_all, 1);
  RoundRun split = make_run(all_to_all, 2);
  whole.dispatch();
  split.dispatch_send();
  whole.combine(/*release=*/false);
  split.dispatch_recv();
  split.combine_send();
  whole.combine();
  split.combine_recv();
  RoundRun released = make_run(all_to_all, 3);
  released.dispatch();
  released.release();
  for (std::uint64_t seed = 4; seed < 7; ++seed) run_varied_round(all_to_all, seed);
}

/// Also after a reset, when the epochs that replays have used must not come again.
void replay_a_graph(Communicator& communicator, AllToAll& all_to_all) {
  testing::GraphedRound round(all_to_all, 4, 4);
  round.capture();
  for (int i = 0; i < 8; ++i) {
    if (i == 5) {
      communicator.barrier();
      all_to_all.reset();
      for (std::uint64_t seed = 1; seed < 5; ++seed) run_varied_round(all_to_all, seed);
    }
    round.fill((i * 3 + all_to_all.rank()) % 5, static_cast<std::uint64_t>(i));
    round.replay();
    round.check_out(str("replay ", i));
  }
}

/// "fabric rank_major"
void make_rounds(const RankArguments& arguments) {
  std::istringstream words(arguments.extra);
  std::string kind;
  std::string layout;
  words >> kind >> layout;
  on_gpu(arguments, [&](Communicator& communicator) {
    Allocator allocator = allocator_of(communicator, kind);
    AllToAll all_to_all(communicator, config_of(layout), &allocator);
    expect(cudasim::calls()["cuMemHostRegister"] == 1, "the control area is not page-locked");
    run_all_ways(all_to_all);
    replay_a_graph(communicator, all_to_all);
    run_varied_round(all_to_all, 9);
    all_to_all.close();
    communicator.close();
  });
}

// --- A rank is late, aborts or differs --------------------------------------------------------

/// The test stops rank 1 in its dispatch for a while, makes it stay away for longer than the others
/// wait, and stops it in a dispatch once more while the others reset.
void meet_a_late_rank(const RankArguments& arguments) {
  on_gpu(arguments, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config_of());
    run_varied_round(all_to_all, 1);
    say("ready");
    (void)listen();
    run_varied_round(all_to_all, 2);
    say("met");
    (void)listen();
    if (communicator.rank() != 1) {
      RoundRun round = make_run(all_to_all, 3);
      round.inputs.timeout = 150ms;
      const Received received = all_to_all.dispatch(round.inputs);
      say(expect_error<PeerTimeout>({}, [&] { (void)received.host_counts(); }));
      (void)listen();
    }
    all_to_all.reset();
    say("reset");
    (void)listen();
    if (communicator.rank() == 1) {
      RoundRun round = make_run(all_to_all, 4);
      expect_error<PeerAborted>({"called reset"}, [&] { round.dispatch(); });
    }
    recover(communicator, all_to_all);
  });
}

/// Rank 1 aborts while the kernels of the others wait for it.
void abort_a_round(const RankArguments& arguments) {
  on_gpu(arguments, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config_of());
    run_varied_round(all_to_all, 1);
    RoundRun round = make_run(all_to_all, 2);
    if (communicator.rank() == 1) {
      (void)listen();
      all_to_all.abort("no more of this");
      say(str(base::now_ns()));
      expect_error<PeerAborted>({"rank 1 aborted: no more of this"}, [&] { all_to_all.check(); });
    } else {
      const Received received = all_to_all.dispatch(round.inputs);
      say("waits");
      try {
        (void)received.host_counts();
        say("nothing was thrown");
      } catch (const PeerAborted& error) {
        say(str(base::now_ns()));
        say(str(error.rank(), " ", error.what()));
      }
    }
    recover(communicator, all_to_all);
  });
}

/// Kernels of all ranks wait: those of rank 1 for the next dispatch, rank 0's for a combine.
void reset_while_all_wait(const RankArguments& arguments) {
  on_gpu(arguments, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config_of());
    RoundRun round = make_run(all_to_all, 1);
    round.dispatch();
    RoundRun next = make_run(all_to_all, 2);
    if (communicator.rank() == 0) {
      all_to_all.combine(round.prepare_combine(), round.handle());
    } else {
      (void)all_to_all.dispatch(next.inputs);
    }
    communicator.barrier();  // the first to reset wakes the others
    recover(communicator, all_to_all);
  });
}

/// A round in which rank 1 calls otherwise: what this rank is told.
std::string told_of_difference(AllToAll& all_to_all, const std::string& difference) {
  run_varied_round(all_to_all, 1);
  const bool differs = all_to_all.rank() == 1;
  testing::RoundPlan plan = plan_of(all_to_all, 2, differs && difference == "m" ? 3 : 4);
  if (differs && difference == "payloads") plan.payloads.resize(1);
  if (differs && difference == "weights") plan.exchange.has_weights = false;
  if (differs && difference == "hidden") plan.hidden = 6;
  RoundRun round(all_to_all, std::move(plan));
  std::string text;
  if (difference != "hidden" && difference != "release") {
    text = expect_error<InvalidArgument>({}, [&] { round.dispatch(); });
  } else {
    round.dispatch();
    const bool keeps_open = differs && difference == "release";
    text = expect_error<InvalidArgument>({}, [&] { round.combine(!keeps_open); });
  }
  expect(all_to_all.is_failed(), "has not failed");
  all_to_all.reset();
  run_varied_round(all_to_all, 3);
  return text;
}

/// "m": in what the calls of rank 1 differ.
void differ_in_a_call(const RankArguments& arguments) {
  on_gpu(arguments, [&](Communicator& communicator) {
    AllToAllConfig config = config_of();
    AllToAll on_device(communicator, config);
    config.device = DeviceType::kCpu;
    AllToAll on_host(communicator, config);
    std::istringstream words(arguments.extra);
    for (std::string difference; words >> difference;) {
      const std::string expected = told_of_difference(on_host, difference);
      EXPECT_EQ(told_of_difference(on_device, difference), expected);
      say(expected);
    }
    on_device.close();
    on_host.close();
    communicator.close();
  });
}

}  // namespace

namespace testing {

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all = {{"make_rounds", &make_rounds},
                               {"meet_a_late_rank", &meet_a_late_rank},
                               {"abort_a_round", &abort_a_round},
                               {"reset_while_all_wait", &reset_while_all_wait},
                               {"differ_in_a_call", &differ_in_a_call}};
  for (const Scenario& one : loss_scenarios()) all.push_back(one);
  return all;
}

}  // namespace testing
}  // namespace fanfold
