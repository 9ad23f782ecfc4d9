// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an AllToAll is made from.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fanfold/communicator.h"
#include "fanfold/dtype.h"
#include "fanfold/export.h"

namespace fanfold {

/// How rows travel. `kAuto` is decided once, at creation; see AllToAll::choice.
enum class Strategy : std::uint8_t { kAuto, kBroadcast, kOneSided };

/// How received rows lie in memory. R ranks, m = round_max_tokens, L local experts.
enum class Layout : std::uint8_t {
  kRankMajor,    ///< [R, m, ...]: the rows of source r first in [r]; one row per (token, rank)
  kGathered,     ///< [sum of T, ...]: every token of every rank, routed here or not
  kExpertMajor,  ///< [L, R*m, ...]: one row per (token, local expert), dense from 0
};

/// Who multiplies by the router's weights.
enum class Weighting : std::uint8_t {
  kApplied,  ///< the experts did; rows are only added
  kCarried,  ///< the expert's rank, with the weights that travelled, before it sends
  kOrigin,   ///< the token's own rank, when it adds the unweighted rows
};

/// What an id >= num_experts does.
enum class CheckIds : std::uint8_t {
  kAuto,   ///< kRaise on the CPU
  kRaise,  ///< InvalidArgument that names row and column; nothing is sent
  kDrop,   ///< counts as "no expert", is counted and reported by AllToAll::num_dropped_ids
};

/// Which ids `sanitize` overwrites.
enum class SanitizePolicy : std::uint8_t {
  kPadding,             ///< rows that carry no token
  kPaddingAndNonLocal,  ///< also the ids of experts of other ranks
  kToLocal,             ///< global id -> local id; all others are invalid
};

/// Which rank hosts which expert.
struct FANFOLD_EXPORT Placement {
  enum class Kind : std::uint8_t { kLinear, kRoundRobin, kTable };
  Kind kind = Kind::kLinear;
  std::vector<std::int32_t> table;  ///< kTable: [num_experts] the rank of each expert

  /// Consecutive blocks; the first E mod R ranks host one expert more.
  static Placement linear();
  /// Expert e on rank e mod R.
  static Placement round_robin();
  static Placement from_table(std::vector<std::int32_t> rank_of_expert);
};

FANFOLD_EXPORT const char* name_of(Strategy value) noexcept;
FANFOLD_EXPORT const char* name_of(Layout value) noexcept;
FANFOLD_EXPORT const char* name_of(Weighting value) noexcept;
FANFOLD_EXPORT const char* name_of(CheckIds value) noexcept;
FANFOLD_EXPORT const char* name_of(SanitizePolicy value) noexcept;
/// @throws InvalidArgument  an unknown name; the message lists the known ones.
FANFOLD_EXPORT Strategy strategy_from_name(std::string_view name);
FANFOLD_EXPORT Layout layout_from_name(std::string_view name);
FANFOLD_EXPORT Weighting weighting_from_name(std::string_view name);
FANFOLD_EXPORT CheckIds check_ids_from_name(std::string_view name);
/// "linear" or "round_robin".
FANFOLD_EXPORT Placement placement_from_name(std::string_view name);
FANFOLD_EXPORT SanitizePolicy sanitize_policy_from_name(std::string_view name);

/// Knobs for tests of the library itself; the defaults are production. Not part of what ranks must
/// agree on, except `row_guard_bytes` and `first_epoch`.
struct FANFOLD_EXPORT TestKnobs {
  std::int64_t row_guard_bytes = 0;  ///< gap after each received payload row
  std::uint64_t first_epoch = 1;     ///< epoch of the first round
  std::uint64_t delay_seed = 0;      ///< not 0: random delays at every protocol step
  std::int64_t kill_at_step = -1;    ///< SIGKILL this process at the k-th protocol step
  std::int64_t stop_at_step = -1;    ///< SIGSTOP this process at the k-th protocol step
  std::string isa = "auto";          ///< "portable", "avx2", "avx512"
  bool streaming_stores = true;      ///< push remote rows past the cache
};

/// Configuration of an AllToAll; equal on all ranks, which creation verifies.
struct FANFOLD_EXPORT AllToAllConfig {
  int num_experts = 0;                     ///< E, over all ranks
  int top_k = 0;                           ///< K, experts per token, 1..1024
  std::int64_t max_tokens_per_rank = 0;    ///< M, capacity of *each* rank per round
  std::int64_t hidden = 0;                 ///< elements of a hidden-state row
  DType dtype = DType::kBFloat16;          ///< of the hidden-state payload
  std::int64_t extra_bytes_per_token = 0;  ///< room for further payloads
  /// Bytes of all payload rows of one token; default hidden * size_of(dtype) + extra.
  std::optional<std::int64_t> dispatch_row_bytes;
  /// Bytes of one combine row; default hidden * size_of(combine_dtype).
  std::optional<std::int64_t> combine_row_bytes;
  Strategy strategy = Strategy::kAuto;
  Layout layout = Layout::kRankMajor;
  Weighting weighting = Weighting::kApplied;
  Placement placement;
  /// Partials are rounded to it before they travel; float32, float16 or bfloat16. Default: `dtype`,
  /// which must then be one of these.
  std::optional<DType> combine_dtype;
  int max_in_flight = 1;      ///< rounds that may be open at once, 1..64
  bool deterministic = true;  ///< sums in the stated order
  CheckIds check_ids = CheckIds::kAuto;
  std::chrono::nanoseconds timeout = kDefaultTimeout;
  std::string name;           ///< appears in messages
  bool debug_poison = false;  ///< fill regions that ended with NaN / 0xCD
  TestKnobs test_knobs;
};

}  // namespace fanfold
