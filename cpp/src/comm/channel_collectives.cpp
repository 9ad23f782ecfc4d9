// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/format.h"
#include "comm/channel.h"
#include "comm/channel_layout.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

std::int64_t rows_before(const Channel::Counts& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

/// Null pointers are legal for empty tensors, but not for memcpy.
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

/// Adds with unsigned arithmetic, which wraps. `out` overlaps no row.
template <class Unsigned>
void sum_integers(std::byte* out, const std::vector<const void*>& rows, std::int64_t num_elements) {
  std::memset(out, 0, static_cast<std::size_t>(num_elements) * sizeof(Unsigned));
  for (const void* row : rows) {
    const auto* const in = static_cast<const std::byte*>(row);
    for (std::int64_t i = 0; i < num_elements; ++i) {
      const std::int64_t place = i * std::int64_t{sizeof(Unsigned)};
      Unsigned total = 0;
      Unsigned value = 0;
      std::memcpy(&total, out + place, sizeof total);
      std::memcpy(&value, in + place, sizeof value);
      total += value;
      std::memcpy(out + place, &total, sizeof total);
    }
  }
}

}  // namespace

std::int64_t Channel::Chunk::bytes_of(std::int64_t total) const noexcept {
  return std::clamp(total - begin, std::int64_t{0}, room);
}

void Channel::Chunk::put(std::byte* out, const std::byte* stream, std::int64_t total) const {
  const std::int64_t bytes = bytes_of(total);
  if (bytes > 0) copy_bytes(out, stream + begin, bytes);
}

void Channel::Chunk::take(std::byte* stream, const std::byte* in, std::int64_t total) const {
  const std::int64_t bytes = bytes_of(total);
  if (bytes > 0) copy_bytes(stream + begin, in, bytes);
}

void Channel::sum(std::byte* out, DType dtype, std::int64_t num_elements) {
  switch (dtype) {
    case DType::kInt32:
      return sum_integers<std::uint32_t>(out, rows_, num_elements);
    case DType::kInt64:
      return sum_integers<std::uint64_t>(out, rows_, num_elements);
    default:
      return kernels_.sum_rows(out, dtype, rows_.data(), nullptr, num_ranks_, dtype, num_elements);
  }
}

void Channel::barrier(base::Deadline deadline) {
  run(
      {"barrier", {}}, deadline, [] { return std::int64_t{0}; }, [](std::byte*, const Chunk&) {},
      [](const Chunk&) {});
}

void Channel::all_gather_v(const std::byte* send, std::byte* recv, RowType row,
                           const Counts& counts, base::Deadline deadline) {
  const std::int64_t row_bytes = row.bytes();
  Call call{"all_gather_v", row};
  call.counts = &counts;
  call.stream_bytes = counts[index(rank_)] * row_bytes;
  const auto check = [&] {
    compare_counts(call.name);
    std::byte* const place = recv + rows_before(counts, rank_) * row_bytes;
    copy_bytes(place, send, counts[index(rank_)] * row_bytes);
    return *std::max_element(counts.begin(), counts.end()) * row_bytes;
  };
  const auto fill = [&](std::byte* out, const Chunk& chunk) {
    chunk.put(out, send, counts[index(rank_)] * row_bytes);
  };
  const auto drain = [&](const Chunk& chunk) {
    for (int i = 1; i < num_ranks_; ++i) {
      const int peer = (rank_ + i) % num_ranks_;
      std::byte* const place = recv + rows_before(counts, peer) * row_bytes;
      chunk.take(place, staged(peer, chunk), counts[index(peer)] * row_bytes);
    }
  };
  run(call, deadline, check, fill, drain);
}

void Channel::all_to_all(const std::byte* send, std::byte* recv, RowType row,
                         base::Deadline deadline) {
  const Counts counts(index(num_ranks_), 1);
  exchange({"all_to_all", row}, send, recv, counts, counts, deadline);
}

void Channel::all_to_all_v(const std::byte* send, std::byte* recv, RowType row,
                           const Counts& send_counts, const Counts& recv_counts,
                           base::Deadline deadline) {
  exchange({"all_to_all_v", row}, send, recv, send_counts, recv_counts, deadline);
}

void Channel::exchange(const Call& call, const std::byte* send, std::byte* recv,
                       const Counts& send_counts, const Counts& recv_counts,
                       base::Deadline deadline) {
  const std::int64_t row_bytes = call.row.bytes();
  Call full = call;
  full.counts = &send_counts;
  full.more_counts = &recv_counts;
  full.stream_counts = &send_counts;
  full.unit_bytes = row_bytes;
  full.num_streams = std::max(1, num_ranks_ - 1);
  const auto check = [&] {
    compare_count_pairs(call.name);
    copy_bytes(recv + rows_before(recv_counts, rank_) * row_bytes,
               send + rows_before(send_counts, rank_) * row_bytes,
               send_counts[index(rank_)] * row_bytes);
    std::int64_t longest = 0;
    for (int from = 0; from < num_ranks_; ++from) {
      for (int to = 0; to < num_ranks_; ++to) {
        if (to != from) longest = std::max(longest, header_counts(from)[to]);
      }
    }
    return longest * row_bytes;
  };
  const auto fill = [&](std::byte* out, const Chunk& chunk) {
    for (int to = 0; to < num_ranks_; ++to) {
      if (to == rank_) continue;
      const std::byte* const block = send + rows_before(send_counts, to) * row_bytes;
      chunk.put(out + stream_of(rank_, to) * chunk.room, block, send_counts[index(to)] * row_bytes);
    }
  };
  const auto drain = [&](const Chunk& chunk) {
    for (int i = 1; i < num_ranks_; ++i) {
      const int from = (rank_ + i) % num_ranks_;
      std::byte* const place = recv + rows_before(recv_counts, from) * row_bytes;
      chunk.take(place, staged(from, chunk, stream_of(from, rank_)),
                 recv_counts[index(from)] * row_bytes);
    }
  };
  run(full, deadline, check, fill, drain);
}

void Channel::broadcast(std::byte* data, RowType row, int root, base::Deadline deadline) {
  const std::int64_t bytes = row.bytes();
  Call call{"broadcast", row};
  call.root = root;
  call.stream_bytes = rank_ == root ? bytes : 0;
  const auto fill = [&](std::byte* out, const Chunk& chunk) {
    if (rank_ == root) chunk.put(out, data, bytes);
  };
  const auto drain = [&](const Chunk& chunk) {
    if (rank_ != root) chunk.take(data, staged(root, chunk), bytes);
  };
  run(call, deadline, [&] { return num_ranks_ == 1 ? 0 : bytes; }, fill, drain);
}

void Channel::all_reduce(const std::byte* send, std::byte* recv, RowType row,
                         base::Deadline deadline) {
  const std::int64_t bytes = row.bytes();
  Call call{"all_reduce", row};
  call.stream_bytes = bytes;
  const auto fill = [&](std::byte* out, const Chunk& chunk) { chunk.put(out, send, bytes); };
  const auto drain = [&](const Chunk& chunk) {
    // The own part too is read from the staging: `recv` may be `send`.
    for (int rank = 0; rank < num_ranks_; ++rank) rows_[index(rank)] = staged(rank, chunk);
    const std::int64_t num_bytes = chunk.bytes_of(bytes);
    if (num_bytes > 0) sum(recv + chunk.begin, row.dtype, num_bytes / size_of(row.dtype));
  };
  run(call, deadline, [&] { return bytes; }, fill, drain);
}

void Channel::reduce_scatter_v(const std::byte* send, std::byte* recv, RowType row,
                               const Counts& counts, base::Deadline deadline) {
  const std::int64_t row_bytes = row.bytes();
  Call call{"reduce_scatter_v", row};
  call.counts = &counts;
  call.stream_counts = &counts;
  call.unit_bytes = row_bytes;
  call.num_streams = std::max(1, num_ranks_ - 1);
  const auto check = [&] {
    compare_counts(call.name);
    return *std::max_element(counts.begin(), counts.end()) * row_bytes;
  };
  const auto fill = [&](std::byte* out, const Chunk& chunk) {
    for (int to = 0; to < num_ranks_; ++to) {
      if (to == rank_) continue;
      const std::byte* const block = send + rows_before(counts, to) * row_bytes;
      chunk.put(out + stream_of(rank_, to) * chunk.room, block, counts[index(to)] * row_bytes);
    }
  };
  const auto drain = [&](const Chunk& chunk) {
    const std::int64_t bytes = chunk.bytes_of(counts[index(rank_)] * row_bytes);
    if (bytes == 0) return;
    const std::byte* const own = send + rows_before(counts, rank_) * row_bytes + chunk.begin;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      rows_[index(rank)] = rank == rank_ ? own : staged(rank, chunk, stream_of(rank, rank_));
    }
    sum(recv + chunk.begin, row.dtype, bytes / size_of(row.dtype));
  };
  run(call, deadline, check, fill, drain);
}

std::vector<Channel::Bytes> Channel::all_gather_bytes(const std::byte* data, std::int64_t bytes,
                                                      base::Deadline deadline, const char* name) {
  std::vector<Bytes> result(index(num_ranks_));
  Call call{name, {}};
  call.length = bytes;
  call.stream_bytes = bytes;
  const auto check = [&] {
    std::int64_t longest = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const std::int64_t length = header(rank).length;
      result[index(rank)].resize(static_cast<std::size_t>(length));
      longest = std::max(longest, length);
    }
    copy_bytes(result[index(rank_)].data(), data, bytes);
    return num_ranks_ == 1 ? 0 : longest;
  };
  const auto fill = [&](std::byte* out, const Chunk& chunk) { chunk.put(out, data, bytes); };
  const auto drain = [&](const Chunk& chunk) {
    for (int i = 1; i < num_ranks_; ++i) {
      const int peer = (rank_ + i) % num_ranks_;
      Bytes& place = result[index(peer)];
      const auto length = static_cast<std::int64_t>(place.size());
      chunk.take(place.data(), staged(peer, chunk), length);
    }
  };
  run(call, deadline, check, fill, drain);
  return result;
}

std::vector<std::int64_t> Channel::all_gather_values(const std::vector<std::int64_t>& values,
                                                     base::Deadline deadline, const char* call) {
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(std::int64_t));
  const auto gathered =
      all_gather_bytes(reinterpret_cast<const std::byte*>(values.data()), bytes, deadline, call);
  std::vector<std::int64_t> result;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const Bytes& theirs = gathered[index(rank)];
    if (theirs.size() != gathered[0].size()) {
      throw_mismatch(base::str(call, ": bytes"), 0, std::to_string(gathered[0].size()), rank,
                     std::to_string(theirs.size()));
    }
    result.resize(result.size() + values.size());
    std::memcpy(result.data() + result.size() - values.size(), theirs.data(), theirs.size());
  }
  return result;
}

}  // namespace fanfold::comm
