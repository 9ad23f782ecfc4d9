// SPDX-License-Identifier: Apache-2.0
#include "barriers.h"
#include "simulated_test.h"

namespace cudasim {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BarrierTest : public SimulatedTest {
 protected:
  std::vector<Report> run(BarrierUse use, std::uint64_t seed = 1) {
    restart_with_seed(seed);
    int* const data = zeros<int>(128);
    use_barriers(stream_on(0), data, unwritten<int>(128), use);
    return finish_with_reports();
  }
  std::string kind_of(BarrierUse use) {
    const auto found = run(use);
    return found.empty() ? "clean" : found[0].kind;
  }
};

TEST_F(BarrierTest, CorrectUsesAreCleanUnderManySeeds) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    EXPECT_TRUE(run(BarrierUse::kProducersArrive, seed).empty());
    EXPECT_TRUE(run(BarrierUse::kWholeBlock, seed).empty());
    EXPECT_TRUE(run(BarrierUse::kTwoHalves, seed).empty());
  }
}

TEST_F(BarrierTest, ProducersThatDoNotArriveAreADeadlock) {
  const auto found = run(BarrierUse::kProducersDoNotArrive);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].kind, "deadlock");
  EXPECT_THAT(found[0].text,
              ContainsRegex("64 threads: rank 0 barriers waits in barrier barriers.cu:[0-9]+ "
                            "\\(block 0 thread 64\\)"));
}

TEST_F(BarrierTest, AHalfFullBarrierAtTheEndIsReported) {
  const auto found = run(BarrierUse::kNobodyWaits);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].text, HasSubstr("ended while barrier 2 of block 0 holds 64 of 128 threads"));
}

TEST_F(BarrierTest, MisuseIsReported) {
  EXPECT_EQ(kind_of(BarrierUse::kCountsDiffer), "barrier");
  EXPECT_EQ(kind_of(BarrierUse::kOddCount), "barrier");
  EXPECT_EQ(kind_of(BarrierUse::kNoSuchBarrier), "barrier");
  EXPECT_EQ(kind_of(BarrierUse::kArriveTwice), "barrier");
}

TEST_F(BarrierTest, WhoArrivesIsNotOrderedAfterTheOthers) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  EXPECT_EQ(kind_of(BarrierUse::kArriveAndRace), "race");
}

TEST_F(BarrierTest, PredicatesAreCounted) {
  int* const results = zeros<int>(3);
  count_predicates(stream_on(0), results, 40);
  synchronize_all();
  EXPECT_THAT(values(results, 3), ElementsAre(40, 1, 0));
  count_predicates(stream_on(0), results, 96);
  synchronize_all();
  EXPECT_THAT(values(results, 3), ElementsAre(96, 1, 1));
  count_predicates(stream_on(0), results, 0);
  synchronize_all();
  EXPECT_THAT(values(results, 3), ElementsAre(0, 0, 0));
  EXPECT_EQ(finish(), "clean");
}

TEST_F(BarrierTest, DivergenceIsReportedWithBothPlaces) {
  divergent_barrier(stream_on(0));
  const auto found = finish_with_reports();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].text,
              ContainsRegex("different calls of __syncthreads of rank 0 kernel "
                            "divergent block 0: thread [0-9]+ at barriers.cu:[0-9]+, "
                            "thread [0-9]+ at barriers.cu:[0-9]+"));
}

TEST_F(BarrierTest, ThreadsThatLeaveBeforeABarrierAreReported) {
  leave_before_barrier(stream_on(0));
  EXPECT_EQ(finish(), "barrier");
}

}  // namespace
}  // namespace cudasim
