// SPDX-License-Identifier: Apache-2.0

// A capture in the host's memory.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/format.h"
#include "capture/check.h"
#include "capture/record_errors.h"
#include "capture/routing_capture_impl.h"
#include "capture/row_set.h"
#include "capture/sinks.h"
#include "fanfold/error.h"

namespace fanfold::capture {
namespace {

using base::str;

constexpr int kSentinelByte = 0xff;  // the sentinel of every type is made of it

class HostCapture final : public RoutingCapture::Impl {
 public:
  explicit HostCapture(const RoutingCaptureConfig& given);

 private:
  /// What is known of one recorded layer.
  struct Slot {
    explicit Slot(std::int64_t max_tokens) : rows(max_tokens) {}
    std::uint64_t step = 0;  // the step that `rows` is about; of another one: nothing is recorded
    RowSet rows;
  };

  void check_place(const char* name, const TensorView& view) const override {
    check_host_tensor(name, view);
  }
  exec::Stream to_stream(const std::optional<void*>& /*stream*/) const override { return nullptr; }
  void start_step(exec::Stream stream) override;
  void write(const Record& record) override;
  Joined join(const TensorView& topk_ids, const CaptureLayout& layout,
              exec::Stream stream) override;
  void make_sink(std::size_t slot, Sink& sink, DType dtype, std::int64_t rows,
                 std::int64_t width) override;
  void clear_sink(std::size_t slot, exec::Stream stream) override;
  void copy(RoutingSnapshot::State& state, exec::Stream stream) override;
  void use_map(const std::vector<std::int32_t>& /*logical_of_expert*/) override {}

  /// The layer, whose rows are about this step.
  Slot& current(std::size_t slot);
  void write_again(const Record& record, const std::vector<RowSpan>& spans);
  [[noreturn]] void refuse_ids(const Record& record, const RowSpan& span) const;
  std::byte* row(std::size_t slot, std::int64_t token) noexcept {
    return buffer_.data() + static_cast<std::int64_t>(slot) * layer_bytes() + token * cell_bytes();
  }

  const NarrowTable* narrow_;
  std::vector<Slot> slots_;
  // [num_layers][max_tokens][top_k]: a record writes one dense range. A snapshot interleaves.
  std::vector<std::byte> buffer_;
  std::vector<std::byte> joined_;  // ids of all shards
  std::vector<std::byte> packed_;  // ids of this shard without gaps; rows recorded once more
};

HostCapture::HostCapture(const RoutingCaptureConfig& given)
    : Impl(given), narrow_(&narrow_table()) {
  const std::int64_t bytes = config().num_layers * layer_bytes();
  slots_.assign(static_cast<std::size_t>(config().num_layers), Slot(config().max_tokens));
  buffer_.assign(static_cast<std::size_t>(bytes), std::byte{kSentinelByte});
  std::vector<std::shared_ptr<std::byte>> places;
  places.reserve(static_cast<std::size_t>(config().max_in_flight));
  for (int i = 0; i < config().max_in_flight; ++i) {
    places.emplace_back(new std::byte[static_cast<std::size_t>(bytes)],
                        std::default_delete<std::byte[]>());
  }
  ring_ = std::make_shared<SnapshotRing>(std::move(places));
}

void HostCapture::start_step(exec::Stream /*stream*/) {
  for (const auto& sink : sinks()) {
    if (sink != nullptr) capture::clear_sink(sink->view);
  }
}

HostCapture::Slot& HostCapture::current(std::size_t slot) {
  Slot& found = slots_[slot];
  if (found.step != step()) {
    found.rows.clear();
    found.step = step();
  }
  return found;
}

void HostCapture::refuse_ids(const Record& record, const RowSpan& span) const {
  const WrongId wrong = find_wrong_id(record.ids, span.source, span.num_rows, rule());
  refuse_id(record.layer, wrong, rule().num_experts, !config().logical_of_expert.empty());
}

RoutingCapture::Impl::Joined HostCapture::join(const TensorView& topk_ids,
                                               const CaptureLayout& layout, exec::Stream stream) {
  const std::int64_t mine = topk_ids.shape[0];
  const std::int64_t width = topk_ids.shape[1];
  const std::int64_t sum = check_counts(layout);
  packed_.resize(static_cast<std::size_t>(mine * topk_ids.row_bytes()));
  copy_dense(packed_.data(), topk_ids, mine);
  joined_.resize(static_cast<std::size_t>(sum * topk_ids.row_bytes()));
  const TensorView send(static_cast<const void*>(packed_.data()), topk_ids.dtype, {mine, width});
  const TensorView all(static_cast<void*>(joined_.data()), topk_ids.dtype, {sum, width});
  config().gather(send, all, layout, stream);
  return {all, nullptr};
}

void HostCapture::write(const Record& record) {
  Slot& slot = current(record.slot);
  std::vector<RowSpan> written;
  if (record.is_sink) written = written_spans(record.ids, config().top_k, record.spans);
  const std::vector<RowSpan>& spans = record.is_sink ? written : record.spans;
  for (const RowSpan& span : spans) {
    if (!slot.rows.has_any(span.token, span.num_rows)) continue;
    write_again(record, spans);
    return;
  }
  // Nothing reads a row that is not in slot.rows, so an error may leave anything in it.
  const IdRule id_rule = rule();
  for (const RowSpan& span : spans) {
    if (!store_ids(record.ids, span.source, span.num_rows, id_rule, *narrow_,
                   row(record.slot, span.token))) {
      refuse_ids(record, span);
    }
  }
  for (const RowSpan& span : spans) slot.rows.add(span.token, span.num_rows);
}

void HostCapture::write_again(const Record& record, const std::vector<RowSpan>& spans) {
  Slot& slot = slots_[record.slot];
  const auto size = static_cast<std::size_t>(cell_bytes());
  std::int64_t num_rows = 0;
  for (const RowSpan& span : spans) num_rows += span.num_rows;
  packed_.resize(static_cast<std::size_t>(num_rows * cell_bytes()));
  std::byte* next = packed_.data();
  for (const RowSpan& span : spans) {
    if (!store_ids(record.ids, span.source, span.num_rows, rule(), *narrow_, next)) {
      refuse_ids(record, span);
    }
    for (std::int64_t i = 0; i < span.num_rows; ++i, next += cell_bytes()) {
      const std::int64_t token = span.token + i;
      if (record.overwrite || !slot.rows.contains(token)) continue;
      if (std::memcmp(next, row(record.slot, token), size) == 0) continue;
      refuse_other_ids(record.layer, token, span.source + i, step_id());
    }
  }
  next = packed_.data();
  for (const RowSpan& span : spans) {
    const std::int64_t bytes = span.num_rows * cell_bytes();
    if (bytes > 0) {
      std::memcpy(row(record.slot, span.token), next, static_cast<std::size_t>(bytes));
    }
    next += bytes;
    slot.rows.add(span.token, span.num_rows);
  }
}

void HostCapture::make_sink(std::size_t /*slot*/, Sink& sink, DType dtype, std::int64_t rows,
                            std::int64_t width) {
  sink.bytes = rows * width * size_of(dtype);
  sink.memory.reset(new std::byte[static_cast<std::size_t>(sink.bytes)],
                    std::default_delete<std::byte[]>());
  sink.view = TensorView(static_cast<void*>(sink.memory.get()), dtype, {rows, width});
  capture::clear_sink(sink.view);
}

void HostCapture::clear_sink(std::size_t slot, exec::Stream /*stream*/) {
  capture::clear_sink(sinks()[slot]->view);
}

void HostCapture::copy(RoutingSnapshot::State& state, exec::Stream /*stream*/) {
  const std::int64_t num_tokens = state.num_tokens;
  SnapshotContents& contents = state.contents;
  contents.step_id = step_id();
  std::byte* out = ring_->data(state.place);
  state.ids = out;
  interleave_layers(buffer_.data(), layer_bytes(), config().num_layers, num_tokens, cell_bytes(),
                    out);
  for (std::size_t at = 0; at < slots_.size(); ++at) {
    const Slot& slot = current(at);
    const std::int64_t missing = num_tokens - slot.rows.count(0, num_tokens);
    contents.missing_rows.push_back(missing);
    if (missing == 0) continue;
    contents.missing_layers.push_back(config().layers[at]);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      if (slot.rows.contains(token)) continue;
      std::memset(out + token * spec().row_bytes() + static_cast<std::int64_t>(at) * cell_bytes(),
                  kSentinelByte, static_cast<std::size_t>(cell_bytes()));
    }
  }
  if (!contents.missing_layers.empty()) {
    for (const Slot& slot : slots_) contents.recorded.push_back(slot.rows);
  }
}

}  // namespace

std::unique_ptr<RoutingCapture::Impl> make_host_capture(const RoutingCaptureConfig& config) {
  return std::make_unique<HostCapture>(config);
}

}  // namespace fanfold::capture
