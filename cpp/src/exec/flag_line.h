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
#include "exec/flag_fields.h"

namespace fanfold::exec {

const char* name_of(CallKind kind) noexcept;

struct alignas(base::kCacheLine) FlagLine {
  std::atomic<std::uint64_t> words[kFlagWords];
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
