// SPDX-License-Identifier: Apache-2.0

// Communicators of MPI's ranks: what carries the data, collectives, failures, and the way back.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "fanfold/all_to_all.h"
#include "fanfold/error.h"
#include "mpi/mpi_ranks.h"
#include "support/expect_error.h"
#include "support/random_bits.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_error;
using testing::run_mpi_rank;
using testing::world_rank;
using testing::world_size;
using Counts = std::vector<std::int64_t>;
using Values = std::vector<std::int64_t>;

constexpr std::int64_t kWidth = 5;

TensorView view(Values& values) {
  return TensorView(static_cast<void*>(values.data()), DType::kInt64,
                    {static_cast<std::int64_t>(values.size()) / kWidth, kWidth});
}

/// `num_rows` rows that tell where they came from.
Values rows(int rank, int block, std::int64_t num_rows) {
  Values values(static_cast<std::size_t>(num_rows * kWidth));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = (rank * 100 + block) * 1'000'003LL + static_cast<std::int64_t>(i) * 7 + 1;
  }
  return values;
}

void append(Values& to, const Values& more) { to.insert(to.end(), more.begin(), more.end()); }

class FromMpiTest : public testing::MpiTest {
 protected:
  static void run(const std::function<void(Communicator&)>& body) {
    run_mpi_rank(world_size(), body);
  }
};

/// One pass over every collective, with `num` rows in the largest block; rank 1 has none.
void run_collectives(Communicator& comm, std::int64_t num) {
  const int num_ranks = comm.num_ranks();
  const int rank = comm.rank();
  Counts counts;
  for (int r = 0; r < num_ranks; ++r) counts.push_back(r == 1 ? 0 : num - r % num);
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const std::int64_t own = counts[static_cast<std::size_t>(rank)];

  Values all;
  for (int r = 0; r < num_ranks; ++r) append(all, rows(r, 0, counts[static_cast<std::size_t>(r)]));
  Values send = rows(rank, 0, own);
  Values recv(all.size(), -1);
  comm.all_gather_v(view(send), view(recv), counts);
  EXPECT_TRUE(recv == all) << "all_gather_v of " << num;

  // Every rank gives the same rows times its number plus one.
  const std::int64_t factor = num_ranks * (num_ranks + 1) / 2;
  Values part = rows(0, 3, total);
  for (std::int64_t& value : part) value *= rank + 1;
  Values sum(static_cast<std::size_t>(own * kWidth), -1);
  comm.reduce_scatter_v(view(part), view(sum), counts);
  const std::int64_t first =
      std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0}) * kWidth;
  const Values whole = rows(0, 3, total);
  bool is_right = true;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    is_right = is_right && sum[i] == factor * whole[static_cast<std::size_t>(first) + i];
  }
  EXPECT_TRUE(is_right) << "reduce_scatter_v of " << num;
  comm.all_reduce(view(part), view(part));
  is_right = true;
  for (std::size_t i = 0; i < part.size(); ++i) is_right = is_right && part[i] == factor * whole[i];
  EXPECT_TRUE(is_right) << "all_reduce of " << num;

  Values out;
  Values expected;
  Counts send_counts;
  Counts recv_counts;
  for (int r = 0; r < num_ranks; ++r) {
    send_counts.push_back((num + r) / (rank + 1));
    recv_counts.push_back((num + rank) / (r + 1));
    append(out, rows(rank, r, send_counts.back()));
    append(expected, rows(r, rank, recv_counts.back()));
  }
  Values in(expected.size(), -1);
  comm.all_to_all_v(view(out), view(in), send_counts, recv_counts);
  EXPECT_TRUE(in == expected) << "all_to_all_v of " << num;
  out.clear();
  expected.clear();
  for (int r = 0; r < num_ranks; ++r) {
    append(out, rows(rank, r, num));
    append(expected, rows(r, rank, num));
  }
  in.assign(expected.size(), -1);
  comm.all_to_all(view(out), view(in));
  EXPECT_TRUE(in == expected) << "all_to_all of " << num;

  Values tensor = rows(rank, 9, num);
  comm.broadcast(view(tensor), num_ranks - 1);
  EXPECT_TRUE(tensor == rows(num_ranks - 1, 9, num)) << "broadcast of " << num;
  const Communicator::Bytes bytes(static_cast<std::size_t>(num * rank), std::byte{42});
  const std::vector<Communicator::Bytes> gathered = comm.all_gather_bytes(bytes);
  for (int r = 0; r < num_ranks; ++r) {
    EXPECT_TRUE(gathered[static_cast<std::size_t>(r)] ==
                Communicator::Bytes(static_cast<std::size_t>(num * r), std::byte{42}));
  }
  comm.barrier();
}

TEST_F(FromMpiTest, EveryCollectiveGivesEveryRankItsRows) {
  run([](Communicator& comm) {
    EXPECT_EQ(comm.rank(), world_rank());
    EXPECT_EQ(comm.num_ranks(), world_size());
    EXPECT_FALSE(comm.shares_memory());
    EXPECT_EQ(comm.hosts(), std::vector<int>(static_cast<std::size_t>(world_size()), 0));
    for (const std::int64_t num : {1, 3, 100, 20'000}) run_collectives(comm, num);
    testing::RandomBits random(static_cast<std::uint64_t>(world_rank()));
    for (int round = 0; round < 10; ++round) {
      if (random.below(3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
      run_collectives(comm, 1 + round * round);
    }
  });
}

/// What MPI moves only within calls of its sender has left when a collective returns.
TEST_F(FromMpiTest, ARankThatComputesAfterACollectiveKeepsNobodyInIt) {
  run([](Communicator& comm) {
    for (const int busy : {0, 1}) {
      Values values = rows(comm.rank(), 0, 100'000);
      comm.barrier();
      const std::int64_t start = base::now_ns();
      comm.all_reduce(view(values), view(values));
      if (comm.rank() == busy) {
        std::this_thread::sleep_for(seconds(2));
      } else {
        EXPECT_LT(base::now_ns() - start, 1'900'000'000);
      }
      comm.barrier();
    }
  });
}

TEST_F(FromMpiTest, RanksOfOneHostShareMemoryUnlessToldOtherwise) {
  for (const TransportUse use : {TransportUse::kAuto, TransportUse::kSharedMemory}) {
    Communicator comm = from_mpi(MPI_COMM_WORLD, use, seconds(10));
    EXPECT_EQ(comm.kind(), "processes");
    EXPECT_TRUE(comm.shares_memory());
    EXPECT_EQ(comm.rank(), world_rank());
    run_collectives(comm, 50);
    comm.close();
  }
}

TEST_F(FromMpiTest, RanksOfSeveralHostsUseMpi) {
  ::setenv("FANFOLD_HOST_ID", world_rank() < 2 ? "this one" : "that one", 1);
  Communicator comm = from_mpi(MPI_COMM_WORLD, TransportUse::kAuto, seconds(10));
  EXPECT_EQ(comm.kind(), "mpi");
  EXPECT_EQ(comm.hosts(), (std::vector<int>{0, 0, 1, 1}));
  run_collectives(comm, 50);
  comm.close();
  expect_error<Unsupported>({"this one", "that one"}, [] {
    from_mpi(MPI_COMM_WORLD, TransportUse::kSharedMemory, seconds(10));
  });
  ::unsetenv("FANFOLD_HOST_ID");
}

TEST_F(FromMpiTest, RanksAreNumberedAsInTheCommunicatorGiven) {
  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -world_rank(), &reversed);
  {
    Communicator comm = from_mpi(reversed, TransportUse::kAlways, seconds(10));
    EXPECT_EQ(comm.rank(), world_size() - 1 - world_rank());
    MPI_Comm_free(&reversed);  // the duplicate lives on
    run_collectives(comm, 10);
    comm.close();
  }
}

TEST_F(FromMpiTest, TheCallersErrorHandlerStays) {
  MPI_Errhandler before = MPI_ERRHANDLER_NULL;
  MPI_Errhandler after = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
  run([](Communicator& comm) { comm.barrier(); });
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &after);
  EXPECT_EQ(before, after);
  EXPECT_NE(after, MPI_ERRORS_RETURN);
}

TEST_F(FromMpiTest, SplitGroupsWorkBesideTheWholeOne) {
  run([](Communicator& comm) {
    std::optional<Communicator> half = comm.split(comm.rank() % 2, -comm.rank());
    ASSERT_TRUE(half.has_value());
    EXPECT_EQ(half->num_ranks(), (comm.num_ranks() + 1 - comm.rank() % 2) / 2);
    for (int round = 0; round < 5; ++round) {
      run_collectives(*half, 30);
      run_collectives(comm, 7);
    }
    half->close();
    std::optional<Communicator> some = comm.split(comm.rank() == 0 ? -1 : 0, 0);
    EXPECT_EQ(some.has_value(), comm.rank() != 0);
    if (some) some->close();
    comm.barrier();
  });
}

TEST_F(FromMpiTest, AGroupOutlivesTheOneItWasSplitFrom) {
  Communicator comm = from_mpi(MPI_COMM_WORLD, TransportUse::kAlways, seconds(10));
  std::optional<Communicator> some = comm.split(comm.rank() == 3 ? -1 : 0, 0);
  const std::int64_t begin = base::now_ns();
  comm.close();
  EXPECT_EQ(some.has_value(), world_rank() != 3);
  if (!some) {
    // The others hold a group without this rank: it does not wait for that.
    EXPECT_LT(base::now_ns() - begin, 3'000'000'000);
  } else {
    run_collectives(*some, 100);
    std::this_thread::sleep_for(milliseconds(400));
    run_collectives(*some, 100);
    some->close();
  }
}

TEST_F(FromMpiTest, AnAbortReachesWaitingRanksWithItsReason) {
  run([](Communicator& comm) {
    for (int round = 0; round < 5; ++round) {
      if (comm.rank() == 2) {
        std::this_thread::sleep_for(milliseconds(20));
        comm.abort("out of tokens");
        expect_error<PeerAborted>({"out of tokens"}, [&] { comm.barrier(); });
      } else {
        const std::int64_t begin = base::now_ns();
        try {
          comm.barrier();
          ADD_FAILURE() << "nothing was thrown";
        } catch (const PeerAborted& error) {
          EXPECT_EQ(error.rank(), 2);
          EXPECT_EQ(error.reason(), "out of tokens");
        }
        EXPECT_LT(base::now_ns() - begin, 2'000'000'000);
      }
      comm.reset();
      run_collectives(comm, 5);
    }
  });
}

TEST_F(FromMpiTest, ALateRankIsNamedAndAResetBringsTheGroupBack) {
  run([](Communicator& comm) {
    for (int round = 0; round < 3; ++round) {
      if (comm.rank() == 1) {
        std::this_thread::sleep_for(milliseconds(300));
      } else {
        try {
          comm.barrier(milliseconds(60));
          ADD_FAILURE() << "nothing was thrown";
        } catch (const PeerTimeout& error) {
          EXPECT_EQ(error.rank(), 1) << error.what();
        }
        std::this_thread::sleep_for(milliseconds(80));  // a reset ends the waits of the others
      }
      comm.reset();
      run_collectives(comm, 5);
    }
  });
}

TEST_F(FromMpiTest, StrategiesThatNeedSharedMemoryAreRefusedAndNeverChosen) {
  run([](Communicator& comm) {
    AllToAllConfig config;
    config.num_experts = 8;
    config.top_k = 2;
    config.max_tokens_per_rank = 4;
    config.hidden = 16;
    for (const Strategy strategy : {Strategy::kOneSided, Strategy::kLowLatency,
                                    Strategy::kHighThroughput, Strategy::kTwoSided}) {
      config.strategy = strategy;
      if (strategy == Strategy::kHighThroughput) config.layout = Layout::kFlat;
      if (strategy == Strategy::kLowLatency) config.layout = Layout::kExpertMajor;
      if (strategy == Strategy::kTwoSided) config.layout = Layout::kRankMajor;
      EXPECT_THROW(AllToAll(comm, config), Unsupported) << name_of(strategy);
    }
    config.strategy = Strategy::kAuto;
    AllToAll chosen(comm, config);
    const std::string name = chosen.choice().substr(0, chosen.choice().find(':'));
    EXPECT_TRUE(name == "broadcast" || name == "gather_scatter" || name == "batched") << name;
    chosen.close();
  });
}

/// A job of its own, which two_hosts.sh starts.
class MpiHostsTest : public testing::MpiTest {};

TEST_F(MpiHostsTest, RanksOfTwoHostsUseMpi) {
  Communicator comm = from_mpi(MPI_COMM_WORLD, TransportUse::kAuto, seconds(20));
  EXPECT_EQ(comm.kind(), "mpi");
  EXPECT_EQ(comm.hosts(), (std::vector<int>{0, 0, 1, 1}));
  for (const std::int64_t num : {1, 100, 20'000}) run_collectives(comm, num);
  comm.close();
  expect_error<Unsupported>(
      {"host"}, [] { from_mpi(MPI_COMM_WORLD, TransportUse::kSharedMemory, seconds(20)); });
}

TEST_F(FromMpiTest, ManyGroupsComeAndGo) {
  for (int round = 0; round < 6; ++round) {
    run([&](Communicator& comm) { run_collectives(comm, 1 + round); });
  }
}

}  // namespace
}  // namespace fanfold
