// SPDX-License-Identifier: Apache-2.0
#include "comm/channel.h"

#include <cstring>
#include <utility>

#include "base/format.h"
#include "comm/channel_layout.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

std::string describe(const std::int64_t* counts, std::int64_t num_counts) {
  std::string text = "[";
  for (std::int64_t i = 0; i < num_counts; ++i) text += base::str(i == 0 ? "" : ", ", counts[i]);
  return text + "]";
}

std::string describe(DType dtype, std::int64_t num_elements) {
  return base::str("rows of ", num_elements, " ", name_of(dtype));
}

}  // namespace

std::unique_ptr<Channel> Channel::create(Group& group, std::string what, base::Deadline deadline) {
  Windows windows = group.share_windows(window_bytes(group.num_ranks()), deadline);
  return std::make_unique<Channel>(group, std::move(windows), std::move(what));
}

std::int64_t Channel::window_bytes(int num_ranks) {
  const std::int64_t head = Control::bytes(num_ranks) + std::int64_t{sizeof(SeqLine)};
  return base::align_up(head, kHalfAlignment) + 2 * staging_half_bytes(num_ranks);
}

std::int64_t Channel::max_half_bytes() noexcept { return kMaxHalfBytes; }

Channel::Channel(Group& group, Windows windows, std::string what)
    : windows_(std::move(windows)),
      control_(group, windows_, std::move(what)),
      kernels_(base::kernels(base::Isa::kAuto)),
      rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      half_bytes_(staging_half_bytes(num_ranks_)),
      rows_(static_cast<std::size_t>(num_ranks_)),
      parts_(static_cast<std::size_t>(num_ranks_)) {}

Channel::~Channel() { control_.mark_left(); }

Channel::SeqLine& Channel::seq_line(int rank) const noexcept {
  return *reinterpret_cast<SeqLine*>(windows_[static_cast<std::size_t>(rank)]->data() +
                                     Control::bytes(num_ranks_));
}

std::byte* Channel::half(int rank, std::uint64_t step) const noexcept {
  const std::int64_t head = Control::bytes(num_ranks_) + std::int64_t{sizeof(SeqLine)};
  const auto parity = static_cast<std::int64_t>(step % 2);
  return windows_[static_cast<std::size_t>(rank)]->data() + base::align_up(head, kHalfAlignment) +
         parity * half_bytes_;
}

const std::byte* Channel::staged(int rank, const Chunk& chunk, int stream) const noexcept {
  return half(rank, step_) + chunk.offset + stream * chunk.room;
}

const Channel::Header& Channel::header(int rank) const noexcept {
  return *reinterpret_cast<const Header*>(half(rank, step_));
}

const std::int64_t* Channel::header_counts(int rank) const noexcept {
  return reinterpret_cast<const std::int64_t*>(half(rank, step_) + sizeof(Header));
}

void Channel::check_usable(const char* call) const {
  control_.check_process();
  if (lost_.has_value()) lost_->raise();
  if (needs_reset_) {
    throw InvalidState(base::str(control_.what(), ": ", call,
                                 ": an earlier call failed; call reset() on every rank"));
  }
}

void Channel::run(const Call& call, base::Deadline deadline,
                  base::FunctionRef<std::int64_t()> check,
                  base::FunctionRef<void(std::byte*, const Chunk&)> fill,
                  base::FunctionRef<void(const Chunk&)> drain) {
  check_usable(call.name);
  try {
    // Nothing is published after an abort: a peer must not take it for a sign that all is well.
    control_.throw_if_aborted({rank_, phase_ != nullptr ? phase_ : call.name, round_});
    try {
      run_steps(call, deadline, check, fill, drain);
    } catch (const InvalidArgument&) {
      control_.flush(deadline);  // every rank needs this one's header to throw it
      throw;
    }
    control_.flush(deadline);
  } catch (const InvalidArgument&) {
    throw;  // every rank throws it in the same step: nothing is out of order
  } catch (const PeerLost& error) {
    lost_ = Failure{Failure::Kind::kPeerLost, error.rank(), error.what()};
    throw;
  } catch (const PeerError&) {
    needs_reset_ = true;
    throw;
  } catch (...) {
    needs_reset_ = true;
    control_.abort(Failure::current(rank_).message);
    throw;
  }
}

void Channel::run_steps(const Call& call, base::Deadline deadline,
                        base::FunctionRef<std::int64_t()> check,
                        base::FunctionRef<void(std::byte*, const Chunk&)> fill,
                        base::FunctionRef<void(const Chunk&)> drain) {
  const auto room_after = [&](std::int64_t offset) {
    const std::int64_t share = (half_bytes_ - offset) / call.num_streams;
    return share / 16 * 16;  // whole elements of every type
  };
  Chunk chunk{0, 0, put_header(call), false};
  chunk.room = room_after(chunk.offset);
  fill(half(rank_, step_ + 1) + chunk.offset, chunk);
  step(call, chunk, deadline);
  compare_headers();
  const std::int64_t longest = check();
  chunk.is_last = chunk.room >= longest;
  drain(chunk);
  for (chunk.begin = chunk.room; chunk.begin < longest; chunk.begin += chunk.room) {
    chunk.offset = 0;
    chunk.room = room_after(0);
    fill(half(rank_, step_ + 1), chunk);
    step(call, chunk, deadline);
    chunk.is_last = chunk.begin + chunk.room >= longest;
    drain(chunk);
  }
}

/// Writes the header into the next step's half; returns the bytes that it takes.
std::int64_t Channel::put_header(const Call& call) {
  std::byte* const out = half(rank_, step_ + 1);
  Header head{};
  std::strncpy(head.call.data(), call.name, head.call.size() - 1);
  head.dtype = static_cast<std::int32_t>(call.row.dtype);
  head.root = call.root;
  head.num_elements = call.row.num_elements;
  head.length = call.length;
  std::byte* end = out + sizeof(Header);
  for (const Counts* counts : {call.counts, call.more_counts}) {
    if (counts == nullptr) continue;
    std::memcpy(end, counts->data(), counts->size() * sizeof(std::int64_t));
    end += counts->size() * sizeof(std::int64_t);
    head.num_counts += static_cast<std::int64_t>(counts->size());
  }
  std::memcpy(out, &head, sizeof head);
  return base::align_up(end - out, base::kCacheLine);
}

void Channel::step(const Call& call, const Chunk& chunk, base::Deadline deadline) {
  const std::uint64_t next = ++step_;
  kernels_.store_fence();  // for streaming stores, which the release does not order
  seq_line(rank_).seq.store(next, std::memory_order_release);  // acquire: below, on each peer
  for (int i = 1; i < num_ranks_; ++i) {
    const int peer = (rank_ + i) % num_ranks_;
    if (control_.is_remote()) {
      send_half(peer, call, chunk);
    } else {
      control_.ring(peer);
    }
  }
  for (int i = 1; i < num_ranks_; ++i) {
    const int peer = (rank_ + i) % num_ranks_;
    const std::atomic<std::uint64_t>& seq = seq_line(peer).seq;
    control_.wait([&seq, next] { return seq.load(std::memory_order_acquire) >= next; },
                  {peer, phase_ != nullptr ? phase_ : call.name, round_}, deadline);
  }
}

void Channel::send_half(int peer, const Call& call, const Chunk& chunk) {
  const std::byte* const window = windows_[index(rank_)]->data();
  const std::byte* const out = half(rank_, step_);
  std::int64_t length = call.stream_bytes;
  std::int64_t place = chunk.offset;
  if (call.stream_counts != nullptr) {
    length = (*call.stream_counts)[index(peer)] * call.unit_bytes;
    place += stream_of(rank_, peer) * chunk.room;
  }
  Stores stores;
  stores.bytes(out - window, out, chunk.offset);  // the header
  stores.bytes(out + place - window, out + place, chunk.bytes_of(length));
  const auto* seq = reinterpret_cast<const std::byte*>(&seq_line(rank_).seq);
  stores.set64(seq - window, step_);  // release; acquire: `step` of the peer
  control_.send(peer, stores);
}

void Channel::throw_mismatch(const std::string& field, int rank_a, const std::string& value_a,
                             int rank_b, const std::string& value_b) const {
  const bool in_round = round_ >= 0;
  throw InvalidArgument(
      base::str(control_.what(), ": ", field, in_round ? base::str(" of round ", round_) : "",
                ": expected the same on every rank, got ", value_a, " on rank ", rank_a, " and ",
                value_b, " on rank ", rank_b, in_round ? "; call reset() on every rank" : ""));
}

void Channel::compare_headers() const {
  const Header& first = header(0);
  for (int rank = 1; rank < num_ranks_; ++rank) {
    const Header& other = header(rank);
    const std::string call = first.call.data();
    if (first.call != other.call) throw_mismatch("call", 0, call, rank, other.call.data());
    if (first.dtype != other.dtype || first.num_elements != other.num_elements) {
      throw_mismatch(call, 0, describe(static_cast<DType>(first.dtype), first.num_elements), rank,
                     describe(static_cast<DType>(other.dtype), other.num_elements));
    }
    if (first.root != other.root) {
      throw_mismatch(call + ": root", 0, std::to_string(first.root), rank,
                     std::to_string(other.root));
    }
  }
}

void Channel::compare_counts(const char* call) const {
  for (int rank = 1; rank < num_ranks_; ++rank) {
    const std::int64_t num = header(rank).num_counts;
    if (num == header(0).num_counts &&
        std::memcmp(header_counts(0), header_counts(rank),
                    static_cast<std::size_t>(num) * sizeof(std::int64_t)) == 0) {
      continue;
    }
    throw_mismatch(base::str(call, ": counts"), 0, describe(header_counts(0), header(0).num_counts),
                   rank, describe(header_counts(rank), num));
  }
}

/// Of each header the first half are the counts that the rank sends, the second those it expects.
void Channel::compare_count_pairs(const char* call) const {
  for (int from = 0; from < num_ranks_; ++from) {
    for (int to = 0; to < num_ranks_; ++to) {
      const std::int64_t sent = header_counts(from)[to];
      const std::int64_t expected = header_counts(to)[num_ranks_ + from];
      if (sent == expected) continue;
      throw InvalidArgument(base::str(control_.what(), ": ", call, ": rank ", from, " sends ", sent,
                                      " rows to rank ", to, ", which expects ", expected));
    }
  }
}

void Channel::reset(base::Deadline deadline) {
  control_.check_process();
  if (lost_.has_value()) lost_->raise();
  needs_reset_ = true;  // also if the reset itself times out
  step_ = control_.reset(step_, deadline);
  control_.flush(deadline);
  needs_reset_ = false;
}

void Channel::close(base::Deadline deadline) {
  control_.check_process();
  control_.mark_left();
  control_.wait_all_left(deadline);
}

}  // namespace fanfold::comm
