// SPDX-License-Identifier: Apache-2.0

// Allocator and FabricMemory over GPU memory, as users have them.

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/format.h"
#include "fanfold/all_to_all.h"
#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "fanfold/fabric_memory.h"
#include "fanfold/memory_pool.h"
#include "gmock/gmock.h"
#include "gpu/device_context.h"
#include "gpu/simulated_devices.h"
#include "gtest/gtest.h"
#include "support/eventually.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using testing::eventually;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::SimulatedDevices;
using testing::spawn_ranks;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

GpuMemoryConfig device_of(const Communicator& communicator) {
  GpuMemoryConfig config;
  config.device = communicator.rank();
  return config;
}

template <class Thrown>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Thrown& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(GpuAllocatorTest, BlocksAreCachedCountedAndTrimmed) {
  const SimulatedDevices devices(2);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, device_of(communicator));
    EXPECT_FALSE(allocator.memory().kind.has_value());
    SymmetricMemory first = allocator.allocate(3 * kMiB);
    EXPECT_EQ(allocator.memory().kind, HandleKind::kFabric);
    EXPECT_EQ(first.bytes(), 4 * kMiB);
    const SymmetricMemory second = allocator.allocate(kMiB);
    EXPECT_EQ(allocator.stats().reserved, 6 * kMiB);
    first.data(communicator.rank())[9] = std::byte{1};
    std::byte* const place = first.data(0);
    allocator.free(first);
    first = {};
    EXPECT_EQ(allocator.stats().in_use, 2 * kMiB);
    const SymmetricMemory again = allocator.allocate(2 * kMiB + 1, kMiB);
    EXPECT_EQ(again.data(0), place);
    EXPECT_EQ(again.data(communicator.rank())[9], std::byte{0});
    EXPECT_EQ(allocator.stats().num_reused, 1);
    allocator.free(again);
    allocator.trim();
    EXPECT_EQ(allocator.stats().reserved, 2 * kMiB);
    EXPECT_EQ(allocator.stats().peak_in_use, 6 * kMiB);
  });
}

TEST(GpuAllocatorTest, TensorsLieOnTheDeviceWithTheirTypes) {
  const SimulatedDevices devices(2);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, device_of(communicator));
    const SymmetricMemory memory = allocator.allocate(kMiB);
    for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E8M0}) {
      const TensorView view = memory.tensor(1, dtype, {3, 5}, 256);
      EXPECT_EQ(view.dtype, dtype);
      EXPECT_EQ(view.device, DeviceType::kGpu);
      EXPECT_EQ(view.device_index, communicator.rank());
      EXPECT_EQ(view.data, memory.data(1) + 256);
      EXPECT_EQ(view.strides[0], 5);
    }
    EXPECT_EQ(memory.tensor(0, DType::kBFloat16, {2}).describe(),
              base::str("bfloat16 [2] on cuda:", communicator.rank()));
  });
}

TEST(GpuAllocatorTest, SeveralGroupsAndDevicesWorkInOneProcess) {
  const SimulatedDevices devices(4);
  spawn_ranks(4, [&](Communicator& communicator) {
    std::optional<Communicator> pair = communicator.split(communicator.rank() / 2, 0);
    Allocator all(communicator, device_of(communicator));
    Allocator two(*pair, device_of(communicator));
    const SymmetricMemory wide = all.allocate(kMiB);
    const SymmetricMemory narrow = two.allocate(kMiB);
    wide.data((communicator.rank() + 1) % 4)[0] = static_cast<std::byte>(communicator.rank() + 1);
    narrow.data(1 - pair->rank())[0] = static_cast<std::byte>(communicator.rank() + 11);
    communicator.barrier();
    EXPECT_EQ(wide.data(communicator.rank())[0],
              static_cast<std::byte>((communicator.rank() + 3) % 4 + 1));
    EXPECT_EQ(narrow.data(pair->rank())[0], static_cast<std::byte>((communicator.rank() ^ 1) + 11));
    communicator.barrier();
    pair->close();
  });
}

TEST(GpuAllocatorTest, MemoryComesOutOfTheCallersBuffers) {
  const SimulatedDevices devices(1);
  const gpu::DeviceContext context(0);
  std::vector<OwnBuffer> buffers;
  for (int rank = 0; rank < 2; ++rank) buffers.push_back({context.allocate(kMiB), kMiB});
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, GpuMemoryConfig{}, buffers);
    const SymmetricMemory memory = allocator.allocate(1000, 1000);
    EXPECT_EQ(memory.data(0), buffers[0].data);
    EXPECT_EQ(memory.data(1), buffers[1].data);
    memory.data(1 - communicator.rank())[3] = static_cast<std::byte>(communicator.rank() + 1);
    communicator.barrier();
    EXPECT_EQ(memory.data(communicator.rank())[3], static_cast<std::byte>(2 - communicator.rank()));
    EXPECT_THROW((void)allocator.allocate(2 * kMiB), CapacityExceeded);
    communicator.barrier();
  });
  for (const OwnBuffer& buffer : buffers) context.free(buffer.data);
}

TEST(GpuAllocatorTest, HostMemoryIsNoBufferForAGpu) {
  const SimulatedDevices devices(1);
  std::vector<std::byte> host(8192);
  const std::vector<OwnBuffer> buffers = {{host.data(), 8192}};
  spawn_ranks(1, [&](Communicator& communicator) {
    EXPECT_EQ(
        text_of<InvalidArgument>([&] { Allocator(communicator, GpuMemoryConfig{}, buffers); }),
        "buffers[0]: expected memory of a GPU, got another's");
  });
}

TEST(GpuAllocatorTest, PrivateMemoryIsTheDevicesOrTheCallers) {
  const SimulatedDevices devices(1);
  spawn_ranks(1, [&](Communicator& communicator) {
    Allocator allocator(communicator, GpuMemoryConfig{});
    std::shared_ptr<std::byte> own = allocator.allocate_private(1000);
    EXPECT_TRUE(gpu::DeviceContext(0).is_device_memory(own.get()));
    int num_calls = 0;
    allocator.set_private_memory([&](std::int64_t bytes) {
      ++num_calls;
      EXPECT_EQ(bytes, 4096);
      return own;
    });
    EXPECT_EQ(allocator.allocate_private(4096), own);
    EXPECT_EQ(num_calls, 1);
    allocator.set_private_memory({});
  });
}

TEST(GpuAllocatorTest, APoolDividesTheWindow) {
  const SimulatedDevices devices(2);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, device_of(communicator));
    MemoryPool pool(allocator.allocate(kMiB), communicator.rank());
    std::byte* const part = pool.allocate(3000);
    const TensorView peer =
        pool.memory().tensor(1 - communicator.rank(), DType::kUInt8, {3000}, pool.offset_of(part));
    static_cast<std::byte*>(peer.data)[2999] = static_cast<std::byte>(communicator.rank() + 1);
    communicator.barrier();
    EXPECT_EQ(part[2999], static_cast<std::byte>(2 - communicator.rank()));
    communicator.barrier();
  });
}

TEST(GpuAllocatorTest, ADeviceThatIsNotThereIsUnsupportedOnEveryRank) {
  const SimulatedDevices devices(2);
  spawn_ranks(2, [&](Communicator& communicator) {
    GpuMemoryConfig config;
    config.device = communicator.rank() == 1 ? 7 : 0;
    EXPECT_EQ(text_of<Unsupported>([&] { Allocator(communicator, config); }),
              "rank 1: device: expected 0 to 1, got 7");
    communicator.barrier();
  });
}

TEST(GpuAllocatorTest, RanksMustAskForTheSame) {
  const SimulatedDevices devices(2);
  spawn_ranks(2, [&](Communicator& communicator) {
    GpuMemoryConfig config = device_of(communicator);
    config.kinds = {communicator.rank() == 0 ? HandleKind::kFabric : HandleKind::kFileDescriptor};
    EXPECT_EQ(text_of<InvalidArgument>([&] { Allocator(communicator, config); }),
              "kinds: expected the same on every rank, got fabric on rank 0 and file_descriptor on "
              "rank 1");
    config.kinds = {HandleKind::kFabric, HandleKind::kFabric};
    EXPECT_EQ(text_of<InvalidArgument>([&] { Allocator(communicator, config); }),
              "kinds: expected each once, got fabric twice");
    Allocator allocator(communicator, device_of(communicator));
    EXPECT_THROW((void)allocator.allocate(communicator.rank() + 1), InvalidArgument);
    EXPECT_EQ(allocator.allocate(5).bytes(), 2 * kMiB);
  });
}

TEST(GpuAllocatorTest, LackOfMemoryOnOneRankIsBadAllocOnAllAndItGoesOn) {
  cudasim::DriverConfig driver;
  driver.memory_bytes = 6 * kMiB;
  const SimulatedDevices devices(2, driver);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, device_of(communicator));
    const SymmetricMemory kept = allocator.allocate(4 * kMiB);
    EXPECT_THAT(text_of<std::bad_alloc>([&] { (void)allocator.allocate(4 * kMiB); }),
                AllOf(HasSubstr("rank "), HasSubstr("cuMemCreate of 4194304 bytes")));
    EXPECT_EQ(allocator.allocate(2 * kMiB).bytes(), 2 * kMiB);
  });
}

TEST(GpuAllocatorTest, TheFirstKindThatWorkedIsKept) {
  const SimulatedDevices devices(1);
  spawn_ranks(1, [&](Communicator& communicator) {
    cudasim::fail_call("cuMemExportToShareableHandle", CUDA_ERROR_NOT_SUPPORTED);
    Allocator allocator(communicator, GpuMemoryConfig{});
    const SymmetricMemory first = allocator.allocate(1);
    EXPECT_EQ(allocator.memory().kind, HandleKind::kFileDescriptor);
    ASSERT_EQ(allocator.memory().passed_over.size(), 1U);
    EXPECT_THAT(
        allocator.memory().passed_over[0],
        HasSubstr("fabric: rank 0: cuMemExportToShareableHandle: CUDA_ERROR_NOT_SUPPORTED"));
    const SymmetricMemory second = allocator.allocate(1);
    EXPECT_EQ(second.memory().kind, HandleKind::kFileDescriptor);
    cudasim::fail_call("cuMemMap", CUDA_ERROR_UNKNOWN);
    EXPECT_THROW((void)allocator.allocate(1), CudaFailure);
  });
}

TEST(GpuAllocatorTest, AnAllToAllOfTheCpuRefusesIt) {
  const SimulatedDevices devices(1);
  spawn_ranks(1, [&](Communicator& communicator) {
    Allocator allocator(communicator, GpuMemoryConfig{});
    AllToAllConfig config;
    config.num_experts = 4;
    config.top_k = 2;
    config.max_tokens_per_rank = 8;
    config.hidden = 16;
    EXPECT_EQ(text_of<InvalidArgument>([&] { AllToAll(communicator, config, &allocator); }),
              "allocator: expected host memory for device 'cpu', got memory of cuda:0");
  });
}

TEST(FabricMemoryTest, IsOneAllocationThatAllCloseTogether) {
  const SimulatedDevices devices(3);
  spawn_ranks(3, [&](Communicator& communicator) {
    FabricMemory memory(communicator, 5, device_of(communicator));
    EXPECT_EQ(memory.bytes(), 2 * kMiB);
    EXPECT_EQ(memory.num_ranks(), 3);
    EXPECT_EQ(memory.memory().device_index, communicator.rank());
    EXPECT_THAT(memory.memory().passed_over, IsEmpty());
    const TensorView next = memory.tensor((communicator.rank() + 1) % 3, DType::kInt32, {4});
    static_cast<std::int32_t*>(next.data)[3] = communicator.rank();
    communicator.barrier();
    const TensorView mine = memory.tensor(communicator.rank(), DType::kInt32, {4});
    EXPECT_EQ(static_cast<std::int32_t*>(mine.data)[3], (communicator.rank() + 2) % 3);
    memory.close();
    memory.close();
    EXPECT_THROW((void)memory.data(0), InvalidState);
  });
}

TEST(FabricMemoryTest, CloseNamesTheRankThatIsLateAndLetsGo) {
  const SimulatedDevices devices(1);
  std::atomic<bool> is_late{false};
  spawn_ranks(2, [&](Communicator& communicator) {
    FabricMemory memory(communicator, 5);
    if (communicator.rank() == 0) {
      EXPECT_THROW(memory.close(milliseconds(50)), PeerTimeout);
      EXPECT_THROW((void)memory.data(0), InvalidState);
      is_late = true;
    } else {
      EXPECT_TRUE(eventually([&] { return is_late.load(); }));
      EXPECT_EQ(memory.data(0)[0], std::byte{0}) << "rank 0's memory lives while this rank maps it";
    }
  });
}

TEST(FabricMemoryTest, NeedsBytes) {
  const SimulatedDevices devices(1);
  spawn_ranks(1, [&](Communicator& communicator) {
    EXPECT_THROW(FabricMemory(communicator, 0), InvalidArgument);
  });
}

}  // namespace
}  // namespace fanfold
