// SPDX-License-Identifier: Apache-2.0
#include "functions.h"
#include "simulated_test.h"

namespace cudasim {
namespace {

using ::testing::ElementsAre;

class OperationsTest : public SimulatedTest {};

TEST_F(OperationsTest, WarpFunctionsGiveWhatCudaDocuments) {
  int* const results = unwritten<int>(kNumWarpResults * 32);
  warp_functions(stream_on(0), results);
  EXPECT_EQ(finish(), "clean");
  const std::vector<int> all = values(results, kNumWarpResults * 32);
  for (int lane = 0; lane < 32; ++lane) {
    std::vector<int> mine;
    for (std::size_t i = 0; i < kNumWarpResults; ++i) {
      mine.push_back(all[i * 32 + static_cast<std::size_t>(lane)]);
    }
    EXPECT_THAT(mine, ElementsAre(5, lane / 8 * 8 + 1, lane ^ 3, lane < 2 ? lane : lane - 2,
                                  lane > 29 ? lane : lane + 2, 0xf, 1, 0,
                                  lane < 16 ? 0xffff : static_cast<int>(0xffff0000u), 0, 496, -16,
                                  -1, -1, 0, -1));
  }
}

TEST_F(OperationsTest, AtomicFunctionsGiveWhatCudaDocuments) {
  auto* const results = unwritten<long long>(kNumAtomicResults);
  atomic_functions(stream_on(0), results);
  EXPECT_EQ(finish(), "clean");
  EXPECT_THAT(values(results, kNumAtomicResults), ElementsAre(10, 15, 14, 3, 9, 4, 7, 5, 4, 0, 1, 0,
                                                              7, 20, -1, -8, 375, 128, 129, 129));
}

TEST_F(OperationsTest, MathFunctionsGiveWhatCudaDocuments) {
  auto* const results = unwritten<long long>(kNumMathResults);
  math_functions(stream_on(0), results);
  EXPECT_EQ(finish(), "clean");
  EXPECT_THAT(values(results, kNumMathResults),
              ElementsAre(4, 0, 41, 12, 64, 31, 32, 23, 0x80000000ll, 0x3f800000ll, 2,
                          -0x80000000ll, 3, 0x3ff0000000000000ll, 8193, 8192, 3, -3, 2, 32));
}

}  // namespace
}  // namespace cudasim
