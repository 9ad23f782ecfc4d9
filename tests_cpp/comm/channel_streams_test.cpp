// SPDX-License-Identifier: Apache-2.0
// Streams of bytes through a channel: of any length, also longer than a step, and what may still be
// read when the collective is over.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/channel.h"
#include "comm/thread_group.h"
#include "fanfold/error.h"
#include "gtest/gtest.h"

namespace fanfold::comm {
namespace {

using Incoming = Channel::Incoming;
using Outgoing = Channel::Outgoing;

base::Deadline soon() { return base::Deadline(std::chrono::seconds(60)); }

/// Calls `body` for each rank of a group of threads, with a channel of its own.
void on_channels(int num_ranks, const std::function<void(int rank, Channel& channel)>& body) {
  const auto groups = ThreadGroup::create(num_ranks);
  const Windows windows = ThreadGroup::make_windows(num_ranks, Channel::window_bytes(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Channel channel(*groups[static_cast<std::size_t>(rank)], windows, "test");
      body(rank, channel);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Byte `at` of the stream from one rank to another.
std::byte mark(int from, int to, std::int64_t at) {
  return static_cast<std::byte>((from * 31 + to * 7 + at + at / 251) & 0xff);
}

std::vector<std::byte> stream(int from, int to, std::int64_t length) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(length));
  for (std::int64_t at = 0; at < length; ++at) {
    bytes[static_cast<std::size_t>(at)] = mark(from, to, at);
  }
  return bytes;
}

/// Collects the parts of one stream, which must come in order and without gaps.
void take_part(const Incoming& part, std::vector<std::byte>& bytes) {
  if (part.bytes == 0) return;
  EXPECT_EQ(part.begin, static_cast<std::int64_t>(bytes.size()));
  EXPECT_LE(part.begin + part.bytes, part.length);
  bytes.insert(bytes.end(), part.data, part.data + part.bytes);
}

struct Case {
  int num_ranks;
  std::int64_t longest;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.num_ranks << " ranks, " << c.longest << " bytes";
}

class ChannelStreamTest : public ::testing::TestWithParam<Case> {
 protected:
  static int num_ranks() { return GetParam().num_ranks; }
  /// Uneven, and 0 from rank 1.
  static std::int64_t length(int from, int to) {
    return from == 1 ? 0 : GetParam().longest / (1 + (from + to) % 3);
  }
};

TEST_P(ChannelStreamTest, AllGatherBringsEveryStreamInOrder) {
  on_channels(num_ranks(), [](int rank, Channel& channel) {
    for (int round = 0; round < 3; ++round) {
      const auto mine = stream(rank, 0, length(rank, round));
      std::vector<std::vector<std::byte>> got(static_cast<std::size_t>(num_ranks()));
      int num_last = 0;
      channel.all_gather_stream(
          "all", length(rank, round),
          [&](const Outgoing& out) { out.copy(out.data, mine.data() + out.begin, out.bytes); },
          [&](const std::vector<Incoming>& parts) {
            for (std::size_t from = 0; from < got.size(); ++from) take_part(parts[from], got[from]);
            num_last += parts[0].is_last ? 1 : 0;
          },
          soon());
      EXPECT_EQ(num_last, 1);
      for (int from = 0; from < num_ranks(); ++from) {
        EXPECT_EQ(got[static_cast<std::size_t>(from)], stream(from, 0, length(from, round)));
      }
    }
  });
}

TEST_P(ChannelStreamTest, AllToAllBringsEachRankItsStreams) {
  on_channels(num_ranks(), [](int rank, Channel& channel) {
    Channel::Counts lengths;
    for (int to = 0; to < num_ranks(); ++to) {
      lengths.push_back(to == rank ? 0 : length(rank, to));
    }
    for (int round = 0; round < 3; ++round) {
      std::vector<std::vector<std::byte>> got(static_cast<std::size_t>(num_ranks()));
      channel.all_to_all_stream(
          "each", lengths,
          [&](int to, const Outgoing& out) {
            const auto whole = stream(rank, to, lengths[static_cast<std::size_t>(to)]);
            out.copy(out.data, whole.data() + out.begin, out.bytes);
          },
          [&](const std::vector<Incoming>& parts) {
            for (std::size_t from = 0; from < got.size(); ++from) take_part(parts[from], got[from]);
            EXPECT_EQ(parts[static_cast<std::size_t>(rank)].data, nullptr);
          },
          soon());
      for (int from = 0; from < num_ranks(); ++from) {
        if (from == rank) continue;
        EXPECT_EQ(got[static_cast<std::size_t>(from)], stream(from, rank, length(from, rank)));
      }
    }
  });
}

// What the last step brought may be read until the reader's next collective, while its peers go on.
TEST_P(ChannelStreamTest, TheLastPartStaysUntilTheNextCollective) {
  on_channels(num_ranks(), [](int rank, Channel& channel) {
    for (int round = 0; round < 6; ++round) {
      const int key = rank + round;
      const auto mine = stream(key, round, length(rank, round));
      std::vector<Incoming> last;
      channel.all_gather_stream(
          "all", length(rank, round),
          [&](const Outgoing& out) { out.copy(out.data, mine.data() + out.begin, out.bytes); },
          [&](const std::vector<Incoming>& parts) {
            if (parts[0].is_last) last = parts;
          },
          soon());
      if (rank == round % num_ranks()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      for (int from = 0; from < num_ranks(); ++from) {
        const Incoming& part = last[static_cast<std::size_t>(from)];
        const auto whole = stream(from + round, round, length(from, round));
        ASSERT_TRUE(std::equal(part.data, part.data + part.bytes, whole.begin() + part.begin));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, ChannelStreamTest,
                         ::testing::Values(Case{1, 5000}, Case{2, 0}, Case{2, 100}, Case{2, 20'000},
                                           Case{2, 3'000'000}, Case{3, 1'100'000},
                                           Case{5, 900'000}));

TEST(ChannelStreamRoomTest, AStreamOfThatManyBytesTakesOneStep) {
  on_channels(2, [](int, Channel& channel) {
    for (const std::int64_t more : {0, 1}) {
      int num_steps = 0;
      channel.all_gather_stream(
          "all", channel.stream_room() + more,
          [](const Outgoing& out) {
            std::memset(out.data, 1, static_cast<std::size_t>(out.bytes));
          },
          [&](const std::vector<Incoming>&) { ++num_steps; }, soon());
      EXPECT_EQ(num_steps, 1 + more);
    }
  });
}

TEST(ChannelStreamErrorTest, OtherCallsAreNamedAndARefusalOnAllRanksLeavesTheChannelUsable) {
  on_channels(3, [](int rank, Channel& channel) {
    const auto put = [](const Outgoing& out) {
      std::memset(out.data, 2, static_cast<std::size_t>(out.bytes));
    };
    const auto nothing = [](const std::vector<Incoming>&) {};
    try {
      channel.all_gather_stream(rank == 2 ? "combine" : "dispatch", 8, put, nothing, soon());
      FAIL() << "expected InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(),
                   "test: call: expected the same on every rank, got dispatch on rank 0 and "
                   "combine on rank 2");
    }
    const auto refuse = [](const std::vector<Incoming>&) { throw InvalidArgument("refused"); };
    EXPECT_THROW(channel.all_gather_stream("dispatch", 8, put, refuse, soon()), InvalidArgument);
    channel.all_gather_stream("dispatch", 8, put, nothing, soon());
  });
}

}  // namespace
}  // namespace fanfold::comm
