// SPDX-License-Identifier: Apache-2.0
// Calls that wait or are refused: in captures, for peers that do not come, at the end.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "api/received_state.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_case.h"
#include "gpu/kernels/kernels.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using namespace std::chrono_literals;
using testing::expect_error;
using testing::gpu_config;
using testing::of_rank;
using testing::plan_of;
using testing::RoundRun;
using testing::run_round;

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A capture that a call has made invalid.
class LostCapture {
 public:
  LostCapture(void* stream, cudaStreamCaptureMode mode)
      : stream_(static_cast<cudaStream_t>(stream)) {
    testing::check_cuda(cudaSetDevice(0), "cudaSetDevice");
    testing::check_cuda(cudaStreamBeginCapture(stream_, mode), "cudaStreamBeginCapture");
  }
  ~LostCapture() {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
  }
  LostCapture(const LostCapture&) = delete;
  LostCapture& operator=(const LostCapture&) = delete;

 private:
  cudaStream_t stream_;
};

TEST(GpuHostCallsTest, WhatWaitsForTheDeviceIsRefusedInACaptureAndChangesNothing) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, gpu_config());
    const auto stream = testing::test_device()->make_stream(0);
    for (const auto mode : {cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
      const auto refused = [&](const std::string& name, const std::function<void()>& call) {
        const LostCapture capture(stream.get(), mode);
        expect_error<InvalidState>(
            {"AllToAll: " + name +
             " waits for the device, which cannot be done in a graph capture; the capture is "
             "invalid now"},
            call);
      };
      refused("set_active_mask", [&] { all_to_all.set_active_mask({true}); });
      refused("set_placement", [&] { all_to_all.set_placement(Placement::round_robin()); });
      refused("reset", [&] { all_to_all.reset(); });
      refused("close", [&] { all_to_all.close(); });
      EXPECT_FALSE(all_to_all.is_failed());
      EXPECT_FALSE(all_to_all.is_closed());
      run_round(all_to_all, 1);
    }
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, ADestructorInACaptureLeavesTheMemoryMapped) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    auto all_to_all = std::make_unique<AllToAll>(communicator, gpu_config());
    run_round(*all_to_all, 1);
    const auto* const data = static_cast<const std::byte*>([&] {
      RoundRun round(*all_to_all, plan_of(all_to_all->config(), 1));
      round.dispatch();
      const void* const at = round.received().payloads().front().data;
      round.combine();
      return at;
    }());
    const auto stream = testing::test_device()->make_stream(0);
    {
      const LostCapture capture(stream.get(), cudaStreamCaptureModeThreadLocal);
      all_to_all.reset();
    }
    std::byte word{};
    EXPECT_EQ(cudaMemcpy(&word, data, 1, cudaMemcpyDeviceToHost), cudaSuccess);
  });
}

TEST(GpuHostCallsTest, KernelsAreLoadedWithTheExchangeNotWhileOthersWaitForALaunch) {
  // Some have an instance for each type of rows.
  int num_kernels = 0;
  for (const gpu::KernelEntry* each = gpu::first_kernel(); each != nullptr; each = each->next) {
    ++num_kernels;
  }
  EXPECT_GT(num_kernels, 12);
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    cudasim::fail_call("cudaFuncGetAttributes", cudaErrorUnknown);
    expect_error<CudaFailure>({"cudaFuncGetAttributes"},
                              [&] { AllToAll(communicator, gpu_config()); });
    cudasim::clear_faults();
    AllToAll all_to_all(communicator, gpu_config());
    run_round(all_to_all, 1);
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, AFailedWaitForTheDeviceFailsBeforeAnythingChanges) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, gpu_config());
    run_round(all_to_all, 1);
    cudasim::fail_call("cuCtxSynchronize", cudaErrorUnknown);
    expect_error<CudaFailure>({"cuCtxSynchronize"},
                              [&] { all_to_all.set_placement(Placement::round_robin()); });
    EXPECT_TRUE(all_to_all.is_failed());
    cudasim::clear_faults();
    all_to_all.reset();
    run_round(all_to_all, 2);
    all_to_all.close();
  });
}

/// One rank ends in `end`, with a release enqueued whose peers do not come.
void end_alone(const std::function<void(std::unique_ptr<AllToAll>&)>& end) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAllConfig config = of_rank(gpu_config(), communicator);
    config.timeout = 20s;
    auto all_to_all = std::make_unique<AllToAll>(communicator, config);
    {
      RoundRun round(*all_to_all, plan_of(config, 2));
      round.dispatch();
      communicator.barrier();
      if (communicator.rank() == 0) {
        all_to_all->release(round.handle());
        EXPECT_LT(seconds_of([&] { end(all_to_all); }), 10);
      }
    }
    communicator.barrier();
    if (communicator.rank() == 1) {
      // Until the end of rank 0's work.
      expect_error<PeerLost>({"rank 0 is gone"}, [&] { all_to_all->check(); });
    }
    communicator.barrier();
  });
}

TEST(GpuHostCallsTest, ACloseKeepsItsTimeoutWhenPeersDoNotCome) {
  end_alone([](std::unique_ptr<AllToAll>& all_to_all) {
    expect_error<PeerTimeout>({"rank 1"}, [&] { all_to_all->close(100ms); });
    EXPECT_TRUE(all_to_all->is_closed());
  });
}

TEST(GpuHostCallsTest, ADestructorGivesUpWorkThatWaitsForPeers) {
  end_alone([](std::unique_ptr<AllToAll>& all_to_all) { all_to_all.reset(); });
}

TEST(GpuHostCallsTest, ADispatchIntoAnInvalidCaptureIsRefusedAndAllGoesOn) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    const AllToAllConfig config = gpu_config();
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 1));
    {
      const LostCapture capture(round.stream(), cudaStreamCaptureModeThreadLocal);
      expect_error<InvalidState>({}, [&] { all_to_all.set_active_mask({true}); });
      expect_error<InvalidState>({"stream: its graph capture is invalid; end it, and capture anew"},
                                 [&] { (void)all_to_all.dispatch(round.inputs); });
    }
    EXPECT_FALSE(all_to_all.is_failed());
    run_round(all_to_all, 2);
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, ACloseWaitsForPeersThatComeLate) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 2));
    round.dispatch();
    if (communicator.rank() == 1) std::this_thread::sleep_for(100ms);
    all_to_all.combine(round.prepare_combine(), round.handle());
    all_to_all.close();
  });
}

/// Rank 1's first launch of a dispatch, that of `kernel`, is refused.
void fail_first_launch(const AllToAllConfig& given, const std::string& kernel) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(given, communicator);
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 2));
    const auto dispatch_only = [&] {
      all_to_all.release(all_to_all.dispatch(round.inputs).handle());
      round.synchronize();
      communicator.barrier();
    };
    dispatch_only();
    if (communicator.rank() == 1) {
      cudasim::fail_call("launch", cudaErrorLaunchOutOfResources, 1);
      expect_error<CudaFailure>({"launch of " + kernel},
                                [&] { (void)all_to_all.dispatch(round.inputs); });
      cudasim::clear_faults();
      communicator.barrier();
    } else {
      communicator.barrier();
      expect_error<PeerAborted>({"rank 1 aborted: launch of " + kernel}, [&] {
        const Received received = all_to_all.dispatch(round.inputs);
        (void)received.host_counts();
      });
    }
    communicator.barrier();
    all_to_all.reset();
    dispatch_only();
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, ACudaFailureOfOneRankEndsTheWaitsOfTheOthers) {
  fail_first_launch(gpu_config(), "dispatch_send");
}

TEST(GpuHostCallsTest, SoDoesOneWhileADispatchIsPrepared) {
  AllToAllConfig config = gpu_config();
  config.strategy = Strategy::kLowLatency;
  config.dispatch_wire = Wire::kFp8E4M3;
  fail_first_launch(config, "pack_rows");
}

/// Rank 0 waits in `wait` for a dispatch whose peer leaves.
void wait_for_lost(const std::function<void(const Received&)>& wait) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);  // 60 seconds
    auto all_to_all = std::make_unique<AllToAll>(communicator, config);
    run_round(*all_to_all, 1);
    communicator.barrier();
    if (communicator.rank() == 0) {
      RoundRun round(*all_to_all, plan_of(config, 2));
      const Received received = all_to_all->dispatch(round.inputs);
      EXPECT_LT(seconds_of([&] {
                  expect_error<PeerLost>({"dispatch of round 1: rank 1 is gone"},
                                         [&] { wait(received); });
                }),
                20);
      EXPECT_TRUE(all_to_all->is_failed());
    } else {
      std::this_thread::sleep_for(50ms);
      all_to_all.reset();
    }
    communicator.barrier();
  });
}

TEST(GpuHostCallsTest, AWaitForCountsSeesThatAPeerIsGone) {
  wait_for_lost([](const Received& received) { (void)received.host_counts(); });
}

TEST(GpuHostCallsTest, AWaitForTheCountsOfARoutingSeesThatAPeerIsGone) {
  wait_for_lost([](const Received& received) { (void)received.routing().rank_counts(); });
}

TEST(GpuHostCallsTest, AWaitThatThisRankGaveUpIsNotCalledATimeout) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);
    AllToAll all_to_all(communicator, config);
    if (communicator.rank() == 0) {
      RoundRun round(all_to_all, plan_of(config, 2));
      const Routing routing = all_to_all.dispatch(round.inputs).routing();
      expect_error<PeerTimeout>({"rank 1"}, [&] { all_to_all.close(100ms); });
      expect_error<PeerAborted>(
          {"AllToAll: dispatch of round 0: this rank (0) gave up waiting for rank 1"},
          [&] { (void)routing.rank_counts(); });
    }
    communicator.barrier();
  });
}

TEST(GpuHostCallsTest, ACaptureThatIsDroppedLetsItsRoundEnd) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, gpu_config());
    RoundRun run(all_to_all, plan_of(all_to_all.config(), 1));
    testing::Capture first(0, run.stream());
    testing::Capture second(0, run.stream());
    first.begin();
    const Received received = all_to_all.dispatch(run.inputs);
    const Round sent = received.handle();
    first.end();
    second.begin();
    expect_error<InvalidState>(
        {"combine: round 0 of AllToAll was dispatched in a graph capture and must end in it, got a "
         "stream of another capture"},
        [&] {
          CombineInputs combine;
          combine.y = all_to_all.combine_buffer(sent);
          combine.out = run.inputs.payloads.front();
          all_to_all.combine(combine, sent);
        });
    second.end();
    expect_error<InvalidState>({"needs the slot of round 0"},
                               [&] { (void)all_to_all.dispatch(run.inputs); });
    all_to_all.release(sent);
    EXPECT_FALSE(received.is_open());
    testing::Capture third(0, run.stream());
    third.begin();
    const Round half = all_to_all.dispatch_send(run.inputs);
    expect_error<InvalidState>({"must be received, is sent"}, [&] { all_to_all.release(half); });
    third.end();
    all_to_all.release(half);
    run_round(all_to_all, 3);
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, ARoutingBelongsToItsRank) {
  const testing::GpuRanks gpus(2, 2);
  Routing routings[2];
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 2));
    round.dispatch();
    routings[communicator.rank()] = round.received().routing();
    round.combine();
    communicator.barrier();
    DispatchInputs inputs;
    inputs.payloads = round.inputs.payloads;
    inputs.stream = round.stream();
    const int other = 1 - communicator.rank();
    inputs.routing = routings[other];
    expect_error<InvalidArgument>(
        {"routing: expected a routing made on rank " + std::to_string(communicator.rank()) +
         ", got one of rank " + std::to_string(other)},
        [&] { (void)all_to_all.dispatch(inputs); });
    inputs.routing = routings[communicator.rank()];
    all_to_all.release(all_to_all.dispatch(inputs).handle());
    round.synchronize();
    communicator.barrier();
    routings[communicator.rank()] = Routing();
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, ARoutingEndsWithItsGeneration) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    const AllToAllConfig config = gpu_config();
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 1));
    round.dispatch();
    DispatchInputs inputs;
    inputs.routing = round.received().routing();
    inputs.payloads = round.inputs.payloads;
    inputs.stream = round.stream();
    round.combine();
    all_to_all.reset();
    expect_error<InvalidArgument>(
        {"routing: expected a routing of generation 1, got one of generation 0"},
        [&] { (void)all_to_all.dispatch(inputs); });
    run_round(all_to_all, 2);
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, ADispatchFreesNoRoutingOfAnEarlierRound) {
  // Both ranks on one device, where to free memory would wait for the other's kernels.
  const testing::GpuRanks gpus(2, 1);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAllConfig config = gpu_config();
    config.timeout = 20s;
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 2));
    DispatchInputs again;
    again.payloads = round.inputs.payloads;
    again.stream = round.stream();
    {
      const Received received = all_to_all.dispatch(round.inputs);
      again.routing = received.routing();
      all_to_all.release(received.handle());
    }
    all_to_all.release(all_to_all.dispatch(again).handle());
    again.routing = Routing();  // the slot has the last one
    communicator.barrier();
    if (communicator.rank() == 0) std::this_thread::sleep_for(100ms);
    {
      const Received received = all_to_all.dispatch(round.inputs);
      (void)received.host_counts();  // in time: nobody waits for the other's kernel
      all_to_all.release(received.handle());
    }
    round.synchronize();
    communicator.barrier();
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, ACallOnAnotherStreamComesBehindTensorsMadeLate) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    const AllToAllConfig config = gpu_config();
    AllToAll all_to_all(communicator, config);
    testing::TensorBuffer out(DType::kFloat32, 4, {config.hidden});
    out.move_to(0, testing::test_device()->make_stream(0).get());
    std::vector<Routing> routings;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      RoundRun round(all_to_all, plan_of(config, 1, seed));
      round.dispatch_send();
      const Received received = all_to_all.dispatch_recv(round.handle());
      CombineInputs combine;
      combine.y = all_to_all.combine_buffer(round.handle());
      combine.out = out.view();
      const auto other = testing::test_device()->make_stream(0);
      cudaEvent_t event = nullptr;
      testing::check_cuda(cudaSetDevice(0), "cudaSetDevice");
      testing::check_cuda(cudaEventCreate(&event), "cudaEventCreate");
      testing::check_cuda(cudaEventRecord(event, static_cast<cudaStream_t>(round.stream())),
                          "cudaEventRecord");
      testing::check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(other.get()), event, 0),
                          "cudaStreamWaitEvent");
      // Behind the event, and before the combine.
      if (seed % 2 == 0) {
        (void)received.expert_counts();
        (void)received.source_rank();
      }
      if (seed > 0) routings.push_back(received.routing());
      combine.stream = other.get();
      all_to_all.combine(combine, received.handle());
      testing::check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(other.get())),
                          "cudaStreamSynchronize");
      testing::check_cuda(cudaEventDestroy(event), "cudaEventDestroy");
      all_to_all.check();
    }
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, AKernelThatIsStuckInItselfSaysSoAfterTheTimeout) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    const AllToAllConfig config = gpu_config();
    AllToAll all_to_all(communicator, config);
    run_round(all_to_all, 1);
    RoundRun round(all_to_all, plan_of(config, 1));
    round.inputs.timeout = 100ms;
    const Received received = all_to_all.dispatch(round.inputs);
    round.synchronize();
    // The first tile of the next kernel is one that nobody takes.
    const exchange::Exchange& exchange = received.state()->exchange();
    const exchange::Slot& slot = received.state()->slot_state();
    const plan::Workspace& workspace = exchange.workspace();
    std::byte* const at = exchange.local_base(slot) - workspace.local_slot_offset +
                          workspace.device.slots_offset + offsetof(exec::DeviceSlot, next_tile);
    const std::uint32_t second = 1;
    testing::check_cuda(cudaMemcpy(at, &second, sizeof second, cudaMemcpyHostToDevice),
                        "cudaMemcpy");
    double seconds = 0;
    expect_error<CudaFailure>(
        {"AllToAll: dispatch of round 1: a block of a kernel waited for another one of the same "
         "kernel for 100 ms in vain; call reset() on every rank"},
        [&] {
          const auto start = std::chrono::steady_clock::now();
          try {
            (void)received.host_counts();
          } catch (...) {
            seconds =
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            throw;
          }
        });
    EXPECT_GT(seconds, 0.05);
    EXPECT_TRUE(all_to_all.is_failed());
    all_to_all.reset();
    run_round(all_to_all, 2);
    all_to_all.close();
  });
}

TEST(GpuHostCallsTest, AnAccessorOfASecondThreadIsRefusedWhileACallRuns) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 2));
    if (communicator.rank() == 0) {
      const Received received = all_to_all.dispatch(round.inputs);  // the peer comes later
      const auto is_refused = [&](const std::function<void()>& call, std::string* text) {
        try {
          call();
        } catch (const InvalidState& error) {
          *text = error.what();
        }
        return !text->empty();
      };
      std::thread waits([&] {
        for (std::string text; is_refused([&] { (void)received.host_counts(); }, &text);) {
          text.clear();  // this thread was the second one
        }
      });
      std::string text;
      while (!is_refused([&] { (void)received.routing(); }, &text)) {
        std::this_thread::sleep_for(1ms);
      }
      EXPECT_THAT(text, ::testing::HasSubstr("another thread is inside a call on this object"));
      communicator.barrier();
      waits.join();
      all_to_all.release(received.handle());
    } else {
      communicator.barrier();
      all_to_all.release(all_to_all.dispatch(round.inputs).handle());
    }
    round.synchronize();
    communicator.barrier();
    all_to_all.close();
  });
}

}  // namespace
}  // namespace fanfold
