// SPDX-License-Identifier: Apache-2.0
#include "exec/peer_distance.h"

#include "gtest/gtest.h"

namespace fanfold::exec {
namespace {

TEST(PeerDistanceTest, APeerIsFarUntilAFlagSaysOtherwise) {
  PeerDistance distance;
  EXPECT_FALSE(distance.is_near());
  distance.add(400);
  EXPECT_FALSE(distance.is_near());
  distance.add(60);
  EXPECT_TRUE(distance.is_near());
}

TEST(PeerDistanceTest, OneLateFlagChangesNothing) {
  PeerDistance distance;
  distance.add(60);
  distance.add(1'000'000);
  EXPECT_TRUE(distance.is_near());
}

TEST(PeerDistanceTest, APeerThatMovedAwayIsFarAfterTwoBlocksOfFlags) {
  PeerDistance distance;
  distance.add(60);
  for (int i = 0; i < 15; ++i) distance.add(200);
  EXPECT_TRUE(distance.is_near());
  for (int i = 0; i < 16; ++i) distance.add(200);
  EXPECT_FALSE(distance.is_near());
}

TEST(PeerDistanceTest, SlowStoresOutweighFastFlags) {
  PeerDistance distance;
  distance.add(60);
  distance.refute();
  EXPECT_FALSE(distance.is_near());
  for (int i = 0; i < 255; ++i) {
    distance.next_round();
    distance.add(60);
  }
  EXPECT_FALSE(distance.is_near());
  distance.next_round();
  EXPECT_TRUE(distance.is_near());
}

TEST(PeerDistanceTest, AnOldEstimateIsForgotten) {
  PeerDistance distance;
  distance.add(60);
  for (int i = 0; i < 255; ++i) distance.next_round();
  EXPECT_TRUE(distance.is_near());
  distance.next_round();
  EXPECT_FALSE(distance.is_near());
}

}  // namespace
}  // namespace fanfold::exec
