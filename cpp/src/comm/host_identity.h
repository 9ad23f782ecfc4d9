// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which ranks can meet in one machine's memory.

#include <string>
#include <vector>

namespace fanfold::comm {

/// Equal on two ranks if they are on one host: the machine's boot id and the network namespace, or
/// FANFOLD_HOST_ID where that is set. Containers of one machine have namespaces of their own. One
/// line of text.
/// @throws Unsupported      /proc does not tell.
/// @throws InvalidArgument  FANFOLD_HOST_ID has more than one line or 200 bytes.
std::string host_identity();

/// "rank 0 on host A and rank 1 on host B", and how to say otherwise.
std::string describe_hosts(int rank_a, const std::string& host_a, int rank_b,
                           const std::string& host_b);

/// By rank: numbers from 0 in the order in which the ranks first name them.
std::vector<int> number_hosts(const std::vector<std::string>& identities);

}  // namespace fanfold::comm
