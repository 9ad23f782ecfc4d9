// SPDX-License-Identifier: Apache-2.0
#pragma once

// Expert-parallel exchange: token rows go out to their experts, results come home.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fanfold/all_to_all_config.h"
#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "fanfold/export.h"
#include "fanfold/metainfo.h"
#include "fanfold/received.h"
#include "fanfold/tensor_view.h"

namespace fanfold {

/// Inputs of one dispatch. T tokens of this rank, K = top_k. All are only read, and only until the
/// call returns; on a GPU, until `stream` has passed the call. All tensors lie on the device of the
/// AllToAll. A tensor of zero tokens may have a null pointer.
struct FANFOLD_EXPORT DispatchInputs {
  /// [T, K] int16, int32, int64 or uint32, any row stride; a negative id selects no expert. May be
  /// empty for layout kGathered, and with `routing`.
  TensorView topk_ids;
  /// Each [T, ...], any dtype, rows contiguous with any row stride; 1..16 payloads.
  std::vector<TensorView> payloads;
  TensorView topk_weights;  ///< optional [T, K] float32, any row stride
  /// m with T <= m <= M, equal on all ranks; default M.
  std::optional<std::int64_t> round_max_tokens;
  Routing routing;  ///< send along an earlier dispatch's rows
  /// What each rank's T is, where the caller knows it; verified, on a GPU by Received::host_counts.
  std::optional<std::vector<std::int64_t>> num_tokens_per_rank;
  /// Optional one int32: only the first n rows are tokens. On a GPU it is read when the work runs,
  /// so that a captured graph replays with another number (at least 0, at most the rows given);
  /// `out` then has as many rows as were given, and those from n on become zeros.
  TensorView num_tokens;
  std::optional<std::int64_t> invalid_expert_id;  ///< default -1
  /// On a GPU each wait of its kernels has this long; a captured graph keeps it.
  std::optional<std::chrono::nanoseconds> timeout;
  /// A cudaStream_t; null is the legacy default stream. On a GPU it must be given; else ignored.
  std::optional<void*> stream;
};

/// Inputs of one combine.
struct FANFOLD_EXPORT CombineInputs {
  /// The experts' rows in the layout of the dispatch: its leading dimensions, then H;
  /// float32, float16 or bfloat16; H * size of combine_dtype <= combine_row_bytes, H equal on all
  /// ranks.
  TensorView y;
  TensorView out;           ///< [T, H] float32, float16 or bfloat16; overwritten
  TensorView topk_weights;  ///< weighting kOrigin: optional [T, K] float32 in place of dispatch's
  /// False: the round stays open for another combine; costs one more flag exchange. Equal on all
  /// ranks.
  bool release = true;
  std::optional<std::chrono::nanoseconds> timeout;
  /// On a GPU; none: that of the round's dispatch, for combine_recv, too, whatever combine_send was
  /// given.
  std::optional<void*> stream;
};

/// What a strategy can do.
struct FANFOLD_EXPORT Capabilities {
  Strategy strategy = Strategy::kAuto;
  std::vector<Layout> layouts;         ///< all that it gives
  std::vector<Layout> native_layouts;  ///< those that need no local copy after the rows arrived
                                       ///< (flat_by_expert: without max_recv_rows)
  std::vector<DType> id_dtypes;
  bool two_phase = false;
  bool graph_safe = false;
  bool needs_uniform_tokens = false;
  /// Whether its sums are always in the stated order; false: also offers the transport's own order,
  /// with deterministic = false.
  bool deterministic = true;
  /// What deterministic = false promises; empty where it changes nothing.
  std::string error_bound;
  bool rank_mask = false;
  bool wires = false;    ///< dispatch_wire and combine_wire
  bool workers = false;  ///< set_num_workers has an effect
  int max_payloads = 0;
  int max_top_k = 0;
  int max_ranks = 0;
};

/// What one round can hold on this rank.
struct FANFOLD_EXPORT Capacities {
  std::int64_t tokens_per_rank = 0;    ///< M; tokens that one rank may send to another
  std::int64_t experts_per_token = 0;  ///< min(top_k, L): rows that one token can have per rank
  std::int64_t rows_per_expert = 0;    ///< R * M
  std::int64_t rows = 0;               ///< rows of the layout; 0: as a round brings them
};

/// Whether a call would fit, and if not, why.
struct FANFOLD_EXPORT Feasibility {
  bool feasible = false;
  std::string reason;
};

/// One reusable dispatch/combine exchange over a group of ranks. Serves any number of layers of
/// equal configuration.
///
/// Owns its workspace; shares the communicator's state. Every rank issues the same sequence of
/// phases. An argument error is local: nothing was sent, and a corrected call continues the round.
/// A difference between ranks that the flags show (InvalidArgument from a receiving call), and
/// PeerTimeout and PeerAborted, put it into state failed until `reset()`. After PeerLost close it.
/// Threads: one call at a time per object, else InvalidState; `abort` may be called at any time.
/// All calls run on the calling thread and wait only where they say so, with a deadline.
///
/// On a GPU (AllToAllConfig::device) the calls of a round only enqueue work on their stream;
/// "waits" then means that the stream does, and the caller orders the streams of one round. Errors
/// of the work (PeerTimeout, PeerAborted, PeerLost, InvalidArgument where the ranks' calls differ)
/// are thrown by the next call that looks: any of a round, `check`, Received::host_counts. Work
/// that was enqueued behind a failure does nothing. Graph capture: a round that is dispatched in a
/// capture must end in it, and one from outside cannot go on in one (InvalidState). Every rank
/// replays its graphs in one order, and makes no round of its own between. A failed round ends the
/// work of all replays until `reset`. Where ranks share a GPU, a stream may queue behind another
/// rank's that waits for it, until that one's timeout: CUDA keeps CUDA_DEVICE_MAX_CONNECTIONS (8
/// by default) streams of a process apart.
///
/// Where collectives carry rows on GPUs (broadcast, gather_scatter, batched), ranks enqueue the
/// rounds of all AllToAlls of one communicator, and its own calls, in one order; blocks of
/// `round_max_tokens` rows travel, however many there are. A peer that does not come holds up the
/// stream until a call of this rank finds that a round's time is over (it counts from the call), or
/// that a peer has aborted or left: any of a round, `check`, and those that wait. The
/// communicator's collectives are aborted then; `reset` makes them anew, for all AllToAlls of the
/// communicator, whose graphs must be captured again. Not so with an NCCL communicator of the
/// caller's (NcclOptions::handle): only the caller can end what waits in it, and `reset` throws
/// Unsupported.
class FANFOLD_EXPORT AllToAll {
 public:
  static constexpr int kMaxPayloads = 16;
  static constexpr int kMaxTopK = 1024;
  static constexpr int kMaxRanks = 1024;

  /// Allocates the workspace, from `allocator` where given: its symmetric memory (but for the rows
  /// of high_throughput, whose memory grows with need) and its private memory. Collective.
  /// @throws InvalidArgument  `config` contradicts itself (nothing was allocated), or the ranks'
  ///         configurations differ: on every rank, naming the field and both values.
  /// @throws Unsupported  the strategy lacks the layout or a wire; on a GPU also `workspace_of`,
  ///         and a strategy over collectives where the communicator has none on GPUs.
  /// @throws CapacityExceeded  the caller's buffers of `allocator` have no room: on every rank.
  /// On a GPU: memory of `config.device_index`, from an allocator of its own or one whose memory is
  /// of that device (InvalidArgument). Synchronizes with its own copies only. Graph capture: not
  /// allowed.
  /// @throws PeerTimeout, PeerLost, SystemFailure, std::bad_alloc; a rank that runs out of memory
  ///         ends it on all of them.
  ///
  /// `workspace_of`: use its memory and take part in its order of rounds, as two kinds of layers of
  /// one model may. Round n of any of them uses slot n mod max_in_flight, so every rank must make
  /// the rounds of all of them in one order, which the flags verify. Strategy (kAuto: its own),
  /// max_in_flight and, for two_sided, channel_bytes must be equal, and each part must fit where
  /// the first of them has it: what arrives, what goes home, private memory (InvalidArgument with
  /// the bytes needed and available). Failure, reset, mask and abort are then shared, too;
  /// placement, name and all else are not. `close` of one while others live does not wait, needs
  /// its own rounds ended (InvalidState) and leaves the memory to the others; the last one gives it
  /// back. One that is destroyed in an open round fails the others on all ranks (PeerAborted) until
  /// `reset`.
  /// @throws InvalidState  `workspace_of` is closed or has failed.
  AllToAll(Communicator& communicator, const AllToAllConfig& config, Allocator* allocator = nullptr,
           const AllToAll* workspace_of = nullptr);
  /// Marks this rank as left; never waits for a peer. Prefer `close()`. On a GPU: enqueued work
  /// that waits for a peer is given up, so that what it would have written stays as it was;
  /// synchronize first. Then, or when the last Received is gone, waits for all work of the device,
  /// that of ranks that share it included, since it may use the memory; where it cannot, as in a
  /// graph capture, the memory stays mapped until the process ends.
  ~AllToAll();
  AllToAll(AllToAll&&) noexcept;
  AllToAll& operator=(AllToAll&&) noexcept;

  /// Bytes of workspace that an AllToAll of this configuration holds per rank: symmetric and
  /// private, exactly `workspace_bytes()` when it is made. The counts and indices of a routing and
  /// small scratch of the collectives come on top. Layout flat_by_expert, where it is not native:
  /// the private area of its rows counts as its worst case, which is address space; it takes memory
  /// only where it is written. high_throughput holds, on every rank, room for the rows of the
  /// fullest rank of any round so far, by expert those of payloads and of results.
  static std::int64_t required_bytes(int num_ranks, const AllToAllConfig& config);

  const AllToAllConfig& config() const;
  int rank() const;
  int num_ranks() const;
  int num_local_experts() const;
  /// Global ids of this rank's experts, ascending; position = local id.
  const std::vector<std::int32_t>& local_experts() const;

  /// Sends each token once to each rank that hosts one of its experts, and receives. Waits for
  /// every active rank's rows.
  /// Stream (GPU): enqueues on `inputs.stream`. Never synchronizes. Graph capture: allowed.
  /// @throws InvalidArgument, InvalidState, PeerTimeout, PeerAborted, PeerLost
  /// @throws CapacityExceeded  strategy high_throughput: a rank has no memory for as many rows. On
  ///         every rank, before a row moves; the round has not begun.
  Received dispatch(const DispatchInputs& inputs);
  /// First half: never waits for a peer, except (CPU) for a slot whose previous round ended by
  /// `release` while a peer still holds it.
  /// Stream (GPU): enqueues on `inputs.stream`. Never synchronizes. Graph capture: allowed.
  /// @throws InvalidState  all `max_in_flight` slots hold open rounds; nothing was sent.
  /// @throws Unsupported   the strategy has no two phases.
  Round dispatch_send(const DispatchInputs& inputs);
  /// Second half: waits for every active rank.
  /// Stream (GPU): enqueues on `stream`; none: that of the round's dispatch_send. Never
  /// synchronizes. Graph capture: of the round's dispatch_send only.
  Received dispatch_recv(const Round& round,
                         std::optional<std::chrono::nanoseconds> timeout = std::nullopt,
                         std::optional<void*> stream = std::nullopt);

  /// Where the experts of `round` may write their results so that combine copies nothing:
  /// by layout [R, m, H], [sum of T, H], [L, R*m, H], [N, H] or [N', H]. Defaults: the configured
  /// hidden and combine_dtype. Never overlaps the received rows. Contents are unspecified.
  /// Stream: none. Graph capture: allowed.
  TensorView combine_buffer(const Round& round, std::optional<std::int64_t> hidden = std::nullopt,
                            std::optional<DType> dtype = std::nullopt);
  /// {T, H}: the shape of `out` for an open round; H as the results that were sent have it, else
  /// the configured hidden. On a GPU T is the number of rows given to dispatch.
  std::pair<std::int64_t, std::int64_t> out_shape(const Round& round) const;
  /// Adds each token's rows and writes `out`; a token without an expert becomes zeros. Ends the
  /// round unless `release` is false. Waits for every active rank.
  /// Stream (GPU): enqueues on `inputs.stream`, none: that of the round's dispatch. Never
  /// synchronizes. Graph capture: of the round's dispatch only. So for both halves.
  void combine(const CombineInputs& inputs, const Round& round);
  /// First half: stages or reduces `inputs.y` and announces it; `inputs.out` is not used. Never
  /// waits.
  void combine_send(const CombineInputs& inputs, const Round& round);
  /// Second half; `inputs.y` is not used.
  void combine_recv(const CombineInputs& inputs, const Round& round);
  /// Ends a round without a combine. Every rank must do so. Does not wait. A round whose graph
  /// capture has ended without it is forgotten, in any state, and nothing is enqueued.
  /// Stream (GPU): enqueues on `stream`, none: that of the round's dispatch; the stream then waits
  /// until every active rank has left the round. Never synchronizes. Graph capture: of the round's
  /// dispatch only.
  void release(const Round& round, std::optional<void*> stream = std::nullopt);

  /// Writes `ids` [R, m, K] (or [rows, K]) to `out`, overwriting ids as `policy` says. `counts`
  /// int32 [R] (or [1]): rows with a token in each [r].
  /// Local; `out` may be `ids`.
  /// Stream (GPU): enqueues on `stream`, which must be given; all three tensors lie on the device.
  /// Counts that lie outside of [0, m] are taken for the nearest number inside. Never synchronizes.
  /// Graph capture: allowed.
  void sanitize(const TensorView& ids, const TensorView& counts, std::int64_t invalid_expert_id,
                SanitizePolicy policy, const TensorView& out,
                std::optional<void*> stream = std::nullopt) const;

  /// Ranks left out: no rows go to them, they are not waited for, what they hold is missing from
  /// the sums. Takes effect with the next dispatch; equal on all active ranks, which the flags
  /// verify.
  /// On a GPU: waits for all work of the device (ranks that share one need a barrier after it); not
  /// in a graph capture. What was captured before takes the new mask, too, but for rounds along a
  /// routing, which must be captured anew.
  /// @throws InvalidArgument  wrong length, or this rank is masked out.
  /// @throws InvalidState     a round is open; a graph capture is under way, which is then invalid.
  void set_active_mask(const std::vector<bool>& active);
  std::vector<bool> active_mask() const;

  /// Moves experts: a new placement of as many (physical) experts. Collective, waits; no round may
  /// be open. The flags carry its version; routings made before are refused. On a GPU: waits for
  /// all work of the device; not in a graph capture, and what was captured before must be captured
  /// anew.
  /// @throws InvalidArgument  the placements of the ranks differ, or the workspace has no room for
  ///         a rank's experts (see AllToAllConfig::max_local_experts); nothing has changed.
  /// @throws InvalidState     a round is open; a graph capture is under way, which is then invalid.
  void set_placement(const Placement& placement,
                     std::optional<std::chrono::nanoseconds> timeout = std::nullopt);

  /// Threads that move rows in large rounds, the caller's included; 1..256, default 1. Results are
  /// the same bit for bit. Local, between calls. No effect on a GPU.
  void set_num_workers(int num_workers);
  int num_workers() const;

  /// Makes the waits of all ranks on this AllToAll throw PeerAborted(rank, reason). Any thread. On
  /// a GPU the kernels of all ranks stop waiting, and their next calls throw.
  void abort(const std::string& reason);
  /// Brings a failed AllToAll back: ends all open rounds. Collective over the active ranks, waits;
  /// on a GPU first for all work of the device. Graph capture: not allowed (InvalidState; nothing
  /// has changed but the capture, which is invalid).
  void reset(std::optional<std::chrono::nanoseconds> timeout = std::nullopt);
  /// Collective: waits until every active rank has called it or has left, then gives the workspace
  /// back. Idempotent. Not the last of those that share a workspace: see the constructor. On a GPU
  /// first waits for all work of the device; what waits for peers then is given up after `timeout`,
  /// or when they are gone. Graph capture: not allowed (InvalidState, as reset).
  void close(std::optional<std::chrono::nanoseconds> timeout = std::nullopt);
  bool is_closed() const noexcept;
  bool is_failed() const noexcept;
  /// Throws what the last failed call threw, or PeerAborted / PeerLost where a peer has aborted or
  /// left; returns when all is well. Does not wait. On a GPU also what kernels have reported so
  /// far; when a peer is gone, they stop waiting for it. Waits of this library see that by
  /// themselves. Who synchronizes otherwise with enqueued work calls this now and then meanwhile,
  /// or waits for the timeout of the work.
  void check() const;
  /// Ids >= num_experts that were dropped since creation (CheckIds::kDrop); on a GPU by the work
  /// that has ended.
  std::int64_t num_dropped_ids() const noexcept;
  /// Rows beyond max_recv_rows that were dropped on this rank since creation.
  std::int64_t num_dropped_rows() const noexcept;

  const Metainfo& metainfo() const;
  /// Bytes held now: symmetric and private. high_throughput without max_recv_rows holds more as
  /// rounds bring more rows.
  std::int64_t workspace_bytes() const;
  Capacities capacities() const;
  Capabilities capabilities() const;
  /// Which strategy serves, and why: "one_sided: …".
  std::string choice() const;
  /// A pure function of values equal on all ranks.
  Feasibility feasible(std::int64_t round_max_tokens, std::int64_t row_bytes, Layout layout) const;
  /// Keeps the memory of all views mapped while held, past `close()` and destruction.
  std::shared_ptr<const void> memory() const;

  class Impl;

 private:
  Impl& impl() const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace fanfold
