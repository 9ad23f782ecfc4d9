// SPDX-License-Identifier: Apache-2.0
#include "exchange/rank_streams.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <type_traits>

#include "base/format.h"
#include "comm/communicator_impl.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

using Record = RankStreams::Record;
constexpr auto kRecordBytes = static_cast<std::int64_t>(sizeof(Record));
static_assert(std::is_trivially_copyable_v<Record>, "a record travels as its bytes");

/// Bytes between two words that tell the other end of them: large enough that the words cost
/// little, small enough that both ends work at the same time.
constexpr std::int64_t kQuantumBytes = std::int64_t{32} << 10;
constexpr std::int64_t kStreamingBytes = 512;  // shorter pieces cover few whole lines

void copy_ordinary(std::byte* target, const std::byte* source, std::int64_t bytes) {
  std::memcpy(target, source, static_cast<std::size_t>(bytes));
}

}  // namespace

StreamWindow::StreamWindow(const AllToAllConfig& config, int num_ranks) noexcept {
  lines_offset = comm::Control::bytes(num_ranks);
  rings_offset =
      base::align_up(lines_offset + num_ranks * static_cast<std::int64_t>(sizeof(FifoLine)), 128);
  reserve_bytes = (std::int64_t{config.max_in_flight} + 3) * kRecordBytes;
  ring_bytes = base::align_up(config.channel_bytes + reserve_bytes, 128);
  bytes = rings_offset + (num_ranks - 1) * ring_bytes;
}

RankStreams::RankStreams(const Setup& setup, base::Deadline deadline)
    : layout_(setup.config, setup.map.num_ranks),
      // Control words and lines must start as zeros; rings need not.
      window_(setup, layout_.bytes, layout_.rings_offset, deadline),
      kernels_(base::kernels(base::isa_from_name(setup.config.test_knobs.isa.c_str()))),
      rank_(setup.communicator->group().rank()),
      num_ranks_(setup.map.num_ranks),
      streaming_(setup.config.test_knobs.streaming_stores),
      first_epoch_(setup.config.test_knobs.first_epoch),
      quantum_bytes_(std::min(kQuantumBytes, setup.config.channel_bytes / 4)) {
  peers_.reserve(static_cast<std::size_t>(num_ranks_));
  for (int rank = 0; rank < num_ranks_; ++rank) peers_.push_back(make_peer(rank));
  pending_.reserve(peers_.size());
  released_.reserve(static_cast<std::size_t>(setup.config.max_in_flight) + 1);
}

RankStreams::Peer RankStreams::make_peer(int rank) const {
  const auto base = [&](int window) { return window_.bases()[static_cast<std::size_t>(window)]; };
  const auto ring = [&](int window, int source) {
    const std::int64_t index = (source + num_ranks_ - window - 1) % num_ranks_;
    return base(window) + layout_.rings_offset + index * layout_.ring_bytes;
  };
  const auto line = [&](int window, int source) {
    return reinterpret_cast<FifoLine*>(base(window) + layout_.lines_offset) + source;
  };
  const bool is_own = rank == rank_;
  FifoLine* const theirs = line(rank, rank_);
  FifoLine* const mine = line(rank_, rank);
  return Peer{rank,
              FifoWriter(is_own ? nullptr : ring(rank, rank_), layout_.ring_bytes, theirs, mine),
              FifoReader(is_own ? nullptr : ring(rank_, rank), layout_.ring_bytes, mine, theirs),
              {},
              {},
              {},
              {}};
}

// --- Bytes --------------------------------------------------------------------------------------

/// Least bytes that are waited for before they are written: not a line at a time.
std::int64_t RankStreams::next_bytes(const Peer& peer) const noexcept {
  return std::min(peer.sending.remaining(), quantum_bytes_);
}

bool RankStreams::can_push(Peer& peer) const noexcept {
  return peer.sending.remaining() > 0 && room(peer, next_bytes(peer)) >= next_bytes(peer);
}

bool RankStreams::can_pull(Peer& peer) noexcept {
  return peer.receiving.remaining() > 0 && peer.in.available(1) > 0;
}

/// Puts a record into the ring, not yet to be seen.
void RankStreams::post(Peer& peer, Record record) noexcept {
  assert(peer.out.free_bytes(kRecordBytes) >= kRecordBytes);
  record.sent_ns = base::now_ns();
  peer.out.write(reinterpret_cast<const std::byte*>(&record), kRecordBytes, &copy_ordinary);
}

void RankStreams::show(Peer& peer, base::StepHook& hook) noexcept {
  peer.out.publish();
  control().ring(peer.rank);
  hook.step();
}

/// Writes some of what is left to be sent; false when there is nothing or no room. Ordinary stores
/// to lines that a distant core has read last crawl: past the cache is the rule. Two ranks on Zen
/// 4, 32 rows of 4096 bytes, the fastest of many: dispatch 25 us against 44 us.
bool RankStreams::push(Peer& peer, base::StepHook& hook) noexcept {
  if (!can_push(peer)) return false;
  std::int64_t left =
      std::min({peer.sending.remaining(), kQuantumBytes, room(peer, kQuantumBytes)});
  const bool streaming = streaming_ && !peer.distance.is_near();
  while (left > 0) {
    const auto piece = peer.sending.piece();
    const std::int64_t bytes = std::min(piece.bytes, left);
    const bool is_long = bytes >= kStreamingBytes;
    peer.out.write(piece.data, bytes,
                   streaming && is_long ? kernels_.copy_streaming : &copy_ordinary);
    peer.sending.advance(bytes);
    left -= bytes;
  }
  if (streaming) kernels_.store_fence();
  hook.step();
  show(peer, hook);
  return true;
}

/// Reads some of what has come; false when nothing has.
bool RankStreams::pull(Peer& peer, base::StepHook& hook) noexcept {
  if (!can_pull(peer)) return false;
  std::int64_t left =
      std::min({peer.receiving.remaining(), kQuantumBytes, peer.in.available(kQuantumBytes)});
  while (left > 0) {
    const auto piece = peer.receiving.piece();
    const std::int64_t bytes = std::min(piece.bytes, left);
    peer.in.read(piece.data, bytes);
    peer.receiving.advance(bytes);
    left -= bytes;
  }
  hook.step();
  peer.in.publish();
  control().ring(peer.rank);
  hook.step();
  return true;
}

// This rank's own rows are copied while the first bytes travel.
void RankStreams::move(const Call& call) {
  pending_.clear();
  for (int i = 1; i < num_ranks_; ++i) pending_.push_back((rank_ + i) % num_ranks_);
  for (const int rank : pending_) push(peer_at(rank), *call.hook);
  copy_rows(peer_at(rank_).sending, peer_at(rank_).receiving);
  for (;;) {
    bool has_moved = false;
    for (const int rank : pending_) {
      Peer& peer = peer_at(rank);
      const bool pushed = push(peer, *call.hook);
      const bool pulled = pull(peer, *call.hook);
      has_moved = has_moved || pushed || pulled;
    }
    const auto is_done = [&](int rank) {
      return peer_at(rank).sending.remaining() == 0 && peer_at(rank).receiving.remaining() == 0;
    };
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(), is_done), pending_.end());
    if (pending_.empty()) return;
    if (!has_moved) await_move(call);
  }
}

/// Waits until something can be moved. Late is who sends nothing; only when all has come, who
/// takes nothing.
void RankStreams::await_move(const Call& call) {
  const auto owes = [&](int rank) { return peer_at(rank).receiving.remaining() > 0; };
  const auto late = std::find_if(pending_.begin(), pending_.end(), owes);
  const int target = late != pending_.end() ? *late : pending_.front();
  const auto can_move = [&] {
    return std::any_of(pending_.begin(), pending_.end(), [&](int rank) {
      return can_pull(peer_at(rank)) || can_push(peer_at(rank));
    });
  };
  control().wait(can_move, {target, call.phase, call.round}, call.deadline);
}

// --- Records ------------------------------------------------------------------------------------

void RankStreams::announce(const Record& record, const plan::SendPlan* plan,
                           base::StepHook& hook) noexcept {
  for (int i = 1; i < num_ranks_; ++i) {
    Peer& peer = peer_at((rank_ + i) % num_ranks_);
    Record own = record;
    if (plan != nullptr) {
      own.num_rows =
          static_cast<std::uint32_t>(plan->rows_per_rank[static_cast<std::size_t>(peer.rank)]);
    }
    post(peer, own);
    if (!push(peer, hook)) show(peer, hook);
  }
}

void RankStreams::announce_release(const Record& record, base::StepHook& hook) {
  for (Peer& peer : peers_) peer.sending.clear();
  announce(record, nullptr, hook);
  released_.push_back(record);
}

Record RankStreams::take_record(Peer& peer, const Call& call) {
  const auto has_come = [&] { return peer.in.available(kRecordBytes) >= kRecordBytes; };
  const bool is_waited_for = !has_come();
  control().wait(has_come, {peer.rank, call.phase, call.round}, call.deadline);
  Record record;
  peer.in.read(reinterpret_cast<std::byte*>(&record), kRecordBytes);
  if (is_waited_for) peer.distance.add(base::now_ns() - record.sent_ns);
  call.hook->step();
  return record;
}

void RankStreams::compare(const Record& mine, const Record& got, const Peer& peer,
                          const char* phase, const std::string& what) const {
  const std::string difference = exec::call_difference(mine, rank_, got, peer.rank, first_epoch_);
  if (difference.empty()) return;
  throw InvalidArgument(
      base::str(what, ": ", phase, " of round ", exec::round_of(mine.epoch, first_epoch_),
                " differs between ranks: ", difference, "; call reset() on every rank"));
}

// In the order in which peers send: the next rank writes to this one last.
void RankStreams::expect(const Record& mine, const Call& call) {
  for (Peer& peer : peers_) peer.distance.next_round();
  for (int i = 1; i < num_ranks_; ++i) {
    Peer& peer = peer_at((rank_ + num_ranks_ - i) % num_ranks_);
    for (const Record& release : released_) {
      compare(release, take_record(peer, call), peer, "release", *call.what);
    }
    peer.record = take_record(peer, call);
    compare(mine, peer.record, peer, call.phase, *call.what);
    peer.in.publish();  // nobody waits for this little room: no doorbell
  }
  released_.clear();
}

// Rings and lines stay as they are: see fifo_channel.h.
void RankStreams::restart() noexcept {
  for (Peer& peer : peers_) {
    peer.out.restart(control().generation());
    peer.in.restart(control().generation());
    peer.sending.clear();
    peer.receiving.clear();
  }
  released_.clear();
}

}  // namespace fanfold::exchange
