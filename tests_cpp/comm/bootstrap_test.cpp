// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap.h"

#include <chrono>
#include <string>
#include <vector>

#include "comm/private_directory.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::spawn_ranks;
using Bytes = Communicator::Bytes;

/// What from_callbacks throws on each rank of two when `change` alters what the gather returns.
template <class Error, class Change>
void expect_error(Change change, const std::string& text) {
  spawn_ranks(2, [&](Communicator& outer) {
    const auto gather = [&](const Bytes& bytes) {
      auto all = outer.all_gather_bytes(bytes);
      change(outer.rank(), all);
      return all;
    };
    const auto barrier = [] { ADD_FAILURE() << "expected no barrier after an error"; };
    try {
      (void)Communicator::from_callbacks(outer.rank(), 2, gather, barrier, seconds(20));
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
    outer.close();
  });
}

TEST(BootstrapTest, TheCallersCollectivesBringTheRanksTogether) {
  spawn_ranks(3, [](Communicator& outer) {
    int num_gathers = 0;
    int num_barriers = 0;
    Communicator comm = Communicator::from_callbacks(
        outer.rank(), 3,
        [&](const Bytes& bytes) {
          ++num_gathers;
          return outer.all_gather_bytes(bytes);
        },
        [&] {
          ++num_barriers;
          outer.barrier();
        },
        seconds(20));
    EXPECT_EQ(num_gathers, 1);
    EXPECT_EQ(num_barriers, 1);
    EXPECT_EQ(comm.kind(), "processes");
    EXPECT_EQ(comm.rank(), outer.rank());
    comm.barrier();
    comm.close();
    outer.close();
  });
}

TEST(BootstrapTest, RanksOnDifferentHostsAreRefusedOnEveryRank) {
  const auto change = [](int rank, std::vector<Bytes>& all) {
    all[static_cast<std::size_t>(1 - rank)][7] ^= std::byte{1};  // of the boot id
  };
  expect_error<Unsupported>(
      change, "from_callbacks: expected all ranks on one host, got rank 0 on host 'boot ");
}

TEST(BootstrapTest, AGatherThatLosesARankIsRefused) {
  const auto change = [](int, std::vector<Bytes>& all) { all.pop_back(); };
  expect_error<InvalidArgument>(change, "all_gather: expected the bytes of 2 ranks in rank order");
}

TEST(BootstrapTest, AGatherThatReturnsOtherBytesIsRefused) {
  const auto change = [](int rank, std::vector<Bytes>& all) {
    all[static_cast<std::size_t>(1 - rank)].clear();
  };
  expect_error<InvalidArgument>(change, "all_gather: expected what the ranks gave");
}

TEST(BootstrapTest, CallbacksThatAreMissingAreRefused) {
  EXPECT_THROW((void)Communicator::from_callbacks(0, 1, {}, [] {}), InvalidArgument);
  const auto gather = [](const Bytes& bytes) { return std::vector<Bytes>{bytes}; };
  EXPECT_THROW((void)Communicator::from_callbacks(0, 1, gather, {}), InvalidArgument);
  EXPECT_THROW((void)Communicator::from_callbacks(1, 1, gather, [] {}), InvalidArgument);
}

}  // namespace
}  // namespace fanfold
