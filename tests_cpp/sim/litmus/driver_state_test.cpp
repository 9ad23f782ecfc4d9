// SPDX-License-Identifier: Apache-2.0

// What the driver API refuses: each wrong state and each wrong argument has its error.

#include <gmock/gmock.h>

#include "driver_litmus.h"

namespace fanfold::gpu::litmus {
namespace {

using DriverStates = DriverTest;

constexpr std::uint64_t kDevice0 = 1U << 0U;
constexpr std::uint64_t kDevice1 = 1U << 1U;

CUresult create(const CUmemAllocationProp& wanted, std::size_t bytes = kGranule) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult error = cuMemCreate(&handle, bytes, &wanted, 0);
  if (error == CUDA_SUCCESS) {
    cuMemRelease(handle);
  }
  return error;
}

TEST_F(DriverStates, SizesMustBeWholeGranules) {
  std::size_t granularity = 0;
  const CUmemAllocationProp wanted = properties(0);
  ASSERT_EQ(cuMemGetAllocationGranularity(&granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
            CUDA_SUCCESS);
  EXPECT_EQ(granularity, kGranule);
  EXPECT_EQ(create(wanted, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(create(wanted, kGranule + 4096), CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemAddressReserve(&address, 4096, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressReserve(&address, kGranule, 3, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAlloc(&address, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(DriverStates, MemoryMustBeOnADeviceThatIsThere) {
  EXPECT_EQ(create(properties(64)), CUDA_ERROR_INVALID_DEVICE);
  CUmemAllocationProp wanted = properties(0);
  wanted.location.type = CU_MEM_LOCATION_TYPE_HOST;
  EXPECT_EQ(create(wanted), CUDA_ERROR_NOT_SUPPORTED);
  wanted = properties(0);
  wanted.type = CU_MEM_ALLOCATION_TYPE_INVALID;
  EXPECT_EQ(create(wanted), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(DriverStates, HandleTypesMustBeSupported) {
  EXPECT_EQ(create(properties(0, CU_MEM_HANDLE_TYPE_WIN32)), CUDA_ERROR_NOT_SUPPORTED);
  config_.driver.fabric_handles = false;
  start(config_);
  EXPECT_EQ(create(properties(0, kFabric)), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(create(properties(0, kFd)), CUDA_SUCCESS);
  config_.driver.fabric_handles = true;
  config_.driver.fd_handles = false;
  start(config_);
  EXPECT_EQ(create(properties(0, kFd)), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(create(properties(0, kFabric)), CUDA_SUCCESS);
}

TEST_F(DriverStates, FabricHandlesNeedAnImexChannel) {
  config_.driver.imex_channel = false;
  start(config_);
  EXPECT_EQ(create(properties(0, kFabric)), CUDA_ERROR_NOT_PERMITTED);
  EXPECT_EQ(create(properties(0, kFd)), CUDA_SUCCESS);
}

TEST_F(DriverStates, ADeviceHasItsMemoryAndNoMore) {
  config_.driver.memory_bytes = 3 * kGranule;
  start(config_);
  {
    const Memory first(0, 0, 2 * kGranule);
    EXPECT_EQ(create(properties(0), 2 * kGranule), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(create(properties(0), kGranule), CUDA_SUCCESS);
    EXPECT_EQ(create(properties(1), 2 * kGranule), CUDA_SUCCESS);
  }
  EXPECT_EQ(create(properties(0), 3 * kGranule), CUDA_SUCCESS);  // it came back
}

TEST_F(DriverStates, AReleasedHandleIsNoHandle) {
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp wanted = properties(0, kFd);
  ASSERT_EQ(cuMemCreate(&handle, kGranule, &wanted, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
  const Memory other(0);  // does not take the number over
  EXPECT_NE(other.handle(), handle);
  EXPECT_EQ(cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
  int fd = -1;
  EXPECT_EQ(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr address = 0;
  ASSERT_EQ(cuMemAddressReserve(&address, kGranule, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemMap(address, kGranule, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressFree(address, kGranule), CUDA_SUCCESS);
}

TEST_F(DriverStates, AnAddressIsMappedOnce) {
  const Memory memory(0, 0, 2 * kGranule);
  CUdeviceptr address = 0;
  ASSERT_EQ(cuMemAddressReserve(&address, 4 * kGranule, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemMap(address + kGranule, 2 * kGranule, 0, memory.handle(), 0), CUDA_SUCCESS);
  for (const std::size_t begin : {std::size_t{0}, kGranule, 2 * kGranule}) {
    EXPECT_EQ(cuMemMap(address + begin, 2 * kGranule, 0, memory.handle(), 0),
              CUDA_ERROR_INVALID_VALUE)
        << begin;
  }
  ASSERT_EQ(cuMemUnmap(address + kGranule, 2 * kGranule), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAddressFree(address, 4 * kGranule), CUDA_SUCCESS);
}

TEST_F(DriverStates, AMappingLiesInAReservationAndInItsMemory) {
  const Memory memory(0);
  CUdeviceptr address = 0;
  ASSERT_EQ(cuMemAddressReserve(&address, 2 * kGranule, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemMap(address, 2 * kGranule, 0, memory.handle(), 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(address + 2 * kGranule, kGranule, 0, memory.handle(), 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(address + 4096, kGranule, 0, memory.handle(), 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(address, kGranule, kGranule, memory.handle(), 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(kGranule, kGranule, 0, memory.handle(), 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemAddressFree(address, 2 * kGranule), CUDA_SUCCESS);
}

TEST_F(DriverStates, AReservationIsFreedWholeAndUnmapped) {
  const Memory memory(0);
  CUdeviceptr address = 0;
  ASSERT_EQ(cuMemAddressReserve(&address, 2 * kGranule, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemMap(address, kGranule, 0, memory.handle(), 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressFree(address, 2 * kGranule), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemUnmap(address, kGranule), CUDA_SUCCESS);
  EXPECT_EQ(cuMemUnmap(address, kGranule), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressFree(address, kGranule), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressFree(address + kGranule, kGranule), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemAddressFree(address, 2 * kGranule), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressFree(address, 2 * kGranule), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(DriverStates, MappingsAreUnmappedWhole) {
  const Memory memory(0, 0, 2 * kGranule);
  const Mapped mapped(memory.handle(), kDevice0, 2 * kGranule);
  EXPECT_EQ(cuMemUnmap(mapped.address(), kGranule), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemUnmap(mapped.address() + kGranule, kGranule), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(DriverStates, UnmappingWhileWorkIsPendingIsRefusedAndReported) {
  const Memory memory(0);
  const Mapped mapped(memory.handle(), kDevice0);
  put(mapped.words(0), stream(0));
  EXPECT_EQ(cuMemUnmap(mapped.address(), kGranule), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(kinds(), "driver");
  ASSERT_EQ(sync(), cudaSuccess);
}

TEST_F(DriverStates, WorkOfADeviceWithoutRightsDoesNotMatter) {
  const Memory memory(0);
  const Words elsewhere = words(0);
  {
    const Mapped mapped(memory.handle(), kDevice0);
    put(elsewhere, stream(1));
  }
  EXPECT_EQ(kinds(), "") << all_texts();
  ASSERT_EQ(sync(), cudaSuccess);
}

TEST_F(DriverStates, RightsAreGivenToWholeMappingsAndDevicesThatAreThere) {
  const Memory memory(0, 0, 2 * kGranule);
  const Mapped mapped(memory.handle(), 0, 2 * kGranule);
  EXPECT_EQ(allow(mapped.address(), kGranule, kDevice0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(allow(mapped.address(), 4 * kGranule, kDevice0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(allow(mapped.address(), 2 * kGranule, std::uint64_t{1} << 63U),
            CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(cuMemSetAccess(mapped.address(), 2 * kGranule, nullptr, 1), CUDA_ERROR_INVALID_VALUE);
  CUmemAccessDesc read_only = {};
  read_only.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  read_only.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
  EXPECT_EQ(cuMemSetAccess(mapped.address(), 2 * kGranule, &read_only, 1),
            CUDA_ERROR_NOT_SUPPORTED);
}

TEST_F(DriverStates, ADeviceThatCannotReachTheMemoryGetsNoRights) {
  config_.driver.peer_access = false;
  start(config_);
  const Memory memory(0);
  const Mapped mapped(memory.handle(), kDevice0);
  EXPECT_EQ(allow(mapped.address(), kGranule, kDevice1), CUDA_ERROR_INVALID_DEVICE);
}

TEST_F(DriverStates, CopiesNeedRights) {
  const Memory memory(1);
  const Mapped mapped(memory.handle(), 0);
  int value = 3;
  EXPECT_EQ(cuMemcpyHtoD(mapped.address(), &value, sizeof(value)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyDtoH(&value, mapped.address(), sizeof(value)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemsetD8(mapped.address(), 0, 64), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(allow(mapped.address(), kGranule, kDevice1), CUDA_SUCCESS);
  EXPECT_EQ(cuMemcpyHtoD(mapped.address(), &value, sizeof(value)), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(cuMemcpyHtoD(mapped.address(), &value, sizeof(value)), CUDA_SUCCESS);
  // Past the end of the mapping, in memory that nobody gave out, and on the host.
  EXPECT_EQ(cuMemsetD8(mapped.address() + kGranule - 8, 0, 16), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemsetD8(16, 0, 16), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemsetD32(mapped.address() + 2, 0, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyDtoD(mapped.address(), reinterpret_cast<CUdeviceptr>(&value), sizeof(value)),
            CUDA_ERROR_INVALID_VALUE);
}

TEST_F(DriverStates, OnlyWhatCuMemAllocGaveIsFreed) {
  const Memory memory(0);
  const Mapped mapped(memory.handle(), kDevice0);
  EXPECT_EQ(cuMemFree(mapped.address()), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(64), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(0), CUDA_SUCCESS);
}

TEST_F(DriverStates, NoMemoryIsAllocatedWhileThisThreadCaptures) {
  ASSERT_EQ(cudaStreamBeginCapture(stream(0), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemAlloc(&address, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream(0), &graph), cudaErrorStreamCaptureInvalidated);
}

TEST_F(DriverStates, DevicesThatAreNotThereAreRefused) {
  CUdevice device = 0;
  int value = 0;
  CUcontext context = nullptr;
  EXPECT_EQ(cuDeviceGet(&device, 64), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, -1),
            CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(cuDevicePrimaryCtxRetain(&context, 64), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(cuInit(1), CUDA_ERROR_INVALID_VALUE);
}

}  // namespace
}  // namespace fanfold::gpu::litmus
