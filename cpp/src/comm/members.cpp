// SPDX-License-Identifier: Apache-2.0
#include "comm/members.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

std::string describe(const std::vector<int>& members) {
  std::string text = "[";
  for (std::size_t i = 0; i < members.size(); ++i) {
    text += base::str(i == 0 ? "" : ", ", members[i]);
  }
  return text + "]";
}

}  // namespace

int position_in(const std::vector<int>& members, int rank) noexcept {
  const auto place = std::find(members.begin(), members.end(), rank);
  return place == members.end() ? -1 : static_cast<int>(place - members.begin());
}

void check_members(const std::vector<int>& members, int rank, int num_ranks) {
  if (members.empty()) return;
  std::vector<int> sorted = members;
  std::sort(sorted.begin(), sorted.end());
  const bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  const bool in_range = sorted.front() >= 0 && sorted.back() < num_ranks;
  if (!distinct || !in_range || position_in(members, rank) < 0) {
    throw InvalidArgument(base::str("split: members: expected distinct ranks of 0 to ",
                                    num_ranks - 1, " with rank ", rank, " among them, got ",
                                    describe(members)));
  }
}

void check_members_agree(const std::vector<std::vector<int>>& members_by_rank) {
  for (std::size_t rank = 0; rank < members_by_rank.size(); ++rank) {
    for (const int member : members_by_rank[rank]) {
      const auto& theirs = members_by_rank[static_cast<std::size_t>(member)];
      if (theirs == members_by_rank[rank]) continue;
      throw InvalidArgument(base::str("split: members: rank ", rank, " gave ",
                                      describe(members_by_rank[rank]), ", rank ", member, " gave ",
                                      describe(theirs)));
    }
  }
}

}  // namespace fanfold::comm
