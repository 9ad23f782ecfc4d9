// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "comm/channel.h"
#include "comm/channel_layout.h"

namespace fanfold::comm {
namespace {

void copy_ordinary(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

/// The peers have read these lines of the staging before. From a core that shares this one's last
/// cache they come back fast, and peers then read what is put there from that cache; from a distant
/// core they come back at 2 GB/s, and stores past the cache are the faster ones. Measured on Zen 4,
/// two ranks near each other, a round of 32 rows of 4096 bytes: 50 us against 70 us. So what counts
/// is how fast the last ordinary stores were; an interruption may be mistaken for distance, which
/// costs little.
void Channel::put_timed(std::int64_t bytes, base::FunctionRef<void(Copy)> put) {
  constexpr std::int64_t kFewBytes = std::int64_t{16} << 10;
  constexpr std::int64_t kNearBytesPerNs = 3;
  constexpr int kFarPuts = 64;
  if (bytes <= kFewBytes) return put(&copy_ordinary);
  if (num_far_puts_ > 0) {
    --num_far_puts_;
    return put(kernels_.copy_streaming);
  }
  const std::int64_t start = base::now_ns();
  put(&copy_ordinary);
  if ((base::now_ns() - start) * kNearBytesPerNs > bytes) num_far_puts_ = kFarPuts;
}

std::int64_t Channel::stream_room() const noexcept {
  return (half_bytes_ - base::align_up(sizeof(Header), base::kCacheLine)) / 16 * 16;
}

void Channel::all_gather_stream(const char* name, std::int64_t length,
                                base::FunctionRef<void(const Outgoing&)> put,
                                base::FunctionRef<void(const std::vector<Incoming>&)> take,
                                base::Deadline deadline) {
  Call call{name, {}};
  call.length = length;
  call.stream_bytes = length;
  const auto check = [&] {
    std::int64_t longest = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      parts_[index(rank)].length = header(rank).length;
      longest = std::max(longest, header(rank).length);
    }
    return longest;
  };
  const auto fill = [&](std::byte* out, const Chunk& chunk) {
    const std::int64_t bytes = chunk.bytes_of(length);
    if (bytes == 0) return;
    put_timed(bytes, [&](Copy copy) { put({out, chunk.begin, bytes, copy}); });
  };
  const auto drain = [&](const Chunk& chunk) {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      Incoming& part = parts_[index(rank)];
      part = {staged(rank, chunk), chunk.begin, chunk.bytes_of(part.length), part.length,
              chunk.is_last};
    }
    take(parts_);
  };
  run(call, deadline, check, fill, drain);
}

void Channel::all_to_all_stream(const char* name, const Counts& lengths,
                                base::FunctionRef<void(int, const Outgoing&)> put,
                                base::FunctionRef<void(const std::vector<Incoming>&)> take,
                                base::Deadline deadline) {
  Call call{name, {}};
  call.counts = &lengths;
  call.stream_counts = &lengths;
  call.num_streams = std::max(1, num_ranks_ - 1);
  const auto check = [&] {
    std::int64_t longest = 0;
    for (int from = 0; from < num_ranks_; ++from) {
      parts_[index(from)].length = header_counts(from)[rank_];
      for (int to = 0; to < num_ranks_; ++to) longest = std::max(longest, header_counts(from)[to]);
    }
    return longest;
  };
  const auto fill = [&](std::byte* out, const Chunk& chunk) {
    for (int to = 0; to < num_ranks_; ++to) {
      const std::int64_t bytes = chunk.bytes_of(lengths[index(to)]);
      if (to == rank_ || bytes == 0) continue;
      std::byte* const place = out + stream_of(rank_, to) * chunk.room;
      put_timed(bytes, [&](Copy copy) { put(to, {place, chunk.begin, bytes, copy}); });
    }
  };
  const auto drain = [&](const Chunk& chunk) {
    for (int from = 0; from < num_ranks_; ++from) {
      Incoming& part = parts_[index(from)];
      const std::byte* data = from == rank_ ? nullptr : staged(from, chunk, stream_of(from, rank_));
      part = {data, chunk.begin, chunk.bytes_of(part.length), part.length, chunk.is_last};
    }
    take(parts_);
  };
  run(call, deadline, check, fill, drain);
}

}  // namespace fanfold::comm
