// SPDX-License-Identifier: Apache-2.0
#pragma once

// The 64-byte line by which one rank tells another that a phase of a round is complete.
//
// One line per (slot, phase, source, destination), in the destination's window, written by the
// source only. The words are stored in any order, the epoch last with release; the destination
// reads the epoch with acquire and then the rest. A line is overwritten only after its reader has
// read it:
//   dispatch(n + F) follows my combine flag of n, which I publish after I have read dispatch(n);
//   combine(n + F) follows my dispatch flag of n + F, which I publish after I have read combine(n).

#include <atomic>
#include <cstdint>
#include <string>

#include "base/byte_math.h"

namespace fanfold::exec {

/// What the sender of a flag is doing.
enum class CallKind : std::uint16_t {
  kNone,
  kDispatch,        // new routing
  kDispatchRouted,  // payloads along an earlier routing
  kCombine,         // ends the round
  kCombineKeep,     // the round stays open
  kRelease,         // an empty combine
  kAck,             // has pulled the rows of a kCombineKeep
};

const char* name_of(CallKind kind) noexcept;

/// Contents of a line. All but `epoch` and the two counts must be equal on both sides.
struct FlagFields {
  std::uint64_t epoch = 0;
  std::uint32_t generation = 0;
  CallKind kind = CallKind::kNone;
  std::uint16_t member = 0;  // of the AllToAlls that share a workspace, in order of creation
  std::uint32_t round_max_tokens = 0;   // m
  std::uint32_t num_tokens = 0;         // T of the sender
  std::uint32_t num_rows = 0;           // rows for the reader; of a combine: how they come home
  std::uint32_t num_payloads = 0;       // or the hidden size of a combine
  std::uint64_t digest = 0;             // of the payload set; 0 for a combine
  std::uint32_t placement_version = 0;  // of the sender's placement
  std::uint32_t mask_digest = 0;        // of the sender's active mask
  std::uint64_t routing = 0;            // identity of the routing that is re-used
  std::int64_t sent_ns = 0;             // when it was published; not compared
};

struct alignas(base::kCacheLine) FlagLine {
  std::atomic<std::uint64_t> words[8];
};

/// Stores `fields` and the present time; the epoch with release, paired with the acquire in
/// `has_arrived`.
void publish(FlagLine& line, const FlagFields& fields) noexcept;

/// Whether the flag of `epoch` is there.
inline bool has_arrived(const FlagLine& line, std::uint64_t epoch) noexcept {
  return line.words[0].load(std::memory_order_acquire) == epoch;
}

/// The contents, after `has_arrived`.
FlagFields read(const FlagLine& line) noexcept;

/// Empty when `got` of rank `peer` agrees with `mine`, else a sentence naming both ranks and
/// values.
std::string difference(const FlagFields& mine, int rank, const FlagFields& got, int peer);

/// The same where the kinds of call agree but their epochs may not, as they cannot where flags are
/// waited for by epoch: then also the round, or how many combines of it came before.
std::string call_difference(const FlagFields& mine, int rank, const FlagFields& got, int peer,
                            std::uint64_t first_epoch);

/// The number of the round whose dispatch or combine has `epoch`.
inline std::int64_t round_of(std::uint64_t epoch, std::uint64_t first_epoch) noexcept {
  constexpr std::uint64_t kRoundMask = (std::uint64_t{1} << 48) - 1;
  return static_cast<std::int64_t>((epoch & kRoundMask) - first_epoch);
}

}  // namespace fanfold::exec
