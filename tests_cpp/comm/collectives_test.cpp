// SPDX-License-Identifier: Apache-2.0

// Every collective against a plain loop, over numbers of ranks and sizes; larger than the staging
// too.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/float_convert.h"
#include "fanfold/communicator.h"
#include "gtest/gtest.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::GroupKind;
using testing::spawn_ranks;
using Counts = std::vector<std::int64_t>;

template <class T>
TensorView view(std::vector<T>& values, DType dtype, std::int64_t rows, std::int64_t width) {
  return TensorView(static_cast<void*>(values.data()), dtype, {rows, width});
}

/// A value that tells where it came from.
std::int64_t mark(int rank, std::int64_t place) { return rank * 1'000'003 + place * 7 + 1; }

std::vector<std::int64_t> marks(int rank, std::int64_t num) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(num));
  for (std::int64_t i = 0; i < num; ++i) values[static_cast<std::size_t>(i)] = mark(rank, i);
  return values;
}

constexpr std::int64_t kWidth = 5;

/// Kind of group, number of ranks, rows of the largest rank. 30000 rows of 40 bytes are more than a
/// staging half.
class CollectivesTest : public ::testing::TestWithParam<std::tuple<GroupKind, int, std::int64_t>> {
 protected:
  int num_ranks() const { return std::get<1>(GetParam()); }
  std::int64_t max_rows() const { return std::get<2>(GetParam()); }
  void spawn(const std::function<void(Communicator&)>& body) const {
    spawn_ranks(std::get<0>(GetParam()), num_ranks(), body);
  }
  /// Uneven: rank 1 has none, the others between half and all.
  std::int64_t rows_of(int rank) const {
    return rank == 1 ? 0 : max_rows() - (rank * max_rows()) / (2 * num_ranks());
  }
  Counts counts() const {
    Counts result;
    for (int rank = 0; rank < num_ranks(); ++rank) result.push_back(rows_of(rank));
    return result;
  }
};

TEST_P(CollectivesTest, AllGatherVPutsTheRowsOfEveryRankInRankOrder) {
  const Counts rows = counts();
  std::vector<std::int64_t> expected;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const auto part = marks(rank, rows_of(rank) * kWidth);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  const std::int64_t sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  spawn([&](Communicator& comm) {
    auto send = marks(comm.rank(), rows_of(comm.rank()) * kWidth);
    std::vector<std::int64_t> recv(expected.size(), -1);
    comm.all_gather_v(view(send, DType::kInt64, rows_of(comm.rank()), kWidth),
                      view(recv, DType::kInt64, sum, kWidth), rows);
    EXPECT_EQ(recv, expected);
    comm.close();
  });
}

TEST_P(CollectivesTest, AllGatherVMayTakeItsRowsFromTheirPlaceInTheResult) {
  const Counts rows(static_cast<std::size_t>(num_ranks()), max_rows());
  spawn([&](Communicator& comm) {
    const std::int64_t part = max_rows() * kWidth;
    std::vector<std::int64_t> recv(static_cast<std::size_t>(num_ranks() * part), -1);
    const auto own = marks(comm.rank(), part);
    std::copy(own.begin(), own.end(), recv.begin() + comm.rank() * part);
    const TensorView send(static_cast<void*>(recv.data() + comm.rank() * part), DType::kInt64,
                          {max_rows(), kWidth});
    comm.all_gather_v(send, view(recv, DType::kInt64, num_ranks() * max_rows(), kWidth), rows);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const auto theirs = marks(rank, part);
      EXPECT_TRUE(std::equal(theirs.begin(), theirs.end(), recv.begin() + rank * part));
    }
    comm.close();
  });
}

TEST_P(CollectivesTest, AllToAllVDeliversEachBlockToItsRank) {
  // Rank s sends rows_of(s) rows, one fewer for odd destinations.
  const auto num = [&](int from, int to) {
    return std::max<std::int64_t>(0, rows_of(from) / num_ranks() - to % 2);
  };
  spawn([&](Communicator& comm) {
    Counts out, in;
    std::vector<std::int64_t> send, expected;
    for (int peer = 0; peer < num_ranks(); ++peer) {
      out.push_back(num(comm.rank(), peer));
      in.push_back(num(peer, comm.rank()));
      const auto block = marks(comm.rank() * 100 + peer, out.back() * kWidth);
      send.insert(send.end(), block.begin(), block.end());
      const auto theirs = marks(peer * 100 + comm.rank(), in.back() * kWidth);
      expected.insert(expected.end(), theirs.begin(), theirs.end());
    }
    std::vector<std::int64_t> recv(expected.size(), -1);
    const auto sent = static_cast<std::int64_t>(send.size()) / kWidth;
    const auto received = static_cast<std::int64_t>(recv.size()) / kWidth;
    comm.all_to_all_v(view(send, DType::kInt64, sent, kWidth),
                      view(recv, DType::kInt64, received, kWidth), out, in);
    EXPECT_EQ(recv, expected);
    comm.close();
  });
}

TEST_P(CollectivesTest, AllToAllTransposesEqualBlocks) {
  const std::int64_t block = max_rows() * kWidth;
  spawn([&](Communicator& comm) {
    std::vector<std::int64_t> send, expected;
    for (int peer = 0; peer < num_ranks(); ++peer) {
      const auto mine = marks(comm.rank() * 100 + peer, block);
      send.insert(send.end(), mine.begin(), mine.end());
      const auto theirs = marks(peer * 100 + comm.rank(), block);
      expected.insert(expected.end(), theirs.begin(), theirs.end());
    }
    std::vector<std::int64_t> recv(expected.size(), -1);
    comm.all_to_all(view(send, DType::kInt64, num_ranks() * max_rows(), kWidth),
                    view(recv, DType::kInt64, num_ranks() * max_rows(), kWidth));
    EXPECT_EQ(recv, expected);
    comm.close();
  });
}

TEST_P(CollectivesTest, BroadcastGivesEveryRankTheRootsTensor) {
  const int root = num_ranks() - 1;
  const auto expected = marks(root, max_rows() * kWidth);
  spawn([&](Communicator& comm) {
    auto tensor = marks(comm.rank(), max_rows() * kWidth);
    comm.broadcast(view(tensor, DType::kInt64, max_rows(), kWidth), root);
    EXPECT_EQ(tensor, expected);
    comm.close();
  });
}

TEST_P(CollectivesTest, AllReduceWrapsIntegersAndMayWorkInPlace) {
  constexpr std::int64_t kBig = INT64_MAX - 10;
  spawn([&](Communicator& comm) {
    const auto size = static_cast<std::size_t>(max_rows() * kWidth);
    std::vector<std::int64_t> values(size, kBig + comm.rank());
    comm.all_reduce(view(values, DType::kInt64, max_rows(), kWidth),
                    view(values, DType::kInt64, max_rows(), kWidth));
    std::uint64_t expected = 0;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      expected += static_cast<std::uint64_t>(kBig + rank);
    }
    EXPECT_EQ(values, std::vector<std::int64_t>(size, static_cast<std::int64_t>(expected)));
    comm.close();
  });
}

TEST_P(CollectivesTest, ReduceScatterVSumsFloatsInRankOrder) {
  const Counts rows = counts();
  const std::int64_t sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  // Large and small: the order of the additions shows in the bits.
  const auto value = [](int rank, std::int64_t place) {
    return std::ldexp(1.0F + static_cast<float>(place % 97) / 97.0F, (rank * 11) % 30);
  };
  spawn([&](Communicator& comm) {
    std::vector<float> send(static_cast<std::size_t>(sum * kWidth));
    for (std::size_t i = 0; i < send.size(); ++i) {
      send[i] = value(comm.rank(), static_cast<std::int64_t>(i));
    }
    std::vector<float> recv(static_cast<std::size_t>(rows_of(comm.rank()) * kWidth), -1.0F);
    comm.reduce_scatter_v(view(send, DType::kFloat32, sum, kWidth),
                          view(recv, DType::kFloat32, rows_of(comm.rank()), kWidth), rows);
    const std::int64_t first =
        std::accumulate(rows.begin(), rows.begin() + comm.rank(), std::int64_t{0}) * kWidth;
    for (std::size_t i = 0; i < recv.size(); ++i) {
      float total = 0.0F;
      for (int rank = 0; rank < num_ranks(); ++rank) {
        total += value(rank, first + static_cast<std::int64_t>(i));
      }
      ASSERT_EQ(recv[i], total) << "element " << i;
    }
    comm.close();
  });
}

TEST_P(CollectivesTest, AllGatherBytesTakesAnyLengths) {
  const auto length = [&](int rank) { return static_cast<std::size_t>(rows_of(rank) * 41 + rank); };
  spawn([&](Communicator& comm) {
    const Communicator::Bytes own(length(comm.rank()), static_cast<std::byte>(comm.rank() + 1));
    const auto gathered = comm.all_gather_bytes(own);
    ASSERT_EQ(gathered.size(), static_cast<std::size_t>(num_ranks()));
    for (int rank = 0; rank < num_ranks(); ++rank) {
      EXPECT_EQ(gathered[static_cast<std::size_t>(rank)],
                Communicator::Bytes(length(rank), static_cast<std::byte>(rank + 1)));
    }
    comm.close();
  });
}

std::string name_of_case(
    const ::testing::TestParamInfo<std::tuple<GroupKind, int, std::int64_t>>& info) {
  return std::string(name_of(std::get<0>(info.param))) + "Ranks" +
         std::to_string(std::get<1>(info.param)) + "Rows" + std::to_string(std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Threads, CollectivesTest,
                         ::testing::Combine(::testing::Values(GroupKind::kThreads),
                                            ::testing::Values(1, 2, 4, 7),
                                            ::testing::Values(0, 1, 37, 30'000)),
                         name_of_case);
// 8000 rows, too, are more than a staging half.
INSTANTIATE_TEST_SUITE_P(Loopback, CollectivesTest,
                         ::testing::Combine(::testing::Values(GroupKind::kLoopback),
                                            ::testing::Values(1, 2, 5),
                                            ::testing::Values(0, 37, 8'000)),
                         name_of_case);

class AllReduceTest : public ::testing::TestWithParam<std::tuple<GroupKind, DType>> {};

TEST_P(AllReduceTest, SumsInFloat32AndRoundsOnce) {
  const auto kind = std::get<0>(GetParam());  // bindings cannot be captured
  const DType dtype = std::get<1>(GetParam());
  const auto encode = [&](float value) {
    return dtype == DType::kFloat16 ? base::float16_from_float(value)
                                    : base::bfloat16_from_float(value);
  };
  const auto decode = [&](std::uint16_t bits) {
    return dtype == DType::kFloat16 ? base::float_from_float16(bits)
                                    : base::float_from_bfloat16(bits);
  };
  constexpr std::int64_t kNum = 1001;
  const auto value = [&](int rank, std::int64_t i) {
    return encode(static_cast<float>(i) * 0.37F + static_cast<float>(rank) * 13.0F);
  };
  spawn_ranks(kind, 4, [&](Communicator& comm) {
    std::vector<std::uint16_t> values;
    for (std::int64_t i = 0; i < kNum; ++i) values.push_back(value(comm.rank(), i));
    comm.all_reduce(view(values, dtype, kNum, 1), view(values, dtype, kNum, 1));
    for (std::int64_t i = 0; i < kNum; ++i) {
      float total = 0.0F;
      for (int rank = 0; rank < 4; ++rank) total += decode(value(rank, i));
      ASSERT_EQ(values[static_cast<std::size_t>(i)], encode(total)) << "element " << i;
    }
    comm.close();
  });
}

INSTANTIATE_TEST_SUITE_P(Types, AllReduceTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kGroupKinds),
                                            ::testing::Values(DType::kFloat16, DType::kBFloat16)));

class GroupKindTest : public ::testing::TestWithParam<GroupKind> {};

TEST_P(GroupKindTest, NoRankLeavesABarrierBeforeAllHaveCome) {
  std::atomic<int> num_arrived{0};
  spawn_ranks(GetParam(), 4, [&](Communicator& comm) {
    for (int round = 1; round <= 500; ++round) {
      num_arrived.fetch_add(1, std::memory_order_relaxed);
      comm.barrier();
      ASSERT_GE(num_arrived.load(std::memory_order_relaxed), 4 * round);
      comm.barrier();
    }
    comm.close();
  });
}

TEST_P(GroupKindTest, ManyStepsOfChangingKindsNeverMixTheirData) {
  spawn_ranks(GetParam(), 3, [&](Communicator& comm) {
    for (int step = 0; step < 400; ++step) {
      std::vector<std::int64_t> value{comm.rank() + step};
      std::vector<std::int64_t> sum{0};
      comm.all_reduce(view(value, DType::kInt64, 1, 1), view(sum, DType::kInt64, 1, 1));
      ASSERT_EQ(sum[0], 3 + 3 * step);
      std::vector<std::int64_t> all(3);
      comm.all_gather_v(view(value, DType::kInt64, 1, 1), view(all, DType::kInt64, 3, 1),
                        {1, 1, 1});
      ASSERT_EQ(all, (std::vector<std::int64_t>{step, step + 1, step + 2}));
      if (step % 3 == comm.rank()) std::this_thread::yield();
    }
    comm.close();
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, GroupKindTest, ::testing::ValuesIn(testing::kGroupKinds));

}  // namespace
}  // namespace fanfold
