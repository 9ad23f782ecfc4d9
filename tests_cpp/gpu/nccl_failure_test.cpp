// SPDX-License-Identifier: Apache-2.0

// What goes wrong with NCCL, and how it is said: libraries, peers that are late or gone, aborts.

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator_impl.h"
#include "fanfold/error.h"
#include "gpu/gpu_ranks.h"
#include "gpu/nccl_collectives.h"
#include "gpu/nccl_ranks.h"
#include "gpu/test_gpu.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using testing::check_cuda;
using testing::expect_error;
using testing::GpuRanks;
using testing::nccl_options;
using testing::spawn_nccl_ranks;
using testing::spawn_ranks;
using testing::test_device;

/// 256 bytes on the rank's device and a stream.
struct Block {
  explicit Block(int index)
      : device(index),
        stream(test_device()->make_stream(index)),
        data(test_device()->allocate(index, 256)) {
    const std::vector<std::byte> zeros(256);
    test_device()->upload(index, data.get(), zeros.data(), 256, stream.get());
  }
  TensorView view(std::int64_t count = 8) const {
    TensorView view(data.get(), DType::kInt32, {count});
    view.device = DeviceType::kGpu;
    view.device_index = device;
    return view;
  }
  int device;
  std::shared_ptr<void> stream;
  std::shared_ptr<std::byte> data;
};

/// Looks until what has failed shows; the text.
template <class ErrorType>
std::string wait_for_failure(Communicator& communicator) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (std::chrono::steady_clock::now() < end) {
    try {
      communicator.check_device();
    } catch (const ErrorType& error) {
      return error.what();
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

void expect_sum_works(Communicator& communicator) {
  const Block block(communicator.rank());
  const std::vector<std::int32_t> ones(8, 1);
  test_device()->upload(block.device, block.data.get(), ones.data(), 32, block.stream.get());
  communicator.all_reduce(block.view(), block.view(), {}, block.stream.get());
  std::int32_t sum = 0;
  test_device()->download(block.device, &sum, block.data.get(), 4, block.stream.get());
  EXPECT_EQ(sum, communicator.num_ranks());
}

// --- Making one ---------------------------------------------------------------------------------

TEST(NcclFailureTest, AnOldLibraryIsRefusedWithBothVersions) {
  const GpuRanks gpus(2, 2);
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(21805);
  spawn_ranks(2, [](Communicator& bootstrap) {
    expect_error<Unsupported>(
        {"expected version 2.19.0 or later, got 2.18.5", "libnccl_double.so", "rank 0"},
        [&] { (void)Communicator::from_nccl(bootstrap, nccl_options(bootstrap.rank())); });
  });
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(0);
}

TEST(NcclFailureTest, OneRankWithoutALibraryFailsAllOfThem) {
  const GpuRanks gpus(2, 2);
  spawn_ranks(2, [](Communicator& bootstrap) {
    NcclOptions options = nccl_options(bootstrap.rank());
    if (bootstrap.rank() == 1) options.library = "/nowhere/libnccl.so.2";
    expect_error<Unsupported>({"rank 1", "expected a library at /nowhere/libnccl.so.2"},
                              [&] { (void)Communicator::from_nccl(bootstrap, options); });
    bootstrap.barrier();  // goes on
  });
}

TEST(NcclFailureTest, AFileThatIsNotNcclIsRefused) {
  const GpuRanks gpus(1, 1);
  spawn_ranks(1, [](Communicator& bootstrap) {
    NcclOptions options = nccl_options(0);
    options.library = "libm.so.6";
    expect_error<Unsupported>({"expected ncclGetVersion in libm.so.6", "it is not NCCL"},
                              [&] { (void)Communicator::from_nccl(bootstrap, options); });
  });
}

TEST(NcclFailureTest, ADeviceThatIsNotThereFailsAllRanks) {
  const GpuRanks gpus(2, 1);
  spawn_ranks(2, [](Communicator& bootstrap) {
    expect_error<Unsupported>({"rank 1", "device: expected 0 to 0, got 1"}, [&] {
      (void)Communicator::from_nccl(bootstrap, nccl_options(bootstrap.rank()));
    });
  });
}

TEST(NcclFailureTest, AFailureOfNcclIsToldInItsWordsOnAllRanks) {
  const GpuRanks gpus(2, 2);
  cudasim::fail_every("cudaGetDeviceCount", cudaErrorNoDevice);  // only the double calls it
  spawn_ranks(2, [](Communicator& bootstrap) {
    NcclOptions options = nccl_options(bootstrap.rank());
    options.timeout = std::chrono::seconds(1);
    expect_error<CudaFailure>(
        {"ncclCommInitRankConfig", "unhandled cuda error", "double: no device", "[NCCL 2.32.3]"},
        [&] { (void)Communicator::from_nccl(bootstrap, options); });
  });
  cudasim::clear_faults();
  EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleNumComms)(), 0);
}

// --- Handles of the caller ----------------------------------------------------------------------

/// As another library would make one.
ncclComm_t make_handle(const ncclUniqueId& id, int num_ranks, int rank, int device) {
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  ncclComm_t comm = nullptr;
  const ncclResult_t result =
      FANFOLD_NCCL_DOUBLE_CALL(ncclCommInitRankConfig)(&comm, num_ranks, id, rank, nullptr);
  EXPECT_EQ(result, ncclSuccess);
  return comm;
}

ncclUniqueId new_id() {
  ncclUniqueId id{};
  EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclGetUniqueId)(&id), ncclSuccess);
  return id;
}

TEST(NcclHandleTest, AHandleStaysTheCallers) {
  const GpuRanks gpus(2, 2);
  const ncclUniqueId id = new_id();
  spawn_ranks(2, [&](Communicator& bootstrap) {
    const int rank = bootstrap.rank();
    const ncclComm_t handle = make_handle(id, 2, rank, rank);
    NcclOptions options = nccl_options(rank);
    options.handle = handle;
    {
      Communicator communicator = Communicator::from_nccl(bootstrap, options);
      EXPECT_EQ(communicator.device_index(), rank);
      expect_sum_works(communicator);
      communicator.close();
    }
    {
      Communicator again = Communicator::from_nccl(bootstrap, options);
      expect_sum_works(again);
      again.abort("a reason");
      expect_error<InvalidState>({"they were aborted"}, [&] { again.check_device(); });
    }
    int count = 0;
    EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommCount)(handle, &count), ncclSuccess);
    EXPECT_EQ(count, 2);
    bootstrap.barrier();
    EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommDestroy)(handle), ncclSuccess);
  });
}

TEST(NcclHandleTest, AHandleMustFitTheGroup) {
  const GpuRanks gpus(2, 2);
  const ncclUniqueId id = new_id();
  spawn_ranks(2, [&](Communicator& bootstrap) {
    const int rank = bootstrap.rank();
    const ncclComm_t handle = make_handle(id, 2, 1 - rank, 1 - rank);
    NcclOptions options = nccl_options(rank);
    options.handle = handle;
    expect_error<InvalidArgument>({"rank 0", "expected a communicator with rank 0, got 1"},
                                  [&] { (void)Communicator::from_nccl(bootstrap, options); });
    options.handle = rank == 0 ? handle : nullptr;
    expect_error<InvalidArgument>({"handle: expected a communicator with rank 0, got 1"},
                                  [&] { (void)Communicator::from_nccl(bootstrap, options); });
    bootstrap.barrier();
    EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommDestroy)(handle), ncclSuccess);
  });
}

TEST(NcclHandleTest, SomeHandlesOnlyAreRefused) {
  const GpuRanks gpus(2, 2);
  const ncclUniqueId id = new_id();
  spawn_ranks(2, [&](Communicator& bootstrap) {
    const int rank = bootstrap.rank();
    const ncclComm_t handle = make_handle(id, 2, rank, rank);
    NcclOptions options = nccl_options(rank);
    if (rank == 1) options.handle = handle;
    expect_error<InvalidArgument>(
        {"handle: expected one on every rank or on none, got none on rank 0 and one on rank 1"},
        [&] { (void)Communicator::from_nccl(bootstrap, options); });
    bootstrap.barrier();
    EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommDestroy)(handle), ncclSuccess);
  });
}

// --- While it works -----------------------------------------------------------------------------

TEST(NcclFailureTest, AnErrorShowsLaterWithNcclsWordsAndEndsInAReset) {
  const GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [](Communicator& communicator) {
    const Block block(communicator.rank());
    communicator.check_device();
    communicator.barrier();
    if (communicator.rank() == 0) {
      FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleFail)(1, ncclSystemError, "a cable fell out");
    }
    communicator.barrier();
    if (communicator.rank() == 1) {
      const std::string text = wait_for_failure<SystemFailure>(communicator);
      EXPECT_NE(text.find("rank 1, check: unhandled system error"), std::string::npos) << text;
      EXPECT_NE(text.find("a cable fell out"), std::string::npos) << text;
      expect_error<InvalidState>({"have failed", "a cable fell out"}, [&] {
        communicator.all_reduce(block.view(), block.view(), {}, block.stream.get());
      });
    }
    communicator.reset();
    expect_sum_works(communicator);
    communicator.close();
  });
  EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleNumComms)(), 0);
}

TEST(NcclFailureTest, SizesThatDifferAreAnErrorAfterwards) {
  const GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [](Communicator& communicator) {
    const Block block(communicator.rank());
    const std::int64_t count = communicator.rank() == 0 ? 8 : 6;
    std::string text;
    try {
      communicator.all_reduce(block.view(count), block.view(count), {}, block.stream.get());
      test_device()->synchronize(block.device, block.stream.get());
      text = wait_for_failure<InvalidArgument>(communicator);
    } catch (const InvalidArgument& error) {  // so soon
      text = error.what();
    }
    EXPECT_NE(text.find("invalid usage"), std::string::npos) << text;
    communicator.reset();
    expect_sum_works(communicator);
    communicator.close();
  });
}

TEST(NcclFailureTest, ALatePeerHoldsTheStreamUntilAnAbort) {
  const GpuRanks gpus(2, 2);
  std::atomic<bool> is_over{false};
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    const Block block(communicator.rank());
    if (communicator.rank() == 0) {
      communicator.all_reduce(block.view(), block.view(), {}, block.stream.get());
      auto* const stream = static_cast<cudaStream_t>(block.stream.get());
      check_cuda(cudaSetDevice(0), "cudaSetDevice");
      for (int look = 0; look < 20; ++look) EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
      communicator.abort("rank 1 does not come");
      test_device()->synchronize(0, stream);
      expect_error<InvalidState>({"have failed: they were aborted"}, [&] {
        communicator.all_reduce(block.view(), block.view(), {}, block.stream.get());
      });
      is_over = true;
    }
    while (!is_over) std::this_thread::sleep_for(milliseconds(1));
    communicator.reset();
    expect_sum_works(communicator);
    communicator.close();
  });
}

TEST(NcclFailureTest, CallsFromInsideWaitForNcclUntilTheDeadline) {
  const GpuRanks gpus(1, 1);
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLaunchLooks)(1000000);
  spawn_ranks(1, [](Communicator& bootstrap) {
    NcclOptions options = nccl_options(0);
    options.timeout = milliseconds(50);
    Communicator communicator = Communicator::from_nccl(bootstrap, options);
    const Block block(0);
    expect_error<PeerTimeout>({"ncclAllReduce: still in progress after 50 ms"}, [&] {
      communicator.all_reduce(block.view(), block.view(), {}, block.stream.get());
    });
  });
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLaunchLooks)(0);
  EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleNumComms)(), 0);
}

TEST(NcclFailureTest, ALostPeerIsNamed) {
  const GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [](Communicator& communicator) {
    if (communicator.rank() == 1) return;  // its communicator goes
    const std::string text = wait_for_failure<PeerLost>(communicator);
    EXPECT_NE(text.find("rank 1 is lost"), std::string::npos) << text;
  });
}

TEST(NcclFailureTest, CloseDoesNotWaitForWhoIsGone) {
  const GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [](Communicator& communicator) {
    if (communicator.rank() == 1) return;
    const Block block(0);
    communicator.all_reduce(block.view(), block.view(), {}, block.stream.get());  // never comes
    const auto begin = std::chrono::steady_clock::now();
    communicator.close();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    test_device()->synchronize(0, block.stream.get());
  });
}

/// An all-reduce in a graph, which lives as long as this.
class CapturedSum {
 public:
  explicit CapturedSum(Communicator& communicator) : block_(communicator.rank()) {
    check_cuda(cudaSetDevice(block_.device), "cudaSetDevice");
    check_cuda(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "begin");
    communicator.all_reduce(block_.view(), block_.view(), {}, stream());
    check_cuda(cudaStreamEndCapture(stream(), &graph_), "end");
  }
  ~CapturedSum() { check_cuda(cudaGraphDestroy(graph_), "cudaGraphDestroy"); }
  CapturedSum(const CapturedSum&) = delete;
  CapturedSum& operator=(const CapturedSum&) = delete;

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(block_.stream.get()); }
  Block block_;
  cudaGraph_t graph_ = nullptr;
};

TEST(NcclFailureTest, AnAbortDoesNotWaitForGraphsAndAResetNamesThem) {
  const GpuRanks gpus(2, 2);
  std::atomic<bool> is_aborted{false};
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    auto graph = std::make_unique<CapturedSum>(communicator);
    communicator.barrier();
    const auto begin = std::chrono::steady_clock::now();
    if (communicator.rank() == 0) {
      communicator.abort("enough");
      is_aborted = true;
    }
    while (!is_aborted) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    expect_error<InvalidState>({"reset: NCCL has not ended the communicator within",
                                "destroy the graphs that were captured over it"},
                               [&] { communicator.reset(milliseconds(400)); });
    graph.reset();
    communicator.reset();
    expect_sum_works(communicator);
    communicator.close();
  });
  EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleNumComms)(), 0);
}

TEST(NcclFailureTest, ACloseNamesGraphsThatAreLeft) {
  const GpuRanks gpus(1, 1);
  spawn_nccl_ranks(1, 1, [](Communicator& communicator) {
    const CapturedSum graph(communicator);
    expect_error<PeerTimeout>(
        {"ncclCommFinalize", "a graph that was captured over the communicator"},
        [&] { communicator.close(milliseconds(100)); });
  });
  // What was left to end does so once the graph is gone.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleNumComms)() != 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(NcclFailureTest, WrongArgumentsOfOneCallDoNotEndTheCommunicator) {
  const GpuRanks gpus(1, 1);
  spawn_nccl_ranks(1, 1, [](Communicator& communicator) {
    auto& nccl = static_cast<gpu::NcclCollectives&>(*communicator.impl()->device_collectives());
    const auto refuse = [](const gpu::nccl::Functions&, gpu::nccl::Comm) {
      return gpu::nccl::kInvalidArgument;
    };
    expect_error<InvalidArgument>({"ncclSomething", "invalid argument"}, [&] {
      nccl.run("ncclSomething", refuse, base::Deadline(std::chrono::seconds(1)));
    });
    expect_sum_works(communicator);
    communicator.close();
  });
}

TEST(NcclFailureTest, TheTimeoutOfACallBoundsNccl) {
  const GpuRanks gpus(1, 1);
  spawn_nccl_ranks(1, 1, [](Communicator& communicator) {
    const Block block(0);
    FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLaunchLooks)(1000000);
    expect_error<PeerTimeout>({"ncclAllReduce: still in progress after 30 ms"}, [&] {
      communicator.all_reduce(block.view(), block.view(), milliseconds(30), block.stream.get());
    });
    FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLaunchLooks)(0);
  });
}

TEST(NcclFailureTest, AGroupThatWasCancelledLeavesNothing) {
  const GpuRanks gpus(1, 1);
  spawn_nccl_ranks(1, 1, [](Communicator& communicator) {
    comm::DeviceCollectives& device = *communicator.impl()->device_collectives();
    const Block block(0);
    std::byte* const data = block.data.get();
    device.begin_group();
    device.all_gather(data + 64, data, 64, block.stream.get());
    device.cancel_group();
    expect_error<InvalidState>({"end_group: expected a group that was begun"},
                               [&] { device.end_group(); });
    expect_sum_works(communicator);
    communicator.close();
  });
}

TEST(NcclFailureTest, AShrinkThatIsNotDoneInTimeLeavesNothing) {
  const GpuRanks gpus(3, 3);
  std::vector<Communicator> survivors = Communicator::threads(2);
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLateLooks)(100000000);
  spawn_nccl_ranks(3, 3, [&](Communicator& communicator) {
    if (communicator.rank() == 1) return;
    Communicator& left = survivors[static_cast<std::size_t>(communicator.rank() / 2)];
    expect_error<PeerTimeout>({"ncclCommShrink: still in progress after"},
                              [&] { (void)communicator.shrink({1}, left, milliseconds(200)); });
  });
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLateLooks)(-1);
  EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleNumComms)(), 0);
}

TEST(NcclFailureTest, SurvivorsMustMeanTheSameRanks) {
  const GpuRanks gpus(4, 4);
  std::vector<Communicator> survivors = Communicator::threads(2);
  spawn_nccl_ranks(4, 4, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    if (rank > 1) return;
    Communicator& left = survivors[static_cast<std::size_t>(rank)];
    std::vector<int> lost = rank == 0 ? std::vector<int>{2, 3} : std::vector<int>{0, 3};
    expect_error<InvalidArgument>({"survivors: expected rank 1 as rank 0, in the old order"},
                                  [&] { (void)communicator.shrink(lost, left); });
    lost = rank == 0 ? std::vector<int>{2, 3} : std::vector<int>{1, 3};
    expect_error<InvalidArgument>({"expected ranks that are gone, got rank 1"},
                                  [&] { (void)communicator.shrink(lost, left); });
  });
}

TEST(NcclFailureTest, SurvivorsShrinkAndGoOn) {
  for (const int version : {0, 22600}) {  // with ncclCommShrink, and from nothing
    const GpuRanks gpus(3, 3);
    FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(version);
    std::vector<Communicator> survivors = Communicator::threads(2);
    spawn_nccl_ranks(3, 3, [&](Communicator& communicator) {
      expect_sum_works(communicator);
      if (communicator.rank() == 1) return;
      const int place = communicator.rank() / 2;
      Communicator& left = survivors[static_cast<std::size_t>(place)];
      expect_error<InvalidArgument>({"lost: expected different ranks, which with the 2 survivors"},
                                    [&] { (void)communicator.shrink({1, 0}, left); });
      const Block block(communicator.rank());
      communicator.all_reduce(block.view(), block.view(), {}, block.stream.get());  // hangs
      Communicator shrunk = communicator.shrink({1}, left);
      test_device()->synchronize(block.device, block.stream.get());
      EXPECT_EQ(shrunk.num_ranks(), 2);
      EXPECT_EQ(shrunk.rank(), place);
      const Block again(communicator.rank());
      const std::vector<std::int32_t> ones(8, 1);
      test_device()->upload(again.device, again.data.get(), ones.data(), 32, again.stream.get());
      shrunk.all_reduce(again.view(), again.view(), {}, again.stream.get());
      std::int32_t sum = 0;
      test_device()->download(again.device, &sum, again.data.get(), 4, again.stream.get());
      EXPECT_EQ(sum, 2);
      shrunk.close();
    });
    FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(0);
  }
}

}  // namespace
}  // namespace fanfold
