// SPDX-License-Identifier: Apache-2.0
#include "fanfold/metainfo.h"

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold {

Metainfo::Metainfo(std::vector<Entry> entries) : entries_(std::move(entries)) {}

std::int64_t Metainfo::at(std::string_view name) const {
  for (const Entry& entry : entries_) {
    if (entry.first == name) return entry.second;
  }
  throw InvalidArgument(base::str("metainfo: expected a known name, got \"", name, '"'));
}

}  // namespace fanfold
