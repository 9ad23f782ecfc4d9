// SPDX-License-Identifier: Apache-2.0
#pragma once

// The lists of ranks that a split is made from.

#include <vector>

namespace fanfold::comm {

/// Position of `rank` in `members`, -1 if it is not in.
int position_in(const std::vector<int>& members, int rank) noexcept;

/// Checks the list that one rank passes to `Group::split`.
/// @throws InvalidArgument  it is not empty and lacks `rank`, has a rank twice or out of range.
void check_members(const std::vector<int>& members, int rank, int num_ranks);

/// Checks the lists of all ranks against each other; the same answer wherever it is asked.
/// @throws InvalidArgument  a rank is in another's list but passed a different list.
void check_members_agree(const std::vector<std::vector<int>>& members_by_rank);

}  // namespace fanfold::comm
