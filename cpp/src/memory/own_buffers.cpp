// SPDX-License-Identifier: Apache-2.0
#include "memory/own_buffers.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>

#include "base/byte_math.h"
#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::memory {
namespace {

constexpr std::int64_t kMinBytes = 4096;

/// Bytes from `data` to the next aligned address.
std::int64_t head_of(const OwnBuffer& buffer) noexcept {
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(buffer.data));
  return base::align_up(address, Arena::kAlignment) - address;
}

void check_buffers(const std::vector<OwnBuffer>& buffers, int num_ranks) {
  if (buffers.size() != static_cast<std::size_t>(num_ranks)) {
    throw InvalidArgument(
        base::str("buffers: expected ", num_ranks, " (one per rank), got ", buffers.size()));
  }
  for (std::size_t rank = 0; rank < buffers.size(); ++rank) {
    if (buffers[rank].data != nullptr && buffers[rank].bytes >= kMinBytes) continue;
    throw InvalidArgument(base::str(
        "buffers[", rank, "]: expected ", kMinBytes, " bytes or more, got ",
        buffers[rank].data == nullptr ? "a null pointer" : base::str(buffers[rank].bytes)));
  }
}

/// Two ranks that wrote to the same bytes could not even be told what is wrong.
void check_apart(const std::vector<OwnBuffer>& buffers) {
  std::vector<std::size_t> order(buffers.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const std::less<const std::byte*> before;
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return before(buffers[a].data, buffers[b].data); });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const OwnBuffer& first = buffers[order[i - 1]];
    if (!before(buffers[order[i]].data, first.data + first.bytes)) continue;
    throw InvalidArgument(base::str("buffers[", std::max(order[i - 1], order[i]),
                                    "]: expected memory apart from buffers[",
                                    std::min(order[i - 1], order[i]), "], got an overlap"));
  }
}

/// Compares two numbers per buffer, as rank `other` gives them, with those of rank 0.
void check_same(const std::int64_t* first, const std::int64_t* theirs, int other,
                std::size_t num_buffers) {
  for (std::size_t rank = 0; rank < num_buffers; ++rank) {
    for (const bool is_size : {true, false}) {
      const std::size_t at = 2 * rank + (is_size ? 0 : 1);
      if (first[at] == theirs[at]) continue;
      throw InvalidArgument(base::str(
          "buffers[", rank, "]: ", is_size ? "bytes" : "bytes up to the next multiple of 128",
          " differs between ranks: rank 0 has ", first[at], ", rank ", other, " has ", theirs[at]));
    }
  }
}

}  // namespace

OwnBuffers::OwnBuffers(WindowSource& source, comm::Channel& channel, int rank, int num_ranks,
                       const std::vector<OwnBuffer>& buffers, base::Deadline deadline) {
  check_buffers(buffers, num_ranks);
  check_apart(buffers);
  for (std::size_t i = 0; i < buffers.size(); ++i) source.check_buffer(buffers[i], i);
  std::vector<std::int64_t> own;
  std::int64_t room = INT64_MAX;
  for (const OwnBuffer& buffer : buffers) {
    const std::int64_t head = head_of(buffer);
    own.push_back(buffer.bytes);
    own.push_back(head);
    starts_.push_back(buffer.data + head);
    room = std::min(room, (buffer.bytes - head) / Arena::kAlignment * Arena::kAlignment);
  }
  // A word that nobody else would think of at both ends of what is used: written before the first
  // exchange, read by all between the two, free for use after the second.
  std::byte* const mine = starts_[static_cast<std::size_t>(rank)];
  const std::uint64_t word =
      base::mix_digest(static_cast<std::uint64_t>(base::now_ns()),
                       reinterpret_cast<std::uintptr_t>(&own) + static_cast<std::uintptr_t>(rank));
  const std::int64_t last = room - static_cast<std::int64_t>(sizeof word);
  source.write_word(mine, word);
  source.write_word(mine + last, word);
  own.push_back(static_cast<std::int64_t>(word));
  const auto values = channel.all_gather_values(own, deadline, "Allocator of own buffers");
  for (int other = 1; other < num_ranks; ++other) {
    check_same(values.data(), values.data() + static_cast<std::size_t>(other) * own.size(), other,
               buffers.size());
  }
  std::int64_t unseen = -1;
  for (int other = num_ranks - 1; other >= 0; --other) {
    const auto expected =
        static_cast<std::uint64_t>(values[static_cast<std::size_t>(other + 1) * own.size() - 1]);
    const std::byte* start = starts_[static_cast<std::size_t>(other)];
    if (source.read_word(start) != expected || source.read_word(start + last) != expected) {
      unseen = other;
    }
  }
  const auto verdicts = channel.all_gather_values({unseen}, deadline, "Allocator of own buffers");
  for (std::size_t other = 0; other < verdicts.size(); ++other) {
    if (verdicts[other] < 0) continue;
    throw InvalidArgument(base::str("buffers[", verdicts[other], "]: expected the memory of rank ",
                                    verdicts[other], " on every rank, got other memory on rank ",
                                    other));
  }
  arena_ = Arena(room);
}

std::optional<comm::Windows> OwnBuffers::take(std::int64_t id, std::int64_t bytes) {
  const std::optional<std::int64_t> offset = arena_.take(bytes);
  if (!offset) return std::nullopt;
  parts_[id] = Part{*offset, bytes};
  comm::Windows windows;
  for (std::byte* start : starts_) {
    windows.push_back(std::make_shared<base::Mapping>(start + *offset, bytes));
  }
  return windows;
}

void OwnBuffers::give_back(std::int64_t id) {
  const auto part = parts_.find(id);
  if (part == parts_.end()) return;
  arena_.give(part->second.offset, part->second.bytes);
  parts_.erase(part);
}

std::vector<std::int64_t> common_ids(comm::Channel& channel, const std::vector<std::int64_t>& own,
                                     base::Deadline deadline) {
  std::vector<std::int64_t> common = own;
  std::sort(common.begin(), common.end());
  const auto all = channel.all_gather_bytes(reinterpret_cast<const std::byte*>(own.data()),
                                            static_cast<std::int64_t>(own.size() * sizeof own[0]),
                                            deadline, "allocate");
  for (const comm::Channel::Bytes& bytes : all) {
    std::vector<std::int64_t> theirs(bytes.size() / sizeof(std::int64_t));
    if (!theirs.empty()) std::memcpy(theirs.data(), bytes.data(), bytes.size());
    std::sort(theirs.begin(), theirs.end());
    std::vector<std::int64_t> both;
    std::set_intersection(common.begin(), common.end(), theirs.begin(), theirs.end(),
                          std::back_inserter(both));
    common = std::move(both);
  }
  return common;
}

}  // namespace fanfold::memory
