// SPDX-License-Identifier: Apache-2.0

// Handles that leave the process and come back: file descriptors and fabric handles.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "driver_litmus.h"

namespace fanfold::gpu::litmus {
namespace {

using ShareLitmus = DriverTest;
using ShareFaults = WithAccessChecks<DriverTest>;

constexpr std::uint64_t kDevice0 = 1U << 0U;
constexpr std::uint64_t kDevice1 = 1U << 1U;
constexpr auto kFdType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr auto kFabricType = CU_MEM_HANDLE_TYPE_FABRIC;

using Blob = std::array<unsigned char, 64>;

int export_fd(const Memory& memory) {
  int fd = -1;
  EXPECT_EQ(cuMemExportToShareableHandle(&fd, memory.handle(), kFdType, 0), CUDA_SUCCESS);
  return fd;
}

Blob export_fabric(const Memory& memory) {
  Blob blob = {};
  EXPECT_EQ(cuMemExportToShareableHandle(blob.data(), memory.handle(), kFabricType, 0),
            CUDA_SUCCESS);
  return blob;
}

CUresult import_fd(int fd, CUmemGenericAllocationHandle* handle) {
  return cuMemImportFromShareableHandle(handle, at_address(static_cast<std::uintptr_t>(fd)),
                                        kFdType);
}

CUresult import_fabric(Blob blob) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult error = cuMemImportFromShareableHandle(&handle, blob.data(), kFabricType);
  if (error == CUDA_SUCCESS) {
    cuMemRelease(handle);
  }
  return error;
}

TEST_F(ShareLitmus, AnImportedDescriptorIsTheSameMemory) {
  const Memory memory(0, kFd);
  const int fd = export_fd(memory);
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(import_fd(fd, &handle), CUDA_SUCCESS);
  EXPECT_EQ(close(fd), 0);  // the handle does not need it any more
  const Memory imported(handle);
  const Mapped mine(memory.handle(), kDevice0);
  const Mapped theirs(imported.handle(), kDevice1);
  mine.clear();
  message_passing(mine.words(kFences), 0, stream(0));
  message_passing(theirs.words(kFences), 1, stream(1));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(mine.words(0)), 42);
}

TEST_F(ShareFaults, RacesThroughAnImportedFabricHandleAreFound) {
  const Memory memory(0, kFabric);
  Blob blob = export_fabric(memory);
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(cuMemImportFromShareableHandle(&handle, blob.data(), kFabricType), CUDA_SUCCESS);
  const Memory imported(handle);
  const Mapped mine(memory.handle(), kDevice0);
  const Mapped theirs(imported.handle(), kDevice1);
  mine.clear();
  message_passing(mine.words(kRelaxed), 0, stream(0));
  message_passing(theirs.words(kRelaxed), 1, stream(1));
  sync();
  EXPECT_EQ(kinds(), "race");
}

TEST_F(ShareLitmus, AnExportedDescriptorKeepsTheMemoryAlive) {
  int fd = -1;
  {
    const Memory memory(1, kFd);
    const Mapped mapped(memory.handle(), kDevice0);
    ASSERT_EQ(cuMemsetD8(mapped.address(), 5, 64), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
    fd = export_fd(memory);
  }
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(import_fd(fd, &handle), CUDA_SUCCESS);
  const Memory imported(handle);
  const Mapped mapped(imported.handle(), kDevice0);
  int value = 0;
  ASSERT_EQ(cuMemcpyDtoH(&value, mapped.address(), sizeof(value)), CUDA_SUCCESS);
  EXPECT_EQ(value, 0x05050505);
  int device = -1;
  ASSERT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, mapped.address()),
            CUDA_SUCCESS);
  EXPECT_EQ(device, 1);  // whose memory it is
  EXPECT_EQ(close(fd), 0);
}

TEST_F(ShareLitmus, AFabricHandleOfMemoryThatIsGoneIsInvalid) {
  Blob blob = {};
  {
    const Memory memory(0, kFabric);
    blob = export_fabric(memory);
    EXPECT_EQ(import_fabric(blob), CUDA_SUCCESS);
  }
  EXPECT_EQ(import_fabric(blob), CUDA_ERROR_INVALID_HANDLE);
  const Memory other(0, kFabric);  // perhaps with the same descriptor
  EXPECT_EQ(import_fabric(blob), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(ShareLitmus, MemoryIsExportedAsItWasCreated) {
  const Memory with_fd(0, kFd);
  const Memory without(0);
  Blob blob = {};
  EXPECT_EQ(cuMemExportToShareableHandle(blob.data(), with_fd.handle(), kFabricType, 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemExportToShareableHandle(blob.data(), without.handle(), kFdType, 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemExportToShareableHandle(nullptr, with_fd.handle(), kFdType, 0),
            CUDA_ERROR_INVALID_VALUE);
  const Memory both(0, kFd | kFabric);
  EXPECT_EQ(close(export_fd(both)), 0);
  EXPECT_EQ(import_fabric(export_fabric(both)), CUDA_SUCCESS);
}

TEST_F(ShareLitmus, AFabricHandleIsGoodInItsCliqueOnly) {
  config_.driver.cliques = {7, 8, 7};
  start(config_);
  const Memory memory(0, kFabric);
  const Blob blob = export_fabric(memory);
  EXPECT_EQ(import_fabric(blob), CUDA_SUCCESS);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(import_fabric(blob), CUDA_ERROR_INVALID_HANDLE);
  ASSERT_EQ(cudaSetDevice(2), cudaSuccess);
  EXPECT_EQ(import_fabric(blob), CUDA_SUCCESS);
  config_.driver.cluster_uuid[3] = 9;
  start(config_);
  EXPECT_EQ(import_fabric(blob), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(ShareLitmus, AFabricHandleOfAnotherUserIsRefused) {
  const Memory memory(0, kFabric);
  const Blob blob = export_fabric(memory);
  config_.driver.uid = 4711;
  start(config_);
  EXPECT_EQ(import_fabric(blob), CUDA_ERROR_NOT_PERMITTED);
  EXPECT_EQ(import_fabric(export_fabric(memory)), CUDA_SUCCESS);
}

TEST_F(ShareLitmus, FabricHandlesAreRefusedWithoutAChannelOrSupport) {
  const Memory memory(0, kFabric);
  const Blob blob = export_fabric(memory);
  config_.driver.imex_channel = false;
  start(config_);
  EXPECT_EQ(import_fabric(blob), CUDA_ERROR_NOT_PERMITTED);
  config_.driver.fabric_handles = false;
  start(config_);
  EXPECT_EQ(import_fabric(blob), CUDA_ERROR_NOT_SUPPORTED);
}

TEST_F(ShareLitmus, WhatIsNoHandleIsNotImported) {
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(import_fd(-1, &handle), CUDA_ERROR_INVALID_HANDLE);
  const int other = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_EQ(import_fd(other, &handle), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(close(other), 0);
  EXPECT_EQ(import_fabric({}), CUDA_ERROR_INVALID_HANDLE);
  Blob blob = {};
  EXPECT_EQ(cuMemImportFromShareableHandle(&handle, blob.data(), CU_MEM_HANDLE_TYPE_WIN32),
            CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(cuMemImportFromShareableHandle(nullptr, blob.data(), kFabricType),
            CUDA_ERROR_INVALID_VALUE);
}

TEST_F(ShareLitmus, NoDescriptorIsLeftOpen) {
  const auto lowest_free = [] {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    close(fd);
    return fd;
  };
  const int before = lowest_free();
  {
    const Memory memory(0, kFd | kFabric);
    const int fd = export_fd(memory);
    CUmemGenericAllocationHandle handle = 0;
    ASSERT_EQ(import_fd(fd, &handle), CUDA_SUCCESS);
    const Memory imported(handle);
    EXPECT_EQ(import_fabric(export_fabric(memory)), CUDA_SUCCESS);
    EXPECT_EQ(close(fd), 0);
    const Mapped mapped(imported.handle(), kDevice0);
  }
  EXPECT_EQ(lowest_free(), before);
}

}  // namespace
}  // namespace fanfold::gpu::litmus
