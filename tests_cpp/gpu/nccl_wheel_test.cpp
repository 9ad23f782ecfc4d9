// SPDX-License-Identifier: Apache-2.0

// The real NCCL, of its Python wheel, as far as it works without a driver.

#include <cstring>
#include <string>

#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "fanfold/nccl.h"
#include "gpu/gpu_ranks.h"
#include "gpu/nccl_library.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/spawn_ranks.h"

namespace fanfold::gpu {
namespace {

using testing::expect_error;

std::shared_ptr<const NcclLibrary> wheel() {
  return NcclLibrary::open({FANFOLD_NCCL_WHEEL, "", false});
}

TEST(NcclWheelTest, ItHasAllThatItsVersionPromises) {
  const auto library = wheel();
  EXPECT_GE(library->version(), 23203);
  EXPECT_NE(library->file().find("libnccl.so.2"), std::string::npos) << library->file();
  library->require(NcclFeature::kRanksShareDevice);
#define FANFOLD_NCCL_EXPECT_THERE(name, since, ...) \
  EXPECT_NE(library->functions().name, nullptr) << #name;
  FANFOLD_NCCL_FUNCTIONS(FANFOLD_NCCL_EXPECT_THERE)
#undef FANFOLD_NCCL_EXPECT_THERE
}

TEST(NcclWheelTest, OnceLoadedItIsTheOneOfTheProcess) {
  const auto first = wheel();
  const auto second = NcclLibrary::open({"", "/nowhere/libnccl.so.2", true});
  EXPECT_EQ(second->file(), first->file());
}

TEST(NcclWheelTest, UniqueIdsDiffer) {
  const auto library = wheel();
  nccl::UniqueId first{};
  nccl::UniqueId second{};
  ASSERT_EQ(library->functions().ncclGetUniqueId(&first), nccl::kSuccess);
  ASSERT_EQ(library->functions().ncclGetUniqueId(&second), nccl::kSuccess);
  EXPECT_NE(std::memcmp(&first, &second, sizeof first), 0);
}

TEST(NcclWheelTest, GroupsAndErrorTextsAreItsOwn) {
  const auto library = wheel();
  EXPECT_EQ(library->functions().ncclGroupStart(), nccl::kSuccess);
  EXPECT_EQ(library->functions().ncclGroupEnd(), nccl::kSuccess);
  int count = 0;
  EXPECT_EQ(library->functions().ncclCommCount(nullptr, &count), nccl::kInvalidArgument);
  EXPECT_NE(library->describe(nccl::kInvalidArgument, nullptr).find("invalid argument"),
            std::string::npos);
}

TEST(NcclWheelTest, ItsFailureToMakeACommunicatorIsTold) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [](Communicator& bootstrap) {
    NcclOptions options;
    options.library = FANFOLD_NCCL_WHEEL;
    expect_error<CudaFailure>(
        {"NCCL, rank 0, ncclCommInitRankConfig: unhandled cuda error", "driver", "[NCCL 2."},
        [&] { (void)Communicator::from_nccl(bootstrap, options); });
  });
}

}  // namespace
}  // namespace fanfold::gpu
