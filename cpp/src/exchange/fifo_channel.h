// SPDX-License-Identifier: Apache-2.0
#pragma once

// A bounded stream of bytes from one rank to another, through a ring in the reader's window.
//
// Two streams join each pair of ranks, one each way. Every rank's window holds a ring and a line
// per peer, so that a rank polls its own window and stores into its peers':
//
//   word            in the window of    written by   release in         acquire in
//   FifoLine::tail  the reader          the writer   FifoWriter         FifoReader::available (the
//                                                    ::publish          bytes before it are there)
//   FifoLine::head  the writer          the reader   FifoReader         FifoWriter::free_bytes (the
//                                                    ::publish          bytes before it were read)
//   ring bytes      the reader          the writer   with the tail      with the tail
//
// A word is a position in the stream, modulo 2^48, under 16 bits of the generation. A word of
// another generation counts as the first position. So a reset touches no word: both ends begin
// anew, and what is left of the generation before is neither read nor waited for. It must only be
// certain that no rank still uses the old one, which the collective reset of comm/control.h is: a
// rank begins the new generation after it has acquired every peer's word that the old has ended
// there.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/byte_math.h"

namespace fanfold::exchange {

/// What one peer tells this rank, in this rank's window.
struct alignas(base::kCacheLine) FifoLine {
  std::atomic<std::uint64_t> tail;  // end of what the peer has put into the ring here
  std::atomic<std::uint64_t> head;  // end of what the peer has taken of this rank's stream to it
};

/// Copies `bytes` bytes; no overlap.
using FifoCopy = void (*)(std::byte* target, const std::byte* source, std::int64_t bytes);

/// Positions of one end of one stream.
class FifoPosition {
 public:
  static constexpr int kBits = 48;
  static constexpr std::uint64_t kMask = (std::uint64_t{1} << kBits) - 1;

  FifoPosition(std::int64_t ring_bytes, std::uint64_t first) noexcept
      : ring_bytes_(ring_bytes), first_(first & kMask) {
    restart(0);
  }
  void restart(std::uint32_t generation) noexcept {
    // Not 0 at the start: lines that nobody has written to are of no generation.
    tag_ = static_cast<std::uint64_t>((generation + 1) & 0xffffU) << kBits;
    position_ = first_;
    offset_ = 0;
  }
  std::uint64_t position() const noexcept { return position_; }
  /// Where the next byte lies in the ring.
  std::int64_t offset() const noexcept { return offset_; }
  std::int64_t ring_bytes() const noexcept { return ring_bytes_; }
  void advance(std::int64_t bytes) noexcept {
    position_ = (position_ + static_cast<std::uint64_t>(bytes)) & kMask;
    offset_ += bytes;
    if (offset_ >= ring_bytes_) offset_ -= ring_bytes_;
  }
  std::uint64_t word() const noexcept { return tag_ | position_; }
  /// The position that a word of the other end means.
  std::uint64_t decode(std::uint64_t word) const noexcept {
    return (word & ~kMask) == tag_ ? word & kMask : first_;
  }
  static std::int64_t distance(std::uint64_t from, std::uint64_t to) noexcept {
    return static_cast<std::int64_t>((to - from) & kMask);
  }

 private:
  std::int64_t ring_bytes_;
  std::uint64_t first_;
  std::uint64_t tag_ = 0;
  std::uint64_t position_ = 0;
  std::int64_t offset_ = 0;
};

/// The sending end. Threads: one at a time.
class FifoWriter {
 public:
  /// `ring` of `ring_bytes` and `theirs` lie in the reader's window, `mine` in this rank's.
  FifoWriter(std::byte* ring, std::int64_t ring_bytes, FifoLine* theirs, const FifoLine* mine,
             std::uint64_t first_position = 0) noexcept
      : ring_(ring), theirs_(theirs), mine_(mine), at_(ring_bytes, first_position) {
    restart(0);
  }
  /// Begins the stream anew. No rank uses the one before any more.
  void restart(std::uint32_t generation) noexcept {
    at_.restart(generation);
    read_ = at_.position();
  }
  /// Bytes that `write` may take now. At least `wanted` if there are so many.
  std::int64_t free_bytes(std::int64_t wanted) noexcept {
    const std::int64_t known = unused();
    if (known >= wanted) return known;
    read_ = at_.decode(mine_->head.load(std::memory_order_acquire));
    return unused();
  }
  /// Puts `bytes` <= free_bytes() bytes into the ring; the reader sees them after `publish`.
  void write(const std::byte* data, std::int64_t bytes, FifoCopy copy) noexcept {
    const std::int64_t before_end = at_.ring_bytes() - at_.offset();
    const std::int64_t first = bytes < before_end ? bytes : before_end;
    copy(ring_ + at_.offset(), data, first);
    if (first < bytes) copy(ring_, data + first, bytes - first);
    at_.advance(bytes);
  }
  /// Streaming stores must have been fenced.
  void publish() noexcept { theirs_->tail.store(at_.word(), std::memory_order_release); }

 private:
  std::int64_t unused() const noexcept {
    return at_.ring_bytes() - FifoPosition::distance(read_, at_.position());
  }

  std::byte* ring_;
  FifoLine* theirs_;
  const FifoLine* mine_;
  FifoPosition at_;
  std::uint64_t read_ = 0;  // as far as known
};

/// The receiving end. Threads: one at a time.
class FifoReader {
 public:
  /// `ring` of `ring_bytes` and `mine` lie in this rank's window, `theirs` in the writer's.
  FifoReader(const std::byte* ring, std::int64_t ring_bytes, const FifoLine* mine, FifoLine* theirs,
             std::uint64_t first_position = 0) noexcept
      : ring_(ring), mine_(mine), theirs_(theirs), at_(ring_bytes, first_position) {
    restart(0);
  }
  /// As FifoWriter::restart.
  void restart(std::uint32_t generation) noexcept {
    at_.restart(generation);
    written_ = at_.position();
  }
  /// Bytes that `read` may take now. At least `wanted` if there are so many.
  std::int64_t available(std::int64_t wanted) noexcept {
    const std::int64_t known = FifoPosition::distance(at_.position(), written_);
    if (known >= wanted) return known;
    written_ = at_.decode(mine_->tail.load(std::memory_order_acquire));
    return FifoPosition::distance(at_.position(), written_);
  }
  /// Takes `bytes` <= available() bytes; the writer may overwrite them after `publish`.
  void read(std::byte* target, std::int64_t bytes) noexcept {
    const std::int64_t before_end = at_.ring_bytes() - at_.offset();
    const std::int64_t first = bytes < before_end ? bytes : before_end;
    std::memcpy(target, ring_ + at_.offset(), static_cast<std::size_t>(first));
    if (first < bytes) {
      std::memcpy(target + first, ring_, static_cast<std::size_t>(bytes - first));
    }
    at_.advance(bytes);
  }
  void publish() noexcept { theirs_->head.store(at_.word(), std::memory_order_release); }

 private:
  const std::byte* ring_;
  const FifoLine* mine_;
  FifoLine* theirs_;
  FifoPosition at_;
  std::uint64_t written_ = 0;  // as far as known
};

}  // namespace fanfold::exchange
