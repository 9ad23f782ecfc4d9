// SPDX-License-Identifier: Apache-2.0
#include "fanfold/communicator.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::spawn_ranks;

/// What `body` throws, or a failure of the test.
template <class Error, class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return "";
}

TensorView floats(std::vector<float>& values) {
  return TensorView(static_cast<void*>(values.data()), DType::kFloat32,
                    {static_cast<std::int64_t>(values.size())});
}

/// Runs `wrong` on every rank, expects the same message everywhere, and that the group still works.
void expect_same_error(testing::GroupKind kind, int num_ranks,
                       const std::function<void(Communicator&)>& wrong,
                       const std::string& message) {
  spawn_ranks(kind, num_ranks, [&](Communicator& comm) {
    EXPECT_EQ(message_of<InvalidArgument>([&] { wrong(comm); }), message);
    comm.barrier();
    comm.close();
  });
}

TEST(CommunicatorTest, KnowsItsRankSizeKindAndTimeout) {
  auto ranks = Communicator::threads(3, seconds(7));
  for (int rank = 0; rank < 3; ++rank) {
    const Communicator& comm = ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(comm.rank(), rank);
    EXPECT_EQ(comm.num_ranks(), 3);
    EXPECT_EQ(comm.kind(), "threads");
    EXPECT_EQ(comm.hosts(), std::vector<int>(3, 0));
    EXPECT_TRUE(comm.shares_memory());
    EXPECT_EQ(comm.timeout(), seconds(7));
    EXPECT_FALSE(comm.is_closed());
  }
}

TEST(CommunicatorTest, RefusesANumberOfRanksOutOfRange) {
  for (const int num_ranks : {0, -1, 1025}) {
    EXPECT_EQ(message_of<InvalidArgument>([&] { Communicator::threads(num_ranks); }),
              "num_ranks: expected 1 to 1024, got " + std::to_string(num_ranks));
  }
  EXPECT_THROW(Communicator::processes(2, 2, "/nowhere/x"), InvalidArgument);
  EXPECT_THROW(Communicator::threads(2, milliseconds(-1)), InvalidArgument);
}

TEST(CommunicatorTest, ManyRanksFitOnOneMachine) {
  spawn_ranks(130, [&](Communicator& comm) {
    std::vector<float> value{1.0F};
    comm.all_reduce(floats(value), floats(value));
    EXPECT_EQ(value[0], 130.0F);
    comm.close();
  });
}

TEST(CommunicatorTest, GroupsInOneProcessAreIndependent) {
  auto first = Communicator::threads(2);
  auto second = Communicator::threads(2);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      for (int i = 0; i < 50; ++i) {
        first[rank].barrier();
        second[rank].barrier();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(CommunicatorTest, AMovedFromObjectIsRefused) {
  auto ranks = Communicator::threads(1);
  Communicator moved = std::move(ranks[0]);
  EXPECT_THROW(ranks[0].barrier(), InvalidState);  // NOLINT: the state after a move is the subject
  EXPECT_TRUE(ranks[0].is_closed());
  moved.barrier();
}

// --- Mismatches: the same error on every rank, and the group goes on ---------------------------

class CommunicatorMismatchTest : public ::testing::TestWithParam<testing::GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, CommunicatorMismatchTest,
                         ::testing::ValuesIn(testing::kGroupKinds));

TEST_P(CommunicatorMismatchTest, DifferentCallsNameBoth) {
  expect_same_error(
      GetParam(), 3,
      [](Communicator& comm) {
        std::vector<float> value{1.0F};
        if (comm.rank() == 2) {
          comm.all_reduce(floats(value), floats(value));
        } else {
          comm.barrier();
        }
      },
      "Communicator: call: expected the same on every rank, got barrier on rank 0 and all_reduce "
      "on "
      "rank 2");
}

TEST_P(CommunicatorMismatchTest, DifferentShapesNameBoth) {
  expect_same_error(
      GetParam(), 2,
      [](Communicator& comm) {
        std::vector<float> values(comm.rank() == 0 ? 4 : 6);
        comm.all_reduce(floats(values), floats(values));
      },
      "Communicator: all_reduce: expected the same on every rank, got rows of 4 float32 on rank 0 "
      "and rows of 6 float32 on rank 1");
}

TEST_P(CommunicatorMismatchTest, DifferentTypesNameBoth) {
  expect_same_error(
      GetParam(), 2,
      [](Communicator& comm) {
        std::vector<float> values(4);
        const DType dtype = comm.rank() == 0 ? DType::kFloat32 : DType::kInt32;
        const TensorView view(static_cast<void*>(values.data()), dtype, {4});
        comm.broadcast(view, 0);
      },
      "Communicator: broadcast: expected the same on every rank, got rows of 4 float32 on rank 0 "
      "and rows of 4 int32 on rank 1");
}

TEST_P(CommunicatorMismatchTest, DifferentRootsNameBoth) {
  expect_same_error(
      GetParam(), 3,
      [](Communicator& comm) {
        std::vector<float> values(4);
        comm.broadcast(floats(values), comm.rank() == 1 ? 2 : 0);
      },
      "Communicator: broadcast: root: expected the same on every rank, got 0 on rank 0 and 2 on "
      "rank 1");
}

TEST_P(CommunicatorMismatchTest, DifferentCountsNameBoth) {
  expect_same_error(
      GetParam(), 2,
      [](Communicator& comm) {
        std::vector<float> send(2);
        std::vector<float> recv(comm.rank() == 0 ? 4 : 5);
        std::vector<std::int64_t> counts{2, 2};
        if (comm.rank() == 1) counts = {3, 2};
        comm.all_gather_v(floats(send), floats(recv), counts);
      },
      "Communicator: all_gather_v: counts: expected the same on every rank, got [2, 2] on rank 0 "
      "and "
      "[3, 2] on rank 1");
}

TEST_P(CommunicatorMismatchTest, ARankThatExpectsMoreThanIsSentIsNamedOnBothSides) {
  expect_same_error(
      GetParam(), 2,
      [](Communicator& comm) {
        std::vector<float> send(4);
        std::vector<float> recv(comm.rank() == 0 ? 4 : 5);
        const std::vector<std::int64_t> expected{comm.rank() == 0 ? 2 : 3, 2};
        comm.all_to_all_v(floats(send), floats(recv), {2, 2}, expected);
      },
      "Communicator: all_to_all_v: rank 0 sends 2 rows to rank 1, which expects 3");
}

// --- Arguments: a local error, nothing was sent -------------------------------------------------

TEST(CommunicatorArgumentTest, EachRuleHasItsSentence) {
  auto ranks = Communicator::threads(1);
  Communicator& comm = ranks[0];
  std::vector<float> four(4);
  std::vector<float> eight(8);
  const auto text = [](const auto& body) { return message_of<InvalidArgument>(body); };
  EXPECT_EQ(text([&] { comm.all_gather_v(floats(four), floats(eight), {4}); }),
            "recv: expected float32 [4] on cpu, got float32 [8] on cpu");
  EXPECT_EQ(text([&] { comm.all_gather_v(floats(four), floats(four), {3}); }),
            "send: expected float32 [3] on cpu, got float32 [4] on cpu");
  EXPECT_EQ(text([&] { comm.all_gather_v(floats(four), floats(four), {2, 2}); }),
            "counts: expected 1 numbers of rows, none negative, got [2, 2]");
  EXPECT_EQ(text([&] { comm.all_to_all_v(floats(four), floats(four), {-1}, {4}); }),
            "send_counts: expected 1 numbers of rows, none negative, got [-1]");
  EXPECT_EQ(text([&] { comm.broadcast(floats(four), 1); }),
            "root: expected a rank of 0 to 0, got 1");
  EXPECT_EQ(text([&] { comm.barrier(milliseconds(-1)); }),
            "timeout: expected 0 or more, got -1000000 nanoseconds");
  EXPECT_EQ(text([&] { comm.all_to_all(floats(four), floats(four)); }),
            "recv: expected memory apart from send, got tensors that overlap");
}

TEST(CommunicatorArgumentTest, OddTensorsAreRefused) {
  auto ranks = Communicator::threads(2);
  Communicator& comm = ranks[0];
  std::vector<float> values(9);
  const auto text = [&](const TensorView& view) {
    return message_of<InvalidArgument>([&] { comm.all_reduce(view, view); });
  };
  TensorView gaps(static_cast<void*>(values.data()), DType::kFloat32, {2, 2});
  gaps.strides = {4, 1};
  EXPECT_THAT(text(gaps), HasSubstr("send: expected a contiguous tensor"));
  TensorView gpu = floats(values);
  gpu.device = DeviceType::kGpu;
  EXPECT_EQ(text(gpu),
            "communicator of kind threads: expected a tensor on cpu, got float32 [9] on cuda:0; "
            "one made by from_nccl takes GPU tensors");
  EXPECT_THAT(text(TensorView()), HasSubstr("send: expected at least one dimension"));
  EXPECT_EQ(text(TensorView(static_cast<void*>(nullptr), DType::kFloat32, {3})),
            "send: expected memory for float32 [3] on cpu, got a null pointer");
  EXPECT_THAT(text(TensorView(static_cast<void*>(values.data()), DType::kFloat64, {3})),
              HasSubstr("send: expected float32, float16, bfloat16, int32 or int64, got float64"));
  EXPECT_EQ(message_of<InvalidArgument>([&] { comm.all_to_all(floats(values), floats(values)); }),
            "send: expected a multiple of 2 rows, one block per rank, got float32 [9] on cpu");
}

TEST(CommunicatorArgumentTest, NullPointersAreLegalForEmptyTensors) {
  spawn_ranks(2, [](Communicator& comm) {
    const TensorView empty(static_cast<void*>(nullptr), DType::kFloat32, {0, 4});
    comm.all_reduce(empty, empty);
    comm.all_gather_v(empty, empty, {0, 0});
    comm.all_to_all_v(empty, empty, {0, 0}, {0, 0});
    comm.close();
  });
}

}  // namespace
}  // namespace fanfold
