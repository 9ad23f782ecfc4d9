// SPDX-License-Identifier: Apache-2.0

// What the processes do that gpu_round_processes_test.cpp starts: rounds on GPUs of which a rank is
// killed, or cannot take part.

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/format.h"
#include "cudasim/control.h"
#include "fanfold/error.h"
#include "gpu/process_rank.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using namespace std::chrono_literals;
using base::str;
using testing::allocator_of;
using testing::config_of;
using testing::expect;
using testing::expect_equal_stats;
using testing::expect_error;
using testing::listen;
using testing::make_run;
using testing::on_gpu;
using testing::RankArguments;
using testing::recover;
using testing::RoundRun;
using testing::run_varied_round;
using testing::say;

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
    run_varied_round(*all_to_all, 1);
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
        run_varied_round(all_to_all, 1);
        all_to_all.close();
        communicator.close();
      },
      arguments.rank == 1 ? 1 : 0);
}

/// A launch is refused on rank 1, which then aborts.
void fail_to_launch(const RankArguments& arguments) {
  on_gpu(arguments, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config_of());
    run_varied_round(all_to_all, 1);
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

std::vector<Scenario> loss_scenarios() {
  return {{"lose_a_rank", &lose_a_rank},
          {"die_at_a_call", &die_at_a_call},
          {"fail_to_create", &fail_to_create},
          {"fail_to_launch", &fail_to_launch}};
}

}  // namespace testing
}  // namespace fanfold
