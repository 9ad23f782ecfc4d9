// SPDX-License-Identifier: Apache-2.0
#pragma once

// Symmetric memory out of buffers that the caller brought.

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "comm/channel.h"
#include "comm/group.h"
#include "fanfold/allocator.h"
#include "memory/arena.h"
#include "memory/window_source.h"

namespace fanfold::memory {

/// Divides one buffer per rank, alike on all ranks. All ranks call `take` and `give_back` in the
/// same order with the same values.
class OwnBuffers {
 public:
  /// Collective: proves that all ranks mean the same memory. What fails on one rank fails on all.
  /// @throws InvalidArgument  as Allocator's constructor
  OwnBuffers(WindowSource& source, comm::Group& group, const std::vector<OwnBuffer>& buffers,
             base::Deadline deadline);

  /// Windows of at least `bytes` for the block `id`; nothing if there is no room.
  std::optional<comm::Windows> take(std::int64_t id, std::int64_t bytes);
  /// Nobody uses the windows of block `id` any more, on any rank.
  void give_back(std::int64_t id);
  const Arena& arena() const noexcept { return arena_; }

 private:
  struct Proof;
  Proof prepare(WindowSource& source, const std::vector<OwnBuffer>& buffers, int rank);
  std::int64_t first_unseen(WindowSource& source, const std::vector<Proof>& proofs) const;

  struct Part {
    std::int64_t offset;
    std::int64_t bytes;
  };
  std::vector<std::byte*> starts_;  // [R] aligned
  std::int64_t room_ = 0;
  Arena arena_{0};
  std::map<std::int64_t, Part> parts_;  // by id
};

/// Ids that every rank has in its list. Collective.
std::vector<std::int64_t> common_ids(comm::Channel& channel, const std::vector<std::int64_t>& own,
                                     base::Deadline deadline);

}  // namespace fanfold::memory
