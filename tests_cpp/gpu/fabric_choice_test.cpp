// SPDX-License-Identifier: Apache-2.0

// Which kind of handle is taken, and what is said of the others.

#include "gmock/gmock.h"
#include "gpu/fabric_outcome.h"
#include "gpu/simulated_devices.h"
#include "gtest/gtest.h"

namespace fanfold::gpu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::SimulatedDevices;
using ::testing::StartsWith;

TEST(FabricChoiceTest, TheBestKindIsTaken) {
  const SimulatedDevices devices(2);
  EXPECT_EQ(common_outcome(RankKind::kProcesses, 2, all_kinds()), "fabric");
}

TEST(FabricChoiceTest, WithoutFabricHandlesDescriptorsAreTakenAndTheReasonIsSaid) {
  cudasim::DriverConfig driver;
  driver.fabric_handles = false;
  const SimulatedDevices devices(2, driver);
  EXPECT_EQ(common_outcome(RankKind::kProcesses, 2, all_kinds()),
            "file_descriptor | fabric: rank 0: device 0 has no fabric handles");
}

TEST(FabricChoiceTest, WithoutAnImexChannelTheReasonNamesIt) {
  cudasim::DriverConfig driver;
  driver.imex_channel = false;
  const SimulatedDevices devices(2, driver);
  EXPECT_THAT(common_outcome(RankKind::kThreads, 2, all_kinds()),
              AllOf(StartsWith("file_descriptor | fabric: rank 0: cuMemCreate of 4194304 bytes on "
                               "device 0 with a fabric handle"),
                    HasSubstr("IMEX daemon"), HasSubstr("CUDA_ERROR_NOT_PERMITTED")));
}

TEST(FabricChoiceTest, DevicesOfDifferentCliquesShareByDescriptors) {
  cudasim::DriverConfig driver;
  driver.cliques = {4, 4, 5};
  const SimulatedDevices devices(3, driver);
  EXPECT_THAT(common_outcome(RankKind::kThreads, 3, all_kinds()),
              AllOf(StartsWith("file_descriptor | fabric: rank 2: its device is in clique 5 of "
                               "cluster fab1"),
                    HasSubstr("that of rank 0 in clique 4 of cluster fab1")));
}

TEST(FabricChoiceTest, AFabricThatIsNotReadyIsPassedOver) {
  cudasim::DriverConfig driver;
  driver.fabric_state = 2;
  const SimulatedDevices devices(2, driver);
  EXPECT_THAT(common_outcome(RankKind::kThreads, 2, all_kinds()),
              AllOf(StartsWith("file_descriptor | fabric: rank 0: NVML says that device "),
                    HasSubstr("has not joined a fabric (state 2")));
}

TEST(FabricChoiceTest, WithoutNvmlTheDriverDecides) {
  cudasim::DriverConfig driver;
  driver.nvml_present = false;
  const SimulatedDevices devices(2, driver);
  EXPECT_EQ(common_outcome(RankKind::kProcesses, 2, all_kinds()), "fabric");
}

TEST(FabricChoiceTest, ThreadsNeedNoHandles) {
  cudasim::DriverConfig driver;
  driver.fabric_handles = false;
  driver.fd_handles = false;
  const SimulatedDevices devices(2, driver);
  EXPECT_EQ(common_outcome(RankKind::kThreads, 2, all_kinds()),
            "same_process | fabric: rank 0: device 0 has no fabric handles | file_descriptor: rank "
            "0: device 0 has no descriptor handles");
}

TEST(FabricChoiceTest, WhenNothingWorksEveryReasonIsSaid) {
  cudasim::DriverConfig driver;
  driver.fabric_handles = false;
  driver.fd_handles = false;
  const SimulatedDevices devices(2, driver);
  EXPECT_EQ(common_outcome(RankKind::kProcesses, 2, all_kinds()),
            "Unsupported GPU memory of 3145728 bytes: no way to share it works; fabric: rank 0: "
            "device 0 has no fabric handles; file_descriptor: rank 0: device 0 has no descriptor "
            "handles; same_process: rank 0: expected ranks that are threads of one process, got "
            "processes");
}

TEST(FabricChoiceTest, DevicesThatCannotReachEachOtherAreSaidSo) {
  cudasim::DriverConfig driver;
  driver.peer_access = false;
  const SimulatedDevices devices(2, driver);
  EXPECT_THAT(
      common_outcome(RankKind::kThreads, 2, {HandleKind::kSameProcess}),
      AllOf(StartsWith("CudaFailure "),
            HasSubstr("rank 0: cuMemSetAccess of device 0 to rank 1's memory (which needs peer "
                      "access between two devices)")));
}

TEST(FabricChoiceTest, LackOfMemoryOnOneRankIsOutOfMemoryOnAllAndNothingElseIsTried) {
  cudasim::DriverConfig driver;
  driver.memory_bytes = 2 << 20;
  const SimulatedDevices devices(2, driver);
  EXPECT_THAT(common_outcome(RankKind::kProcesses, 2, all_kinds()),
              AllOf(StartsWith("OutOfMemory rank "), HasSubstr("cuMemCreate of 4194304 bytes"),
                    HasSubstr("CUDA_ERROR_OUT_OF_MEMORY")));
}

}  // namespace
}  // namespace fanfold::gpu
