// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks that several files of this module make.

#include <cstdint>
#include <string>
#include <string_view>

#include "fanfold/routing_rows.h"
#include "fanfold/tensor_view.h"

namespace fanfold::capture {

/// Of a token in its request. Leaves room for adding lengths.
constexpr std::int64_t kMaxPosition = INT64_MAX / 4;

/// @throws InvalidArgument  always: name, expected and got.
[[noreturn]] void refuse(const char* name, const std::string& expected, const std::string& got);

/// The first record of shards makes memory, which no graph capture may hold.
[[noreturn]] void refuse_first_shards_in_graph();

/// A tensor in the host's memory that has data.
void check_host_tensor(const char* name, const TensorView& view);

/// `view` is [tokens, num_layers, top_k] of the spec's dtype with dense rows.
void check_routing_array(const char* name, const RoutingSpec& spec, const TensorView& view);

/// The sizes of `rows` fit its spec; its ids are not looked at.
void check_sizes(const char* name, const RoutingRows& rows);

/// Every id is an expert or the sentinel.
void check_ids(const char* name, const RoutingRows& rows);

/// `num_tokens` are all of the rows of `num_shards` shards but for fewer than num_shards.
void check_padding(const char* name, std::int64_t num_rows, std::int64_t num_shards,
                   std::int64_t num_tokens);

/// `text`, which may be any bytes, for messages: quoted, escaped and cut.
std::string quote(std::string_view text);

/// Copies rows of `row_bytes` from a tensor with a row stride.
void copy_dense(std::byte* to, const TensorView& from, std::int64_t num_rows);

}  // namespace fanfold::capture
