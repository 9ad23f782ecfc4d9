// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a communicator gets collectives on GPU memory: Communicator::from_nccl.

#include <chrono>
#include <optional>
#include <string>

#include "fanfold/export.h"

namespace fanfold {

/// NCCL is looked up at run time: the path given here or in the environment variable
/// FANFOLD_NCCL_LIBRARY, else a libnccl.so.2 that this process has loaded, else
/// `default_library`, else the system's. Version 2.19 or later.
///
/// NCCL ends a communicator only when the graphs that captured its calls are destroyed: destroy
/// them before `reset` or `close`, which else fail at their deadline and say so. `abort` ends what
/// runs at once, and leaves the rest to a thread.
struct FANFOLD_EXPORT NcclOptions {
  /// This rank's CUDA device.
  int device_index = 0;
  /// An ncclComm_t of the caller, with the ranks, their order and the device of this call; null: a
  /// new one is made. The caller keeps it: it must outlive the communicator, which neither
  /// finalizes, aborts nor destroys it, and nobody else may use it meanwhile in another order.
  /// `library`, if given, must be the one that the process has loaded. Where the handle blocks,
  /// NCCL's own first calls have no deadline; nor can what waits for a peer on it be ended but by
  /// its owner.
  void* handle = nullptr;
  /// NCCL's file; empty: as above.
  std::string library;
  std::string default_library;
  /// Also the default deadline of the communicator's calls. Absent: that of the bootstrap.
  std::optional<std::chrono::nanoseconds> timeout;
};

}  // namespace fanfold
