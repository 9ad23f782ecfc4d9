// SPDX-License-Identifier: Apache-2.0
#include "capture/foreign_ids.h"

#include <cstring>

#include "base/format.h"
#include "capture/check.h"
#include "capture/id_types.h"

namespace fanfold::capture {
namespace {

using base::str;

/// An unsigned type whose every value is an id.
bool has_no_sentinel(DType dtype, int num_experts) noexcept {
  return (dtype == DType::kUInt8 || dtype == DType::kUInt16) &&
         num_experts - 1 == max_id_of(dtype) + 1;
}

}  // namespace

std::vector<std::byte> foreign_ids(const RoutingRows& rows, DType dtype) {
  const RoutingSpec& spec = rows.spec;
  if (!has_no_sentinel(dtype, spec.num_experts)) return astype(rows, dtype).data;
  check_rows(rows);
  std::vector<std::byte> ids(rows.data.size() / static_cast<std::size_t>(size_of(spec.dtype)) *
                             static_cast<std::size_t>(size_of(dtype)));
  const std::int64_t num_ids = rows.num_tokens * spec.num_layers * spec.top_k;
  with_id_type(spec.dtype, [&](auto from_type) {
    using From = decltype(from_type);
    for (std::int64_t i = 0; i < num_ids; ++i) {
      const std::int64_t id = load_number<From>(rows.data.data(), i);
      if (id == spec.sentinel()) {
        refuse("dtype",
               str("a type with room for \"no expert\" beside ids up to ", spec.num_experts - 1),
               str(name_of(dtype), " for token ", i / spec.top_k / spec.num_layers, ", layer ",
                   i / spec.top_k % spec.num_layers, ", column ", i % spec.top_k));
      }
      // Little-endian: the low bytes come first.
      std::memcpy(ids.data() + i * size_of(dtype), &id, static_cast<std::size_t>(size_of(dtype)));
    }
  });
  return ids;
}

RoutingRows rows_of_foreign_ids(const std::byte* data, std::size_t size, DType dtype,
                                std::int64_t num_tokens, int num_layers, int num_experts, int top_k,
                                std::int64_t first_position) {
  const bool widens = has_no_sentinel(dtype, num_experts);
  const RoutingSpec spec =
      make_routing_spec(num_layers, num_experts, top_k, widens ? std::optional<DType>() : dtype);
  const auto bytes = static_cast<std::int64_t>(size);
  const std::int64_t row_bytes = std::int64_t{num_layers} * top_k * size_of(dtype);
  if (num_tokens < 0 || bytes % row_bytes != 0 || bytes / row_bytes != num_tokens) {
    refuse("data", str(num_tokens, " tokens of ", row_bytes, " bytes"), str(bytes, " bytes"));
  }
  RoutingRows rows{spec, first_position, num_tokens, {}};
  if (!widens) {
    rows.data.assign(data, data + size);
  } else {
    rows.data.resize(static_cast<std::size_t>(num_tokens * spec.row_bytes()));
    const std::int64_t num_ids = num_tokens * num_layers * top_k;
    for (std::int64_t i = 0; i < num_ids; ++i) {
      std::uint32_t id = 0;
      std::memcpy(&id, data + i * size_of(dtype), static_cast<std::size_t>(size_of(dtype)));
      std::memcpy(rows.data.data() + i * size_of(spec.dtype), &id,
                  static_cast<std::size_t>(size_of(spec.dtype)));
    }
  }
  check_rows(rows);
  return rows;
}

}  // namespace fanfold::capture
