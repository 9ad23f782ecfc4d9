// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a dispatch gives back.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/export.h"
#include "fanfold/tensor_view.h"

namespace fanfold {

/// One dispatch that waits for its combine. A small value; copies mean the same round.
class FANFOLD_EXPORT Round {
 public:
  Round() = default;
  std::uint64_t owner = 0;       ///< identity of the AllToAll, unique in the process
  std::int64_t number = -1;      ///< counts the rounds of one AllToAll from 0
  std::uint32_t generation = 0;  ///< of the AllToAll when the round began
  /// "round 3 of AllToAll 'moe' (generation 0)"
  std::string describe(const std::string& owner_name) const;
};

/// Counts and indices of one dispatch in memory of their own, immutable, of any lifetime. Give it
/// to a later dispatch of an equally configured AllToAll to send new payloads along the same rows.
///
/// Only of the rank that made it. Of a GPU's AllToAll: memory of that GPU, written on the stream of
/// the round's last call, behind which rounds along it must be ordered. It must outlive the graphs
/// whose rounds go along it; its last copy frees it, which waits for the device and must not happen
/// in a graph capture.
class FANFOLD_EXPORT Routing {
 public:
  Routing();
  ~Routing();
  Routing(const Routing&);
  Routing(Routing&&) noexcept;
  Routing& operator=(const Routing&);
  Routing& operator=(Routing&&) noexcept;

  bool has_value() const noexcept { return data_ != nullptr; }
  /// T of this rank; of a GPU's the rows given to dispatch.
  std::int64_t num_tokens() const;
  std::int64_t round_max_tokens() const;  ///< m
  /// Rows that each rank sent here, [R]. Of a GPU's: waits, when first asked, for
  /// the stream that it was made on, which must still exist.
  /// @throws PeerTimeout, PeerAborted, PeerLost, InvalidArgument  on a GPU, when first asked: what
  ///         kernels have reported.
  const std::vector<std::int32_t>& rank_counts() const;

  struct Data;
  explicit Routing(std::shared_ptr<const Data> data) noexcept;
  /// For the library itself.
  const std::shared_ptr<const Data>& data() const noexcept { return data_; }

 private:
  std::shared_ptr<const Data> data_;
};

/// Host copies of the counts.
struct FANFOLD_EXPORT HostCounts {
  std::vector<std::int32_t> rank_counts;    ///< [R] as Received::rank_counts
  std::vector<std::int32_t> expert_counts;  ///< [L] as Received::expert_counts
  std::int64_t num_rows = 0;                ///< as Received::num_rows
};

/// Views of what one dispatch received. R ranks, m = round_max_tokens, K = top_k, L local experts.
///
/// All views but those of a Routing are valid until the combine (or release) of its round is
/// called; afterwards every accessor throws InvalidState. Copies share the state. On a GPU they are
/// tensors of the device, to be used on the stream of the round's last call (dispatch,
/// dispatch_recv, a combine that left it open) or behind it; the accessors enqueue there what they
/// make on first use, and never synchronize but for host_counts. A tensor that is first asked for
/// after an event was recorded there is not behind that event; later calls of the round come behind
/// it by themselves. What makes a tensor counts as a call: InvalidState while another thread is
/// inside one.
class FANFOLD_EXPORT Received {
 public:
  Received();
  ~Received();
  Received(const Received&);
  Received(Received&&) noexcept;
  Received& operator=(const Received&);
  Received& operator=(Received&&) noexcept;

  bool has_value() const noexcept { return state_ != nullptr; }
  const Round& handle() const;
  /// False once the round ended.
  bool is_open() const noexcept;
  std::int64_t round_max_tokens() const;  ///< m
  std::int64_t num_tokens() const;        ///< T of this rank; on a GPU the rows given to dispatch
  /// In the order of the payloads that were given: rank_major [R, m, ...], gathered [sum of T,
  /// ...], expert_major [L, R*m, ...], flat [N, ...], flat_by_expert [N', ...]. Bytes of rows past
  /// the counts are unspecified, except that those within flat_by_expert's groups are zero.
  const std::vector<TensorView>& payloads() const;
  /// With a dispatch_wire: the scales of payload 0, [.., ceil(H / 128)] float32, or uint8 for
  /// wire_scale ue8m0. Else empty.
  const TensorView& scales() const;
  /// [R] int32: rows from each rank. With max_recv_rows also those dropped.
  const TensorView& rank_counts() const;
  /// [L] int32: (token, local expert) pairs; with max_recv_rows of kept rows only. -1 each when no
  /// ids were given.
  const TensorView& expert_counts() const;
  /// [1] int32: rows received, one per (token, rank); gathered: all tokens; flat_by_expert: rows of
  /// the layout, zero rows within the groups included. With max_recv_rows also those dropped.
  const TensorView& num_rows() const;
  /// [L+1] int32: exclusive sums of expert_counts; flat_by_expert: where each expert's group
  /// begins, at most max_recv_rows. Unspecified when no ids were given.
  const TensorView& offsets() const;
  /// On a GPU: waits for the stream of the round's last call; not in a graph capture.
  /// @throws PeerTimeout, PeerAborted, PeerLost, InvalidArgument  on a GPU: what kernels reported;
  ///         the AllToAll has failed then.
  HostCounts host_counts() const;
  /// [R, m, K], [sum of T, K] or [N, K] int32: global ids as sent (with replicas: physical),
  /// invalid_expert_id in rows without a token. Empty for layouts per expert, or when no ids were
  /// given.
  const TensorView& topk_ids() const;
  /// [R, m, K], [sum of T, K], [N, K] or (per expert) [L, R*m], [N'] float32. Empty when none were
  /// given.
  const TensorView& topk_weights() const;
  const TensorView& source_rank() const;   ///< per row int32, -1 in rows without a token
  const TensorView& source_token() const;  ///< per row int32, -1 in rows without a token
  /// Copies the counts and indices; valid for ever. On a GPU to memory that is allocated, on the
  /// stream of the round's last call; not in a graph capture. May wait for the device. `reset` ends
  /// its use for dispatch there.
  Routing routing() const;
  /// Keeps the memory of all these views mapped while held.
  std::shared_ptr<const void> memory() const;

  class State;
  explicit Received(std::shared_ptr<State> state) noexcept;
  /// For the library itself.
  const std::shared_ptr<State>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace fanfold
