// SPDX-License-Identifier: Apache-2.0

#include "virtual_range.h"

#include <gtest/gtest.h>

#include <vector>

namespace fanfold::gpu::litmus {

namespace {

constexpr std::size_t kPageInts = 1024;

}  // namespace

CUmemAllocationProp properties(int device, unsigned handle_types) {
  CUmemAllocationProp wanted = {};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  wanted.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(handle_types);
  return wanted;
}

Memory::Memory(int device, unsigned handle_types, std::size_t bytes) {
  const CUmemAllocationProp wanted = properties(device, handle_types);
  EXPECT_EQ(cuMemCreate(&handle_, bytes, &wanted, 0), CUDA_SUCCESS);
}

Memory::~Memory() { EXPECT_EQ(cuMemRelease(handle_), CUDA_SUCCESS); }

Mapped::Mapped(CUmemGenericAllocationHandle handle, std::uint64_t devices, std::size_t bytes)
    : bytes_(bytes) {
  EXPECT_EQ(cuMemAddressReserve(&address_, bytes, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemMap(address_, bytes, 0, handle, 0), CUDA_SUCCESS);
  if (devices != 0) {
    EXPECT_EQ(allow(address_, bytes, devices), CUDA_SUCCESS);
  }
}

Mapped::~Mapped() {
  EXPECT_EQ(cuMemUnmap(address_, bytes_), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressFree(address_, bytes_), CUDA_SUCCESS);
}

void Mapped::clear() const {
  EXPECT_EQ(cuMemsetD8(address_, 0, 3 * kPageInts * sizeof(int)), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);  // a fill is not ordered before non-blocking streams
}

Words Mapped::words(int mode) const {
  return {data(), reinterpret_cast<std::uint32_t*>(data() + kPageInts), data() + 2 * kPageInts,
          mode};
}

CUresult allow(CUdeviceptr address, std::size_t bytes, std::uint64_t devices) {
  std::vector<CUmemAccessDesc> wanted;
  for (int device = 0; device < 64; ++device) {
    if ((devices >> device & 1U) != 0) {
      CUmemAccessDesc one = {};
      one.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      one.location.id = device;
      one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      wanted.push_back(one);
    }
  }
  return cuMemSetAccess(address, bytes, wanted.data(), wanted.size());
}

}  // namespace fanfold::gpu::litmus
