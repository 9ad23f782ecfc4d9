// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <thread>

#include "simple.h"
#include "simulated_test.h"

namespace cudasim {
namespace {

using ::testing::HasSubstr;

class RuntimeTest : public SimulatedTest {};

TEST_F(RuntimeTest, AllocationsAreCountedAndAForeignPointerIsRefused) {
  const std::size_t before = stats().allocations;
  void* address = nullptr;
  ASSERT_EQ(cudaMalloc(&address, 100), cudaSuccess);
  EXPECT_EQ(stats().allocations, before + 1);
  EXPECT_EQ(cudaFree(static_cast<char*>(address) + 16), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(address), cudaSuccess);
  EXPECT_EQ(cudaFree(address), cudaErrorInvalidValue);
  EXPECT_EQ(stats().allocations, before);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(RuntimeTest, PointerAttributesTellWhoseMemoryItIs) {
  void* host = nullptr;
  ASSERT_EQ(cudaMallocHost(&host, 64), cudaSuccess);
  int local = 0;
  cudaPointerAttributes attributes{};
  cudaPointerGetAttributes(&attributes, zeros<int>(1));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  cudaPointerGetAttributes(&attributes, host);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(attributes.devicePointer, host);
  cudaPointerGetAttributes(&attributes, &local);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaHostRegister(&local, sizeof local, 0), cudaSuccess);
  cudaPointerGetAttributes(&attributes, &local);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(cudaHostUnregister(&local), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
}

TEST_F(RuntimeTest, AKernelWritesMappedHostMemory) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  void* host = nullptr;
  ASSERT_EQ(cudaHostAlloc(&host, 32 * sizeof(int), cudaHostAllocMapped), cudaSuccess);
  auto* const words = static_cast<int*>(host);
  void* device_address = nullptr;
  ASSERT_EQ(cudaHostGetDevicePointer(&device_address, host, 0), cudaSuccess);
  put(stream_on(0), static_cast<int*>(device_address), 32, 7);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(words[31], 7);
  put(stream_on(0), words, 32, 8);
  put(stream_on(1), words, 32, 9);
  const auto found = finish_with_reports();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].text, HasSubstr("write of host memory+"));
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
}

TEST_F(RuntimeTest, AHostStoreToMappedMemoryPublishesWhatTheHostDidBefore) {
  void* host = nullptr;
  ASSERT_EQ(cudaMallocHost(&host, sizeof(unsigned)), cudaSuccess);
  auto* const word = static_cast<unsigned*>(host);
  *word = 0;
  int* const data = unwritten<int>(1);
  int* const out = unwritten<int>(1);
  wait_for_word(stream_on(0), word, 1, out, data);
  const int sent = 42;
  cudaSetDevice(1);
  ASSERT_EQ(cudaMemcpyAsync(data, &sent, sizeof sent, cudaMemcpyHostToDevice, stream_on(1)),
            cudaSuccess);
  *word = 1;
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(value(out), 42);
  cudaFreeHost(host);
}

TEST_F(RuntimeTest, CopiesToPageableMemoryWaitAndOthersDoNot) {
  auto* const word = zeros<unsigned>(1);
  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, 64), cudaSuccess);
  int* const data = zeros<int>(16);
  wait_for_word(stream_on(0), word, 1);
  EXPECT_EQ(cudaMemcpyAsync(pinned, data, 64, cudaMemcpyDeviceToHost, stream_on(0)), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_on(0)), cudaErrorNotReady);
  signal_word(stream_on(1), word, 1);
  int local[16];
  EXPECT_EQ(cudaMemcpyAsync(local, data, 64, cudaMemcpyDeviceToHost, stream_on(0)), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_on(0)), cudaSuccess);
  EXPECT_EQ(finish(), "clean");
  cudaFreeHost(pinned);
}

TEST_F(RuntimeTest, RowsOfAPitchedCopyKeepTheirPlaces) {
  const int rows[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  int* const data = zeros<int>(6);
  ASSERT_EQ(cudaMemcpy2DAsync(data, 3 * sizeof(int), rows, sizeof rows[0], 2 * sizeof(int), 2,
                              cudaMemcpyHostToDevice, stream_on(0)),
            cudaSuccess);
  EXPECT_THAT(values(data, 6), ::testing::ElementsAre(1, 2, 0, 5, 6, 0));
  EXPECT_EQ(cudaMemcpy2DAsync(data, 4, rows, 16, 8, 2, cudaMemcpyHostToDevice, stream_on(0)),
            cudaErrorInvalidPitchValue);
}

TEST_F(RuntimeTest, AMemsetDoesNotWaitForStreamsThatDoNotWaitForIt) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  int* const data = unwritten<int>(32);
  cudaMemset(data, 0, 128);
  put(stream_on(0), data, 32, 1);
  const auto found = finish_with_reports();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].text, HasSubstr("write by memset on rank 0"));
  cudaMemset(data, 0, 128);
  cudaDeviceSynchronize();
  put(stream_on(0), data, 32, 1);
  EXPECT_EQ(finish(), "clean");
}

TEST_F(RuntimeTest, TheLegacyStreamWaitsForBlockingStreamsOnly) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  int* const data = zeros<int>(32);
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  put(blocking, data, 32, 1);
  increment(nullptr, data, 32);
  increment(blocking, data, 32);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(value(data), 3);
  put(stream_on(0), data, 32, 1);
  increment(nullptr, data, 32);
  EXPECT_EQ(finish(), "race");
  cudaStreamDestroy(blocking);
}

TEST_F(RuntimeTest, AStreamPerThreadIsNotAnothersStream) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  int* const data = zeros<int>(32);
  put(cudaStreamPerThread, data, 32, 1);
  increment(cudaStreamPerThread, data, 32);
  EXPECT_EQ(finish(), "clean");
  put(cudaStreamPerThread, data, 32, 1);
  std::thread([&] { increment(cudaStreamPerThread, data, 32); }).join();
  EXPECT_EQ(finish(), "race");
}

TEST_F(RuntimeTest, FreeingWaitsForTheDevice) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  void* address = nullptr;
  cudaMalloc(&address, 128);
  put(stream_on(0), static_cast<int*>(address), 32, 1);
  EXPECT_EQ(cudaFree(address), cudaSuccess);
  EXPECT_EQ(finish(), "clean");
  put(stream_on(0), static_cast<int*>(address), 32, 1);
  EXPECT_EQ(finish(), "oob");
}

TEST_F(RuntimeTest, EventsOrderStreamsAndMeasureVirtualTime) {
  int* const data = zeros<int>(32);
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle);
  cudaEventRecord(begin, stream_on(0));
  put(stream_on(0), data, 32, 1);
  cudaEventRecord(end, stream_on(0));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorNotReady);
  cudaStreamWaitEvent(stream_on(1), end, 0);
  increment(stream_on(1), data, 32);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(cudaEventQuery(end), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_GT(milliseconds, 0);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

TEST_F(RuntimeTest, ALaunchNeedsItsStreamsDevice) {
  int* const data = zeros<int>(32);
  const cudaStream_t stream = stream_on(1);
  cudaSetDevice(0);
  EXPECT_EQ(put(stream, data, 32, 1), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(finish(), "launch");
  EXPECT_EQ(put(reinterpret_cast<cudaStream_t>(data), data, 32, 1), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(put(stream_on(0), data, 1025, 1), cudaErrorInvalidConfiguration);
}

TEST_F(RuntimeTest, MuchSharedMemoryMustBeAskedFor) {
  const std::size_t much = 100 << 10;
  EXPECT_EQ(use_shared(stream_on(0), 48 << 10), cudaSuccess);
  EXPECT_EQ(use_shared(stream_on(0), much), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(use_shared_function(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(much)),
            cudaSuccess);
  EXPECT_EQ(use_shared(stream_on(0), much), cudaSuccess);
  cudaFuncAttributes attributes{};
  EXPECT_EQ(cudaFuncGetAttributes(&attributes, use_shared_function()), cudaSuccess);
  EXPECT_EQ(attributes.maxDynamicSharedSizeBytes, static_cast<int>(much));
  EXPECT_EQ(finish(), "clean");
}

TEST_F(RuntimeTest, AHostFunctionRunsInOrderAndMayNotCallTheApi) {
  struct Result {
    int* data;
    int seen;
    cudaError_t error;
  };
  void* host = nullptr;
  cudaMallocHost(&host, 128);
  Result result{static_cast<int*>(host), 0, cudaSuccess};
  put(stream_on(0), result.data, 32, 5);
  cudaLaunchHostFunc(
      stream_on(0),
      [](void* argument) {
        auto* const r = static_cast<Result*>(argument);
        r->seen = r->data[31];
        void* more = nullptr;
        r->error = cudaMalloc(&more, 4);
        r->data[0] = 10;
      },
      &result);
  increment(stream_on(0), result.data, 1);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(result.seen, 5);
  EXPECT_EQ(result.error, cudaErrorNotPermitted);
  EXPECT_EQ(result.data[0], 11);
  cudaFreeHost(host);
}

TEST_F(RuntimeTest, InjectedFaultsComeOnceAtTheNthCallOrAtEvery) {
  void* address = nullptr;
  clear_calls();
  fail_call("cudaMalloc", cudaErrorMemoryAllocation, 2);
  EXPECT_EQ(cudaMalloc(&address, 4), cudaSuccess);
  cudaFree(address);
  EXPECT_EQ(cudaMalloc(&address, 4), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&address, 4), cudaSuccess);
  cudaFree(address);
  EXPECT_EQ(calls()["cudaMalloc"], 3);
  fail_every("launch", cudaErrorLaunchOutOfResources);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(fail(stream_on(0)), cudaErrorLaunchOutOfResources);
  clear_faults();
}

TEST_F(RuntimeTest, AFailedDeviceRefusesWorkAndOthersGoOn) {
  int* const data = zeros<int>(32);
  fail(stream_on(0));
  put(stream_on(1), data, 32, 3);
  EXPECT_EQ(cudaStreamSynchronize(stream_on(1)), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_on(0)), cudaErrorLaunchFailure);
  EXPECT_EQ(put(stream_on(0), data, 32, 4), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  const auto found = finish_with_reports();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].text,
              HasSubstr("__trap by rank 0 kernel fail block 0 thread 0 at simple.cu:"));
  restart();
  EXPECT_EQ(put(stream_on(0), data, 32, 4), cudaSuccess);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(value(data), 4);
  cudaGetLastError();
}

TEST_F(RuntimeTest, NothingIsLeftOfWhatWasDestroyed) {
  const Stats before = stats();
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -1);
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  EXPECT_EQ(stats().streams, before.streams + 1);
  EXPECT_EQ(stats().events, before.events + 1);
  cudaStreamDestroy(stream);
  cudaEventDestroy(event);
  EXPECT_EQ(stats().streams, before.streams);
  EXPECT_EQ(stats().events, before.events);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
}

TEST_F(RuntimeTest, ErrorsHaveTheirNames) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorStreamCaptureUnjoined), "cudaErrorStreamCaptureUnjoined");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
  EXPECT_STREQ(cudaGetErrorName(static_cast<cudaError_t>(12345)), "unrecognized error code");
}

TEST_F(RuntimeTest, SeveralHostThreadsDriveTheirDevices) {
  Config config;
  config.host_threads = 2;
  restart(config);
  auto* const words = zeros<unsigned>(2);
  int* const data = unwritten<int>(2);
  int* const out = unwritten<int>(2);
  std::atomic<int> num_good{0};
  const auto rank = [&](int me) {
    const int other = 1 - me;
    cudaSetDevice(me);
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    signal_word(stream, words + me, 1, data + me, 10 + me);
    wait_for_word(stream, words + other, 1, out + me, data + other);
    num_good += cudaStreamSynchronize(stream) == cudaSuccess ? 1 : 0;
    cudaStreamDestroy(stream);
  };
  std::thread first(rank, 0);
  std::thread second(rank, 1);
  first.join();
  second.join();
  EXPECT_EQ(num_good, 2);
  EXPECT_EQ(finish(), "clean");
  EXPECT_THAT(values(out, 2), ::testing::ElementsAre(11, 10));
}

}  // namespace
}  // namespace cudasim
