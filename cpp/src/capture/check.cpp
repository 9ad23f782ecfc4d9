// SPDX-License-Identifier: Apache-2.0
#include "capture/check.h"

#include <cstring>

#include "base/format.h"
#include "capture/id_types.h"
#include "fanfold/error.h"

namespace fanfold::capture {

void refuse(const char* name, const std::string& expected, const std::string& got) {
  throw InvalidArgument(base::str(name, ": expected ", expected, ", got ", got));
}

void refuse_first_shards_in_graph() {
  throw InvalidState(
      "record: expected the first record of shards, which makes memory, outside of a graph "
      "capture, "
      "got it in one");
}

void check_host_tensor(const char* name, const TensorView& view) {
  if (view.device != DeviceType::kCpu) refuse(name, "a tensor on cpu", view.describe());
  if (view.num_elements() > 0 && view.data == nullptr) {
    refuse(name, "data", "a null pointer for " + view.describe());
  }
}

void check_routing_array(const char* name, const RoutingSpec& spec, const TensorView& view) {
  check_host_tensor(name, view);
  if (view.dtype != spec.dtype || view.ndim != 3 || view.shape[1] != spec.num_layers ||
      view.shape[2] != spec.top_k) {
    refuse(name,
           base::str(name_of(spec.dtype), " [tokens, ", spec.num_layers, ", ", spec.top_k, "]"),
           view.describe());
  }
  if (!view.rows_are_contiguous()) {
    refuse(name, "dense ids of each token", "strides that skip within a row");
  }
}

void check_sizes(const char* name, const RoutingRows& rows) {
  using base::str;
  const RoutingSpec& spec = rows.spec;
  make_routing_spec(spec.num_layers, spec.num_experts, spec.top_k, spec.dtype, spec.id_space);
  if (rows.first_position < 0 || rows.first_position > kMaxPosition) {
    refuse("first_position", str("0 to ", kMaxPosition), str(rows.first_position));
  }
  const auto bytes = static_cast<std::int64_t>(rows.data.size());
  if (rows.num_tokens < 0 || bytes % spec.row_bytes() != 0 ||
      bytes / spec.row_bytes() != rows.num_tokens) {
    refuse(name, str(rows.num_tokens, " tokens of ", spec.row_bytes(), " bytes"),
           str(bytes, " bytes"));
  }
}

void check_ids(const char* name, const RoutingRows& rows) {
  using base::str;
  const RoutingSpec& spec = rows.spec;
  with_id_type(spec.dtype, [&](auto type) {
    using Id = decltype(type);
    const std::int64_t num_ids = rows.num_tokens * spec.num_layers * spec.top_k;
    const std::int64_t sentinel = spec.sentinel();
    for (std::int64_t i = 0; i < num_ids; ++i) {
      const std::int64_t id = load_number<Id>(rows.data.data(), i);
      if ((id >= 0 && id < spec.num_experts) || id == sentinel) continue;
      const std::int64_t layer = i / spec.top_k % spec.num_layers;
      refuse(name, str("ids below ", spec.num_experts, " (num_experts) or ", sentinel),
             str(id, " at token ", i / spec.top_k / spec.num_layers, ", layer ", layer, ", column ",
                 i % spec.top_k));
    }
  });
}

void check_padding(const char* name, std::int64_t num_rows, std::int64_t num_shards,
                   std::int64_t num_tokens) {
  const std::int64_t padding = num_rows - num_tokens;
  if (padding == 0 || (padding > 0 && padding < num_shards)) return;
  refuse(name,
         base::str("room for the ", num_rows, " rows of ", num_shards,
                   " shards but for fewer than ", num_shards, " rows of padding"),
         base::str(num_tokens, " rows"));
}

std::string quote(std::string_view text) {
  constexpr std::size_t kMaxQuoted = 40;
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text.substr(0, kMaxQuoted)) {
    if (c >= ' ' && c <= '~') {
      quoted += c;
      continue;
    }
    const auto byte = static_cast<unsigned char>(c);
    quoted += "\\x";
    quoted += kHex[byte / 16];
    quoted += kHex[byte % 16];
  }
  return quoted + (text.size() > kMaxQuoted ? "\"..." : "\"");
}

void copy_dense(std::byte* to, const TensorView& from, std::int64_t num_rows) {
  const std::int64_t row_bytes = from.row_bytes();
  if (num_rows == 0 || row_bytes == 0) return;
  const auto* source = static_cast<const std::byte*>(from.data);
  const std::int64_t stride = from.row_stride_bytes();
  if (stride == row_bytes || num_rows == 1) {
    std::memcpy(to, source, static_cast<std::size_t>(num_rows * row_bytes));
    return;
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(to + row * row_bytes, source + row * stride, static_cast<std::size_t>(row_bytes));
  }
}

}  // namespace fanfold::capture
