// SPDX-License-Identifier: Apache-2.0
#include "plan/shared_workspace.h"

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::plan {
namespace {

class Fit {
 public:
  explicit Fit(const std::string& owner_name) : owner_name_(owner_name) {}

  void check(const char* part, std::int64_t needed, std::int64_t available) const {
    if (needed <= available) return;
    throw InvalidArgument(base::str(
        "workspace_of: ", part, ": needed ", needed, " bytes, ", owner_name_, " has ", available,
        "; give the first of them the larger sizes (hidden, top_k, ",
        "max_tokens_per_rank, dispatch_row_bytes, combine_row_bytes, max_local_experts; in layout ",
        "flat_by_expert of high_throughput also num_experts)"));
  }

 private:
  const std::string& owner_name_;
};

std::int64_t mine_bytes(const Workspace& w) noexcept { return w.local_bytes - w.local_mine_offset; }

}  // namespace

Workspace share_workspace(const AllToAllConfig& config, const Workspace& own,
                          const Workspace& owner, const std::string& owner_name) {
  const Fit fit(owner_name);
  const StoreKind kind = store_kind(config.strategy);
  Workspace w = own;
  if (kind == StoreKind::kWindow) {
    fit.check("rows that arrive in a slot", own.store.payload_offset + own.store.payload_bytes,
              owner.store.combine_offset);
    w.store = walk_store(config, own, own.store.num_rows, 0, owner.store.combine_offset);
    fit.check("rows that go home from a slot", w.store.combine_bytes,
              owner.slot_stride - owner.store.combine_offset);
  } else if (kind == StoreKind::kPrivate) {
    fit.check("rows of a slot", own.store.bytes, owner.slot_stride);
    fit.check("what is sent", own.local_scratch_bytes, owner.local_scratch_bytes);
    fit.check("rows that come home", mine_bytes(own), mine_bytes(owner));
    w.local_scratch_offset = owner.local_scratch_offset;
    w.local_scratch_bytes = owner.local_scratch_bytes;
    w.local_mine_offset = owner.local_mine_offset;
  }
  fit.check("counts of a slot", own.counts_stride, owner.counts_stride);
  w.counts_stride = owner.counts_stride;
  fit.check("private memory of a slot", own.local_slot_stride, owner.local_slot_stride);
  w.slot_offset = owner.slot_offset;
  w.slot_stride = owner.slot_stride;
  w.symmetric_bytes = owner.symmetric_bytes;
  w.local_slot_offset = owner.local_slot_offset;
  w.local_slot_stride = owner.local_slot_stride;
  w.local_bytes = owner.local_bytes;
  return w;
}

}  // namespace fanfold::plan
