// SPDX-License-Identifier: Apache-2.0

// The driver API where all goes well, and what the checks say about memory that it mapped.

#include <dlfcn.h>
#include <gmock/gmock.h>

#include <array>
#include <cstring>
#include <set>
#include <string>
#include <thread>

#include "driver_litmus.h"

namespace fanfold::gpu::litmus {
namespace {

using testing::HasSubstr;

using DriverLitmus = DriverTest;
using DriverFaults = WithAccessChecks<DriverTest>;

constexpr std::uint64_t kDevice0 = 1U << 0U;
constexpr std::uint64_t kDevice1 = 1U << 1U;

TEST_F(DriverLitmus, KernelsUseAMappingWithRights) {
  const Memory memory(0);
  const Mapped mapped(memory.handle(), kDevice0);
  mapped.clear();
  const Words parts = mapped.words(0);
  put(parts, stream(0));
  get(parts, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts, 31), 1);
}

TEST_F(DriverFaults, AMappingWithoutRightsIsFound) {
  const Memory memory(0);
  const Mapped mapped(memory.handle(), 0);
  put(mapped.words(0), stream(0));
  EXPECT_EQ(cudaStreamSynchronize(stream(0)), cudaErrorIllegalAddress);
  EXPECT_EQ(kinds(), "oob");
  EXPECT_THAT(text_of("oob"), HasSubstr("message_passing.cu:"));
  start(config_);
}

TEST_F(DriverFaults, RightsAreOfEachDevice) {
  const Memory memory(0);
  const Mapped mapped(memory.handle(), kDevice0);
  put(mapped.words(0), stream(0));
  ASSERT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  put(mapped.words(0), stream(1));
  EXPECT_EQ(cudaStreamSynchronize(stream(1)), cudaErrorIllegalAddress);
  EXPECT_EQ(kinds(), "oob");
  start(config_);
}

TEST_F(DriverLitmus, RightsCanBeGivenLaterAndTakenBack) {
  const Memory memory(0);
  const Mapped mapped(memory.handle(), 0);
  unsigned long long flags = 9;
  CUmemLocation where = {};
  where.type = CU_MEM_LOCATION_TYPE_DEVICE;
  where.id = 1;
  ASSERT_EQ(cuMemGetAccess(&flags, &where, mapped.address() + 100), CUDA_SUCCESS);
  EXPECT_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);
  ASSERT_EQ(allow(mapped.address(), kGranule, kDevice1), CUDA_SUCCESS);
  ASSERT_EQ(cuMemGetAccess(&flags, &where, mapped.address()), CUDA_SUCCESS);
  EXPECT_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  CUmemAccessDesc none = {};
  none.location = where;
  none.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  ASSERT_EQ(cuMemSetAccess(mapped.address(), kGranule, &none, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuMemGetAccess(&flags, &where, mapped.address()), CUDA_SUCCESS);
  EXPECT_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);
}

TEST_F(DriverFaults, AReservationWithoutAMappingIsFound) {
  CUdeviceptr address = 0;
  ASSERT_EQ(cuMemAddressReserve(&address, kGranule, 0, 0, 0), CUDA_SUCCESS);
  Words parts;
  parts.data = static_cast<int*>(at_address(address));
  put(parts, stream(0));
  EXPECT_EQ(cudaStreamSynchronize(stream(0)), cudaErrorIllegalAddress);
  EXPECT_EQ(kinds(), "oob");
  start(config_);
  ASSERT_EQ(cuMemAddressFree(address, kGranule), CUDA_SUCCESS);
}

TEST_F(DriverLitmus, TwoMappingsOfOneMemoryAreOneMemory) {
  const Memory memory(0);
  const Mapped mine(memory.handle(), kDevice0);
  const Mapped theirs(memory.handle(), kDevice1);
  mine.clear();
  message_passing(mine.words(kReleaseAcquire), 0, stream(0));
  message_passing(theirs.words(kReleaseAcquire), 1, stream(1));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(mine.words(0)), 42);
}

TEST_F(DriverFaults, ARaceThroughTwoMappingsIsFound) {
  const Memory memory(0);
  const Mapped mine(memory.handle(), kDevice0);
  const Mapped theirs(memory.handle(), kDevice1);
  mine.clear();
  message_passing(mine.words(kRelaxed), 0, stream(0));
  message_passing(theirs.words(kRelaxed), 1, stream(1));
  sync();
  EXPECT_EQ(kinds(), "race");
}

TEST_F(DriverFaults, NewMemoryIsNeitherZeroNorWritten) {
  const Memory memory(0);
  const Mapped mapped(memory.handle(), kDevice0);
  int value = 0;
  ASSERT_EQ(cuMemcpyDtoH(&value, mapped.address(), sizeof(value)), CUDA_SUCCESS);
  EXPECT_EQ(static_cast<unsigned>(value), 0xcdcdcdcdU);
  get(mapped.words(0), stream(0));
  ASSERT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "uninit");
}

TEST_F(DriverLitmus, AHandleMayBeReleasedWhileItsMemoryIsMapped) {
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp wanted = properties(0);
  ASSERT_EQ(cuMemCreate(&handle, kGranule, &wanted, 0), CUDA_SUCCESS);
  const Mapped mapped(handle, kDevice0);
  ASSERT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
  put(mapped.words(0), stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(DriverLitmus, CopiesAndFillsGoBothWays) {
  CUdeviceptr address = 0;
  ASSERT_EQ(cuMemAlloc(&address, 4096), CUDA_SUCCESS);
  const std::array<unsigned, 4> sent = {1, 2, 3, 4};
  std::array<unsigned, 4> got = {};
  ASSERT_EQ(cuMemcpyHtoD(address, sent.data(), sizeof(sent)), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoD(address + 64, address, sizeof(sent)), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoH(got.data(), address + 64, sizeof(got)), CUDA_SUCCESS);
  EXPECT_EQ(got, sent);
  ASSERT_EQ(cuMemsetD32(address, 0xabcdef12U, 2), CUDA_SUCCESS);
  ASSERT_EQ(cuMemsetD8(address + 8, 7, 4), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoH(got.data(), address, sizeof(got)), CUDA_SUCCESS);
  EXPECT_EQ(got, (std::array<unsigned, 4>{0xabcdef12U, 0xabcdef12U, 0x07070707U, 4}));
  ASSERT_EQ(cuMemFree(address), CUDA_SUCCESS);
}

TEST_F(DriverLitmus, PageLockedMemoryIsReachedByItsDeviceAddress) {
  void* host = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_DEVICEMAP), CUDA_SUCCESS);
  CUdeviceptr address = 0;
  ASSERT_EQ(cuMemHostGetDevicePointer(&address, host, 0), CUDA_SUCCESS);
  EXPECT_NE(address, 0);
  ASSERT_EQ(cuMemFreeHost(host), CUDA_SUCCESS);
  alignas(4096) static std::array<char, 4096> own = {};
  EXPECT_EQ(cuMemHostGetDevicePointer(&address, own.data(), 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemHostRegister(own.data(), own.size(), 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostRegister(own.data(), own.size(), 0),
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_EQ(cuMemHostGetDevicePointer(&address, own.data() + 8, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemHostUnregister(own.data()), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostUnregister(own.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

TEST_F(DriverLitmus, StreamsTellTheirContextAndWhetherTheyCapture) {
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&first, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
  CUcontext found = nullptr;
  ASSERT_EQ(cuStreamGetCtx(stream(1), &found), CUDA_SUCCESS);
  EXPECT_EQ(found, second);
  ASSERT_EQ(cuCtxPushCurrent(first), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamGetCtx(nullptr, &found), CUDA_SUCCESS);
  EXPECT_EQ(found, first);
  ASSERT_EQ(cuCtxPopCurrent(&found), CUDA_SUCCESS);
  int no_stream = 0;
  EXPECT_EQ(cuStreamGetCtx(reinterpret_cast<CUstream>(&no_stream), &found),
            CUDA_ERROR_INVALID_HANDLE);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  ASSERT_EQ(cuStreamIsCapturing(stream(0), &status), CUDA_SUCCESS);
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
  ASSERT_EQ(cudaStreamBeginCapture(stream(0), cudaStreamCaptureModeRelaxed), cudaSuccess);
  ASSERT_EQ(cuStreamIsCapturing(stream(0), &status), CUDA_SUCCESS);
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream(0), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ASSERT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  ASSERT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

TEST_F(DriverLitmus, PointersTellWhatTheyAre) {
  const Memory memory(2);
  const Mapped mapped(memory.handle(), kDevice0);
  unsigned type = 0;
  int device = -1;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  const CUdeviceptr inside = mapped.address() + 5000;
  ASSERT_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside), CUDA_SUCCESS);
  ASSERT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside),
            CUDA_SUCCESS);
  ASSERT_EQ(cuPointerGetAttribute(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside),
            CUDA_SUCCESS);
  ASSERT_EQ(cuPointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside), CUDA_SUCCESS);
  EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
  EXPECT_EQ(device, 2);
  EXPECT_EQ(begin, mapped.address());
  EXPECT_EQ(bytes, kGranule);
  int on_host = 0;
  EXPECT_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                  reinterpret_cast<CUdeviceptr>(&on_host)),
            CUDA_ERROR_INVALID_VALUE);
}

TEST_F(DriverLitmus, DevicesHaveNamesBusIdsAndUuidsOfTheirOwn) {
  int count = 0;
  ASSERT_EQ(cuDeviceGetCount(&count), CUDA_SUCCESS);
  std::set<std::string> seen;
  for (int i = 0; i < count; ++i) {
    CUdevice device = -1;
    ASSERT_EQ(cuDeviceGet(&device, i), CUDA_SUCCESS);
    std::array<char, 32> text = {};
    ASSERT_EQ(cuDeviceGetPCIBusId(text.data(), 32, device), CUDA_SUCCESS);
    seen.insert(text.data());
    ASSERT_EQ(cuDeviceGetName(text.data(), 32, device), CUDA_SUCCESS);
    seen.insert(text.data());
    CUuuid uuid = {};
    ASSERT_EQ(cuDeviceGetUuid(&uuid, device), CUDA_SUCCESS);
    seen.insert(std::string(uuid.bytes, sizeof(uuid.bytes)));
  }
  EXPECT_GE(count, kNumDevices);
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(3 * count));
}

TEST_F(DriverLitmus, AttributesFollowTheConfiguration) {
  int value = -1;
  constexpr auto kFabricSupported = CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
  ASSERT_EQ(cuDeviceGetAttribute(&value, kFabricSupported, 0), CUDA_SUCCESS);
  EXPECT_EQ(value, 1);
  config_.driver.fabric_handles = false;
  start(config_);
  ASSERT_EQ(cuDeviceGetAttribute(&value, kFabricSupported, 0), CUDA_SUCCESS);
  EXPECT_EQ(value, 0);
}

TEST_F(DriverLitmus, DriverAndRuntimeHaveOneCurrentDevice) {
  CUcontext context = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&context, 2), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxPushCurrent(context), CUDA_SUCCESS);
  int device = -1;
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 2);
  ASSERT_EQ(cuCtxGetDevice(&device), CUDA_SUCCESS);
  EXPECT_EQ(device, 2);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  CUcontext popped = nullptr;
  ASSERT_EQ(cuCtxPopCurrent(&popped), CUDA_SUCCESS);
  EXPECT_EQ(popped, context);
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0);
  ASSERT_EQ(cuDevicePrimaryCtxRelease(2), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxPushCurrent(context), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(2), CUDA_ERROR_INVALID_CONTEXT);
}

TEST_F(DriverLitmus, APopBringsBackTheDeviceThatTheRuntimeChose) {
  CUcontext context = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&context, 2), CUDA_SUCCESS);
  for (const int chosen : {0, 1, 0}) {
    ASSERT_EQ(cudaSetDevice(chosen), cudaSuccess);
    ASSERT_EQ(cuCtxPushCurrent(context), CUDA_SUCCESS);
    CUcontext popped = nullptr;
    ASSERT_EQ(cuCtxPopCurrent(&popped), CUDA_SUCCESS);
    int device = -1;
    ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, chosen);
  }
  ASSERT_EQ(cuDevicePrimaryCtxRelease(2), CUDA_SUCCESS);
}

TEST_F(DriverLitmus, EachThreadHasItsOwnCurrentContext) {
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&first, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(first), CUDA_SUCCESS);
  std::thread([&] {
    EXPECT_EQ(cuCtxSetCurrent(second), CUDA_SUCCESS);
    CUdevice device = -1;
    EXPECT_EQ(cuCtxGetDevice(&device), CUDA_SUCCESS);
    EXPECT_EQ(device, 1);
  }).join();
  CUcontext current = nullptr;
  ASSERT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, first);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);  // the runtime makes the context current as well
  ASSERT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, second);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, nullptr);
  CUdevice device = -1;
  EXPECT_EQ(cuCtxGetDevice(&device), CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  ASSERT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

TEST_F(DriverLitmus, FunctionsAreFoundByTheirNamesInBothLibraries) {
  const std::string folder = CUDASIM_LIBRARY_DIR;
  void* const library = dlopen((folder + "/libcuda.so.1").c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  auto* const find =
      reinterpret_cast<decltype(&cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  // The same file, so one state: what is found there is what is linked here.
  EXPECT_EQ(find, &cuGetProcAddress);
  void* function = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  ASSERT_EQ(find("cuMemcpyHtoD", &function, 12000, 0, &status), CUDA_SUCCESS);
  EXPECT_EQ(function, reinterpret_cast<void*>(&cuMemcpyHtoD));
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_SUCCESS);
  EXPECT_EQ(find("cuMemFlyToTheMoon", &function, 12000, 0, &status), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  EXPECT_EQ(function, nullptr);
  EXPECT_EQ(find("cuMemCreate", &function, 9000, 0, &status), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  dlclose(library);
}

TEST_F(DriverLitmus, ErrorsHaveTheirNamesAndTexts) {
  const char* text = nullptr;
  ASSERT_EQ(cuGetErrorName(CUDA_ERROR_NOT_PERMITTED, &text), CUDA_SUCCESS);
  EXPECT_STREQ(text, "CUDA_ERROR_NOT_PERMITTED");
  ASSERT_EQ(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text), CUDA_SUCCESS);
  EXPECT_STREQ(text, "out of memory");
  EXPECT_EQ(cuGetErrorName(static_cast<CUresult>(998), &text), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(text, nullptr);
}

TEST_F(DriverLitmus, ACallCanBeMadeToFail) {
  cudasim::fail_call("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY, 2);
  const Memory first(0);
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp wanted = properties(0);
  EXPECT_EQ(cuMemCreate(&handle, kGranule, &wanted, 0), CUDA_ERROR_OUT_OF_MEMORY);
  const Memory third(0);
}

}  // namespace
}  // namespace fanfold::gpu::litmus
