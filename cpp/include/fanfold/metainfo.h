// SPDX-License-Identifier: Apache-2.0
#pragma once

// The table of byte offsets into a workspace.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fanfold/export.h"

namespace fanfold {

/// Names and values of an AllToAll's offset table. Names are stable across versions of one minor
/// release; offsets count bytes from the start of a rank's window, `local_*` ones from the start of
/// this rank's private memory.
///
/// Names: num_ranks, num_experts, max_local_experts, top_k, max_tokens_per_rank, max_in_flight,
/// dispatch_row_bytes, combine_row_bytes, row_guard_bytes, control_offset, flags_offset,
/// flags_stride (of one in-flight slot), slot_offset, slot_stride; from the start of a slot's
/// flags: dispatch_flags_offset, combine_flags_offset, ack_flags_offset, count_flags_offset; from
/// the start of a slot: source_token_offset, topk_ids_offset, topk_weights_offset, payload_offset,
/// payload_bytes, combine_offset, combine_bytes; the private side: local_slot_offset,
/// local_slot_stride, and from the start of a private slot local_payload_offset,
/// local_payload_bytes, local_combine_offset, local_combine_bytes; symmetric_bytes, local_bytes,
/// workspace_bytes (the sum of both and, for high_throughput, of the blocks that its rows lie in,
/// as they are at creation).
class FANFOLD_EXPORT Metainfo {
 public:
  using Entry = std::pair<std::string, std::int64_t>;
  explicit Metainfo(std::vector<Entry> entries);
  const std::vector<Entry>& entries() const noexcept { return entries_; }
  /// @throws InvalidArgument  no such name.
  std::int64_t at(std::string_view name) const;

 private:
  std::vector<Entry> entries_;
};

}  // namespace fanfold
