// SPDX-License-Identifier: Apache-2.0
#include "fanfold/build_info.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fanfold {
namespace {

TEST(BuildInfoTest, VersionHasThreeNumbers) {
  EXPECT_THAT(build_info().version, testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
}

TEST(BuildInfoTest, NamesTheCompiler) {
  EXPECT_THAT(build_info().compiler, testing::Not(testing::StrEq("")));
}

TEST(BuildInfoTest, ArchitecturesAreGivenExactlyWhenThereIsCuda) {
  EXPECT_EQ(std::string(build_info().cuda).empty(),
            std::string(build_info().cuda_architectures).empty());
}

}  // namespace
}  // namespace fanfold
