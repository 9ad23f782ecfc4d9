// SPDX-License-Identifier: Apache-2.0
#pragma once

// Collectives through shared windows, on plain bytes.
//
// A window: | control area | seq line | staging half 0 | staging half 1 |
//
// A collective is a sequence of steps, equally many on every rank. In step n a rank
//   1. writes its data into half n mod 2 of its own window,
//   2. stores n into its own seq (release),
//   3. waits until every peer's seq is at least n (acquire),
//   4. reads the peers' halves n mod 2.
// Two halves suffice: a rank writes half n mod 2 in step n + 2 only after every peer's seq has
// reached n + 1, and a peer stores n + 1 after it has finished reading step n.
//
//   word            written by               read by                      carries
//   SeqLine::seq    its owner, release       every peer's wait, acquire   the owner's half, and
//   that the
//                                                                         owner has read step n - 1
//   Control words   see comm/control.h
//
// Where ranks share no memory, step 2 sends each peer what it reads of the half and then n, which
// go to the peer's copy of this window (transport_group.h).
//
// The first step of each collective carries a header. Every rank compares all headers before it
// uses any data, so a mismatch is the same InvalidArgument on every rank, and as all are at the
// same step the group goes on working. seq never goes back: after a reset it continues above the
// group's maximum.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/function_ref.h"
#include "base/kernels.h"
#include "comm/control.h"
#include "comm/failure.h"
#include "comm/group.h"
#include "fanfold/dtype.h"

namespace fanfold::comm {

/// One row as the collectives see it. All ranks must give the same.
struct RowType {
  DType dtype = DType::kUInt8;
  std::int64_t num_elements = 1;
  std::int64_t bytes() const noexcept { return num_elements * size_of(dtype); }
};

/// A rank's end of one private channel of its group.
///
/// After PeerTimeout or PeerAborted every collective throws InvalidState until `reset`; after
/// PeerLost every collective throws PeerLost again.
/// Threads: one at a time, except `abort`. Borrows the group, which must outlive it.
class Channel {
 public:
  using Bytes = std::vector<std::byte>;
  using Counts = std::vector<std::int64_t>;

  /// Collective. `what` names the owner in messages.
  static std::unique_ptr<Channel> create(Group& group, std::string what, base::Deadline deadline);
  static std::int64_t window_bytes(int num_ranks);
  /// Of a staging half in a group of any size: what one step sends to a peer at most.
  static std::int64_t max_half_bytes() noexcept;
  /// On windows of `window_bytes` that were made for it.
  Channel(Group& group, Windows windows, std::string what);
  /// Tells the peers that this rank has left.
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void barrier(base::Deadline deadline);
  /// `recv` holds sum(counts) rows; `send` may be this rank's place in it.
  void all_gather_v(const std::byte* send, std::byte* recv, RowType row, const Counts& counts,
                    base::Deadline deadline);
  /// `send` and `recv` hold one block per rank, of `row.bytes()` bytes; no overlap.
  void all_to_all(const std::byte* send, std::byte* recv, RowType row, base::Deadline deadline);
  void all_to_all_v(const std::byte* send, std::byte* recv, RowType row, const Counts& send_counts,
                    const Counts& recv_counts, base::Deadline deadline);
  void broadcast(std::byte* data, RowType row, int root, base::Deadline deadline);
  /// `send` may be `recv`. float32, float16, bfloat16, int32 or int64.
  void all_reduce(const std::byte* send, std::byte* recv, RowType row, base::Deadline deadline);
  /// No overlap. Types as all_reduce.
  void reduce_scatter_v(const std::byte* send, std::byte* recv, RowType row, const Counts& counts,
                        base::Deadline deadline);
  /// `call` is compared between the ranks and named in messages.
  std::vector<Bytes> all_gather_bytes(const std::byte* data, std::int64_t bytes,
                                      base::Deadline deadline,
                                      const char* call = "all_gather_bytes");
  /// Every rank's `values`, equally many on each, in rank order.
  std::vector<std::int64_t> all_gather_values(const std::vector<std::int64_t>& values,
                                              base::Deadline deadline, const char* call);

  using Copy = void (*)(std::byte* to, const std::byte* from, std::int64_t bytes);
  /// Where one step wants the bytes [begin, begin + bytes) of a stream; to be written with `copy`.
  struct Outgoing {
    std::byte* data;
    std::int64_t begin;
    std::int64_t bytes;
    Copy copy;
  };
  /// The bytes [begin, begin + bytes) of a stream of `length` bytes. In the last step `data` may be
  /// read until this rank's next collective on the channel, before which no peer writes there
  /// again; in the others while `take` runs.
  struct Incoming {
    const std::byte* data;
    std::int64_t begin;
    std::int64_t bytes;
    std::int64_t length;
    bool is_last;
  };
  /// Everybody's stream of bytes to everybody, for callers that know where the bytes come from and
  /// where they go better than a row type can say. The lengths may differ. Each step calls `put`
  /// for this rank's part, if there is one, and `take` with the parts [R] of all ranks, this rank's
  /// included; all have the same `begin`. `take` may throw InvalidArgument if it does on every rank
  /// in the same step.
  void all_gather_stream(const char* call, std::int64_t length,
                         base::FunctionRef<void(const Outgoing&)> put,
                         base::FunctionRef<void(const std::vector<Incoming>&)> take,
                         base::Deadline deadline);
  /// The same with a stream of `lengths[to]` bytes for each rank. This rank's own does not travel:
  /// its part has no data.
  void all_to_all_stream(const char* call, const Counts& lengths,
                         base::FunctionRef<void(int to, const Outgoing&)> put,
                         base::FunctionRef<void(const std::vector<Incoming>&)> take,
                         base::Deadline deadline);
  /// Bytes of a stream of all_gather_stream that travel in one step.
  std::int64_t stream_room() const noexcept;

  void abort(const std::string& reason) noexcept { control_.abort(reason); }
  void reset(base::Deadline deadline);
  /// Waits until every rank has closed or is gone.
  void close(base::Deadline deadline);
  Control& control() noexcept { return control_; }
  /// The round that the next calls belong to, for messages; -1: none.
  /// `phase`, where given, names their waits in place of the collective.
  void set_round(std::int64_t round, const char* phase = nullptr) noexcept {
    round_ = round;
    phase_ = phase;
  }

 private:
  struct SeqLine;
  /// What all ranks must agree on; counts follow it in the staging half.
  struct Header;
  /// What this rank puts into its header.
  struct Call {
    const char* name;
    RowType row;
    int root = 0;
    std::int64_t length = 0;  // may differ between the ranks
    const Counts* counts = nullptr;
    const Counts* more_counts = nullptr;
    int num_streams = 1;  // pieces that share a half equally
    /// Bytes of this rank's stream for each rank, in units of `unit_bytes`; null: one stream for
    /// all, of `stream_bytes`.
    const Counts* stream_counts = nullptr;
    std::int64_t unit_bytes = 1;
    std::int64_t stream_bytes = 0;
  };
  /// The part of each stream that one step carries.
  struct Chunk {
    std::int64_t begin;   // bytes of each stream before this step
    std::int64_t room;    // at most so many in this step
    std::int64_t offset;  // of the first stream in a half
    bool is_last;         // set when it is drained

    /// What it carries of a stream of `total` bytes.
    std::int64_t bytes_of(std::int64_t total) const noexcept;
    /// Copies its part of `stream` to `out`, from `in`.
    void put(std::byte* out, const std::byte* stream, std::int64_t total) const;
    void take(std::byte* stream, const std::byte* in, std::int64_t total) const;
  };

  SeqLine& seq_line(int rank) const noexcept;
  std::byte* half(int rank, std::uint64_t step) const noexcept;
  /// Start of `rank`'s part of this step's chunk; valid while it is drained.
  const std::byte* staged(int rank, const Chunk& chunk, int stream = 0) const noexcept;
  const Header& header(int rank) const noexcept;
  const std::int64_t* header_counts(int rank) const noexcept;

  void check_usable(const char* call) const;
  /// Runs a collective: header, check, then as many steps as the longest stream needs. `check`
  /// compares and returns the bytes of the longest stream of any rank, `fill` writes a chunk of
  /// this rank, `drain` reads everyone's.
  void run(const Call& call, base::Deadline deadline, base::FunctionRef<std::int64_t()> check,
           base::FunctionRef<void(std::byte* out, const Chunk& chunk)> fill,
           base::FunctionRef<void(const Chunk& chunk)> drain);
  void run_steps(const Call& call, base::Deadline deadline, base::FunctionRef<std::int64_t()> check,
                 base::FunctionRef<void(std::byte* out, const Chunk& chunk)> fill,
                 base::FunctionRef<void(const Chunk& chunk)> drain);
  std::int64_t put_header(const Call& call);
  void step(const Call& call, const Chunk& chunk, base::Deadline deadline);
  /// Sends `peer` what it reads of this rank's half.
  void send_half(int peer, const Call& call, const Chunk& chunk);
  /// @throws InvalidArgument  the same on every rank
  void compare_headers() const;
  void compare_counts(const char* call) const;
  void compare_count_pairs(const char* call) const;
  [[noreturn]] void throw_mismatch(const std::string& field, int rank_a, const std::string& value_a,
                                   int rank_b, const std::string& value_b) const;
  void exchange(const Call& call, const std::byte* send, std::byte* recv, const Counts& send_counts,
                const Counts& recv_counts, base::Deadline deadline);
  /// Calls put(copy) with the copy that suits `bytes` of this rank's staging.
  void put_timed(std::int64_t bytes, base::FunctionRef<void(Copy)> put);
  /// out[i] = sum over the ranks r of rows_[r][i].
  void sum(std::byte* out, DType dtype, std::int64_t num_elements);

  Windows windows_;
  Control control_;
  const base::Kernels& kernels_;
  int rank_;
  int num_ranks_;
  std::int64_t half_bytes_;
  std::uint64_t step_ = 0;  // the last step that this rank has published
  std::vector<const void*> rows_;
  std::vector<Incoming> parts_;  // [R] of the stream under way
  int num_far_puts_ = 0;         // puts to come that take the peers for distant
  std::int64_t round_ = -1;
  const char* phase_ = nullptr;
  bool needs_reset_ = false;
  std::optional<Failure> lost_;
};

}  // namespace fanfold::comm
