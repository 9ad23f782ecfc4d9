// SPDX-License-Identifier: Apache-2.0
#include "api/check.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "base/format.h"
#include "fanfold/error.h"
#include "plan/wire.h"

namespace fanfold::api {
namespace {

using base::str;

[[noreturn]] void fail(const char* name, const std::string& expected, const std::string& got) {
  throw InvalidArgument(str(name, ": expected ", expected, ", got ", got));
}

bool is_id_dtype(DType dtype) noexcept {
  return dtype == DType::kInt16 || dtype == DType::kInt32 || dtype == DType::kInt64 ||
         dtype == DType::kUInt32;
}

void check_place(const AllToAllConfig& config, const char* name, const TensorView& view) {
  if (view.device != config.device) {
    const bool is_cpu = config.device == DeviceType::kCpu;
    fail(name, is_cpu ? "a tensor on cpu" : str("a tensor on cuda:", config.device_index),
         view.describe());
  }
  if (config.device == DeviceType::kGpu && view.device_index != config.device_index) {
    fail(name, str("a tensor on cuda:", config.device_index), view.describe());
  }
}

void check_rows(const AllToAllConfig& config, const char* name, const TensorView& view) {
  check_place(config, name, view);
  if (view.num_elements() > 0 && view.data == nullptr) {
    fail(name, "data", "a null pointer for " + view.describe());
  }
  if (!view.rows_are_contiguous()) {
    fail(name, "rows whose elements are contiguous",
         "strides that skip within a row of " + view.describe());
  }
}

/// T rows, as `topk_ids`, `routing` or the first payload says.
std::int64_t number_of_tokens(const DispatchInputs& in) {
  if (in.routing.has_value()) return in.routing.num_tokens();
  if (in.topk_ids.has_value()) return in.topk_ids.shape[0];
  return in.payloads[0].shape[0];
}

void check_ids(const exchange::Exchange& exchange, const DispatchInputs& in) {
  const int top_k = exchange.config().top_k;
  if (!in.topk_ids.has_value()) {
    if (exchange.config().layout != Layout::kGathered && !in.routing.has_value()) {
      fail("topk_ids", "a tensor (only layout gathered can do without)", "none");
    }
    return;
  }
  const TensorView& ids = in.topk_ids;
  if (!is_id_dtype(ids.dtype) || ids.ndim != 2 || ids.shape[1] != top_k) {
    fail("topk_ids", str("int16, int32, int64 or uint32 [num_tokens, ", top_k, "]"),
         ids.describe());
  }
  check_rows(exchange.config(), "topk_ids", ids);
}

void check_weights(const AllToAllConfig& config, const TensorView& weights,
                   std::int64_t num_tokens) {
  const char* const name = "topk_weights";
  const int top_k = config.top_k;
  if (!weights.has_value()) return;
  if (weights.dtype != DType::kFloat32 || weights.ndim != 2 || weights.shape[0] != num_tokens ||
      weights.shape[1] != top_k) {
    fail(name, str("float32 [", num_tokens, ", ", top_k, "]"), weights.describe());
  }
  check_rows(config, name, weights);
}

/// Bytes that a row of payload 0 takes on its way.
std::int64_t travelling_bytes(const exchange::Exchange& exchange, const TensorView& payload) {
  if (exchange.config().dispatch_wire == Wire::kNone) return payload.row_bytes();
  if (!is_summable(payload.dtype) || payload.ndim != 2) {
    fail("payloads[0]",
         "float32, float16 or bfloat16 [num_tokens, hidden] (dispatch_wire packs it)",
         payload.describe());
  }
  return plan::packed_row_bytes(payload.shape[1], exchange.config().wire_scale);
}

/// By number; made beforehand, since making text takes longer than all checks of a call.
constexpr const char* kPayloadNames[] = {
    "payloads[0]",  "payloads[1]",  "payloads[2]",  "payloads[3]", "payloads[4]",  "payloads[5]",
    "payloads[6]",  "payloads[7]",  "payloads[8]",  "payloads[9]", "payloads[10]", "payloads[11]",
    "payloads[12]", "payloads[13]", "payloads[14]", "payloads[15]"};
static_assert(std::size(kPayloadNames) == AllToAll::kMaxPayloads);

void check_payloads(const exchange::Exchange& exchange, const DispatchInputs& in,
                    std::int64_t num_tokens) {
  if (in.payloads.empty() || in.payloads.size() > AllToAll::kMaxPayloads) {
    fail("payloads", str("1 to ", AllToAll::kMaxPayloads, " tensors"), str(in.payloads.size()));
  }
  std::int64_t total = 0;
  for (std::size_t i = 0; i < in.payloads.size(); ++i) {
    const TensorView& payload = in.payloads[i];
    const char* const name = kPayloadNames[i];
    if (payload.ndim < 1 || payload.shape[0] != num_tokens) {
      fail(name, str("[", num_tokens, ", ...] (one row per token)"), payload.describe());
    }
    if (payload.row_bytes() < 1) {
      fail(name, "rows of at least one byte", payload.describe());
    }
    check_rows(exchange.config(), name, payload);
    if (num_tokens > 0 && exchange.owns(payload.data)) {
      fail(name, "memory outside this AllToAll (peers may overwrite it)",
           "a view of received rows");
    }
    total += i == 0 ? travelling_bytes(exchange, payload) : payload.row_bytes();
  }
  if (total > exchange.workspace().dispatch_row_bytes) {
    fail("payloads",
         str("at most ", exchange.workspace().dispatch_row_bytes,
             " bytes per token (dispatch_row_bytes; see extra_bytes_per_token)"),
         str(total));
  }
}

/// T, on a GPU at most.
std::int64_t first_tokens(const AllToAllConfig& config, const DispatchInputs& in,
                          std::int64_t rows) {
  if (!in.num_tokens.has_value()) return rows;
  const TensorView& view = in.num_tokens;
  check_place(config, "num_tokens", view);
  if (view.dtype != DType::kInt32 || view.num_elements() + (view.ndim == 0 ? 1 : 0) != 1 ||
      view.data == nullptr) {
    fail("num_tokens", "one int32", view.describe());
  }
  if (config.device == DeviceType::kGpu) return rows;  // kernels read it
  const std::int32_t num_tokens = *static_cast<const std::int32_t*>(view.data);
  if (num_tokens < 0 || num_tokens > rows) {
    fail("num_tokens", str("a value in [0, ", rows, "] (the rows given)"), str(num_tokens));
  }
  return num_tokens;
}

void check_routing(const exchange::Exchange& exchange, const DispatchInputs& in) {
  if (!in.routing.has_value()) return;
  const Routing::Data& data = *in.routing.data();
  if (data.placement_version != exchange.placement_version()) {
    fail("routing", "a routing made under the present placement", "one of another placement");
  }
  if (data.config_digest != exchange.config_digest()) {
    fail("routing", "a routing of an equally configured AllToAll", "one of another configuration");
  }
  if (data.rank != exchange.rank()) {
    fail("routing", str("a routing made on rank ", exchange.rank()),
         str("one of rank ", data.rank));
  }
  if (exchange.is_on_gpu() && data.device_index != exchange.config().device_index) {
    fail("routing", str("a routing on cuda:", exchange.config().device_index),
         str("one on cuda:", data.device_index));
  }
  if (exchange.is_on_gpu() && data.generation != exchange.generation()) {
    fail("routing", str("a routing of generation ", exchange.generation()),
         str("one of generation ", data.generation, ", whose kernels may have failed"));
  }
  if (data.mask_digest != exchange.mask_digest()) {
    fail("routing", "a routing made under the present active mask", "one of another mask");
  }
  if (in.topk_ids.has_value() || in.topk_weights.has_value() || in.num_tokens.has_value() ||
      in.invalid_expert_id) {
    fail("routing",
         "no topk_ids, topk_weights, num_tokens or invalid_expert_id beside it (it holds them)",
         "some of them");
  }
}

/// Whether ids of `dtype` can be `value`; uint32 also takes the negative ids that wrap to it.
bool holds(DType dtype, std::int64_t value) noexcept {
  switch (dtype) {
    case DType::kInt16:
      return value >= INT16_MIN && value <= INT16_MAX;
    case DType::kInt64:
      return true;
    case DType::kUInt32:
      return value >= INT32_MIN && value <= UINT32_MAX;
    default:
      return value >= INT32_MIN && value <= INT32_MAX;
  }
}

/// "[2, 4, hidden]"
std::string shape_text(const exchange::Extents& leading) {
  std::string text = "[";
  for (int i = 0; i < leading.ndim; ++i) {
    text += str(leading.shape[static_cast<std::size_t>(i)], ", ");
  }
  return text + "hidden]";
}

}  // namespace

void check_stream(const AllToAllConfig& config, const std::optional<void*>& stream) {
  if (config.device != DeviceType::kGpu || stream) return;
  fail("stream", "a CUDA stream for device 'cuda'", "none");
}

exchange::DispatchCall check_dispatch(const exchange::Exchange& exchange,
                                      const DispatchInputs& in) {
  const AllToAllConfig& config = exchange.config();
  check_stream(config, in.stream);
  check_routing(exchange, in);
  check_ids(exchange, in);
  if (in.payloads.empty()) fail("payloads", str("1 to ", AllToAll::kMaxPayloads, " tensors"), "0");
  const std::int64_t rows = number_of_tokens(in);
  check_weights(config, in.topk_weights, rows);
  check_payloads(exchange, in, rows);
  if (config.weighting == Weighting::kCarried && !in.topk_weights.has_value() &&
      !in.routing.has_value()) {
    fail("topk_weights", "a tensor (weighting carried multiplies by it)", "none");
  }
  const std::int64_t num_tokens = first_tokens(config, in, rows);
  const std::int64_t capacity = config.max_tokens_per_rank;
  const std::int64_t m = in.routing.has_value() ? in.routing.round_max_tokens()
                                                : in.round_max_tokens.value_or(capacity);
  if (in.routing.has_value() && in.round_max_tokens && *in.round_max_tokens != m) {
    fail("round_max_tokens", str(m, " (that of the routing)"), str(*in.round_max_tokens));
  }
  if (m < 0 || m > capacity) {
    fail("round_max_tokens", str("a value in [0, ", capacity, "] (max_tokens_per_rank)"), str(m));
  }
  if (num_tokens > m) {
    fail("topk_ids",
         str("at most ", m,
             m == capacity ? " tokens (max_tokens_per_rank)" : " tokens (round_max_tokens)"),
         str(num_tokens));
  }
  if (in.num_tokens_per_rank) {
    const auto& known = *in.num_tokens_per_rank;
    const auto me = static_cast<std::size_t>(exchange.rank());
    if (known.size() != static_cast<std::size_t>(exchange.num_ranks())) {
      fail("num_tokens_per_rank", str(exchange.num_ranks(), " entries"), str(known.size()));
    }
    const bool is_unknown = exchange.is_on_gpu() && in.num_tokens.has_value();
    if (!is_unknown && known[me] != num_tokens) {
      fail("num_tokens_per_rank", str(num_tokens, " tokens at this rank's entry ", me),
           str(known[me]));
    }
  }
  const std::int64_t invalid = in.invalid_expert_id.value_or(-1);
  if (invalid < INT32_MIN || invalid > INT32_MAX) {
    fail("invalid_expert_id", "a value that int32 holds", str(invalid));
  }
  return {&in, num_tokens, m, static_cast<std::int32_t>(invalid),
          base::Deadline(in.timeout.value_or(config.timeout))};
}

void check_combine_row(const exchange::Exchange& exchange, std::int64_t hidden, DType dtype) {
  if (!is_summable(dtype)) {
    fail("dtype of the combine", "float32, float16 or bfloat16", name_of(dtype));
  }
  const DType travels = exchange.combine_dtype();
  const std::int64_t bytes = hidden * std::max(size_of(dtype), size_of(travels));
  if (hidden < 1 || bytes > exchange.workspace().combine_row_bytes) {
    fail("hidden of the combine",
         str("a row of 1 element to ", exchange.workspace().combine_row_bytes,
             " bytes (combine_row_bytes)"),
         str(hidden, " elements, ", bytes, " bytes"));
  }
}

void check_results(exchange::Exchange& exchange, const exchange::Slot& slot,
                   const CombineInputs& in) {
  const TensorView& y = in.y;
  check_place(exchange.config(), "y", y);
  const TensorView wanted = exchange.combine_view(
      slot, y.ndim > 0 ? y.shape[static_cast<std::size_t>(y.ndim - 1)] : 0, y.dtype);
  if (y.ndim != wanted.ndim ||
      !std::equal(y.shape.begin(), y.shape.begin() + y.ndim, wanted.shape.begin()) ||
      !is_summable(y.dtype)) {
    fail("y", "float32, float16 or bfloat16 " + shape_text(exchange.leading(slot)), y.describe());
  }
  // Rows that are staged need only room for what travels.
  const bool staged = y.num_elements() == 0 || !exchange.owns(y.data);
  check_combine_row(exchange, wanted.shape[static_cast<std::size_t>(y.ndim - 1)],
                    staged ? exchange.combine_dtype() : y.dtype);
  if (!y.is_contiguous()) fail("y", "a contiguous tensor", "other strides");
  if (y.num_elements() > 0 && y.data == nullptr) fail("y", "data", "a null pointer");
  if (staged) return;
  const auto buffer_of = [](const exchange::Slot& of) {
    return str("the combine buffer of round ", of.round);
  };
  if (y.data != wanted.data) {
    std::string got = "other memory of this AllToAll";
    for (const exchange::Slot& other : exchange.slots()) {
      const TensorView buffer = exchange.combine_view(other, 1, y.dtype);
      if (buffer.data == y.data) got = buffer_of(other);
    }
    fail("y", buffer_of(slot) + ", or memory outside this AllToAll", got);
  }
  const DType travels = exchange.combine_dtype();
  if (exchange.combines_in_place() && y.dtype != travels) {
    fail("y", str(name_of(travels), " (combine_dtype) in ", buffer_of(slot)), y.describe());
  }
}

void check_combine_out(const exchange::Exchange& exchange, const exchange::Slot& slot,
                       const CombineInputs& in, std::int64_t hidden) {
  const std::int64_t num_tokens = slot.plan().num_tokens;
  const TensorView& out = in.out;
  if (!is_summable(out.dtype) || out.ndim != 2 || out.shape[0] != num_tokens ||
      out.shape[1] != hidden) {
    fail("out", str("float32, float16 or bfloat16 [", num_tokens, ", ", hidden, "]"),
         out.describe());
  }
  check_rows(exchange.config(), "out", out);
  if (num_tokens > 0 && exchange.owns(out.data)) {
    fail("out", "memory outside this AllToAll", "a view of its memory");
  }
  if (exchange.config().weighting != Weighting::kOrigin) {
    if (in.topk_weights.has_value()) {
      fail("topk_weights", "none (only weighting origin multiplies at combine)",
           in.topk_weights.describe());
    }
    return;
  }
  check_weights(exchange.config(), in.topk_weights, num_tokens);
  if (!in.topk_weights.has_value() && !slot.has_weights) {
    fail("topk_weights", "weights at dispatch or at combine (weighting origin)", "none");
  }
}

void check_sanitize(const exchange::Exchange& exchange, const TensorView& ids,
                    const TensorView& counts, std::int64_t invalid_expert_id,
                    const TensorView& out) {
  if (!is_id_dtype(ids.dtype) || (ids.ndim != 2 && ids.ndim != 3)) {
    fail("ids", "int16, int32, int64 or uint32 [num_ranks, rows, top_k] or [rows, top_k]",
         ids.describe());
  }
  for (const auto& [name, view] :
       {std::pair("ids", ids), std::pair("counts", counts), std::pair("out", out)}) {
    check_place(exchange.config(), name, view);
    if (view.num_elements() > 0 && view.data == nullptr) fail(name, "data", "a null pointer");
  }
  const auto last = static_cast<std::size_t>(ids.ndim - 1);
  if (ids.shape[last] > 1 && ids.strides[last] != 1) {
    fail("ids", "contiguous rows", "strides that skip within a row");
  }
  if (out.dtype != ids.dtype || out.ndim != ids.ndim || out.shape != ids.shape ||
      (out.shape[last] > 1 && out.strides[last] != 1)) {
    fail("out", ids.describe() + " with contiguous rows", out.describe());
  }
  const std::int64_t num_sources = ids.ndim == 3 ? ids.shape[0] : 1;
  const std::int64_t num_rows = ids.shape[last - 1];
  if (counts.dtype != DType::kInt32 || counts.ndim != 1 || counts.shape[0] != num_sources ||
      !counts.is_contiguous()) {
    fail("counts", str("int32 [", num_sources, "]"), counts.describe());
  }
  const auto* values = static_cast<const std::int32_t*>(counts.data);
  for (std::int64_t i = 0; i < num_sources && !exchange.is_on_gpu(); ++i) {
    // One count of [rows, K] may be a num_rows of which some rows were dropped.
    if (values[i] >= 0 && (values[i] <= num_rows || ids.ndim == 2)) continue;
    fail("counts", str("values in [0, ", num_rows, "]"), str(values[i], " at ", i));
  }
  if (!holds(ids.dtype, invalid_expert_id)) {
    fail("invalid_expert_id", str("a value that ", name_of(ids.dtype), " holds"),
         str(invalid_expert_id));
  }
}

}  // namespace fanfold::api
