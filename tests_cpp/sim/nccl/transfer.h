// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a kernel of the double does: the operations of one group, as one rank's part.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "board.h"

namespace cudasim::nccl {

struct Operation {
  enum class Kind : std::uint8_t {
    kSend = 1,
    kRecv,
    kAllGather,
    kBroadcast,
    kAllReduce,
    kReduceScatter
  };
  Kind kind;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::size_t count = 0;  // elements of one block
  int type = 0;           // ncclDataType_t
  std::size_t type_bytes = 1;
  int peer = 0;  // or the root

  std::size_t bytes() const { return count * type_bytes; }
};

/// Collectives in their order, then all messages at the same time. Runs on a device, as its only
/// thread. Ends early where this rank is stopped; ranks that mean different things stop each other.
void run_operations(const Board& board, int rank, const std::vector<Operation>& operations);

}  // namespace cudasim::nccl
