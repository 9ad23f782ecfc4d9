// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the ranks of one communicator of the double share. Ranks of one process have it in
// page-locked memory, which the simulated devices check; ranks of several in a shared file.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace cudasim::nccl {

constexpr int kMaxRanks = 64;
constexpr std::size_t kSlotBytes = 4096;
constexpr std::uint64_t kNumSlots = 2;

/// Where a rank stands: it takes part in its kernels' work while this is kRuns.
enum Stop : std::uint32_t { kRuns = 0, kAborted = 1, kFailed = 2 };

/// One rank's words. Whoever raises `stop` from kRuns to kFailed writes the rest, `has_text` last.
struct alignas(64) RankLine {
  std::uint32_t stop;
  std::uint32_t has_text;
  std::uint32_t error;  // ncclResult_t
  std::array<char, 244> text;
};

/// What every part of a message begins with; both sides must mean the same.
struct Head {
  std::uint64_t kind;
  std::uint64_t total;   // bytes of the whole message
  std::uint64_t detail;  // of collectives: type, root
};

struct alignas(64) Slot {
  Head head;
  std::array<std::uint8_t, 40> unused;
  std::array<std::uint8_t, kSlotBytes> data;
};

/// From one rank to another. Part n lies in slot n mod kNumSlots.
///   tail  written by the sender, release   <- acquire by the receiver: parts that are there
///   head  written by the receiver, release <- acquire by the sender: parts that were taken
struct Channel {
  alignas(64) std::uint64_t tail;
  alignas(64) std::uint64_t head;
  std::array<Slot, kNumSlots> slots;
};

struct Board {
  static std::size_t bytes(int num_ranks) {
    const auto n = static_cast<std::size_t>(num_ranks);
    return n * sizeof(RankLine) + n * n * sizeof(Channel);
  }
  std::byte* data = nullptr;
  int num_ranks = 0;

  RankLine& line(int rank) const { return reinterpret_cast<RankLine*>(data)[rank]; }
  Channel& channel(int from, int to) const {
    auto* const channels =
        reinterpret_cast<Channel*>(data + static_cast<std::size_t>(num_ranks) * sizeof(RankLine));
    return channels[from * num_ranks + to];
  }
};

/// What a rank tells the others when it joins, and later. Lies in the shared file.
struct alignas(64) Card {
  std::uint32_t has_joined;
  std::int32_t pid;
  std::int32_t device;
  // Of ncclCommSplit, by the number of the call mod 2.
  std::array<std::uint32_t, 2> split_count;
  std::array<std::int32_t, 2> color;
  std::array<std::int32_t, 2> key;
  // Of ncclCommWindowRegister, likewise.
  std::array<std::uint32_t, 2> window_count;
  std::array<std::int32_t, 2> window_fd;  // of process `pid`
  std::array<std::uint64_t, 2> window_bytes;
  std::array<std::uint64_t, 2> window_taken;  // peers' registrations that this rank has mapped
};

/// The shared file of one communicator: cards, then (with several processes) the board.
class Meeting : public std::enable_shared_from_this<Meeting> {
 public:
  /// A name that no other communicator has.
  static std::string new_name();
  /// Opens the file, and makes it if it is not there; null where that fails.
  static std::shared_ptr<Meeting> open(const std::string& name, int num_ranks);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  Card& card(int rank) const { return reinterpret_cast<Card*>(data_)[rank]; }
  int num_ranks() const { return num_ranks_; }
  const std::string& name() const { return name_; }
  /// All ranks have joined: nobody opens the file any more.
  bool is_complete() const;
  /// Once it is complete. The holder keeps the memory; it never calls CUDA when it ends, so that a
  /// kernel's body may be the last one.
  std::shared_ptr<const Board> board();

 private:
  Meeting(std::string name, int num_ranks, std::byte* data, std::size_t bytes)
      : name_(std::move(name)), num_ranks_(num_ranks), data_(data), bytes_(bytes) {}

  std::string name_;
  int num_ranks_;
  std::byte* data_;
  std::size_t bytes_;
};

}  // namespace cudasim::nccl
