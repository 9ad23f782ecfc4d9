// SPDX-License-Identifier: Apache-2.0
#pragma once

// What every strategy is: slots, memory, and the phases of a round.
//
// The callers (api) have checked all arguments and the order of calls; a phase moves data and
// waits.

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/function_ref.h"
#include "base/step_hook.h"
#include "comm/device_collectives.h"
#include "exchange/slot.h"
#include "exec/backend.h"
#include "exec/device_backend.h"
#include "exec/workers.h"
#include "fanfold/all_to_all.h"
#include "plan/expert_map.h"
#include "plan/workspace.h"

namespace fanfold::exchange {

class Exchange;

/// Makes the backend once the exchange knows its context (the exchange never names a concrete one).
using BackendFactory = std::unique_ptr<exec::Backend> (*)(const exec::Context&);

/// Likewise where rows lie on a GPU.
using DeviceBackendFactory = std::unique_ptr<exec::DeviceBackend> (*)(int device);

/// What an exchange is made from; `config` is resolved and checked.
struct Setup {
  AllToAllConfig config;
  std::shared_ptr<Communicator::Impl> communicator;
  Communicator* handle = nullptr;  // only during construction
  Allocator* allocator = nullptr;  // only during construction; null: one of its own
  bool owns_allocator = false;     // `allocator` was made for this exchange
  plan::ExpertMap map;
  std::uint64_t config_digest = 0;
  std::uint64_t identity = 0;  // of this creation, equal on all ranks
  std::string what;            // "AllToAll 'moe'"
  BackendFactory backend = nullptr;
  DeviceBackendFactory device_backend = nullptr;
  comm::DeviceCollectives* collectives = nullptr;  // the communicator's; null: it has none
  // Only during construction: whose memory, control area and slots it uses; null: its own.
  std::shared_ptr<Exchange> workspace_of;
  std::uint16_t member = 0;  // of those that share a workspace, in order of creation
  base::Deadline deadline{kDefaultTimeout};  // of the construction
};

/// A checked dispatch.
struct DispatchCall {
  const DispatchInputs* inputs = nullptr;
  std::int64_t num_tokens = 0;        // T
  std::int64_t round_max_tokens = 0;  // m
  std::int32_t invalid_expert_id = -1;
  base::Deadline deadline;
  bool is_whole = false;  // dispatch_recv follows at once
};

/// A checked combine.
struct CombineCall {
  const CombineInputs* inputs = nullptr;
  base::Deadline deadline;
  bool is_whole = false;  // combine_recv follows at once
};

/// A checked sanitize.
struct SanitizeCall {
  TensorView ids;
  TensorView counts;
  std::int64_t invalid_expert_id;
  SanitizePolicy policy;
  TensorView out;
  exec::Stream stream;
};

/// One or two leading dimensions.
struct Extents {
  int ndim = 0;
  std::array<std::int64_t, 2> shape{};
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
  std::uint64_t identity() const noexcept { return setup_.identity; }
  int rank() const noexcept { return rank_; }
  int num_ranks() const noexcept { return setup_.map.num_ranks; }
  int num_local_experts() const noexcept;
  std::vector<Slot>& slots() noexcept { return slots_; }
  const std::vector<bool>& active() const noexcept { return active_; }
  std::uint32_t mask_digest() const noexcept { return mask_digest_; }
  std::uint32_t placement_version() const noexcept { return placement_version_; }
  std::int64_t num_dropped_rows() const noexcept { return num_dropped_rows_; }
  bool is_on_gpu() const noexcept { return setup_.config.device == DeviceType::kGpu; }
  /// Ids that kernels have dropped.
  virtual std::int64_t num_ids_dropped_by_kernels() const noexcept { return 0; }
  /// Bytes held now.
  virtual std::int64_t workspace_bytes() const { return workspace_.total_bytes(); }
  Capacities capacities() const;

  virtual Capabilities capabilities() const = 0;
  virtual std::uint32_t generation() const noexcept = 0;

  // On a GPU a call enqueues on a stream. Elsewhere these do nothing.
  /// @throws InvalidState  its memory has ended before it.
  virtual void require_memory() const {}
  virtual bool kernels_have_failed() const noexcept { return false; }
  /// Throws what kernels have reported. Does not wait.
  virtual void throw_if_kernels_failed() {}
  /// The stream of the next phase of the slot's round, none: the round's; `call` names it.
  /// @throws InvalidState  the round was dispatched in a graph capture and `stream` is not in one,
  ///         or the other way round. @throws InvalidArgument  another device's stream.
  virtual void use_stream(Slot&, const std::optional<void*>& /*stream*/, const char* /*call*/) {}
  /// Whether the slot's round was dispatched in a graph capture that has ended: no work can end it.
  virtual bool has_lost_capture(const Slot&) const { return false; }
  /// The slot's round needs its routing no more.
  virtual void forget_routing(Slot& slot) { slot.routing.reset(); }

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

  /// @throws InvalidState  on a GPU: a graph capture is under way, in which nothing may wait.
  virtual void check_no_capture(const char* /*call*/) const {}
  /// Before anything below changes what rounds read: waits for work that is enqueued.
  /// @throws CudaFailure
  /// `next_active`: ranks that will be left out from then on may be gone.
  virtual void finish_work(const std::vector<bool>* /*next_active*/) {}
  virtual void set_active(const std::vector<bool>& active);
  /// Threads that move rows, the caller's included.
  virtual void set_num_workers(int num_workers);
  int num_workers() const noexcept;
  /// Uses `placement`, whose tables are `map`, from the next round on. Between rounds, on every
  /// rank alike. `config_digest` is that of the configuration with it, `version` grows.
  virtual void set_placement(const Placement& placement, plan::ExpertMap map,
                             std::uint64_t config_digest, std::uint32_t version);
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Collective; returns the first epoch of the new generation.
  virtual std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) = 0;
  /// @throws PeerAborted, PeerLost
  virtual void check() const = 0;
  /// Rounds that are open now never end: on a GPU their work need not wait for peers any more.
  virtual void give_up_open_rounds() noexcept {}
  virtual void leave() noexcept = 0;
  virtual void close(base::Deadline deadline) = 0;
  /// Lets go of the memory, which others that share it go on using. Rounds that this rank has
  /// released here may still be settled; nothing else is called afterwards.
  virtual void detach() noexcept { local_.reset(); }
  /// Forgets what was for the construction only.
  void end_setup() noexcept;
  const std::shared_ptr<Communicator::Impl>& communicator() const noexcept {
    return setup_.communicator;
  }
  virtual bool is_forked_child() const noexcept = 0;
  /// Messages about waits name this exchange from now on, not another one of its workspace.
  virtual void use_name() {}

  /// Base of the slot's rows in memory that this rank reads.
  virtual std::byte* slot_base(const Slot& slot) const noexcept = 0;
  /// Whether `data` points into memory of this exchange.
  virtual bool owns(const void* data) const noexcept;
  std::byte* local_base(const Slot& slot) const noexcept;
  /// Layout gathered: every token's rows of the slot, in memory that peers reach.
  virtual std::byte* block_base(const Slot&) const noexcept { return nullptr; }
  /// Keeps every view mapped, as views are now.
  virtual std::shared_ptr<const void> memory() const = 0;

  // Views of a received round (views.cpp).
  std::vector<TensorView> payload_views(const Slot& slot) const;
  TensorView scales_view(const Slot& slot) const;
  TensorView rank_counts_view(const Slot& slot) const;
  TensorView expert_counts_view(Slot& slot);
  TensorView offsets_view(Slot& slot);
  TensorView num_rows_view(const Slot& slot) const;
  TensorView topk_ids_view(const Slot& slot) const;
  TensorView topk_weights_view(const Slot& slot) const;
  TensorView source_rank_view(Slot& slot);
  TensorView source_token_view(Slot& slot);
  TensorView combine_view(const Slot& slot, std::int64_t hidden, DType dtype) const;
  virtual std::shared_ptr<const Routing::Data> copy_routing(Slot& slot);
  /// Where `call.out` are the received ids of an open round, first takes what is otherwise read
  /// from them when it is first asked for.
  virtual void sanitize(const SanitizeCall& call);
  /// May wait.
  virtual HostCounts host_counts(Slot& slot);
  /// Once slot.token_counts are known: against those that the caller gave to dispatch.
  /// @throws InvalidArgument  one differs; the peers' waits are aborted.
  void check_token_counts(const Slot& slot);
  /// Leading dimensions of the layout's tensors.
  Extents leading(const Slot& slot) const noexcept;
  /// Whether y at the combine buffer of a layout per rank goes home as it is.
  bool combines_in_place() const noexcept;

 protected:
  // What the fields of a slot are filled with, for `prepare_dispatch`.
  /// Which token goes where. @throws InvalidArgument  an id >= E
  virtual void plan_tokens(Slot& slot, const DispatchCall& call);
  virtual void pack_rows(const Slot&, const DispatchInputs&, const exec::PackRowsParams& params) {
    backend_->pack_rows(params);
  }
  /// The slot whose received ids `ids` lie in, of an open round that has them still; else null.
  Slot* slot_of_ids(const TensorView& ids) noexcept;
  /// What a routing of the slot's round says, but for counts and indices.
  std::shared_ptr<Routing::Data> start_routing(const Slot& slot) const;
  std::int64_t num_rows(const Slot& slot) const noexcept;
  /// `view` as it lies where the rows do.
  TensorView on_device(TensorView view) const noexcept;
  exec::RowArrays row_arrays(const Slot& slot) const noexcept;
  exec::FlagFields dispatch_fields(const Slot& slot) const noexcept;
  exec::FlagFields combine_fields(const Slot& slot, exec::CallKind kind,
                                  std::int64_t hidden) const noexcept;
  /// Received ids and weights of each source, as they lie in the store.
  std::vector<plan::SourceRows> source_rows(const Slot& slot) const;
  bool stores_by_expert() const noexcept { return plan::stores_by_expert(setup_.config); }
  bool stores_flat() const noexcept { return plan::stores_flat(setup_.config); }
  bool is_gathered() const noexcept { return setup_.config.layout == Layout::kGathered; }
  /// Bytes of one row of `hidden` elements as it goes home.
  std::int64_t combine_row_bytes(std::int64_t hidden) const noexcept;
  /// Where the rows of each source lie in the store, from `counts`: call it when they are known.
  void place_rows(Slot& slot);
  /// After all rows are in the store: gives them the layout, where that takes a copy. Rows beyond
  /// the layout's capacity are dropped and counted.
  void arrange(Slot& slot);
  exec::CombineSendParams combine_params(const Slot& slot, const CombineInputs& inputs) const;
  exec::SumRowsParams sum_params(const Slot& slot, const CombineInputs& inputs) const;
  void poison(std::byte* start, std::int64_t bytes, int value) const noexcept;
  void poison_received(const Slot& slot) const noexcept;
  void poison_results(const Slot& slot) const noexcept;

  std::int32_t* counts(const Slot& slot) const noexcept;  // rank [R], expert [L], offsets, rows
  std::int32_t* total_rows(const Slot& slot) const noexcept;
  const std::int32_t* received_ids(const Slot& slot) const noexcept;
  const float* received_weights(const Slot& slot) const noexcept;
  const std::int32_t* received_tokens(const Slot& slot) const noexcept;
  /// Puts the indices of the routing that a round re-uses where a new one would have arrived.
  void restore_indices(const Slot& slot);
  // Once per round each, when a view is first asked for.
  virtual void fill_source_rows(Slot& slot);
  virtual void count_experts(Slot& slot);
  virtual void fill_offsets(const Slot& slot) const;
  virtual void fill_num_rows(const Slot& slot) const;
  void place_experts(Slot& slot);
  std::int64_t kept_rows(const Slot& slot, std::size_t source) const noexcept;
  /// [rows, K] ids and weights, and [rows] tokens, of the rows that the caller sees.
  std::int32_t* layout_ids(const Slot& slot) const noexcept;
  float* layout_weights(const Slot& slot) const noexcept;
  /// Rows of the store in use.
  std::int64_t store_rows(const Slot& slot) const noexcept;
  void expand(Slot& slot);
  void move_to_layout(Slot& slot);
  TensorView payload_view(const Slot& slot, const PayloadSpec& spec) const;
  void pack_payload(Slot& slot, const DispatchInputs& inputs);
  /// Lays the payload regions out in the slot's store.
  void place_payloads(Slot& slot) const;
  /// Private memory, and where everything lies in it and in symmetric memory.
  void take_memory();
  /// Collective: a failure of any rank's `attempt` is thrown on all of them, so that none waits for
  /// a rank that has given up.
  void on_all_ranks(base::FunctionRef<void()> attempt) const;

  Setup setup_;
  int rank_;
  plan::Workspace workspace_;
  std::shared_ptr<std::byte> local_;
  std::vector<Slot> slots_;
  std::vector<bool> active_;
  std::uint32_t mask_digest_ = 0;
  std::uint32_t placement_version_ = 0;
  std::int64_t num_dropped_rows_ = 0;
  base::StepHook hook_;
  std::vector<std::byte> staging_;
  std::unique_ptr<exec::Workers> workers_;  // null until asked for; backend_ uses them
  std::unique_ptr<exec::Backend> backend_;
};

/// The offset table of a resolved configuration.
plan::Workspace workspace_of(const AllToAllConfig& config, int num_ranks, int max_local_experts);

/// The exchange of the configured strategy. Collective.
std::shared_ptr<Exchange> make_exchange(Setup setup, base::Deadline deadline);
/// Capability record of a strategy, without an exchange.
Capabilities capabilities_of(Strategy strategy, DeviceType device = DeviceType::kCpu);

/// Symmetric bytes of two_sided: control area and channels.
std::int64_t two_sided_window_bytes(const AllToAllConfig& config, int num_ranks);

// One per file.
std::shared_ptr<Exchange> make_one_sided(Setup setup, base::Deadline deadline);  // and low_latency
std::shared_ptr<Exchange> make_high_throughput(Setup setup, base::Deadline deadline);
std::shared_ptr<Exchange> make_two_sided(Setup setup, base::Deadline deadline);
std::shared_ptr<Exchange> make_broadcast(Setup setup, base::Deadline deadline);
std::shared_ptr<Exchange> make_gather_scatter(Setup setup, base::Deadline deadline);
std::shared_ptr<Exchange> make_batched(Setup setup, base::Deadline deadline);
// On a GPU: one_sided and low_latency; then broadcast, gather_scatter and batched.
std::shared_ptr<Exchange> make_on_device(Setup setup, base::Deadline deadline);
std::shared_ptr<Exchange> make_collective_on_device(Setup setup, base::Deadline deadline);

}  // namespace fanfold::exchange
