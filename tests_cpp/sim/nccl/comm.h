// SPDX-License-Identifier: Apache-2.0
#pragma once

// A communicator of the double, and what its files share.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "board.h"
#include "nccl.h"
#include "transfer.h"

struct ncclComm {  // NOLINT(readability-identifier-naming): NCCL's
  std::shared_ptr<cudasim::nccl::Meeting> meeting;
  std::shared_ptr<const cudasim::nccl::Board> board;  // null until all have joined
  int rank = 0;
  int num_ranks = 1;
  int device = 0;
  bool is_blocking = true;
  bool is_aborted = false;
  std::uint32_t num_splits = 0;
  std::uint32_t num_shrinks = 0;
  std::uint32_t num_windows = 0;

  std::recursive_mutex mutex;             // guards what follows; not for `ncclCommAbort`
  std::function<ncclResult_t()> pending;  // null: nothing is under way
  std::string last_error;
  cudaStream_t last_stream = nullptr;
  cudaEvent_t last_launch = nullptr;
  std::shared_ptr<int> graphs = std::make_shared<int>();  // also held by each captured launch
};

namespace cudasim::nccl {

struct Launch {
  ncclComm* comm;
  Operation operation;
  cudaStream_t stream;
};

/// Ends the windows of a communicator that ends.
void forget_windows(const ncclComm& comm);
/// Is it a communicator that lives?
bool is_live(const ncclComm* comm);
/// A new one, not known to the world yet.
std::unique_ptr<ncclComm> make_comm(const std::string& name, int num_ranks, int rank,
                                    const ncclConfig_t* config);
/// Makes it known, and waits for its peers, or (where it does not block) lets them come.
ncclResult_t publish(std::unique_ptr<ncclComm> comm, ncclComm_t* out);
/// What has gone wrong with it.
ncclResult_t failure_of(ncclComm& comm);
/// Goes on with what is under way; ncclInProgress while it is.
ncclResult_t advance(ncclComm& comm);
/// Takes it under way. Returns as a call of the communicator does.
ncclResult_t begin(ncclComm& comm, std::function<ncclResult_t()> pending);
/// As `begin`, for calls that tell a communicator which does not block of success at once.
ncclResult_t begin_late(ncclComm& comm, std::function<ncclResult_t()> pending);
/// Graphs that captured a launch exist: neither finalize nor abort ends before they are gone.
inline bool has_graphs(const ncclComm& comm) { return comm.graphs.use_count() > 1; }
/// Remembers `text` for ncclGetLastError.
ncclResult_t refuse(ncclComm* comm, ncclResult_t result, std::string text);

/// Makes a device current while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    (void)cudaGetDevice(&before_);
    (void)cudaSetDevice(device);
  }
  ~OnDevice() { (void)cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace cudasim::nccl
