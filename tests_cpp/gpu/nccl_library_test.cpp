// SPDX-License-Identifier: Apache-2.0

// Which NCCL is taken, and what its version gives.

#include "gpu/nccl_library.h"

#include <string>

#include "fanfold/error.h"
#include "gpu/nccl_ranks.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold::gpu {
namespace {

using testing::expect_error;

TEST(NcclLibraryTest, AnyLibraryTellsItsFileAndVersion) {
  const auto library = NcclLibrary::open({testing::nccl_double(), "", false});
  EXPECT_EQ(library->version(), 23203);
  EXPECT_NE(library->file().find("libnccl_double.so"), std::string::npos) << library->file();
  EXPECT_NE(library->describe(nccl::kSystemError, nullptr).find("unhandled system error"),
            std::string::npos);
}

TEST(NcclLibraryTest, TheDefaultIsTakenWhereTheProcessHasNone) {
  const auto library = NcclLibrary::open({"", testing::nccl_double(), false});
  EXPECT_NE(library->file().find("libnccl_double.so"), std::string::npos) << library->file();
}

TEST(NcclLibraryTest, AHandleNeedsALoadedLibrary) {
  expect_error<Unsupported>({"expected this process to have loaded the library"},
                            [] { (void)NcclLibrary::open({"", testing::nccl_double(), true}); });
}

TEST(NcclLibraryTest, AHandleTakesNoOtherLibraryThanTheLoadedOne) {
  expect_error<Unsupported>(
      {"the library that the handle is of", "/nowhere/libnccl.so.2", "the path given"},
      [] { (void)NcclLibrary::open({"/nowhere/libnccl.so.2", testing::nccl_double(), true}); });
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(0);  // loads it
  EXPECT_EQ(NcclLibrary::open({testing::nccl_double(), "", true})->version(), 23203);
}

TEST(NcclLibraryTest, AFileThatIsNotThereIsNeverReplacedByAnother) {
  expect_error<Unsupported>({"/nowhere/libnccl.so.2", "the path given"}, [] {
    (void)NcclLibrary::open({"/nowhere/libnccl.so.2", testing::nccl_double(), false});
  });
}

TEST(NcclLibraryTest, FeaturesComeWithVersions) {
  struct Case {
    NcclFeature feature;
    int before;
    int since;
    const char* text;
  };
  for (const Case& one :
       {Case{NcclFeature::kWindows, 22606, 22703, "expected version 2.27.0 or later, got 2.26.6"},
        Case{NcclFeature::kShrink, 21900, 22700, "expected version 2.27.0 or later, got 2.19.0"},
        Case{NcclFeature::kPeerPointers, 22809, 22900, "2.29.0 or later, got 2.28.9"},
        Case{NcclFeature::kRanksShareDevice, 22907, 23003, "2.30.0 or later, got 2.29.7"}}) {
    FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(one.before);
    const auto old = NcclLibrary::open({testing::nccl_double(), "", false});
    EXPECT_FALSE(old->has(one.feature));
    expect_error<Unsupported>({one.text, "libnccl_double.so"}, [&] { old->require(one.feature); });
    FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(one.since);
    NcclLibrary::open({testing::nccl_double(), "", false})->require(one.feature);
  }
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(0);
}

TEST(NcclLibraryTest, VersionsReadAsPeopleWriteThem) {
  EXPECT_EQ(nccl_version_text(2708), "2.7.8");
  EXPECT_EQ(nccl_version_text(21805), "2.18.5");
  EXPECT_EQ(nccl_version_text(23203), "2.32.3");
}

}  // namespace
}  // namespace fanfold::gpu
