// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "fanfold/all_to_all_config.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Names there and back; what is none is refused with the list of all.
template <class Enum, class FromName>
void expect_names(const std::vector<std::pair<Enum, std::string>>& names, const char* what,
                  FromName&& from_name) {
  std::string list;
  for (const auto& [value, name] : names) {
    EXPECT_EQ(name_of(value), name);
    EXPECT_EQ(from_name(name), value) << name;
    list += list.empty() ? "" : ", ";
    list += name;
  }
  EXPECT_STREQ(name_of(static_cast<Enum>(names.size())), "unknown") << "a value is left out";
  for (const std::string bad : {"", "Auto", "unknown", "rank-major"}) {
    EXPECT_EQ(testing::expect_error<InvalidArgument>({}, [&] { from_name(bad); }),
              base::str(what, ": expected one of ", list, "; got \"", bad, '"'));
  }
}

TEST(NamesTest, StrategiesHaveNames) {
  expect_names<Strategy>({{Strategy::kAuto, "auto"},
                          {Strategy::kBroadcast, "broadcast"},
                          {Strategy::kGatherScatter, "gather_scatter"},
                          {Strategy::kBatched, "batched"},
                          {Strategy::kOneSided, "one_sided"},
                          {Strategy::kTwoSided, "two_sided"},
                          {Strategy::kHighThroughput, "high_throughput"},
                          {Strategy::kLowLatency, "low_latency"}},
                         "strategy", strategy_from_name);
}

TEST(NamesTest, LayoutsHaveNames) {
  expect_names<Layout>({{Layout::kRankMajor, "rank_major"},
                        {Layout::kGathered, "gathered"},
                        {Layout::kExpertMajor, "expert_major"},
                        {Layout::kFlat, "flat"},
                        {Layout::kFlatByExpert, "flat_by_expert"}},
                       "layout", layout_from_name);
}

TEST(NamesTest, WeightingsHaveNames) {
  expect_names<Weighting>({{Weighting::kApplied, "applied"},
                           {Weighting::kCarried, "carried"},
                           {Weighting::kOrigin, "origin"}},
                          "weighting", weighting_from_name);
}

TEST(NamesTest, ChecksOfIdsHaveNames) {
  expect_names<CheckIds>(
      {{CheckIds::kAuto, "auto"}, {CheckIds::kRaise, "raise"}, {CheckIds::kDrop, "drop"}},
      "check_ids", check_ids_from_name);
}

TEST(NamesTest, SanitizePoliciesHaveNames) {
  expect_names<SanitizePolicy>({{SanitizePolicy::kPadding, "padding"},
                                {SanitizePolicy::kPaddingAndNonLocal, "padding_and_non_local"},
                                {SanitizePolicy::kToLocal, "to_local"}},
                               "policy", sanitize_policy_from_name);
}

TEST(NamesTest, WiresHaveNames) {
  expect_names<Wire>({{Wire::kNone, "none"}, {Wire::kFp8E4M3, "fp8_e4m3"}}, "wire", wire_from_name);
}

TEST(NamesTest, ScalesOfWiresHaveNames) {
  expect_names<WireScale>({{WireScale::kFloat32, "float32"}, {WireScale::kUe8m0, "ue8m0"}},
                          "wire_scale", wire_scale_from_name);
}

TEST(PlacementNameTest, TwoPlacementsHaveNames) {
  EXPECT_EQ(placement_from_name("linear").kind, Placement::Kind::kLinear);
  EXPECT_EQ(placement_from_name("round_robin").kind, Placement::Kind::kRoundRobin);
}

TEST(PlacementNameTest, OtherNamesAreRefused) {
  for (const std::string bad : {"", "table", "Linear"}) {
    EXPECT_EQ(testing::expect_error<InvalidArgument>({}, [&] { placement_from_name(bad); }),
              "placement: expected linear, round_robin or a table of ranks; got \"" + bad + '"');
  }
}

TEST(PlacementNameTest, PlacementsKeepWhatTheyAreMadeFrom) {
  EXPECT_EQ(Placement().kind, Placement::Kind::kLinear);
  EXPECT_EQ(Placement::linear().kind, Placement::Kind::kLinear);
  EXPECT_THAT(Placement::linear().table, IsEmpty());
  EXPECT_EQ(Placement::round_robin().kind, Placement::Kind::kRoundRobin);
  const Placement table = Placement::from_table({2, 0, 1});
  EXPECT_EQ(table.kind, Placement::Kind::kTable);
  EXPECT_THAT(table.table, ElementsAre(2, 0, 1));
  EXPECT_THAT(table.logical_of_expert, IsEmpty());
  const Placement replicas = Placement::from_replicas({2, 0, 1}, {0, 1, 0});
  EXPECT_EQ(replicas.kind, Placement::Kind::kTable);
  EXPECT_THAT(replicas.table, ElementsAre(2, 0, 1));
  EXPECT_THAT(replicas.logical_of_expert, ElementsAre(0, 1, 0));
}

}  // namespace
}  // namespace fanfold
