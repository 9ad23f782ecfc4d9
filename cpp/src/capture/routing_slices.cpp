// SPDX-License-Identifier: Apache-2.0

// Cutting and joining of routing by tokens, by layers, and by shards of a sequence.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/format.h"
#include "capture/check.h"
#include "fanfold/error.h"
#include "fanfold/routing_rows.h"

namespace fanfold {

using base::str;
using capture::refuse;

RoutingRows slice_tokens(const RoutingRows& rows, std::int64_t first, std::int64_t last) {
  capture::check_sizes("rows", rows);
  const std::int64_t end = rows.first_position + rows.num_tokens;
  if (first < rows.first_position || last < first || last > end) {
    refuse("slice_tokens", str("positions within [", rows.first_position, ", ", end, ")"),
           str("[", first, ", ", last, ")"));
  }
  const std::int64_t row_bytes = rows.spec.row_bytes();
  const auto begin = rows.data.begin() + (first - rows.first_position) * row_bytes;
  return {rows.spec, first, last - first, {begin, begin + (last - first) * row_bytes}};
}

RoutingRows slice_layers(const RoutingRows& rows, int first, int last) {
  capture::check_sizes("rows", rows);
  if (first < 0 || last <= first || last > rows.spec.num_layers) {
    refuse("slice_layers", str("layers within [0, ", rows.spec.num_layers, "), one or more"),
           str("[", first, ", ", last, ")"));
  }
  RoutingRows part{rows.spec, rows.first_position, rows.num_tokens, {}};
  part.spec.num_layers = last - first;
  const std::int64_t from_bytes = rows.spec.row_bytes();
  const std::int64_t to_bytes = part.spec.row_bytes();
  const std::int64_t offset = from_bytes / rows.spec.num_layers * first;
  part.data.resize(static_cast<std::size_t>(rows.num_tokens * to_bytes));
  for (std::int64_t token = 0; token < rows.num_tokens; ++token) {
    std::memcpy(part.data.data() + token * to_bytes, rows.data.data() + token * from_bytes + offset,
                static_cast<std::size_t>(to_bytes));
  }
  return part;
}

RoutingRows concat_tokens(const std::vector<RoutingRows>& parts) {
  if (parts.empty()) refuse("parts", "one or more", "none");
  RoutingRows joined{parts[0].spec, parts[0].first_position, 0, {}};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const RoutingRows& part = parts[i];
    capture::check_sizes("parts", part);
    if (part.spec != joined.spec) {
      refuse("parts", joined.spec.describe(), str(part.spec.describe(), " in part ", i));
    }
    const std::int64_t end = joined.first_position + joined.num_tokens;
    if (part.first_position != end) {
      refuse("parts", str("part ", i, " to begin at position ", end),
             str("position ", part.first_position));
    }
    joined.data.insert(joined.data.end(), part.data.begin(), part.data.end());
    joined.num_tokens += part.num_tokens;
  }
  return joined;
}

RoutingRows concat_layers(const std::vector<RoutingRows>& parts) {
  if (parts.empty()) refuse("parts", "one or more", "none");
  RoutingRows joined{parts[0].spec, parts[0].first_position, parts[0].num_tokens, {}};
  std::int64_t num_layers = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const RoutingRows& part = parts[i];
    capture::check_sizes("parts", part);
    RoutingSpec alike = part.spec;
    alike.num_layers = parts[0].spec.num_layers;
    if (alike != parts[0].spec) {
      refuse("parts", parts[0].spec.describe() + " (the number of layers may differ)",
             str(part.spec.describe(), " in part ", i));
    }
    if (part.first_position != joined.first_position || part.num_tokens != joined.num_tokens) {
      refuse("parts",
             str(joined.num_tokens, " tokens from position ", joined.first_position, " on"),
             str(part.num_tokens, " from position ", part.first_position, " on in part ", i));
    }
    num_layers += part.spec.num_layers;
  }
  if (num_layers > INT32_MAX / joined.spec.top_k) {
    refuse("parts", str("at most ", INT32_MAX, " ids per token (layers * top_k)"),
           str(num_layers, " * ", joined.spec.top_k));
  }
  joined.spec.num_layers = static_cast<int>(num_layers);
  joined.data.resize(static_cast<std::size_t>(joined.num_tokens * joined.spec.row_bytes()));
  std::byte* to = joined.data.data();
  for (std::int64_t token = 0; token < joined.num_tokens; ++token) {
    for (const RoutingRows& part : parts) {
      const std::int64_t bytes = part.spec.row_bytes();
      std::memcpy(to, part.data.data() + token * bytes, static_cast<std::size_t>(bytes));
      to += bytes;
    }
  }
  return joined;
}

std::vector<std::int64_t> shard_counts(std::int64_t num_tokens, int num_shards) {
  if (num_tokens < 0) refuse("num_tokens", "0 or more", str(num_tokens));
  if (num_shards < 1) refuse("num_shards", "1 or more", str(num_shards));
  const std::int64_t size = num_tokens / num_shards + (num_tokens % num_shards > 0 ? 1 : 0);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_shards));
  std::int64_t left = num_tokens;
  for (std::int64_t& count : counts) {
    count = std::min(size, left);
    left -= count;
  }
  return counts;
}

TensorView shard_of(const TensorView& rows, int num_shards, int shard) {
  if (rows.ndim < 1) refuse("rows", "a tensor of one dimension or more", rows.describe());
  if (shard < 0 || shard >= num_shards) {
    refuse("shard", str("0 to ", num_shards - 1), str(shard));
  }
  const std::vector<std::int64_t> counts = shard_counts(rows.shape[0], num_shards);
  const std::int64_t first =
      std::accumulate(counts.begin(), counts.begin() + shard, std::int64_t{0});
  TensorView part = rows;
  part.shape[0] = counts[static_cast<std::size_t>(shard)];
  if (part.data != nullptr) {
    part.data = static_cast<std::byte*>(rows.data) + first * rows.row_stride_bytes();
  }
  return part;
}

void join_shards(const std::vector<TensorView>& shards, const TensorView& out) {
  capture::check_host_tensor("out", out);
  if (out.ndim < 1 || !out.is_contiguous()) {
    refuse("out", "a contiguous tensor of one dimension or more", out.describe());
  }
  std::int64_t num_rows = 0;
  for (const TensorView& shard : shards) {
    capture::check_host_tensor("shards", shard);
    bool fits = shard.dtype == out.dtype && shard.ndim == out.ndim && shard.rows_are_contiguous();
    for (int i = 1; fits && i < out.ndim; ++i) {
      const auto dim = static_cast<std::size_t>(i);
      fits = shard.shape[dim] == out.shape[dim];
    }
    if (!fits) refuse("shards", "rows as those of out, " + out.describe(), shard.describe());
    if (shard.shape[0] > INT64_MAX - num_rows) {
      refuse("shards", "rows that memory can hold", shard.describe());
    }
    num_rows += shard.shape[0];
  }
  capture::check_padding("out", num_rows, static_cast<std::int64_t>(shards.size()), out.shape[0]);
  auto* to = static_cast<std::byte*>(out.data);
  std::int64_t left = out.shape[0];
  for (const TensorView& shard : shards) {
    const std::int64_t take = std::min(left, shard.shape[0]);
    capture::copy_dense(to, shard, take);
    if (take > 0) to += take * shard.row_bytes();
    left -= take;
  }
}

}  // namespace fanfold
