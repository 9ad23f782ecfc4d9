// SPDX-License-Identifier: Apache-2.0
#pragma once

// Records which experts each token took, layer by layer, while a model runs.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/dtype.h"
#include "fanfold/export.h"
#include "fanfold/routing_rows.h"
#include "fanfold/tensor_view.h"

namespace fanfold {

class Communicator;

/// Which rows of `topk_ids` are this rank's tokens, and where they go. Always said, never guessed
/// from a number of rows.
struct FANFOLD_EXPORT CaptureLayout {
  enum class Kind : std::uint8_t {
    kLocal,         ///< every row is a token of this rank
    kConcatenated,  ///< the tokens of all ranks one after the other: counts[r] rows of rank r
    kPadded,        ///< `stride` rows of each rank, the first counts[r] of which are tokens
    kSharded,       ///< a shard of this rank's tokens: counts[r] rows are with rank r of the shards
    kRowMap,        ///< row i goes to token token_of_row[i]; a negative one is skipped
  };
  Kind kind = Kind::kLocal;
  std::vector<std::int64_t> counts;
  int rank = 0;
  std::int64_t stride = 0;
  /// kSharded: of all shards; the rows behind them are padding, fewer than there are shards.
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> token_of_row;  ///< kRowMap; negative: the row is skipped
  std::int64_t token_offset = 0;           ///< token that the first row goes to: of a micro-batch

  static CaptureLayout local(std::int64_t token_offset = 0);
  static CaptureLayout concatenated(std::vector<std::int64_t> counts, int rank,
                                    std::int64_t token_offset = 0);
  static CaptureLayout padded(std::vector<std::int64_t> counts, int rank, std::int64_t stride,
                              std::int64_t token_offset = 0);
  static CaptureLayout sharded(std::vector<std::int64_t> counts, int rank, std::int64_t num_tokens,
                               std::int64_t token_offset = 0);
  static CaptureLayout row_map(std::vector<std::int64_t> token_of_row,
                               std::int64_t token_offset = 0);
};

/// Gives `recv` [sum(counts), ...] the `send` [counts[r], ...] of every rank r of the shards, in
/// rank order; collective. `shards`, a layout kSharded, has the counts and says which rank this is:
/// what does not fit the ranks it must refuse before it waits for them. On a GPU `send` may have
/// any row stride, and the work is enqueued on `stream`, a cudaStream_t; else that is null.
/// Returns null where it has compared the ranks' counts; on a GPU it may leave that to the kernel
/// that records: how many rows each rank sent, [R] in device memory, there until the next call.
using GatherRows = std::function<const std::int32_t*(const TensorView& send, const TensorView& recv,
                                                     const CaptureLayout& shards, void* stream)>;

/// What a RoutingCapture is made from.
struct FANFOLD_EXPORT RoutingCaptureConfig {
  int num_layers = 0;           ///< layers that are recorded
  int num_experts = 0;          ///< logical experts
  int top_k = 0;                ///< ids per token that are kept
  std::int64_t max_tokens = 0;  ///< of one step
  /// Type of a stored id; see make_routing_spec.
  std::optional<DType> dtype;
  /// The model's number of each recorded layer, all different. Empty: 0 to num_layers - 1.
  std::vector<int> layers;
  /// The logical expert of each physical one, whose ids `record` then takes. Empty: ids are
  /// logical.
  std::vector<std::int32_t> logical_of_expert;
  /// Ids of fused shared experts that rows may carry behind their top_k; they are not kept.
  int num_shared_experts = 0;
  int max_in_flight = 2;           ///< snapshots at a time
  std::int64_t max_sink_rows = 0;  ///< rows of a sink; 0: max_tokens
  std::string source = "target";   ///< the model whose layers these are
  GatherRows gather;               ///< for layout kSharded only
  /// Where tensors and sinks lie.
  DeviceType device = DeviceType::kCpu;
  int device_index = 0;  ///< of a GPU: its CUDA ordinal
};

/// Details of one `record`.
struct FANFOLD_EXPORT RecordOptions {
  /// Rows of `topk_ids` that the layout is about; those behind are padding. Default: all.
  std::optional<std::int64_t> rows;
  /// The model that routes; must be the capture's own. Empty: it is.
  std::string source;
  /// What becomes of a row that was recorded in this step already. By default the new ids must
  /// equal the old ones, as those of a recomputed layer do.
  bool overwrite = false;
  /// A cudaStream_t; null is the legacy default stream. On a GPU it must be given; else ignored.
  std::optional<void*> stream;
};

/// The routing of the first tokens of one step, in memory of its own: later records do not change
/// it. Copies share it. It holds one of the capture's max_in_flight places until the last copy is
/// gone or released, and may outlive the capture.
///
/// Of a GPU's capture: the copy is enqueued only. All but has_value, is_ready, spec, num_tokens and
/// release wait until it is there, and throw what was wrong with the step's records before it, each
/// time: nothing of such a step is handed out.
///
/// Threads: any may read one object, at the same time; none while another one changes or releases
/// that object. Copies are independent: a thread that reads its own need not care what becomes of
/// the others.
class FANFOLD_EXPORT RoutingSnapshot {
 public:
  RoutingSnapshot();
  ~RoutingSnapshot();
  RoutingSnapshot(const RoutingSnapshot&);
  RoutingSnapshot(RoutingSnapshot&&) noexcept;
  RoutingSnapshot& operator=(const RoutingSnapshot&);
  RoutingSnapshot& operator=(RoutingSnapshot&&) noexcept;

  bool has_value() const noexcept { return state_ != nullptr; }
  /// Waits until the copy is there; on the CPU it is.
  /// @throws InvalidArgument, InvalidState  as RoutingCapture::check, of this step.
  void wait() const;
  /// Whether nothing below would wait.
  bool is_ready() const;
  /// [num_tokens, num_layers, top_k] of the spec's dtype. Cells that were not recorded in this step
  /// hold the sentinel. Valid while this or a copy holds it, as all references below.
  /// @throws InvalidState  released; so do all below.
  TensorView array() const;
  const RoutingSpec& spec() const;
  std::int64_t step_id() const;
  std::int64_t num_tokens() const;
  /// The model's numbers of the layers that lack a row of these tokens, ascending by slot.
  const std::vector<int>& missing_layers() const;
  /// [num_layers] rows that each layer lacks.
  const std::vector<std::int64_t>& missing_rows() const;
  /// The tokens [first, first + num_tokens) of it, which lie at `first_position` of their request.
  /// @throws InvalidArgument  it has no such tokens.
  /// @throws InvalidState     a layer lacks one of them: names the layers.
  RoutingRows rows(std::int64_t first, std::int64_t num_tokens,
                   std::int64_t first_position = 0) const;
  /// [num_layers * num_experts] tokens per expert; sentinels do not count.
  std::vector<std::int64_t> expert_histogram() const;
  /// Lets go of it.
  void release() noexcept { state_.reset(); }

  struct State;
  explicit RoutingSnapshot(std::shared_ptr<const State> state) noexcept;
  /// Keeps the memory of `array`. For the library itself.
  const std::shared_ptr<const State>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<const State> state_;
};

/// Records which experts each token of a step took, per layer.
///
/// A step begins with nothing recorded; what a step did not record shows as the sentinel and is
/// reported as missing, whatever an earlier step left. Every call checks its arguments first: after
/// an error nothing has changed.
///
/// Threads: one call at a time per object; distinct objects are independent, and so are snapshots.
///
/// CPU: tensors are used during the call only.
///
/// GPU (config.device): tensors lie on the device and are used until the stream has passed the
/// call; the caller orders the streams of one capture. begin_step, record and import_sink enqueue
/// kernels, wait for nothing, and may be captured: a replay records in the step that runs then,
/// with the options of the captured call. Ids are looked at by kernels: what CPU calls throw for
/// ids that are no expert, rows recorded with other ids and rows of a sink written in part,
/// `check`, `snapshot` and the step's snapshots throw later. Such a step is lost: the next
/// begin_step starts afresh. The first record of layout kSharded allocates, which no graph capture
/// may hold.
class FANFOLD_EXPORT RoutingCapture {
 public:
  /// Allocates num_layers * max_tokens rows, and as many for each snapshot in flight: on a GPU in
  /// page-locked memory of the host.
  /// @throws InvalidArgument  `config` contradicts itself; nothing was allocated.
  /// @throws Unsupported      no such GPU, or a build without GPUs.
  explicit RoutingCapture(const RoutingCaptureConfig& config);
  /// On a GPU: waits for all work of the device. It, its sinks and the tensors that it was given
  /// must outlive the graphs that hold its calls.
  ~RoutingCapture();
  RoutingCapture(RoutingCapture&&) noexcept;
  RoutingCapture& operator=(RoutingCapture&&) noexcept;

  /// Begins a step: nothing is recorded in it yet. `step_id` is the caller's name for it; each
  /// replay of a captured call begins another step of that name.
  void begin_step(std::int64_t step_id, std::optional<void*> stream = std::nullopt);

  /// Takes the ids of one layer.
  /// @param layer     the model's number of the layer.
  /// @param topk_ids  [rows, top_k] or [rows, top_k + num_shared_experts] int8, int16, int32,
  /// int64,
  ///                  uint8, uint16 or uint32, any row stride. Negative: no expert; so is the
  ///                  maximum of an unsigned type where no expert has that id.
  /// With layout kSharded collective among the ranks of the shards. An id that is no expert is then
  /// an error on all of them; any other wrong argument on the rank that gave it only, which does
  /// not take part: the others wait until the deadline of config.gather.
  /// @throws InvalidArgument  an unknown layer or source, counts that do not fit the rows, a token
  ///         at or past max_tokens, ids that lie in a sink, or an id at or past the experts: names
  ///         row, column, id, layer.
  /// @throws InvalidState     no step has begun, or a row was recorded in this step with other ids:
  ///         names the first.
  void record(int layer, const TensorView& topk_ids, const CaptureLayout& layout = {},
              const RecordOptions& options = {});

  /// Where a fused kernel writes the ids of `layer` itself: int16 or int32 [max_sink_rows,
  /// top_k + num_shared_experts]. The same memory each time for a layer; holds the type's minimum,
  /// which says "not written", from here, `begin_step` or `import_sink` on: what was written before
  /// a step began is not this step's. GPU: the first call for a layer waits for the device, and is
  /// not allowed in a graph capture.
  /// @throws InvalidArgument  an unknown layer, another type, or one that differs from the first
  ///         call's or does not hold every id.
  TensorView sink(int layer, DType dtype = DType::kInt32);
  /// Records the first `num_rows` rows of the layer's sink as `record` does, and clears the sink
  /// (on a GPU also after an error). Rows that the kernel did not write stay unrecorded, and so are
  /// reported as missing.
  /// @throws InvalidArgument  as record; also a row that was written in part.
  /// @throws InvalidState     as record; also a layer without a sink.
  void import_sink(int layer, std::int64_t num_rows, const CaptureLayout& layout = {},
                   const RecordOptions& options = {});

  /// Copies what this step recorded of the first `num_tokens` tokens.
  /// @throws InvalidArgument   more tokens than max_tokens.
  /// @throws InvalidState      no step has begun.
  /// @throws CapacityExceeded  max_in_flight snapshots are held: back-pressure, nothing is
  ///         overwritten. Release one and call again.
  /// Stream (GPU): enqueues on `stream`. Never synchronizes. Not in a graph capture (InvalidState).
  /// Throws as `check` first.
  RoutingSnapshot snapshot(std::int64_t num_tokens, std::optional<void*> stream = std::nullopt);

  /// Throws the first error that kernels have found and nobody was told of; waits for nothing. On
  /// the CPU there is none.
  /// @throws InvalidArgument  an id at or past the experts, or a sink's row written in part.
  /// @throws InvalidState     a row that was recorded in its step with other ids.
  void check();

  /// Replaces config.logical_of_expert, between steps or before the first record of a step. GPU:
  /// waits for the device; graphs that were captured use the new map.
  /// @throws InvalidArgument  an entry that is no logical expert, or more ids than a sink's int16.
  /// @throws InvalidState     this step has recorded already.
  void set_logical_of_expert(std::vector<std::int32_t> logical_of_expert);

  const RoutingSpec& spec() const noexcept;
  const RoutingCaptureConfig& config() const noexcept;
  /// Snapshots held.
  int num_in_flight() const noexcept;

  class Impl;  // the library's own

 private:
  std::unique_ptr<Impl> impl_;
};

/// A `config.gather` among the ranks of `communicator`, at most 128 on a GPU: one rank per shard.
/// Borrows it. Shards of another number of ranks, or of another rank than the communicator's, are
/// InvalidArgument. On a GPU rows go through an AllToAll (one_sided) of `config.max_tokens` rows,
/// which the first call with rows makes: that call is collective, waits, and is InvalidState in a
/// graph capture. A later one waits for nothing; that a peer is late or gone is told by the call
/// after it.
FANFOLD_EXPORT GatherRows gather_rows(Communicator& communicator,
                                      const RoutingCaptureConfig& config);

}  // namespace fanfold
