// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_rows.h"

#include <cstring>

#include "base/format.h"
#include "capture/check.h"
#include "capture/id_types.h"
#include "fanfold/error.h"

namespace fanfold {

using base::str;
using capture::refuse;

const char* name_of(IdSpace id_space) noexcept {
  switch (id_space) {
    case IdSpace::kLogical:
      return "logical";
    case IdSpace::kPhysical:
      return "physical";
  }
  return "unknown";
}

std::int64_t RoutingSpec::sentinel() const noexcept {
  const bool is_unsigned = dtype == DType::kUInt8 || dtype == DType::kUInt16;
  return is_unsigned ? capture::max_id_of(dtype) + 1 : -1;
}

std::int64_t RoutingSpec::row_bytes() const noexcept {
  return std::int64_t{num_layers} * top_k * size_of(dtype);
}

std::string RoutingSpec::describe() const {
  return str(name_of(dtype), " [tokens, ", num_layers, ", ", top_k, "] of ", num_experts, " ",
             name_of(id_space), " experts");
}

bool operator==(const RoutingSpec& a, const RoutingSpec& b) noexcept {
  return a.num_layers == b.num_layers && a.num_experts == b.num_experts && a.top_k == b.top_k &&
         a.dtype == b.dtype && a.id_space == b.id_space;
}
bool operator!=(const RoutingSpec& a, const RoutingSpec& b) noexcept { return !(a == b); }

RoutingSpec make_routing_spec(int num_layers, int num_experts, int top_k,
                              std::optional<DType> dtype, IdSpace id_space) {
  const auto at_least_one = [](const char* name, int value) {
    if (value < 1) refuse(name, "1 or more", str(value));
  };
  at_least_one("num_layers", num_layers);
  at_least_one("num_experts", num_experts);
  at_least_one("top_k", top_k);
  if (num_layers > INT32_MAX / top_k) {
    refuse("num_layers", str("at most ", INT32_MAX, " ids per token (num_layers * top_k)"),
           str(num_layers, " * ", top_k));
  }
  RoutingSpec spec{num_layers, num_experts, top_k, DType::kInt32, id_space};
  if (!dtype) {
    for (const DType narrow : {DType::kInt16, DType::kInt8}) {
      if (num_experts - 1 <= capture::max_id_of(narrow)) spec.dtype = narrow;
    }
    return spec;
  }
  const std::int64_t max_id = capture::max_id_of(*dtype);
  if (max_id == 0) refuse("dtype", "int8, int16, int32, uint8 or uint16", name_of(*dtype));
  if (num_experts - 1 > max_id) {
    refuse("dtype", str("a type for ids 0 to ", num_experts - 1, " and a sentinel"),
           str(name_of(*dtype), ", which holds ids up to ", max_id));
  }
  spec.dtype = *dtype;
  return spec;
}

TensorView RoutingRows::array() const {
  return {
      static_cast<const void*>(data.data()), spec.dtype, {num_tokens, spec.num_layers, spec.top_k}};
}

RoutingRows copy_rows(const RoutingSpec& spec, const TensorView& array,
                      std::int64_t first_position) {
  capture::check_routing_array("array", spec, array);
  if (first_position < 0 || first_position > capture::kMaxPosition) {
    refuse("first_position", str("0 to ", capture::kMaxPosition), str(first_position));
  }
  RoutingRows rows{spec, first_position, array.shape[0], {}};
  rows.data.resize(static_cast<std::size_t>(rows.num_tokens * spec.row_bytes()));
  capture::copy_dense(rows.data.data(), array, rows.num_tokens);
  return rows;
}

void check_rows(const RoutingRows& rows) {
  capture::check_sizes("data", rows);
  capture::check_ids("data", rows);
}

RoutingRows astype(const RoutingRows& rows, DType dtype) {
  check_rows(rows);
  const RoutingSpec& from = rows.spec;
  RoutingRows converted{
      make_routing_spec(from.num_layers, from.num_experts, from.top_k, dtype, from.id_space),
      rows.first_position,
      rows.num_tokens,
      {}};
  const std::int64_t num_ids = rows.num_tokens * from.num_layers * from.top_k;
  converted.data.resize(static_cast<std::size_t>(num_ids * size_of(dtype)));
  capture::with_id_type(from.dtype, [&](auto from_type) {
    using From = decltype(from_type);
    capture::with_id_type(dtype, [&](auto to_type) {
      using To = decltype(to_type);
      const auto sentinel = static_cast<From>(from.sentinel());
      for (std::int64_t i = 0; i < num_ids; ++i) {
        const From id = capture::load_id<From>(rows.data.data(), i);
        const To out = id == sentinel ? static_cast<To>(-1) : static_cast<To>(id);
        std::memcpy(converted.data.data() + i * static_cast<std::int64_t>(sizeof(To)), &out,
                    sizeof(To));
      }
    });
  });
  return converted;
}

std::vector<std::int64_t> expert_histogram(const RoutingRows& rows) {
  check_rows(rows);
  const RoutingSpec& spec = rows.spec;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(spec.num_layers) *
                                   static_cast<std::size_t>(spec.num_experts));
  capture::with_id_type(spec.dtype, [&](auto type) {
    using Id = decltype(type);
    const std::int64_t sentinel = spec.sentinel();
    std::int64_t at = 0;
    for (std::int64_t token = 0; token < rows.num_tokens; ++token) {
      for (std::int64_t layer = 0; layer < spec.num_layers; ++layer) {
        std::int64_t* of_layer = counts.data() + layer * spec.num_experts;
        for (int k = 0; k < spec.top_k; ++k) {
          const std::int64_t id = capture::load_number<Id>(rows.data.data(), at++);
          if (id != sentinel) ++of_layer[id];
        }
      }
    }
  });
  return counts;
}

std::int64_t num_tokens_fed(std::int64_t num_prompt, std::int64_t num_generated) {
  if (num_prompt < 0) refuse("num_prompt", "0 or more tokens", str(num_prompt));
  if (num_generated < 0) refuse("num_generated", "0 or more tokens", str(num_generated));
  if (num_prompt > capture::kMaxPosition || num_generated > capture::kMaxPosition) {
    refuse("num_tokens_fed", str("at most ", capture::kMaxPosition, " tokens of each"),
           str(num_prompt, " and ", num_generated));
  }
  return num_generated == 0 ? num_prompt : num_prompt + num_generated - 1;
}

void check_num_tokens(const RoutingRows& rows, std::int64_t num_prompt,
                      std::int64_t num_generated) {
  const std::int64_t expected = num_tokens_fed(num_prompt, num_generated);
  if (rows.first_position == 0 && rows.num_tokens == expected) return;
  refuse("rows",
         str(expected, " tokens from position 0 on: ", num_prompt, " of the prompt, ",
             num_generated, " generated, the last of which was never fed"),
         str(rows.num_tokens, " from position ", rows.first_position, " on"));
}

}  // namespace fanfold
