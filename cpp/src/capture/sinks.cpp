// SPDX-License-Identifier: Apache-2.0
#include "capture/sinks.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/format.h"
#include "capture/check.h"
#include "capture/record_errors.h"
#include "capture/routing_capture_impl.h"
#include "fanfold/error.h"

namespace fanfold {

namespace capture {
namespace {

template <class Id>
constexpr Id kNotWritten = std::numeric_limits<Id>::min();

template <class Id>
std::vector<RowSpan> written_spans_of(const TensorView& ids, int top_k,
                                      const std::vector<RowSpan>& spans) {
  std::vector<RowSpan> written;
  for (const RowSpan& span : spans) {
    bool extends = false;
    for (std::int64_t i = 0; i < span.num_rows; ++i) {
      const std::int64_t row = span.source + i;
      const Id* first = static_cast<const Id*>(ids.data) + row * ids.strides[0];
      const auto missing = std::count(first, first + top_k, kNotWritten<Id>);
      if (missing == top_k) {
        extends = false;
        continue;
      }
      if (missing > 0) {
        const auto column = std::find(first, first + top_k, kNotWritten<Id>) - first;
        refuse_partly_written(top_k, row, column);
      }
      if (extends) {
        ++written.back().num_rows;
      } else {
        written.push_back({row, span.token + i, 1});
      }
      extends = true;
    }
  }
  return written;
}

}  // namespace

void clear_sink(const TensorView& sink) noexcept {
  if (sink.dtype == DType::kInt16) {
    std::fill_n(static_cast<std::int16_t*>(sink.data), sink.num_elements(),
                kNotWritten<std::int16_t>);
  } else {
    std::fill_n(static_cast<std::int32_t*>(sink.data), sink.num_elements(),
                kNotWritten<std::int32_t>);
  }
}

std::vector<RowSpan> written_spans(const TensorView& ids, int top_k,
                                   const std::vector<RowSpan>& spans) {
  return ids.dtype == DType::kInt16 ? written_spans_of<std::int16_t>(ids, top_k, spans)
                                    : written_spans_of<std::int32_t>(ids, top_k, spans);
}

}  // namespace capture

TensorView RoutingCapture::Impl::sink(int layer, DType dtype) {
  const std::size_t at = slot_of(layer);
  const std::int64_t last = rule().num_experts - 1;
  if (dtype != DType::kInt32 && !(dtype == DType::kInt16 && last <= INT16_MAX)) {
    capture::refuse("dtype of the sink", base::str("int16 or int32 that holds ids up to ", last),
                    name_of(dtype));
  }
  std::unique_ptr<Sink>& sink = sinks_[at];
  if (sink != nullptr) {
    if (sink->view.dtype != dtype) {
      capture::refuse("dtype of the sink",
                      base::str(name_of(sink->view.dtype), ", as when it was made"),
                      name_of(dtype));
    }
    return sink->view;
  }
  const std::int64_t rows = config_.max_sink_rows > 0 ? config_.max_sink_rows : config_.max_tokens;
  const std::int64_t width = config_.top_k + config_.num_shared_experts;
  auto made = std::make_unique<Sink>();
  make_sink(at, *made, dtype, rows, width);
  sink = std::move(made);
  return sink->view;
}

void RoutingCapture::Impl::check_no_sink(const TensorView& topk_ids) const {
  if (topk_ids.num_elements() == 0) return;
  const std::int64_t span = topk_ids.row_stride_bytes() * (topk_ids.shape[0] - 1);
  const auto data = reinterpret_cast<std::uintptr_t>(topk_ids.data);
  const auto last_row = data + static_cast<std::uintptr_t>(span);
  const auto begin = std::min(data, last_row);
  const auto end = std::max(data, last_row) + static_cast<std::uintptr_t>(topk_ids.row_bytes());
  for (std::size_t slot = 0; slot < sinks_.size(); ++slot) {
    if (sinks_[slot] == nullptr) continue;
    const auto of_sink = reinterpret_cast<std::uintptr_t>(sinks_[slot]->memory.get());
    const auto size = static_cast<std::uintptr_t>(sinks_[slot]->bytes);
    if (end <= of_sink || begin >= of_sink + size) continue;
    capture::refuse(
        "topk_ids", "memory of the caller's",
        base::str("the sink of layer ", config_.layers[slot], "; use import_sink for that"));
  }
}

void RoutingCapture::Impl::import_sink(int layer, std::int64_t num_rows,
                                       const CaptureLayout& layout, const RecordOptions& options) {
  const std::size_t slot = slot_of(layer);
  const std::unique_ptr<Sink>& sink = sinks_[slot];
  if (sink == nullptr) {
    throw InvalidState(base::str("import_sink: expected a sink of layer ", layer, ", got none"));
  }
  const std::int64_t max_rows = sink->view.shape[0];
  if (num_rows < 0 || num_rows > max_rows) {
    capture::refuse("num_rows", base::str("0 to ", max_rows, " rows of the sink"),
                    base::str(num_rows));
  }
  if (options.rows && *options.rows != num_rows) {
    capture::refuse("rows", base::str(num_rows, " (num_rows)"), base::str(*options.rows));
  }
  RecordOptions all = options;
  all.rows = num_rows;
  take("import_sink", layer, sink->view, layout, all, true);
  clear_sink(slot, to_stream(options.stream));
}

}  // namespace fanfold
