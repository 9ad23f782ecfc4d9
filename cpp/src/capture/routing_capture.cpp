// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_capture.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "capture/check.h"
#include "capture/routing_capture_impl.h"
#include "fanfold/error.h"

namespace fanfold {

using base::str;
using capture::refuse;
using capture::RowSpan;

namespace {

void check_logical_of_expert(const std::vector<std::int32_t>& logical, int num_experts) {
  if (logical.size() > INT32_MAX) {
    refuse("logical_of_expert", str("at most ", INT32_MAX, " physical experts"),
           str(logical.size()));
  }
  for (std::size_t expert = 0; expert < logical.size(); ++expert) {
    if (logical[expert] >= 0 && logical[expert] < num_experts) continue;
    refuse("logical_of_expert", str("logical experts 0 to ", num_experts - 1),
           str(logical[expert], " for physical expert ", expert));
  }
}

RoutingSpec check_capture_config(const RoutingCaptureConfig& config) {
  const RoutingSpec spec =
      make_routing_spec(config.num_layers, config.num_experts, config.top_k, config.dtype);
  if (config.max_tokens < 1) refuse("max_tokens", "1 or more", str(config.max_tokens));
  if (config.max_in_flight < 1) refuse("max_in_flight", "1 or more", str(config.max_in_flight));
  if (config.num_shared_experts < 0) {
    refuse("num_shared_experts", "0 or more", str(config.num_shared_experts));
  }
  if (config.num_shared_experts > INT32_MAX - config.top_k) {
    refuse("num_shared_experts", str("at most ", INT32_MAX, " ids per row"),
           str(config.num_shared_experts));
  }
  const std::int64_t width = std::int64_t{config.top_k} + config.num_shared_experts;
  if (config.max_sink_rows < 0 || config.max_sink_rows > INT64_MAX / 8 / width) {
    refuse("max_sink_rows", "0 or more rows that memory can hold", str(config.max_sink_rows));
  }
  if (config.source.empty()) refuse("source", "a name", "none");
  if (!config.layers.empty() &&
      config.layers.size() != static_cast<std::size_t>(config.num_layers)) {
    refuse("layers", str(config.num_layers, " numbers (num_layers)"), str(config.layers.size()));
  }
  check_logical_of_expert(config.logical_of_expert, config.num_experts);
  if (config.max_tokens > INT64_MAX / 8 / std::max(spec.row_bytes(), width)) {
    refuse("max_tokens", str("rows of ", spec.row_bytes(), " bytes that memory can hold"),
           str(config.max_tokens));
  }
  if (config.device == DeviceType::kGpu &&
      (config.device_index < 0 || config.device_index > INT16_MAX)) {
    refuse("device_index", str("0 to ", INT16_MAX), str(config.device_index));
  }
  return spec;
}

}  // namespace

RoutingCapture::Impl::Impl(const RoutingCaptureConfig& config)
    : config_(config),
      spec_(check_capture_config(config)),
      cell_bytes_(config.top_k * size_of(spec_.dtype)),
      layer_bytes_(config.max_tokens * cell_bytes_),
      sinks_(static_cast<std::size_t>(config.num_layers)) {
  for (int slot = 0; slot < config_.num_layers; ++slot) {
    if (config.layers.empty()) config_.layers.push_back(slot);
    const int layer = config_.layers[static_cast<std::size_t>(slot)];
    if (!slots_of_layers_.emplace(layer, static_cast<std::size_t>(slot)).second) {
      refuse("layers", "different numbers", str(layer, " twice"));
    }
  }
}

std::size_t RoutingCapture::Impl::slot_of(int layer) const {
  const auto found = slots_of_layers_.find(layer);
  if (found != slots_of_layers_.end()) return found->second;
  std::string known;
  for (const int number : config_.layers) known += str(known.empty() ? "" : ", ", number);
  refuse("layer", "one of the recorded layers " + known, str(layer));
}

void RoutingCapture::Impl::check_step(const char* call) const {
  if (step_ == 0) throw InvalidState(str(call, ": expected begin_step before it, got none"));
}

void RoutingCapture::Impl::check_source(const std::string& source) const {
  if (source.empty() || source == config_.source) return;
  refuse("source", str('"', config_.source, "\" (another model has a capture of its own)"),
         str('"', source, '"'));
}

void RoutingCapture::Impl::check_ids(const TensorView& ids) const {
  const int wide = config_.top_k + config_.num_shared_experts;
  if (!capture::is_router_dtype(ids.dtype) || ids.ndim != 2 ||
      (ids.shape[1] != config_.top_k && ids.shape[1] != wide)) {
    const std::string or_wide = wide == config_.top_k ? "" : str(" or [rows, ", wide, "]");
    refuse("topk_ids",
           str("int8, int16, int32, int64, uint8, uint16 or uint32 [rows, ", config_.top_k, "]",
               or_wide),
           ids.describe());
  }
  check_place("topk_ids", ids);
  if (!ids.rows_are_contiguous()) {
    refuse("topk_ids", "rows whose elements are contiguous",
           "strides that skip within a row of " + ids.describe());
  }
  const auto address = reinterpret_cast<std::uintptr_t>(ids.data);
  if (address % static_cast<std::uintptr_t>(size_of(ids.dtype)) != 0) {
    refuse("topk_ids", "data aligned as its type", "another address");
  }
}

capture::IdRule RoutingCapture::Impl::rule() const noexcept {
  const auto& logical = config_.logical_of_expert;
  const int num_ids = logical.empty() ? config_.num_experts : static_cast<int>(logical.size());
  return {num_ids, logical.empty() ? nullptr : logical.data(), config_.top_k, size_of(spec_.dtype)};
}

void RoutingCapture::Impl::begin_step(std::int64_t step_id, const std::optional<void*>& stream) {
  const exec::Stream on = to_stream(stream);
  const std::int64_t before = step_id_;
  step_id_ = step_id;
  ++step_;
  try {
    start_step(on);
  } catch (...) {
    step_id_ = before;
    --step_;
    throw;
  }
  has_records_ = false;
}

std::vector<RowSpan> RoutingCapture::Impl::check_shards(const TensorView& topk_ids,
                                                        const CaptureLayout& layout) const {
  const std::int64_t sum = capture::check_counts(layout);
  const std::int64_t mine = layout.counts[static_cast<std::size_t>(layout.rank)];
  if (topk_ids.shape[0] != mine) {
    refuse("topk_ids", str(mine, " rows (layout.counts of rank ", layout.rank, ")"),
           str(topk_ids.shape[0]));
  }
  if (layout.num_tokens < 0 || layout.num_tokens > sum) {
    refuse("layout.num_tokens", str("0 to ", sum, " tokens (the sum of layout.counts)"),
           str(layout.num_tokens));
  }
  capture::check_padding("layout.num_tokens", sum, static_cast<std::int64_t>(layout.counts.size()),
                         layout.num_tokens);
  if (sum > INT64_MAX / 8 / topk_ids.row_bytes()) {
    refuse("layout.counts", "rows that memory can hold", str(sum));
  }
  if (config_.gather == nullptr) {
    throw InvalidState(
        "record: expected a gather callback (config.gather) for sharded rows, got "
        "none");
  }
  return capture::row_spans(CaptureLayout::local(layout.token_offset), layout.num_tokens,
                            config_.max_tokens);
}

void RoutingCapture::Impl::take(const char* call, int layer, const TensorView& topk_ids,
                                const CaptureLayout& layout, const RecordOptions& options,
                                bool is_sink) {
  check_step(call);
  check_source(options.source);
  const std::size_t slot = slot_of(layer);
  check_ids(topk_ids);
  const std::int64_t num_rows = options.rows.value_or(topk_ids.shape[0]);
  if (num_rows < 0 || num_rows > topk_ids.shape[0]) {
    refuse("rows", str("0 to ", topk_ids.shape[0], " (rows of topk_ids)"), str(num_rows));
  }
  TensorView ids = topk_ids;
  ids.shape[0] = num_rows;
  if (!is_sink) check_no_sink(ids);
  const exec::Stream stream = to_stream(options.stream);
  Record record{slot, layer, ids, {}, options.overwrite, is_sink, stream, {}};
  if (layout.kind == CaptureLayout::Kind::kSharded) {
    record.spans = check_shards(ids, layout);
    const Joined joined = join(ids, layout, stream);
    record.ids = joined.ids;
    record.counts = layout.counts;
    record.received_counts = joined.received_counts;
  } else {
    record.spans = capture::row_spans(layout, num_rows, config_.max_tokens);
  }
  write(record);
  has_records_ = true;
}

RoutingSnapshot RoutingCapture::Impl::snapshot(std::int64_t num_tokens,
                                               const std::optional<void*>& stream) {
  check_step("snapshot");
  if (num_tokens < 0 || num_tokens > config_.max_tokens) {
    refuse("num_tokens", str("0 to ", config_.max_tokens, " (max_tokens)"), str(num_tokens));
  }
  const exec::Stream on = to_stream(stream);
  check_snapshot(on);
  const auto state = std::make_shared<RoutingSnapshot::State>(ring_);
  state->place = ring_->take();
  if (state->place < 0) {
    throw CapacityExceeded(str("snapshot: expected at most ", config_.max_in_flight,
                               " in flight (max_in_flight), got one more; back-pressure: release "
                               "one first"));
  }
  state->spec = spec_;
  state->num_tokens = num_tokens;
  state->layers = config_.layers;
  copy(*state, on);
  return RoutingSnapshot(state);
}

void RoutingCapture::Impl::set_logical_of_expert(std::vector<std::int32_t> logical_of_expert) {
  check_logical_of_expert(logical_of_expert, config_.num_experts);
  if (has_records_) {
    throw InvalidState(
        str("set_logical_of_expert: expected a call between steps, got one after "
            "records of step ",
            step_id_));
  }
  const auto num_ids =
      logical_of_expert.empty() ? spec_.num_experts : static_cast<int>(logical_of_expert.size());
  for (std::size_t slot = 0; slot < sinks_.size(); ++slot) {
    if (num_ids - 1 <= INT16_MAX || sinks_[slot] == nullptr) continue;
    if (sinks_[slot]->view.dtype != DType::kInt16) continue;
    refuse("logical_of_expert",
           str("ids up to ", INT16_MAX, " (the sink of layer ", config_.layers[slot], " is int16)"),
           str("ids up to ", num_ids - 1));
  }
  use_map(logical_of_expert);
  config_.logical_of_expert = std::move(logical_of_expert);
}

RoutingCapture::~RoutingCapture() = default;
RoutingCapture::RoutingCapture(RoutingCapture&&) noexcept = default;
RoutingCapture& RoutingCapture::operator=(RoutingCapture&&) noexcept = default;

void RoutingCapture::begin_step(std::int64_t step_id, std::optional<void*> stream) {
  impl_->begin_step(step_id, stream);
}
void RoutingCapture::record(int layer, const TensorView& topk_ids, const CaptureLayout& layout,
                            const RecordOptions& options) {
  impl_->take("record", layer, topk_ids, layout, options, false);
}
TensorView RoutingCapture::sink(int layer, DType dtype) { return impl_->sink(layer, dtype); }
void RoutingCapture::import_sink(int layer, std::int64_t num_rows, const CaptureLayout& layout,
                                 const RecordOptions& options) {
  impl_->import_sink(layer, num_rows, layout, options);
}
RoutingSnapshot RoutingCapture::snapshot(std::int64_t num_tokens, std::optional<void*> stream) {
  return impl_->snapshot(num_tokens, stream);
}
void RoutingCapture::check() { impl_->check(); }
void RoutingCapture::set_logical_of_expert(std::vector<std::int32_t> logical_of_expert) {
  impl_->set_logical_of_expert(std::move(logical_of_expert));
}
const RoutingSpec& RoutingCapture::spec() const noexcept { return impl_->spec(); }
const RoutingCaptureConfig& RoutingCapture::config() const noexcept { return impl_->config(); }
int RoutingCapture::num_in_flight() const noexcept { return impl_->num_in_flight(); }

}  // namespace fanfold
