// SPDX-License-Identifier: Apache-2.0

// Every driver call of an allocator's life made to fail at each occurrence: all ranks say the same,
// with the step and the rank, and nothing is left.

#include <cuda.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/format.h"
#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/device_context.h"
#include "gpu/simulated_devices.h"
#include "gtest/gtest.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::SimulatedDevices;
using testing::spawn_ranks;

constexpr int kNumRanks = 2;

/// Whatever a rank holds at the end: given back when no faults are injected any more.
struct Held {
  std::optional<Allocator> allocator;
  std::vector<SymmetricMemory> blocks;
};
using Scenario = std::function<void(Communicator&, Held&)>;

bool gives_back_or_asks(const std::string& name) {
  static const std::set<std::string> kNames = {
      "cuMemRelease",    "cuMemUnmap",       "cuMemAddressFree", "cuDevicePrimaryCtxRelease",
      "cuStreamDestroy", "cuCtxPopCurrent",  "cuMemFree",        "cuCtxSynchronize",
      "cuGetErrorName",  "cuGetErrorString", "cuGetProcAddress", "cuInit"};
  return kNames.count(name) > 0;
}

/// What each rank got: "" or an exception's text. `calls`: what was called until then.
std::vector<std::string> run(const Scenario& scenario,
                             std::map<std::string, int>* calls = nullptr) {
  std::vector<std::string> texts(kNumRanks);
  std::vector<Held> held(kNumRanks);
  cudasim::clear_calls();
  std::vector<Communicator> ranks = Communicator::threads(kNumRanks, std::chrono::seconds(20));
  spawn_ranks(ranks, [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    try {
      scenario(communicator, held[rank]);
    } catch (const CudaFailure& error) {
      texts[rank] = error.what();
    } catch (const Error& error) {
      texts[rank] = base::str("not CudaFailure: ", error.what());
    }
  });
  if (calls != nullptr) *calls = cudasim::calls();
  cudasim::clear_faults();  // what gives back is another test's
  return texts;
}

void expect_each_fault_is_said(const SimulatedDevices& devices, const Scenario& scenario,
                               int min_faults) {
  std::map<std::string, int> calls;
  EXPECT_THAT(run(scenario, &calls), ::testing::Each(""));
  int num_faults = 0;
  for (const auto& [name, num] : calls) {
    if (gives_back_or_asks(name) || name.rfind("cuda", 0) == 0) continue;
    const bool is_nvml = name.rfind("nvml", 0) == 0;
    for (int nth = 1; nth <= num; ++nth) {
      SCOPED_TRACE(base::str(name, " number ", nth));
      cudasim::fail_call(name.c_str(), is_nvml ? 999 : CUDA_ERROR_UNKNOWN, nth);
      const std::vector<std::string> texts = run(scenario);
      EXPECT_EQ(texts[0], texts[1]);
      if (is_nvml) {
        EXPECT_EQ(texts[0], "") << "without NVML the driver decides";
      } else {
        EXPECT_THAT(texts[0],
                    AllOf(HasSubstr("rank "), HasSubstr(name), HasSubstr("CUDA_ERROR_UNKNOWN")));
      }
      devices.expect_nothing_left("after the fault");
      ++num_faults;
    }
  }
  EXPECT_GE(num_faults, min_faults);
}

GpuMemoryConfig config_of(const Communicator& communicator, HandleKind kind) {
  GpuMemoryConfig config;
  config.device = communicator.rank();
  config.kinds = {kind};
  return config;
}

TEST(GpuAllocatorFaultsTest, WhileBlocksAreMadeAndReused) {
  const SimulatedDevices devices(kNumRanks);
  expect_each_fault_is_said(
      devices,
      [](Communicator& communicator, Held& held) {
        held.allocator.emplace(communicator, config_of(communicator, HandleKind::kFabric));
        const SymmetricMemory first = held.allocator->allocate(1);
        held.allocator->free(first);
        held.blocks.push_back(held.allocator->allocate(64, 64));  // zeroes what is reused
        EXPECT_EQ(held.allocator->stats().num_reused, 1);
      },
      60);
}

TEST(GpuAllocatorFaultsTest, WhileTheCallersBuffersAreProven) {
  const SimulatedDevices devices(1);
  const gpu::DeviceContext context(0);
  std::vector<OwnBuffer> buffers;
  for (int rank = 0; rank < kNumRanks; ++rank) buffers.push_back({context.allocate(8192), 8192});
  // What the buffers themselves take is not left by a fault.
  cudasim::DriverConfig driver;
  {
    const SimulatedDevices with_buffers(1, driver);
    expect_each_fault_is_said(
        with_buffers,
        [&](Communicator& communicator, Held& held) {
          held.allocator.emplace(communicator, GpuMemoryConfig{}, buffers);
          held.blocks.push_back(held.allocator->allocate(100, 100));
        },
        30);
  }
  for (const OwnBuffer& buffer : buffers) context.free(buffer.data);
}

TEST(GpuAllocatorFaultsTest, OneRankWithAWrongBufferIsRefusedOnAllAtOnce) {
  const SimulatedDevices devices(1);
  const gpu::DeviceContext context(0);
  std::vector<OwnBuffer> buffers;
  for (int rank = 0; rank < kNumRanks; ++rank) buffers.push_back({context.allocate(8192), 8192});
  std::vector<std::byte> host(8192);
  spawn_ranks(kNumRanks, [&](Communicator& communicator) {
    std::vector<OwnBuffer> mine = buffers;
    if (communicator.rank() == 1) mine[0].data = host.data();
    try {
      const Allocator allocator(communicator, GpuMemoryConfig{}, mine);
      ADD_FAILURE() << "expected InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "buffers[0]: expected memory of a GPU, got another's");
    }
    communicator.barrier();
  });
  for (const OwnBuffer& buffer : buffers) context.free(buffer.data);
}

TEST(GpuAllocatorFaultsTest, PrivateMemoryFailsOnItsRankAlone) {
  const SimulatedDevices devices(1);
  spawn_ranks(kNumRanks, [&](Communicator& communicator) {
    const Allocator allocator(communicator, GpuMemoryConfig{});
    communicator.barrier();
    if (communicator.rank() == 0) {
      cudasim::fail_call("cuMemAlloc", CUDA_ERROR_OUT_OF_MEMORY);
      EXPECT_THROW((void)allocator.allocate_private(1000), OutOfMemory);
      cudasim::fail_call("cuMemAlloc", CUDA_ERROR_UNKNOWN);
      EXPECT_THROW((void)allocator.allocate_private(1000), CudaFailure);
      cudasim::fail_call("cuMemAlloc", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
      EXPECT_THROW((void)allocator.allocate_private(1000), InvalidState);
    }
    communicator.barrier();
    EXPECT_NE(allocator.allocate_private(1000), nullptr);
  });
}

TEST(GpuAllocatorFaultsTest, SizesBeyondAnyMachineAreOutOfMemoryOnAll) {
  const SimulatedDevices devices(1);
  spawn_ranks(kNumRanks, [&](Communicator& communicator) {
    Allocator allocator(communicator, GpuMemoryConfig{});
    EXPECT_THROW((void)allocator.allocate(INT64_MAX), OutOfMemory);
    try {
      (void)allocator.allocate(INT64_MAX / 2);
      ADD_FAILURE() << "expected OutOfMemory";
    } catch (const OutOfMemory& error) {
      EXPECT_THAT(error.what(), HasSubstr("bytes per rank: no machine has that"));
    }
    EXPECT_THROW((void)allocator.allocate(communicator.rank() == 0 ? 0 : 5), InvalidArgument);
    EXPECT_THROW((void)allocator.allocate(0), InvalidArgument);
    EXPECT_GT(allocator.allocate(1).bytes(), 0);
  });
}

}  // namespace
}  // namespace fanfold
