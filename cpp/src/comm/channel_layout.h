// SPDX-License-Identifier: Apache-2.0
#pragma once

// What lies in a channel's window; shared by the files that implement Channel.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "base/byte_math.h"
#include "comm/channel.h"
#include "comm/control.h"
#include "comm/rank_index.h"

namespace fanfold::comm {

constexpr std::int64_t kHalfAlignment = 4096;

struct alignas(128) Channel::SeqLine {  // alone in its lines: the peers poll it
  std::atomic<std::uint64_t> seq;
};

struct alignas(base::kCacheLine) Channel::Header {
  std::array<char, 24> call;  // zero-terminated
  std::int32_t dtype;
  std::int32_t root;
  std::int64_t num_elements;  // of one row
  std::int64_t num_counts;
  std::int64_t length;
};

/// Which of its num_ranks - 1 streams `from` uses for `to`.
constexpr int stream_of(int from, int to) noexcept { return to < from ? to : to - 1; }

constexpr std::int64_t kMaxHalfBytes = std::int64_t{1} << 18;

/// Less when many ranks share one machine, but room for the counts of 1024 ranks.
constexpr std::int64_t staging_half_bytes(int num_ranks) noexcept {
  return base::align_up(
      std::clamp((std::int64_t{4} << 20) / num_ranks, std::int64_t{64} << 10, kMaxHalfBytes),
      kHalfAlignment);
}

}  // namespace fanfold::comm
