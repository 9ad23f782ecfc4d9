// SPDX-License-Identifier: Apache-2.0
#pragma once

// What every strategy is: slots, memory, and the phases of a round.
//
// The callers (api) have checked all arguments and the order of calls; a phase moves data and
// waits.

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/step_hook.h"
#include "exchange/slot.h"
#include "exec/backend.h"
#include "fanfold/all_to_all.h"
#include "plan/expert_map.h"
#include "plan/workspace.h"

namespace fanfold::exchange {

/// Makes the backend once the exchange knows its context (the exchange never names a concrete one).
using BackendFactory = std::unique_ptr<exec::Backend> (*)(const exec::Context&);

/// What an exchange is made from; `config` is resolved and checked.
struct Setup {
  AllToAllConfig config;
  std::shared_ptr<Communicator::Impl> communicator;
  Communicator* handle = nullptr;  // only during construction
  Allocator* allocator = nullptr;  // only during construction; null: one of its own
  plan::ExpertMap map;
  std::uint64_t config_digest = 0;
  std::uint64_t identity = 0;  // of this creation, equal on all ranks
  std::string what;            // "AllToAll 'moe'"
  BackendFactory backend = nullptr;
};

/// A checked dispatch.
struct DispatchCall {
  const DispatchInputs* inputs = nullptr;
  std::int64_t num_tokens = 0;        // T
  std::int64_t round_max_tokens = 0;  // m
  std::int32_t invalid_expert_id = -1;
  base::Deadline deadline;
};

/// A checked combine.
struct CombineCall {
  const CombineInputs* inputs = nullptr;
  base::Deadline deadline;
};

class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  explicit Exchange(Setup setup);
  virtual ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const AllToAllConfig& config() const noexcept { return setup_.config; }
  /// What rows travel home in.
  DType combine_dtype() const noexcept {
    return setup_.config.combine_dtype.value_or(setup_.config.dtype);
  }
  const plan::ExpertMap& map() const noexcept { return setup_.map; }
  const plan::Workspace& workspace() const noexcept { return workspace_; }
  const std::string& what() const noexcept { return setup_.what; }
  std::uint64_t config_digest() const noexcept { return setup_.config_digest; }
  int rank() const noexcept { return rank_; }
  int num_ranks() const noexcept { return setup_.map.num_ranks; }
  int num_local_experts() const noexcept;
  std::vector<Slot>& slots() noexcept { return slots_; }
  const std::vector<bool>& active() const noexcept { return active_; }
  std::uint32_t mask_digest() const noexcept { return mask_digest_; }
  exec::Backend& backend() noexcept { return *backend_; }

  virtual Capabilities capabilities() const = 0;
  virtual std::uint32_t generation() const noexcept = 0;

  // Phases. On an exception nothing of the slot's state has changed in dispatch_send when it is an
  // argument error; otherwise the caller marks the exchange as failed.
  /// Waits until every peer has left the round that this rank released in `slot`.
  virtual void settle(Slot& slot, base::Deadline deadline) = 0;
  /// Fills the slot's plan. @throws InvalidArgument  an id >= E
  void prepare_dispatch(Slot& slot, const DispatchCall& call);
  virtual void dispatch_send(Slot& slot, const DispatchCall& call) = 0;
  virtual void dispatch_recv(Slot& slot, base::Deadline deadline) = 0;
  virtual void combine_send(Slot& slot, const CombineCall& call) = 0;
  virtual void combine_recv(Slot& slot, const CombineCall& call) = 0;
  virtual void release(Slot& slot) = 0;

  virtual void set_active(const std::vector<bool>& active);
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Collective; returns the first epoch of the new generation.
  virtual std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) = 0;
  /// @throws PeerAborted, PeerLost
  virtual void check() const = 0;
  virtual void leave() noexcept = 0;
  virtual void close(base::Deadline deadline) = 0;
  virtual bool is_forked_child() const noexcept = 0;

  /// Base of the slot's rows in memory that this rank reads.
  virtual std::byte* slot_base(const Slot& slot) const noexcept = 0;
  /// Whether `data` points into memory of this exchange.
  virtual bool owns(const void* data) const noexcept;
  std::byte* local_base(const Slot& slot) const noexcept;
  /// Keeps every view mapped.
  virtual std::shared_ptr<const void> memory() const = 0;

  // Views of a received round (views.cpp).
  std::vector<TensorView> payload_views(const Slot& slot) const;
  TensorView rank_counts_view(const Slot& slot) const;
  TensorView expert_counts_view(Slot& slot);
  TensorView offsets_view(Slot& slot);
  TensorView num_rows_view(const Slot& slot) const;
  TensorView topk_ids_view(const Slot& slot) const;
  TensorView topk_weights_view(const Slot& slot) const;
  TensorView source_rank_view(Slot& slot);
  TensorView source_token_view(Slot& slot);
  TensorView combine_view(const Slot& slot, std::int64_t hidden, DType dtype) const;
  std::shared_ptr<const Routing::Data> copy_routing(const Slot& slot) const;
  /// Before `ids`, if they are the received ids of an open round, are overwritten in place: takes
  /// what is otherwise read from them when it is first asked for.
  void freeze_indices(const void* ids);
  std::int64_t num_rows(const Slot& slot) const noexcept;

 protected:
  exec::RowArrays row_arrays(const Slot& slot) const noexcept;
  exec::FlagFields dispatch_fields(const Slot& slot) const noexcept;
  exec::FlagFields combine_fields(const Slot& slot, exec::CallKind kind,
                                  std::int64_t hidden) const noexcept;
  /// Received ids and weights of each source, rank-major.
  std::vector<plan::SourceRows> source_rows(const Slot& slot) const;
  /// expert_major: lays out and copies the received rows.
  void expand(Slot& slot);
  exec::CombineSendParams combine_params(const Slot& slot, const CombineInputs& inputs) const;
  exec::SumRowsParams sum_params(const Slot& slot, const CombineInputs& inputs) const;
  void poison(std::byte* start, std::int64_t bytes, int value) const noexcept;
  void poison_received(const Slot& slot) const noexcept;
  void poison_results(const Slot& slot) const noexcept;

  std::int32_t* counts(const Slot& slot) const noexcept;  // rank [R], expert [L], offsets, rows
  const std::int32_t* received_ids(const Slot& slot) const noexcept;
  const float* received_weights(const Slot& slot) const noexcept;
  const std::int32_t* received_tokens(const Slot& slot) const noexcept;
  /// Puts the indices of the routing that a round re-uses where a new one would have arrived.
  void restore_indices(const Slot& slot);
  void fill_source_rows(Slot& slot);
  void count_experts(Slot& slot);

  Setup setup_;
  int rank_;
  plan::Workspace workspace_;
  std::shared_ptr<std::byte> local_;
  std::vector<Slot> slots_;
  std::vector<bool> active_;
  std::uint32_t mask_digest_ = 0;
  base::StepHook hook_;
  std::vector<std::byte> staging_;
  std::unique_ptr<exec::Backend> backend_;
};

/// The offset table of a resolved configuration.
plan::Workspace workspace_of(const AllToAllConfig& config, int num_ranks, int max_local_experts);

/// Push dispatch, pull combine, over symmetric memory. Collective.
std::shared_ptr<Exchange> make_one_sided(Setup setup, base::Deadline deadline);
/// All-gather, then local work, over the communicator's collectives. Collective.
std::shared_ptr<Exchange> make_broadcast(Setup setup, base::Deadline deadline);

/// Capability records, without an exchange.
Capabilities one_sided_capabilities();
Capabilities broadcast_capabilities();

}  // namespace fanfold::exchange
