// SPDX-License-Identifier: Apache-2.0

// NVML as a program finds it: by dlopen, with types of its own.

#include <cuda.h>
#include <dlfcn.h>
#include <gmock/gmock.h>

#include <array>
#include <cstring>
#include <string>

#include "litmus.h"

namespace fanfold::gpu::litmus {
namespace {

struct FabricInfo {
  unsigned version;
  std::array<unsigned char, 16> cluster_uuid;
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health_mask;
};
constexpr unsigned kVersion2 = sizeof(FabricInfo) | 2U << 24U;

class NvmlLitmus : public LitmusTest {
 protected:
  void SetUp() override {
    LitmusTest::SetUp();
    const std::string path = std::string(CUDASIM_LIBRARY_DIR) + "/libnvidia-ml.so.1";
    library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
    load("nvmlInit_v2", &init_);
    load("nvmlShutdown", &shutdown_);
    load("nvmlErrorString", &error_string_);
    load("nvmlDeviceGetHandleByPciBusId_v2", &handle_of_);
    load("nvmlDeviceGetGpuFabricInfoV", &fabric_info_);
    ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
  }
  void TearDown() override {
    dlclose(library_);
    LitmusTest::TearDown();
  }

  template <typename Function>
  void load(const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(dlsym(library_, name));
    ASSERT_NE(*function, nullptr) << name;
  }

  int read(int device, FabricInfo* info) {
    std::array<char, 16> bus_id = {};
    EXPECT_EQ(cuDeviceGetPCIBusId(bus_id.data(), 16, device), CUDA_SUCCESS);
    void* handle = nullptr;
    if (const int error = handle_of_(bus_id.data(), &handle); error != 0) {
      return error;
    }
    *info = {};
    info->version = kVersion2;
    return fabric_info_(handle, info);
  }

  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  const char* (*error_string_)(int) = nullptr;
  int (*handle_of_)(const char*, void**) = nullptr;
  int (*fabric_info_)(void*, FabricInfo*) = nullptr;

 private:
  void* library_ = nullptr;
};

TEST_F(NvmlLitmus, ADeviceTellsItsFabric) {
  config_.driver.cluster_uuid = {1, 2, 3};
  config_.driver.cliques = {5, 6};
  start(config_);
  ASSERT_EQ(init_(), 0);
  FabricInfo info = {};
  ASSERT_EQ(read(1, &info), 0);
  EXPECT_EQ(info.state, 3);
  EXPECT_EQ(info.status, 0);
  EXPECT_EQ(info.clique, 6U);
  EXPECT_EQ(info.cluster_uuid, config_.driver.cluster_uuid);
  ASSERT_EQ(read(2, &info), 0);
  EXPECT_EQ(info.clique, 0U);
  EXPECT_EQ(shutdown_(), 0);
}

TEST_F(NvmlLitmus, AFabricThatIsNotReadyTellsItsStateOnly) {
  config_.driver.fabric_state = 2;
  config_.driver.cliques = {5};
  start(config_);
  ASSERT_EQ(init_(), 0);
  FabricInfo info = {};
  ASSERT_EQ(read(0, &info), 0);
  EXPECT_EQ(info.state, 2);
  EXPECT_EQ(info.clique, 0U);
  EXPECT_EQ(shutdown_(), 0);
}

TEST_F(NvmlLitmus, WithoutADriverItDoesNotStart) {
  config_.driver.nvml_present = false;
  start(config_);
  EXPECT_EQ(init_(), 9);
  EXPECT_STREQ(error_string_(9), "Driver Not Loaded");
  EXPECT_EQ(shutdown_(), 1);  // not initialized
}

TEST_F(NvmlLitmus, WrongArgumentsAreRefused) {
  FabricInfo info = {};
  void* handle = nullptr;
  EXPECT_EQ(handle_of_("0000:01:00.0", &handle), 1);  // not initialized
  ASSERT_EQ(init_(), 0);
  EXPECT_EQ(handle_of_("0000:ff:00.0", &handle), 6);
  EXPECT_EQ(handle_of_("a device", &handle), 6);
  EXPECT_EQ(handle_of_(nullptr, &handle), 2);
  ASSERT_EQ(handle_of_("00000000:01:00.0", &handle), 0);
  info.version = sizeof(FabricInfo) | 3U << 24U;
  EXPECT_EQ(fabric_info_(handle, &info), 25);
  EXPECT_EQ(fabric_info_(nullptr, &info), 2);
  EXPECT_EQ(shutdown_(), 0);
}

TEST_F(NvmlLitmus, ACallCanBeMadeToFail) {
  ASSERT_EQ(init_(), 0);
  cudasim::fail_call("nvmlDeviceGetGpuFabricInfoV", 3);
  FabricInfo info = {};
  EXPECT_EQ(read(0, &info), 3);
  EXPECT_EQ(read(0, &info), 0);
  EXPECT_EQ(shutdown_(), 0);
}

}  // namespace
}  // namespace fanfold::gpu::litmus
