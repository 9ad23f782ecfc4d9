// SPDX-License-Identifier: Apache-2.0
#include "capture/record_errors.h"

#include "base/format.h"
#include "capture/check.h"
#include "fanfold/error.h"

namespace fanfold::capture {

using base::str;

void refuse_id(int layer, const WrongId& wrong, std::int64_t num_ids, bool is_physical) {
  refuse("topk_ids",
         str("ids below ", num_ids, is_physical ? " (physical experts)" : " (num_experts)",
             " or negative"),
         str(wrong.id, " at row ", wrong.row, ", column ", wrong.column, " of layer ", layer));
}

void refuse_other_ids(int layer, std::int64_t token, std::int64_t row, std::int64_t step_id) {
  throw InvalidState(str("record: expected token ", token, " of layer ", layer,
                         " with the ids that step ", step_id,
                         " recorded before (or overwrite), got other ids at row ", row));
}

void refuse_count(int layer, std::int64_t rank, std::int64_t expected, std::int64_t got) {
  refuse("layout.counts", str(expected, " rows of rank ", rank, ", as this rank has it"),
         str(got, " rows from there for layer ", layer));
}

void refuse_partly_written(int top_k, std::int64_t row, std::int64_t column) {
  refuse("sink", str("all ", top_k, " ids of a row, or none, to be written"),
         str("column ", column, " of row ", row, " not written"));
}

}  // namespace fanfold::capture
