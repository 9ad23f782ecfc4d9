// SPDX-License-Identifier: Apache-2.0
#include "comm/group.h"

#include <sched.h>

#include <thread>

#include "base/format.h"

namespace fanfold::comm {
namespace {

/// Cores that this thread may run on.
int num_cores() noexcept {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // Fails on machines with more cores than the set holds; those have enough for any answer.
  if (::sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

Group::Group(int rank, int num_ranks)
    : rank_(rank),
      num_ranks_(num_ranks),
      may_spin_(num_ranks <= num_cores()),
      hosts_(static_cast<std::size_t>(num_ranks), 0) {}

std::string Group::why_no_memory() const {
  const std::string end = base::str("a '", kind(), "' transport connects them");
  for (int rank = 1; rank < num_ranks_; ++rank) {
    const int host = hosts_[static_cast<std::size_t>(rank)];
    if (host != 0)
      return base::str("rank 0 is on host 0, rank ", rank, " on host ", host, "; ", end);
  }
  if (why_apart_.empty()) {
    return base::str("all ", num_ranks_, " ranks are on one host, but ", end);
  }
  return base::str("all ", num_ranks_, " ranks are on one host, but ", why_apart_, "; ", end);
}

}  // namespace fanfold::comm
