// SPDX-License-Identifier: Apache-2.0
#include "memory/own_buffers.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/byte_math.h"
#include "base/format.h"
#include "comm/failure.h"
#include "comm/parcel.h"
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

/// What a rank tells the others of its buffers.
struct OwnBuffers::Proof {
  std::vector<std::int64_t> sizes;  // of each rank's buffer: bytes, bytes up to where it is aligned
  std::uint64_t word = 0;           // that lies in its own
};

namespace {

std::string encode(const std::vector<std::int64_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof values[0]};
}

std::vector<std::int64_t> decode(const std::string& bytes) {
  std::vector<std::int64_t> values(bytes.size() / sizeof(std::int64_t));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

constexpr const char* kCall = "Allocator of own buffers";

/// Every rank's `values`, or the failure of any of them on all.
std::vector<std::vector<std::int64_t>> gather(comm::Group& group,
                                              const std::vector<std::int64_t>& values,
                                              const std::optional<comm::Failure>& failure,
                                              base::Deadline deadline) {
  comm::Parcel parcel;
  parcel.bytes = encode(values);
  std::vector<std::vector<std::int64_t>> all;
  for (const comm::Parcel& theirs : group.exchange(kCall, std::move(parcel), failure, deadline)) {
    all.push_back(decode(theirs.bytes));
  }
  return all;
}

}  // namespace

// A word that nobody else would think of lies at both ends of what is used: written before the
// first exchange, read by all between the two, free for use after the second.
OwnBuffers::Proof OwnBuffers::prepare(WindowSource& source, const std::vector<OwnBuffer>& buffers,
                                      int rank) {
  Proof own;
  room_ = INT64_MAX;
  for (const OwnBuffer& buffer : buffers) {
    const std::int64_t head = head_of(buffer);
    own.sizes.push_back(buffer.bytes);
    own.sizes.push_back(head);
    starts_.push_back(buffer.data + head);
    room_ = std::min(room_, (buffer.bytes - head) / Arena::kAlignment * Arena::kAlignment);
  }
  own.word =
      base::mix_digest(static_cast<std::uint64_t>(base::now_ns()),
                       reinterpret_cast<std::uintptr_t>(&own) + static_cast<std::uintptr_t>(rank));
  std::byte* const mine = starts_[static_cast<std::size_t>(rank)];
  source.write_word(mine, own.word);
  source.write_word(mine + room_ - sizeof own.word, own.word);
  return own;
}

std::int64_t OwnBuffers::first_unseen(WindowSource& source,
                                      const std::vector<Proof>& proofs) const {
  for (std::size_t rank = 0; rank < proofs.size(); ++rank) {
    const std::uint64_t expected = proofs[rank].word;
    const std::byte* const last = starts_[rank] + room_ - sizeof expected;
    if (source.read_word(starts_[rank]) != expected || source.read_word(last) != expected) {
      return static_cast<std::int64_t>(rank);
    }
  }
  return -1;
}

OwnBuffers::OwnBuffers(WindowSource& source, comm::Group& group,
                       const std::vector<OwnBuffer>& buffers, base::Deadline deadline) {
  std::optional<comm::Failure> failure;
  std::vector<std::int64_t> values;
  try {
    check_buffers(buffers, group.num_ranks());
    check_apart(buffers);
    for (std::size_t i = 0; i < buffers.size(); ++i) source.check_buffer(buffers[i], i);
    const Proof own = prepare(source, buffers, group.rank());
    values = own.sizes;
    values.push_back(static_cast<std::int64_t>(own.word));
  } catch (...) {
    failure = comm::Failure::current(group.rank());
  }
  std::vector<Proof> proofs;
  for (std::vector<std::int64_t>& theirs : gather(group, values, failure, deadline)) {
    Proof& proof = proofs.emplace_back();
    proof.word = static_cast<std::uint64_t>(theirs.back());
    theirs.pop_back();
    proof.sizes = std::move(theirs);
    check_same(proofs[0].sizes.data(), proof.sizes.data(), static_cast<int>(proofs.size()) - 1,
               buffers.size());
  }
  std::int64_t unseen = -1;
  try {
    unseen = first_unseen(source, proofs);
  } catch (...) {
    failure = comm::Failure::current(group.rank());
  }
  const auto verdicts = gather(group, {unseen}, failure, deadline);
  for (std::size_t other = 0; other < verdicts.size(); ++other) {
    const std::int64_t rank = verdicts[other][0];
    if (rank < 0) continue;
    throw InvalidArgument(base::str("buffers[", rank, "]: expected the memory of rank ", rank,
                                    " on every rank, got other memory on rank ", other));
  }
  arena_ = Arena(room_);
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
