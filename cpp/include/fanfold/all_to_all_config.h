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
#include "fanfold/tensor_view.h"

namespace fanfold {

/// How rows travel. `kAuto` is decided once, at creation; see AllToAll::choice.
enum class Strategy : std::uint8_t {
  kAuto,
  kBroadcast,       ///< every row to every rank; the baseline of all comparisons
  kGatherScatter,   ///< all-gather of rows; partial sums go home by all-to-all
  kBatched,         ///< equal-split all-to-all of fixed capacity, any transport
  kOneSided,        ///< rows are pushed into the peers' memory, results pulled from it
  kTwoSided,        ///< bounded FIFO channels; symmetric memory independent of the tokens
  kHighThroughput,  ///< exact counts first, then one_sided's movement into flat rows
  kLowLatency,      ///< one_sided's movement, expert_major, optionally FP8 on the wire
};

/// How received rows lie in memory. R ranks, m = round_max_tokens, L local experts.
enum class Layout : std::uint8_t {
  kRankMajor,    ///< [R, m, ...]: the rows of source r first in [r]; one row per (token, rank)
  kGathered,     ///< [sum of T, ...]: every token of every rank, routed here or not
  kExpertMajor,  ///< [L, R*m, ...]: one row per (token, local expert), dense from 0
  kFlat,         ///< [N, ...]: one row per (token, rank), by source rank
  /// [N', ...]: one row per (token, local expert), by expert; each expert's rows are followed by
  /// zero rows up to a multiple of `expert_alignment`
  kFlatByExpert,
};

/// Whether rows are per (token, local expert) rather than per (token, rank).
constexpr bool is_per_expert(Layout layout) noexcept {
  return layout == Layout::kExpertMajor || layout == Layout::kFlatByExpert;
}

/// How rows of numbers are packed while they travel (strategy low_latency).
enum class Wire : std::uint8_t {
  kNone,
  kFp8E4M3,  ///< one FP8 E4M3 per element and a scale per 128, the last block may be short
};

/// What the scales of a wire are.
enum class WireScale : std::uint8_t {
  kFloat32,
  kUe8m0,  ///< one byte: a power of two, biased by 127
};

/// Who multiplies by the router's weights.
enum class Weighting : std::uint8_t {
  kApplied,  ///< the experts did; rows are only added
  kCarried,  ///< as if the expert's rank did, with the weights that travelled, before it sends
  kOrigin,   ///< the token's own rank, when it adds the unweighted rows
};

/// What an id >= num_experts does.
enum class CheckIds : std::uint8_t {
  kAuto,   ///< kRaise on the CPU, kDrop on a GPU
  kRaise,  ///< InvalidArgument that names row and column; nothing is sent. Not on a GPU
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
  /// Replicas: [num_experts] the logical expert that each (physical) expert is a copy of; the
  /// logical ids are 0 to their maximum, each with at least one copy. Empty: no replicas. The
  /// caller's ids are then logical; the source picks copy (source rank + token) mod n, by
  /// ascending physical id; received ids, num_experts and the local experts are physical.
  std::vector<std::int32_t> logical_of_expert;

  /// Consecutive blocks; the first E mod R ranks host one expert more.
  static Placement linear();
  /// Expert e on rank e mod R.
  static Placement round_robin();
  static Placement from_table(std::vector<std::int32_t> rank_of_expert);
  static Placement from_replicas(std::vector<std::int32_t> rank_of_expert,
                                 std::vector<std::int32_t> logical_of_expert);
};

FANFOLD_EXPORT const char* name_of(Strategy value) noexcept;
FANFOLD_EXPORT const char* name_of(Layout value) noexcept;
FANFOLD_EXPORT const char* name_of(Weighting value) noexcept;
FANFOLD_EXPORT const char* name_of(CheckIds value) noexcept;
FANFOLD_EXPORT const char* name_of(SanitizePolicy value) noexcept;
FANFOLD_EXPORT const char* name_of(Wire value) noexcept;
FANFOLD_EXPORT const char* name_of(WireScale value) noexcept;
/// @throws InvalidArgument  an unknown name; the message lists the known ones.
FANFOLD_EXPORT Strategy strategy_from_name(std::string_view name);
FANFOLD_EXPORT Layout layout_from_name(std::string_view name);
FANFOLD_EXPORT Weighting weighting_from_name(std::string_view name);
FANFOLD_EXPORT CheckIds check_ids_from_name(std::string_view name);
/// "linear" or "round_robin".
FANFOLD_EXPORT Placement placement_from_name(std::string_view name);
FANFOLD_EXPORT SanitizePolicy sanitize_policy_from_name(std::string_view name);
FANFOLD_EXPORT Wire wire_from_name(std::string_view name);
FANFOLD_EXPORT WireScale wire_scale_from_name(std::string_view name);

/// Knobs for tests of the library itself; the defaults are production. Not part of what ranks must
/// agree on, except `row_guard_bytes` and `first_epoch`.
struct FANFOLD_EXPORT TestKnobs {
  std::int64_t row_guard_bytes = 0;    ///< gap after each received payload row
  std::uint64_t first_epoch = 1;       ///< epoch of the first round
  std::uint64_t delay_seed = 0;        ///< not 0: random delays at every protocol step
  std::int64_t kill_at_step = -1;      ///< SIGKILL this process at the k-th protocol step
  std::int64_t stop_at_step = -1;      ///< SIGSTOP this process at the k-th protocol step
  std::string isa = "auto";            ///< "portable", "avx2", "avx512"
  bool streaming_stores = true;        ///< push remote rows past the cache
  std::int64_t min_worker_bytes = -1;  ///< not -1: phases of fewer bytes use one worker
  std::int64_t min_pull_bytes = -1;    ///< not -1: fewer results by expert are folded first
  std::int64_t max_store_bytes = -1;   ///< not -1: a slot of high_throughput cannot grow beyond it
};

/// Configuration of an AllToAll; equal on all ranks but for `device_index` and `name`, which
/// creation verifies.
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
  /// Layouts flat and flat_by_expert. None: as many rows as a round brings, which dispatch waits
  /// for. n: tensors of n rows; rows beyond are dropped from the end and counted
  /// (AllToAll::num_dropped_rows), and their results are missing from the sums.
  std::optional<std::int64_t> max_recv_rows;
  std::int64_t expert_alignment = 1;  ///< flat_by_expert: rows of an expert's group, 1..65536
  int max_local_experts = 0;          ///< room for placements to come; 0: what `placement` needs
  /// Payload 0, float32, float16 or bfloat16 [T, H], travels and arrives as FP8 E4M3 elements (the
  /// "fn" format) and Received::scales, one per block of 128 elements: x becomes x / scale, rounded
  /// to nearest even, with scale = amax / 448 for the block's largest finite magnitude amax. Of x,
  /// element * scale is at most max(|x| / 16, amax / 458752) off; with wire_scale kUe8m0, whose
  /// scales are up to twice as large, max(|x| / 16, amax / 229376). Zeros keep their sign (a block
  /// of zeros has scale 1); infinities and NaN arrive as NaN and touch no other element; scales are
  /// at least 2^-126.
  Wire dispatch_wire = Wire::kNone;
  /// The partial sums of layouts per expert (weighting kOrigin: the experts' rows) travel likewise.
  /// They are packed from float32, not rounded to combine_dtype before, and added as element *
  /// scale in float32: each is off by at most the same bound, of its own block.
  Wire combine_wire = Wire::kNone;
  WireScale wire_scale = WireScale::kFloat32;
  /// Strategy two_sided: bytes of the FIFO channel from each rank to each other, 4096..2^30.
  std::int64_t channel_bytes = std::int64_t{256} << 10;
  int max_in_flight = 1;  ///< rounds that may be open at once, 1..64
  /// Sums in the stated order. False lets broadcast use an all-reduce and gather_scatter a
  /// reduce-scatter, whose order is the transport's; see Capabilities::deterministic. On a GPU the
  /// order is always the stated one.
  bool deterministic = true;
  CheckIds check_ids = CheckIds::kAuto;
  /// Where the tensors lie and the rows move; equal on all ranks. On a GPU: strategies one_sided
  /// and low_latency (kAuto: one_sided) and, on a communicator with collectives on GPUs
  /// (Communicator::from_nccl), broadcast, gather_scatter and batched; with layouts rank_major and
  /// expert_major, top_k up to 128, up to 256 ranks.
  DeviceType device = DeviceType::kCpu;
  int device_index = 0;  ///< of a GPU: this rank's CUDA device; ranks may share one
  std::chrono::nanoseconds timeout = kDefaultTimeout;
  std::string name;           ///< appears in messages
  bool debug_poison = false;  ///< fill regions that ended with NaN / 0xCD
  TestKnobs test_knobs;
};

}  // namespace fanfold
