// SPDX-License-Identifier: Apache-2.0
#pragma once

// How communicators of NCCL are aborted: NCCL waits meanwhile for graphs that captured them.

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "gpu/device_context.h"
#include "gpu/nccl_library.h"

namespace fanfold::gpu {

/// What a call that makes a communicator was given. NCCL's threads may use it after the call, so it
/// is kept until the communicator out of which it was made has ended.
struct NcclMaking {
  nccl::Comm comm = nullptr;  // written by NCCL, perhaps from a thread of its own
  nccl::Config config;
  std::vector<int> lost;

  nccl::Comm made() const noexcept { return __atomic_load_n(&comm, __ATOMIC_ACQUIRE); }
};

/// The end of one communicator, in a thread of its own, which goes on when nobody waits any more.
class NcclEnding {
 public:
  /// Aborts `comm` (null: nothing), then what `late` tells of: calls that were given up.
  static std::shared_ptr<NcclEnding> begin(std::shared_ptr<const NcclLibrary> library,
                                           std::shared_ptr<const DeviceContext> context,
                                           nccl::Comm comm,
                                           std::vector<std::shared_ptr<NcclMaking>> late);

  /// False where it has not ended by then.
  bool wait(base::Deadline deadline);

 private:
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool is_over_ = false;
};

}  // namespace fanfold::gpu
