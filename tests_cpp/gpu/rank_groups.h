// SPDX-License-Identifier: Apache-2.0
#pragma once

// Groups of either kind whose ranks are threads of the test.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "comm/rendezvous.h"
#include "comm/thread_group.h"
#include "support/test_directory.h"

namespace fanfold::testing {

inline base::Deadline soon() { return base::Deadline(std::chrono::seconds(20)); }

enum class RankKind : std::uint8_t { kThreads, kProcesses };

/// Runs `body(group)` on a thread for each rank. A process group takes its ranks for processes, so
/// that handles travel through its sockets.
inline void on_each_rank(RankKind kind, int num_ranks,
                         const std::function<void(comm::Group&)>& body) {
  const TestDirectory directory;
  std::vector<std::unique_ptr<comm::Group>> ranks;
  if (kind == RankKind::kThreads) {
    ranks = comm::ThreadGroup::create(num_ranks);
  } else {
    ranks.resize(static_cast<std::size_t>(num_ranks));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<comm::Group>& group = ranks[static_cast<std::size_t>(rank)];
      if (group == nullptr) {
        group = comm::join_group({directory.path() + "/socket", rank, num_ranks}, soon());
      }
      body(*group);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace fanfold::testing
