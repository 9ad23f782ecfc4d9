// SPDX-License-Identifier: Apache-2.0
#include "base/format.h"

#include <cstdint>
#include <string>

#include "gtest/gtest.h"

namespace fanfold::base {
namespace {

TEST(FormatTest, StrConcatenatesItsArguments) {
  EXPECT_EQ(str("rank ", 3, " of ", std::int64_t{1} << 40, ", ", std::string("late"), '.'),
            "rank 3 of 1099511627776, late.");
  EXPECT_EQ(str(0.5, ' ', -1), "0.5 -1");
}

TEST(FormatTest, DurationsAreInTheLargestUnitThatFits) {
  EXPECT_EQ(format_duration(60'000'000'000), "60 s");
  EXPECT_EQ(format_duration(1'500'000'000), "1.5 s");
  EXPECT_EQ(format_duration(1'000'000'000), "1 s");
  EXPECT_EQ(format_duration(20'000'000), "20 ms");
  EXPECT_EQ(format_duration(1'000'000), "1 ms");
  EXPECT_EQ(format_duration(1'500), "1.5 us");
  EXPECT_EQ(format_duration(1), "0.001 us");
  EXPECT_EQ(format_duration(0), "0 us");
}

TEST(FormatTest, DurationsAreRoundedToSixDigits) {
  EXPECT_EQ(format_duration(1'234'567'890), "1.23457 s");
  EXPECT_EQ(format_duration(2'000'000'001), "2 s");
  EXPECT_EQ(format_duration(12'345'678), "12.3457 ms");
}

}  // namespace
}  // namespace fanfold::base
