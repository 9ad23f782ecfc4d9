// SPDX-License-Identifier: Apache-2.0
#include "fanfold/metainfo.h"

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

TEST(MetainfoTest, FindsValuesByName) {
  const Metainfo info({{"slot_offset", 128}, {"slot_stride", std::int64_t{1} << 40}});
  EXPECT_EQ(info.at("slot_offset"), 128);
  EXPECT_EQ(info.at("slot_stride"), std::int64_t{1} << 40);
}

TEST(MetainfoTest, KeepsTheOrderOfItsEntries) {
  const Metainfo info({{"b", 1}, {"a", 2}});
  EXPECT_THAT(info.entries(),
              ::testing::ElementsAre(Metainfo::Entry("b", 1), Metainfo::Entry("a", 2)));
}

TEST(MetainfoTest, UnknownNamesAreRefused) {
  const Metainfo info({{"slot_offset", 128}});
  for (const std::string name : {"", "slot", "slot_offset_bytes"}) {
    EXPECT_EQ(testing::expect_error<InvalidArgument>({}, [&] { info.at(name); }),
              "metainfo: expected a known name, got \"" + name + '"');
  }
}

}  // namespace
}  // namespace fanfold
