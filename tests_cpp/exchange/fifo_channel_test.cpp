// SPDX-License-Identifier: Apache-2.0
#include "exchange/fifo_channel.h"

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "support/random_bits.h"
#include "support/same_bytes.h"
#include "support/sanitizer.h"

namespace fanfold::exchange {
namespace {

using testing::Bytes;
using testing::random_bytes;
using testing::RandomBits;
using testing::same_bytes;

void copy(std::byte* target, const std::byte* source, std::int64_t bytes) {
  std::memcpy(target, source, static_cast<std::size_t>(bytes));
}

/// Both ends of one stream, and the memory between them.
struct Stream {
  explicit Stream(std::int64_t ring_bytes, std::uint64_t first = 0)
      : ring(static_cast<std::size_t>(ring_bytes)),
        writer(ring.data(), ring_bytes, &at_reader, &at_writer, first),
        reader(ring.data(), ring_bytes, &at_reader, &at_writer, first) {}

  /// Writes as much of `data` as there is room for; returns how much.
  std::int64_t write_some(const std::byte* data, std::int64_t bytes) {
    const std::int64_t now = std::min(bytes, writer.free_bytes(bytes));
    writer.write(data, now, &copy);
    writer.publish();
    return now;
  }
  std::int64_t read_some(std::byte* data, std::int64_t bytes) {
    const std::int64_t now = std::min(bytes, reader.available(bytes));
    reader.read(data, now);
    reader.publish();
    return now;
  }
  void restart(std::uint32_t generation) {
    writer.restart(generation);
    reader.restart(generation);
  }

  Bytes ring;
  FifoLine at_reader{};
  FifoLine at_writer{};
  FifoWriter writer;
  FifoReader reader;
};

/// Moves `data` through in pieces of random size, now the one end and now the other.
Bytes move_through(Stream& stream, const Bytes& data, std::uint64_t seed, std::int64_t max_piece) {
  RandomBits random(seed);
  Bytes got(data.size());
  const auto size = static_cast<std::int64_t>(data.size());
  std::int64_t written = 0;
  std::int64_t read = 0;
  while (read < size) {
    const std::int64_t piece = 1 + random.below(max_piece);
    if (random.below(2) == 0) {
      written += stream.write_some(data.data() + written, std::min(piece, size - written));
    } else {
      read += stream.read_some(got.data() + read, std::min(piece, written - read));
    }
  }
  return got;
}

TEST(FifoChannelTest, BytesComeOutAsTheyWentIn) {
  for (const std::int64_t ring_bytes : {1, 2, 7, 64, 100, 4096}) {
    Stream stream(ring_bytes);
    const Bytes data = random_bytes(20 * ring_bytes + 13, 1);
    EXPECT_TRUE(same_bytes(move_through(stream, data, 2, 2 * ring_bytes), data)) << ring_bytes;
  }
}

TEST(FifoChannelTest, NothingIsSeenBeforeItIsPublished) {
  Stream stream(64);
  const Bytes data = random_bytes(10, 1);
  stream.writer.write(data.data(), 10, &copy);
  EXPECT_EQ(stream.reader.available(1), 0);
  stream.writer.publish();
  EXPECT_EQ(stream.reader.available(1), 10);
}

TEST(FifoChannelTest, RoomComesBackWhenTheReaderPublishes) {
  Stream stream(64);
  const Bytes data = random_bytes(64, 1);
  EXPECT_EQ(stream.writer.free_bytes(1), 64);
  stream.writer.write(data.data(), 64, &copy);
  stream.writer.publish();
  EXPECT_EQ(stream.writer.free_bytes(1), 0);
  Bytes got(64);
  ASSERT_EQ(stream.reader.available(30), 64);
  stream.reader.read(got.data(), 30);
  EXPECT_EQ(stream.writer.free_bytes(1), 0);
  stream.reader.publish();
  EXPECT_EQ(stream.writer.free_bytes(1), 30);
  EXPECT_EQ(stream.reader.available(64), 34);
}

TEST(FifoChannelTest, KnowsMoreThanItLooksUpOnlyWhenItMust) {
  Stream stream(64);
  const Bytes data = random_bytes(20, 1);
  stream.write_some(data.data(), 10);
  EXPECT_EQ(stream.reader.available(5), 10);
  stream.write_some(data.data() + 10, 10);
  EXPECT_EQ(stream.reader.available(5), 10) << "what is known is enough";
  EXPECT_EQ(stream.reader.available(11), 20);
}

TEST(FifoChannelTest, PositionsPassTheirLargestValue) {
  for (const std::uint64_t before : {0U, 1U, 50U, 5000U}) {
    Stream stream(100, FifoPosition::kMask - before);
    const Bytes data = random_bytes(10000, before);
    EXPECT_TRUE(same_bytes(move_through(stream, data, 3, 150), data)) << before;
  }
}

TEST(FifoChannelTest, ARestartLeavesNothingOfTheStreamBefore) {
  Stream stream(100);
  RandomBits random(1);
  for (std::uint32_t generation = 1; generation < 200; ++generation) {
    const Bytes lost = random_bytes(1 + random.below(100), generation);
    stream.write_some(lost.data(), static_cast<std::int64_t>(lost.size()));
    Bytes got(lost.size());
    stream.read_some(got.data(), random.below(static_cast<std::int64_t>(lost.size())));
    stream.restart(generation);
    EXPECT_EQ(stream.reader.available(1), 0);
    EXPECT_EQ(stream.writer.free_bytes(101), 100);
    const Bytes data = random_bytes(500, generation);
    ASSERT_TRUE(same_bytes(move_through(stream, data, generation, 100), data)) << generation;
  }
}

// One end may be through with a reset, and at work, while the other is still in it.
TEST(FifoChannelTest, AnEndThatRestartsLaterFindsTheNewStream) {
  Stream stream(100);
  const Bytes lost = random_bytes(60, 1);
  const Bytes data = random_bytes(80, 2);
  Bytes got(80);
  stream.write_some(lost.data(), 60);
  stream.read_some(got.data(), 25);

  stream.writer.restart(1);
  ASSERT_EQ(stream.write_some(data.data(), 80), 80);
  EXPECT_EQ(stream.writer.free_bytes(100), 20) << "the reader's word is of the last generation";
  stream.reader.restart(1);
  ASSERT_EQ(stream.read_some(got.data(), 80), 80);
  EXPECT_TRUE(same_bytes(got, data));

  ASSERT_EQ(stream.write_some(lost.data(), 60), 60);
  stream.reader.restart(2);
  EXPECT_EQ(stream.reader.available(1), 0) << "the writer's word is of the last generation";
  stream.reader.publish();
  stream.writer.restart(2);
  ASSERT_EQ(stream.write_some(data.data(), 80), 80);
  ASSERT_EQ(stream.read_some(got.data(), 80), 80);
  EXPECT_TRUE(same_bytes(got, data));
}

TEST(FifoChannelTest, GenerationsMayPassTheirSixteenBits) {
  Stream stream(64);
  for (const std::uint32_t generation : {0xfffeU, 0xffffU, 0x10000U, 0x10001U, 0xffffffffU}) {
    stream.restart(generation);
    const Bytes data = random_bytes(300, generation);
    EXPECT_TRUE(same_bytes(move_through(stream, data, generation, 64), data)) << generation;
  }
}

/// Two threads with random pauses, over `rounds` of random size; each round is compared.
void run_threads(std::int64_t ring_bytes, std::int64_t max_round, int rounds, std::uint64_t first) {
  Stream stream(ring_bytes, first);
  const auto data_of = [&](int round) {
    RandomBits random(testing::mix(7, static_cast<std::uint64_t>(round)));
    return random_bytes(1 + random.below(max_round), random.next());
  };
  const auto pause = [](RandomBits& random) {
    for (std::int64_t i = random.below(4); i > 2; --i) std::this_thread::yield();
  };
  std::thread writer([&] {
    RandomBits random(11);
    for (int round = 0; round < rounds; ++round) {
      const Bytes data = data_of(round);
      const auto size = static_cast<std::int64_t>(data.size());
      for (std::int64_t done = 0; done < size; pause(random)) {
        const std::int64_t piece = std::min(1 + random.below(2 * ring_bytes), size - done);
        done += stream.write_some(data.data() + done, piece);
      }
    }
  });
  RandomBits random(12);
  for (int round = 0; round < rounds; ++round) {
    const Bytes data = data_of(round);
    const auto size = static_cast<std::int64_t>(data.size());
    Bytes got(data.size());
    for (std::int64_t done = 0; done < size; pause(random)) {
      const std::int64_t piece = std::min(1 + random.below(2 * ring_bytes), size - done);
      done += stream.read_some(got.data() + done, piece);
    }
    EXPECT_TRUE(same_bytes(got, data)) << "round " << round;
  }
  writer.join();
}

TEST(FifoChannelTest, ThreadsPassManyRoundsOfRandomSizes) {
  const int rounds = testing::kIsSanitizer ? 60 : 600;
  run_threads(256, 1000, rounds, 0);
  run_threads(4096, 10000, rounds, FifoPosition::kMask - 12345);
  run_threads(1 << 16, 1 << 17, rounds / 10, 0);
}

}  // namespace
}  // namespace fanfold::exchange
