// SPDX-License-Identifier: Apache-2.0

// What a strategy asks of a GPU: memory, streams and launches, on simulated devices.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "exec/flag_fields.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/backend.h"
#include "gpu/simulated_devices.h"
#include "gtest/gtest.h"

namespace fanfold {
namespace {

using exec::DeviceBackend;
using exec::DeviceFailure;
using exec::PinnedMemory;
using testing::SimulatedDevices;

constexpr std::int64_t kPage = 4096;

/// The text of what `call` throws, which is a `Thrown`.
template <class Thrown>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Thrown& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "nothing was thrown";
}

class OwnStream {
 public:
  explicit OwnStream(int device) {
    int before = 0;
    EXPECT_EQ(cudaGetDevice(&before), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(before), cudaSuccess);
  }
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaStream_t get() const noexcept { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// What is captured while it lives is thrown away.
class Capture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  }
  ~Capture() {
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  cudaStream_t stream_;
};

/// A page of the test's own.
class OwnPage {
 public:
  OwnPage()
      : data_(::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~OwnPage() { (void)::munmap(data_, kPage); }
  OwnPage(const OwnPage&) = delete;
  OwnPage& operator=(const OwnPage&) = delete;
  std::byte* get() const noexcept { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
};

template <class T>
std::shared_ptr<std::byte> uploaded(DeviceBackend& backend, const std::vector<T>& values) {
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
  std::shared_ptr<std::byte> memory = backend.allocate(bytes);
  backend.upload(memory.get(), static_cast<const void*>(values.data()), bytes);
  return memory;
}

// --- Memory -----------------------------------------------------------------------------------

TEST(DeviceBackendTest, DeviceMemoryIsZeroedAlignedAndFreed) {
  const SimulatedDevices devices(2);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(1);
  EXPECT_EQ(backend->device(), 1);
  const std::size_t before = cudasim::stats().allocations;
  {
    const std::shared_ptr<std::byte> memory = backend->allocate(1000);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 128, 0U);
    EXPECT_EQ(cudasim::stats().allocations, before + 1);
    std::vector<std::byte> got(1000, std::byte{1});
    backend->download(got.data(), memory.get(), 1000);
    EXPECT_EQ(got, std::vector<std::byte>(1000));
    const std::vector<std::byte> sent(10, std::byte{7});
    backend->upload(memory.get() + 5, sent.data(), 10);
    backend->upload(memory.get(), nullptr, 0);
    backend->download(got.data(), memory.get(), 1000);
    EXPECT_EQ(std::count(got.begin(), got.end(), std::byte{7}), 10);
    EXPECT_EQ(got[4], std::byte{0});
    EXPECT_EQ(got[14], std::byte{7});
    cudaPointerAttributes attributes{};
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, memory.get()), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
    EXPECT_EQ(attributes.device, 1);
  }
  EXPECT_EQ(cudasim::stats().allocations, before);
  EXPECT_NE(backend->allocate(0), nullptr);
}

TEST(DeviceBackendTest, MemoryOutlivesTheBackend) {
  const SimulatedDevices devices(1);
  const std::size_t before = cudasim::stats().host_allocations;
  std::shared_ptr<std::byte> memory;
  PinnedMemory pinned;
  {
    const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
    memory = backend->allocate(64);
    pinned = backend->allocate_pinned(64);
  }
  pinned.host.get()[63] = std::byte{3};
  EXPECT_EQ(cudasim::stats().host_allocations, before + 1);
  memory.reset();
  pinned = {};
  EXPECT_EQ(cudasim::stats().host_allocations, before);
}

TEST(DeviceBackendTest, NoMemoryIsOutOfMemory) {
  const SimulatedDevices devices(2);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(1);
  cudasim::fail_call("cuMemAlloc", CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(text_of<OutOfMemory>([&] { (void)backend->allocate(1000); }),
            "cuMemAlloc of 1000 bytes on device 1: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  cudasim::fail_call("cuMemHostAlloc", CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(text_of<OutOfMemory>([&] { (void)backend->allocate_pinned(64); }),
            "cuMemHostAlloc of 64 bytes: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
}

TEST(DeviceBackendTest, AFailureOnTheWayLeavesNothing) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  const cudasim::Stats before = cudasim::stats();
  for (const char* call : {"cuMemsetD8Async", "cuStreamCreate", "cuStreamSynchronize"}) {
    cudasim::fail_call(call, CUDA_ERROR_UNKNOWN);
    EXPECT_THROW((void)backend->allocate(64), CudaFailure) << call;
  }
  cudasim::fail_call("cuMemHostGetDevicePointer", CUDA_ERROR_UNKNOWN, 1);
  EXPECT_EQ(text_of<CudaFailure>([&] { (void)backend->allocate_pinned(64); }),
            "cuMemHostGetDevicePointer: CUDA_ERROR_UNKNOWN (unknown error)");
  EXPECT_EQ(cudasim::stats().allocations, before.allocations);
  EXPECT_EQ(cudasim::stats().host_allocations, before.host_allocations);
  EXPECT_EQ(cudasim::stats().streams, before.streams);
  const OwnPage page;
  cudasim::fail_call("cuMemHostGetDevicePointer", CUDA_ERROR_UNKNOWN, 1);
  EXPECT_THROW((void)backend->pin(page.get(), kPage), CudaFailure);
  (void)backend->pin(page.get(), kPage);  // it is not pinned any more
}

TEST(DeviceBackendTest, APageIsPinnedWhileItIsHeld) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  const OwnPage page;
  PinnedMemory pinned = backend->pin(page.get(), kPage);
  EXPECT_EQ(pinned.host.get(), page.get());
  EXPECT_NE(pinned.device, nullptr);
  EXPECT_EQ(text_of<CudaFailure>([&] { (void)backend->pin(page.get(), kPage); }),
            "cuMemHostRegister of 4096 bytes: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (part or "
            "all of the requested memory range is already mapped)");
  pinned = {};
  pinned = backend->pin(page.get(), kPage);
  EXPECT_NE(pinned.device, nullptr);
}

// --- Streams ----------------------------------------------------------------------------------

TEST(DeviceBackendTest, CopiesAndFillsFollowEachOtherOnAStream) {
  const SimulatedDevices devices(2);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(1);
  const OwnStream own(1);
  for (const exec::Stream stream : {exec::Stream{own.get()}, exec::Stream{}}) {
    const std::shared_ptr<std::byte> memory = backend->allocate(300);
    backend->fill(memory.get() + 1, 0x5a, 99, stream);
    backend->copy(memory.get() + 200, memory.get(), 100, stream);
    backend->copy(memory.get(), memory.get(), 0, stream);
    backend->fill(memory.get(), 1, 0, stream);
    backend->wait(stream, [] {});
    std::vector<std::byte> got(300);
    backend->download(got.data(), memory.get(), 300);
    EXPECT_EQ(std::count(got.begin(), got.end(), std::byte{0x5a}), 198);
    EXPECT_EQ(got[0], std::byte{0});
    EXPECT_EQ(got[200], std::byte{0});
    EXPECT_EQ(got[299], std::byte{0x5a});
  }
  backend->wait_idle([] {});
}

TEST(DeviceBackendTest, FailuresOfStreamsNameTheCall) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  const std::shared_ptr<std::byte> memory = backend->allocate(64);
  cudasim::fail_call("cuMemcpyDtoDAsync", CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(
      text_of<CudaFailure>([&] { backend->copy(memory.get(), memory.get() + 8, 8, nullptr); }),
      "cuMemcpyDtoDAsync of 8 bytes: CUDA_ERROR_INVALID_VALUE (invalid argument)");
  cudasim::fail_call("cuMemsetD8Async", CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(text_of<CudaFailure>([&] { backend->fill(memory.get(), 0, 8, nullptr); }),
            "cuMemsetD8Async of 8 bytes: CUDA_ERROR_INVALID_VALUE (invalid argument)");
  cudasim::fail_call("cuStreamQuery", CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(text_of<CudaFailure>([&] { backend->wait(nullptr, [] {}); }),
            "cuStreamQuery: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)");
  cudasim::fail_call("cuCtxSynchronize", CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(text_of<CudaFailure>([&] { backend->wait_idle([] {}); }),
            "cuCtxSynchronize: CUDA_ERROR_UNKNOWN (unknown error)");
}

TEST(DeviceBackendTest, StreamsTellWhetherTheyCapture) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  const OwnStream stream(0);
  EXPECT_EQ(backend->capture_of(nullptr), 0U);
  EXPECT_EQ(backend->capture_of(stream.get()), 0U);
  {
    const Capture capture(stream.get());
    EXPECT_NE(backend->capture_of(stream.get()), 0U);
  }
  EXPECT_EQ(backend->capture_of(stream.get()), 0U);
}

TEST(DeviceBackendTest, AStreamOfAnotherDeviceIsRefused) {
  const SimulatedDevices devices(2);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(1);
  const OwnStream other(0);
  EXPECT_EQ(text_of<InvalidArgument>([&] { (void)backend->capture_of(other.get()); }),
            "stream: expected a CUDA stream of device 1, got another's");
  int no_stream = 0;
  EXPECT_THROW((void)backend->capture_of(&no_stream), InvalidArgument);
  // The default stream is each device's own, whichever is current.
  EXPECT_EQ(backend->capture_of(nullptr), 0U);
}

TEST(DeviceBackendTest, MemoryIsRefusedInACapture) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  const OwnStream stream(0);
  const OwnPage page;
  const std::string reason =
      ": CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (operation not permitted when stream is capturing); "
      "expected no stream capture under way";
  {
    const Capture capture(stream.get());
    EXPECT_EQ(text_of<InvalidState>([&] { (void)backend->allocate(64); }),
              "cuMemAlloc of 64 bytes on device 0" + reason);
  }
  {
    const Capture capture(stream.get());
    EXPECT_EQ(text_of<InvalidState>([&] { (void)backend->allocate_pinned(64); }),
              "cuMemHostAlloc of 64 bytes" + reason);
  }
  {
    const Capture capture(stream.get());
    EXPECT_EQ(text_of<InvalidState>([&] { (void)backend->pin(page.get(), kPage); }),
              "cuMemHostRegister of 4096 bytes" + reason);
  }
  {
    const Capture capture(stream.get());
    EXPECT_EQ(text_of<InvalidState>([&] { backend->wait(stream.get(), [] {}); }),
              "cuStreamQuery" + reason);
  }
  {
    const Capture capture(stream.get());
    EXPECT_EQ(text_of<InvalidState>([&] { backend->wait_idle([] {}); }), "cuEventQuery" + reason);
  }
  (void)backend->allocate(64);
}

TEST(DeviceBackendTest, NoCallChangesTheCurrentDevice) {
  const SimulatedDevices devices(3);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(1);
  const OwnStream stream(1);
  for (const int current : {2, 0}) {
    ASSERT_EQ(cudaSetDevice(current), cudaSuccess);
    const std::shared_ptr<std::byte> memory = backend->allocate(64);
    const PinnedMemory pinned = backend->allocate_pinned(64);
    backend->fill(memory.get(), 0, 64, stream.get());
    backend->copy(memory.get(), memory.get() + 32, 32, stream.get());
    EXPECT_EQ(backend->capture_of(stream.get()), 0U);
    exec::DevicePackParams params{};
    params.dtype = DType::kBFloat16;
    params.hidden = 8;
    backend->pack_rows(params, stream.get());
    backend->wait(stream.get(), [] {});
    backend->wait_idle([] {});
    int device = -1;
    ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, current);
  }
}

// --- Launches ---------------------------------------------------------------------------------

TEST(DeviceBackendTest, ARefusedLaunchNamesTheKernel) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  const struct {
    const char* name;
    std::function<void()> launch;
  } phases[] = {
      {"signal", [&] { backend->signal({}, nullptr); }},
      {"dispatch_send", [&] { backend->dispatch_send({}, nullptr); }},
      {"arrange", [&] { backend->arrange({}, nullptr); }},
      {"describe_rows", [&] { backend->describe_rows({}, nullptr); }},
      {"combine_send", [&] { backend->combine_send({}, nullptr); }},
      {"sum_rows", [&] { backend->sum_rows({}, nullptr); }},
      {"pack_rows", [&] { backend->pack_rows({}, nullptr); }},
      {"sanitize", [&] { backend->sanitize({}, nullptr); }},
  };
  for (const auto& phase : phases) {
    cudasim::clear_faults();
    cudasim::fail_every("launch", cudaErrorLaunchOutOfResources);
    const std::string text = text_of<CudaFailure>(phase.launch);
    EXPECT_EQ(text,
              std::string("launch of ") + phase.name +
                  ": cudaErrorLaunchOutOfResources (too many resources requested for launch)");
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  cudasim::clear_faults();
  cudasim::fail_call("launch", cudaErrorMemoryAllocation);
  EXPECT_EQ(text_of<OutOfMemory>([&] { backend->pack_rows({}, nullptr); }),
            "launch of pack_rows: cudaErrorMemoryAllocation (out of memory)");
  cudasim::fail_call("launch", cudaErrorStreamCaptureInvalidated);
  EXPECT_THROW(backend->pack_rows({}, nullptr), InvalidState);
}

/// Two ranks of which this is the first; the other one never comes.
struct LonelyRank {
  explicit LonelyRank(DeviceBackend& backend)
      : mine(backend.allocate(kPage)),
        theirs(backend.allocate(kPage)),
        windows(uploaded(backend, std::vector<std::byte*>{mine.get(), theirs.get()})),
        is_active(uploaded(backend, std::vector<std::int32_t>{1, 1})),
        slot(uploaded(backend, std::vector<exec::DeviceSlot>{{9, 0, 0, 0, 0, 0}})),
        control(uploaded(backend, std::vector<exec::DeviceControl>{{4, 0, 0, 0, 0}})),
        report(backend.allocate_pinned(sizeof(exec::DeviceReport))) {
    exec::DeviceRound& round = params.round;
    round.windows = reinterpret_cast<std::byte**>(windows.get());
    round.is_active = reinterpret_cast<std::int32_t*>(is_active.get());
    round.slot = reinterpret_cast<exec::DeviceSlot*>(slot.get());
    round.control = reinterpret_cast<exec::DeviceControl*>(control.get());
    round.report = reinterpret_cast<exec::DeviceReport*>(report.device);
    round.timeout_ns = 1'000'000;
    round.num_ranks = 2;
    params.flags.phase = exec::DevicePhase::kRelease;
    params.announces = true;
    params.waits = true;
  }

  exec::DeviceReport told() const {
    exec::DeviceReport told;
    std::memcpy(&told, report.host.get(), sizeof told);
    return told;
  }

  std::shared_ptr<std::byte> mine, theirs, windows, is_active, slot, control;
  PinnedMemory report;
  exec::DeviceSignalParams params{};
};

TEST(DeviceBackendTest, AKernelWritesItsReportToPinnedMemory) {
  const SimulatedDevices devices(2);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(1);
  const OwnStream stream(1);
  const PinnedMemory abort_any = backend->allocate_pinned(4);
  LonelyRank rank(*backend);
  rank.params.round.abort_any = reinterpret_cast<std::uint32_t*>(abort_any.device);
  EXPECT_EQ(rank.told().failure, 0U);
  backend->signal(rank.params, stream.get());
  backend->wait(stream.get(), [] {});
  EXPECT_EQ(rank.told().failure, static_cast<std::uint32_t>(DeviceFailure::kTimeout));
  EXPECT_EQ(rank.told().peer, 1U);
  EXPECT_EQ(rank.told().epoch, 9U);
  std::uint64_t words[exec::kFlagWords] = {};
  backend->download(words, rank.theirs.get(), sizeof words);
  EXPECT_EQ(exec::flag_fields(words).epoch, 9U);
  EXPECT_EQ(exec::flag_fields(words).generation, 4U);
}

TEST(DeviceBackendTest, AKernelSeesAWordOfPinnedPages) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  const OwnPage page;
  const std::uint32_t aborted = 1 + 4;  // generation 4
  std::memcpy(page.get() + 64, &aborted, sizeof aborted);
  const PinnedMemory pinned = backend->pin(page.get(), kPage);
  LonelyRank rank(*backend);
  rank.params.round.abort_any = reinterpret_cast<std::uint32_t*>(pinned.device + 64);
  rank.params.round.timeout_ns = 10'000'000'000;
  backend->signal(rank.params, nullptr);
  backend->wait(nullptr, [] {});
  EXPECT_EQ(rank.told().failure, static_cast<std::uint32_t>(DeviceFailure::kAborted));
}

TEST(DeviceBackendTest, AnEventPassesWithTheWorkBeforeIt) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  const OwnStream stream(0);
  const std::shared_ptr<void> event = backend->make_event();
  const PinnedMemory abort_any = backend->allocate_pinned(4);
  LonelyRank rank(*backend);
  rank.params.round.abort_any = reinterpret_cast<std::uint32_t*>(abort_any.device);
  backend->signal(rank.params, stream.get());  // waits for a peer until its timeout
  backend->record_event(event.get(), stream.get());
  EXPECT_FALSE(backend->has_passed(event.get()));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  backend->wait_event(event.get());
  EXPECT_TRUE(backend->has_passed(event.get()));
  EXPECT_EQ(rank.told().failure, static_cast<std::uint32_t>(DeviceFailure::kTimeout));
}

TEST(DeviceBackendTest, TilesAreEnoughForAnyGrid) {
  const SimulatedDevices devices(1);
  const std::unique_ptr<DeviceBackend> backend = gpu::make_backend(0);
  EXPECT_EQ(backend->max_tiles(0), 32);  // 16 multiprocessors
  EXPECT_EQ(backend->max_tiles(1024), 64);
  EXPECT_EQ(backend->max_tiles(1025), 65);
  EXPECT_EQ(backend->max_tiles(3200), 132);
}

TEST(DeviceBackendTest, ADeviceThatIsNotThereIsUnsupported) {
  const SimulatedDevices devices(2);
  EXPECT_EQ(text_of<Unsupported>([] { (void)gpu::make_backend(2); }),
            "device: expected 0 to 1, got 2");
  EXPECT_THROW((void)gpu::make_backend(-1), Unsupported);
}

}  // namespace
}  // namespace fanfold
