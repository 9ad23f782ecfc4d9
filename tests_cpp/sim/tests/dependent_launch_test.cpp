// SPDX-License-Identifier: Apache-2.0
#include "dependents.h"
#include "simple.h"
#include "simulated_test.h"

namespace cudasim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class DependentLaunchTest : public SimulatedTest {
 protected:
  void SetUp() override {
    SimulatedTest::SetUp();
    data_ = zeros<int>(2);
    out_ = zeros<int>(2);
    word_ = zeros<unsigned>(1);
    stream_ = stream_on(0);
  }

  int* data_ = nullptr;
  int* out_ = nullptr;
  unsigned* word_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

TEST_F(DependentLaunchTest, AfterTheWaitAllWritesAreOrdered) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    restart_with_seed(seed);
    primary(stream_, {data_, data_ + 1, nullptr, true}, 4);
    dependent(stream_, {nullptr, out_, data_, data_ + 1, nullptr, true});
    EXPECT_EQ(finish(), "clean");
    EXPECT_THAT(values(out_, 2), ElementsAre(1, 2));
  }
}

TEST_F(DependentLaunchTest, BeforeTheWaitAReadRacesEvenIfItComesLate) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  primary(stream_, {data_, data_ + 1, nullptr, true}, 1);
  dependent(stream_, {data_, out_, nullptr, nullptr, nullptr, true});
  const auto found = finish_with_reports();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].text, HasSubstr("kernel dependent"));
  EXPECT_THAT(found[0].text, HasSubstr("kernel primary"));
  primary(stream_, {data_, data_ + 1, nullptr, false}, 1);  // lets it start at its end only
  dependent(stream_, {data_, out_, nullptr, nullptr, nullptr, true});
  EXPECT_EQ(finish(), "race");
}

TEST_F(DependentLaunchTest, WithoutTheWaitNothingIsOrdered) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  primary(stream_, {data_, data_ + 1, nullptr, true}, 1);
  dependent(stream_, {nullptr, out_, data_, data_ + 1, nullptr, false});
  EXPECT_EQ(finish(), "race");
}

TEST_F(DependentLaunchTest, TheDependentRunsBesideAPrimaryThatLetsIt) {
  primary(stream_, {data_, data_ + 1, word_, true}, 4);  // waits for the dependent
  dependent(stream_, {nullptr, out_, data_, data_ + 1, word_, true});
  EXPECT_EQ(finish(), "clean");
  EXPECT_THAT(values(out_, 2), ElementsAre(1, 2));
}

TEST_F(DependentLaunchTest, AllBlocksMustLetItStart) {
  Config config;
  config.resident_blocks = 2;
  restart(config);
  primary(stream_, {data_, data_ + 1, word_, true}, 4);  // two blocks are not even resident
  dependent(stream_, {nullptr, out_, nullptr, nullptr, word_, true});
  EXPECT_EQ(finish(), "deadlock");
}

TEST_F(DependentLaunchTest, APrimaryThatDoesNotLetItIsWaitedFor) {
  primary(stream_, {data_, data_ + 1, word_, false}, 1);
  dependent(stream_, {nullptr, out_, nullptr, nullptr, word_, true});
  EXPECT_EQ(finish(), "deadlock");
}

TEST_F(DependentLaunchTest, TheNextOperationIsOrderedAfterBoth) {
  primary(stream_, {data_, data_ + 1, word_, true}, 1);
  dependent(stream_, {nullptr, out_, nullptr, nullptr, word_, false});
  increment(stream_, data_, 2);
  EXPECT_EQ(finish(), "clean");
  EXPECT_THAT(values(data_, 2), ElementsAre(2, 3));
}

TEST_F(DependentLaunchTest, AChainWaitsForTheFirst) {
  int* const more = zeros<int>(2);
  primary(stream_, {data_, data_ + 1, word_, true}, 1);
  dependent(stream_, {nullptr, more, nullptr, nullptr, word_, false});
  dependent(stream_, {nullptr, out_, data_, data_ + 1, nullptr, true});
  EXPECT_EQ(finish(), "clean");
  EXPECT_THAT(values(out_, 2), ElementsAre(1, 2));
}

TEST_F(DependentLaunchTest, OtherWorkInBetweenIsWaitedFor) {
  primary(stream_, {data_, data_ + 1, nullptr, true}, 1);
  cudaMemsetAsync(out_, 0, 4, stream_);
  dependent(stream_, {data_, out_, data_, data_ + 1, nullptr, false});
  EXPECT_EQ(finish(), "clean");
}

TEST_F(DependentLaunchTest, ACapturedEdgeStaysProgrammatic) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t instance = nullptr;
  cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
  cudaMemsetAsync(word_, 0, 4, stream_);
  primary(stream_, {data_, data_ + 1, word_, true}, 2);
  dependent(stream_, {nullptr, out_, data_, data_ + 1, word_, true});
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&instance, graph, 0), cudaSuccess);
  for (int i = 0; i < 3; ++i) cudaGraphLaunch(instance, stream_);
  EXPECT_EQ(finish(), "clean");
  EXPECT_THAT(values(out_, 2), ElementsAre(1, 2));
  cudaGraphExecDestroy(instance);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace cudasim
