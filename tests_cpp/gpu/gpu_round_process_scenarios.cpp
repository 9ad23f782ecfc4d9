// SPDX-License-Identifier: Apache-2.0

// What the processes do that gpu_round_processes_test.cpp starts: rounds on GPUs, one for each
// process.
//
// Kernels of a simulated device run while a thread of their process waits for them. So each rank
// waits for its stream before it waits for its peers in any other way.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/format.h"
#include "cudasim/control.h"
#include "fanfold/all_to_all.h"
#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "gpu/gpu_case.h"
#include "gpu/graphed_round.h"
#include "gpu/simulated_devices.h"
#include "support/expect_error.h"
#include "support/spawn_processes.h"

namespace fanfold {
namespace {

using namespace std::chrono_literals;
using base::str;
using testing::expect_error;
using testing::listen;
using testing::RankArguments;
using testing::RoundRun;
using testing::say;

// --- One rank ---------------------------------------------------------------------------------

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

void expect_equal_stats(const cudasim::Stats& now, const cudasim::Stats& before) {
  expect(now.handles == before.handles, "handles are left");
  expect(now.mappings == before.mappings, "mappings are left");
  expect(now.reservations == before.reservations, "reservations are left");
  expect(now.contexts == before.contexts, "contexts are left");
  expect(now.allocations == before.allocations, "allocations are left");
  expect(now.host_allocations == before.host_allocations, "page-locked memory is left");
  expect(now.streams == before.streams, "streams are left");
  expect(now.graphs == before.graphs, "graphs are left");
}

/// Calls `body` on a rank with a device of its own. At the end nothing is left of it, on the device
/// or otherwise, and neither a comparison nor the device has found a fault.
/// `num_unpinned`: registrations that the body makes fail.
void on_gpu(const RankArguments& arguments, const std::function<void(Communicator&)>& body,
            int num_unpinned = 0) {
  cudasim::Config config;
  config.multiprocess = true;
  config.host_threads = 2;
  config.resident_blocks = 2;
  config.driver.first_device = arguments.rank;
  cudasim::configure(config);
  const cudasim::Stats before = cudasim::stats();
  const int num_descriptors = testing::num_open_descriptors();
  {
    testing::TestGpu gpu;
    Communicator communicator =
        Communicator::processes(arguments.rank, arguments.num_ranks, arguments.rendezvous, 20s);
    body(communicator);
  }
  expect_equal_stats(cudasim::stats(), before);
  expect(testing::num_open_descriptors() == num_descriptors, "descriptors are left");
  std::map<std::string, int> calls = cudasim::calls();
  expect(calls["cuMemHostRegister"] == calls["cuMemHostUnregister"] + num_unpinned,
         "memory is left page-locked");
  for (const cudasim::Report& report : cudasim::reports()) {
    throw std::runtime_error(report.kind + ": " + report.text);
  }
  expect(!::testing::Test::HasFailure(), "a comparison failed");
  say("done");
}

/// GPU memory by one kind of handle.
Allocator allocator_of(Communicator& communicator, const std::string& kind) {
  GpuMemoryConfig memory;
  memory.kinds = {kind == "fabric" ? HandleKind::kFabric : HandleKind::kFileDescriptor};
  return Allocator(communicator, memory);
}

AllToAllConfig config_of(const std::string& layout = "rank_major") {
  const bool by_expert = layout == "expert_major";
  AllToAllConfig config =
      testing::gpu_config(by_expert ? Layout::kExpertMajor : Layout::kRankMajor);
  if (by_expert) config.weighting = Weighting::kCarried;
  config.max_in_flight = 2;
  config.extra_bytes_per_token = 1;
  return config;
}

testing::RoundPlan plan_of(const AllToAll& all_to_all, std::uint64_t seed, std::int64_t m) {
  return testing::make_round(all_to_all.config(), all_to_all.num_ranks(),
                             testing::RoutingKind::kUneven, m, seed);
}

/// A round of another size, and of another set of what travels, than that of the next seed.
RoundRun make_run(AllToAll& all_to_all, std::uint64_t seed) {
  testing::RoundPlan plan = plan_of(all_to_all, seed, 1 + static_cast<std::int64_t>(seed % 4));
  if (seed % 2 == 0) plan.payloads.resize(1);
  if (seed % 3 == 0 && all_to_all.config().weighting == Weighting::kApplied) {
    plan.exchange.has_weights = false;
  }
  plan.zero_copy = seed % 4 < 2;
  return RoundRun(all_to_all, std::move(plan));
}

void run_round(AllToAll& all_to_all, std::uint64_t seed) {
  RoundRun round = make_run(all_to_all, seed);
  round.dispatch();
  round.combine();
}

/// After a failure that every rank knows of.
void recover(Communicator& communicator, AllToAll& all_to_all) {
  all_to_all.reset();
  expect(!all_to_all.is_failed(), "still failed after the reset");
  for (std::uint64_t seed = 5; seed < 8; ++seed) run_round(all_to_all, seed);
  communicator.barrier();
  all_to_all.close();
  communicator.close();
}

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
  for (std::uint64_t seed = 4; seed < 7; ++seed) run_round(all_to_all, seed);
}

/// Also after a reset, when the epochs that replays have used must not come again.
void replay_a_graph(Communicator& communicator, AllToAll& all_to_all) {
  testing::GraphedRound round(all_to_all, 4, 4);
  round.capture();
  for (int i = 0; i < 8; ++i) {
    if (i == 5) {
      communicator.barrier();
      all_to_all.reset();
      for (std::uint64_t seed = 1; seed < 5; ++seed) run_round(all_to_all, seed);
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
    run_round(all_to_all, 9);
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
    run_round(all_to_all, 1);
    say("ready");
    (void)listen();
    run_round(all_to_all, 2);
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
    run_round(all_to_all, 1);
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
  run_round(all_to_all, 1);
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
  run_round(all_to_all, 3);
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

// --- A rank ends ------------------------------------------------------------------------------

/// "1 dispatch check": rank 1 is killed before its dispatch, its combine, or in the kernel of its
/// dispatch. The others look for it while their kernels wait, or only when these have ended, or
/// just close or destroy the AllToAll.
void lose_a_rank(const RankArguments& arguments) {
  std::istringstream words(arguments.extra);
  int victim = 0;
  std::string phase;
  std::string way;
  words >> victim >> phase >> way;
  const bool looks = way == "check";
  on_gpu(arguments, [&](Communicator& communicator) {
    // Rows that the round brought and views of them outlive the AllToAll.
    auto all_to_all = std::make_unique<AllToAll>(communicator, config_of());
    run_round(*all_to_all, 1);
    RoundRun round = make_run(*all_to_all, 2);
    const std::chrono::nanoseconds timeout = way == "late" ? 300ms : 60s;
    if (phase == "combine") round.dispatch();
    communicator.barrier();
    say("ready");
    (void)listen();
    if (communicator.rank() == victim) {
      if (phase == "kernel") round.dispatch();
      (void)listen();
    }
    // Lets the kernels run, as they do on a device.
    std::thread waiter;
    const auto let_run = [&] {
      if (looks)
        waiter = std::thread([&] { testing::test_device()->synchronize(0, round.stream()); });
      say("waits");
    };
    std::optional<Received> received;
    if (phase == "dispatch") {
      round.inputs.timeout = timeout;
      received = all_to_all->dispatch(round.inputs);
      let_run();
    } else {
      if (phase == "kernel") round.dispatch();  // its flag came before it ended
      CombineInputs combine = round.prepare_combine();
      combine.timeout = timeout;
      all_to_all->combine(combine, round.handle());
      let_run();
    }
    const std::string order = listen();
    if (way == "destroy" || way == "close") {
      if (way == "close") all_to_all->close();
      all_to_all.reset();
      say("ended");
      return;
    }
    const auto check = [&] {
      if (!looks) testing::test_device()->synchronize(0, round.stream());
      for (;;) {
        all_to_all->check();
        std::this_thread::sleep_for(1ms);
      }
    };
    const std::string text = expect_error<PeerLost>({str("rank ", victim, " is gone: ")}, check);
    if (looks) waiter.join();
    say(text);
    // The round's own calls name it, too.
    const std::string told = str(
        "AllToAll: ", phase == "dispatch" ? "dispatch" : "combine", " of round 1: rank ", victim,
        " is gone: its process ended; close the communicator and all that was made from it");
    if (received) {
      expect_error<PeerLost>({told}, [&] { (void)received->host_counts(); });
      expect_error<PeerLost>({told}, [&] { all_to_all->release(received->handle()); });
    } else {
      expect_error<PeerLost>({told}, [&] { (void)all_to_all->dispatch(round.inputs); });
    }
    expect_error<PeerLost>({told}, [&] { all_to_all->check(); });
    if (order != "last") return;  // `close` would wait for the last one
    expect_error<PeerLost>({str("reset: rank ", victim, " is gone")}, [&] { all_to_all->reset(); });
    all_to_all->close();
    communicator.close();
  });
}

/// "1 40": rank 1 dies at its 40th call of CUDA.
void die_at_a_call(const RankArguments& arguments) {
  std::istringstream words(arguments.extra);
  int victim = 0;
  int call = 0;
  words >> victim >> call;
  on_gpu(arguments, [&](Communicator& communicator) {
    if (communicator.rank() == victim) cudasim::die_at_call(call);
    bool is_made = false;
    try {
      AllToAll all_to_all(communicator, config_of());
      is_made = true;
      RoundRun round = make_run(all_to_all, 4);
      // Lets the kernels run, and looks whether they still have whom to wait for.
      const auto wait = [&] {
        while (cudaStreamQuery(static_cast<cudaStream_t>(round.stream())) == cudaErrorNotReady) {
          all_to_all.check();
        }
        all_to_all.check();
      };
      round.dispatch_send();
      (void)all_to_all.dispatch_recv(round.handle());
      wait();
      all_to_all.combine(round.prepare_combine(), round.handle());
      wait();
      communicator.barrier();  // `check` tells of peers that have left, too
      say("through");
      all_to_all.close();
    } catch (const PeerLost& error) {
      say(str(is_made ? "round" : "creation", " lost ", error.rank()));
    }
    communicator.close();
  });
}

// --- A rank cannot ----------------------------------------------------------------------------

/// "cuMemHostAlloc 2 1": on rank 1 the first such call fails with error 2. Rounds work afterwards.
void fail_to_create(const RankArguments& arguments) {
  std::istringstream words(arguments.extra);
  std::string call;
  int error = 0;
  int nth = 0;
  on_gpu(
      arguments,
      [&](Communicator& communicator) {
        while (words >> call >> error >> nth) {
          Allocator allocator = allocator_of(communicator, "fabric");
          const cudasim::Stats before = cudasim::stats();
          const int num_descriptors = testing::num_open_descriptors();
          if (communicator.rank() == 1) cudasim::fail_call(call.c_str(), error, nth);
          try {
            const AllToAll all_to_all(communicator, config_of(), &allocator);
            say("created");
          } catch (const std::exception& failure) {
            say(failure.what());
          }
          cudasim::clear_faults();
          allocator.trim();
          expect_equal_stats(cudasim::stats(), before);
          expect(testing::num_open_descriptors() == num_descriptors, call + " left descriptors");
        }
        AllToAll all_to_all(communicator, config_of());
        run_round(all_to_all, 1);
        all_to_all.close();
        communicator.close();
      },
      arguments.rank == 1 ? 1 : 0);
}

/// A launch is refused on rank 1, which then aborts.
void fail_to_launch(const RankArguments& arguments) {
  on_gpu(arguments, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config_of());
    run_round(all_to_all, 1);
    communicator.barrier();  // an abort ends this round, too
    RoundRun round = make_run(all_to_all, 2);
    if (communicator.rank() == 1) {
      cudasim::fail_call("launch", cudaErrorLaunchOutOfResources, 1);
      const std::string text = expect_error<CudaFailure>(
          {"launch of dispatch_send"}, [&] { (void)all_to_all.dispatch(round.inputs); });
      cudasim::clear_faults();
      cudasim::clear_reports();  // of the launch
      all_to_all.abort(text);
    } else {
      const Received received = all_to_all.dispatch(round.inputs);
      expect_error<PeerAborted>({"rank 1 aborted: launch of dispatch_send"},
                                [&] { (void)received.host_counts(); });
    }
    recover(communicator, all_to_all);
  });
}

}  // namespace

namespace testing {

std::vector<Scenario> scenarios() {
  return {{"make_rounds", &make_rounds},           {"meet_a_late_rank", &meet_a_late_rank},
          {"abort_a_round", &abort_a_round},       {"reset_while_all_wait", &reset_while_all_wait},
          {"differ_in_a_call", &differ_in_a_call}, {"lose_a_rank", &lose_a_rank},
          {"die_at_a_call", &die_at_a_call},       {"fail_to_create", &fail_to_create},
          {"fail_to_launch", &fail_to_launch}};
}

}  // namespace testing
}  // namespace fanfold
