// SPDX-License-Identifier: Apache-2.0
// The double of NCCL: collectives, messages and groups.
#include <atomic>
#include <map>

#include "comm.h"
#include "cudasim/operations.h"

namespace cudasim::nccl {
namespace {

std::atomic<int> launch_looks{0};

struct Group {
  int depth = 0;
  std::vector<Launch> launches;
  ncclResult_t error = ncclSuccess;
};
thread_local Group group;

std::size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
  }
  return 0;
}

/// Kernels of one communicator run one after the other, whatever their streams.
ncclResult_t order_after_last(ncclComm& comm, cudaStream_t stream, bool is_capturing) {
  if (is_capturing || comm.last_launch == nullptr || comm.last_stream == stream) return ncclSuccess;
  return cudaStreamWaitEvent(stream, comm.last_launch, 0) == cudaSuccess ? ncclSuccess
                                                                         : ncclUnhandledCudaError;
}

ncclResult_t remember_launch(ncclComm& comm, cudaStream_t stream, bool is_capturing) {
  if (is_capturing) return ncclSuccess;
  comm.last_stream = stream;
  if (comm.last_launch == nullptr &&
      cudaEventCreateWithFlags(&comm.last_launch, cudaEventDisableTiming) != cudaSuccess) {
    return ncclUnhandledCudaError;
  }
  return cudaEventRecord(comm.last_launch, stream) == cudaSuccess ? ncclSuccess
                                                                  : ncclUnhandledCudaError;
}

ncclResult_t launch_now(ncclComm& comm, const std::vector<Operation>& operations,
                        cudaStream_t stream) {
  const OnDevice current(comm.device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    return refuse(&comm, ncclUnhandledCudaError, "double: cudaStreamIsCapturing failed");
  }
  const bool is_capturing = status != cudaStreamCaptureStatusNone;
  if (const ncclResult_t result = order_after_last(comm, stream, is_capturing)) return result;
  KernelLaunch launch;
  launch.name = "nccl";
  launch.stream = stream;
  const std::shared_ptr<int> captured = is_capturing ? comm.graphs : nullptr;
  const auto body = [board = comm.board, rank = comm.rank, operations, captured] {
    run_operations(*board, rank, operations);
  };
  const cudaError_t error = enqueue_kernel(launch, body);
  if (error != cudaSuccess) {
    return refuse(&comm, ncclUnhandledCudaError,
                  std::string("double: the launch failed: ") + cudaGetErrorString(error));
  }
  return remember_launch(comm, stream, is_capturing);
}

ncclResult_t launch(ncclComm& comm, std::vector<Operation> operations, cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> lock(comm.mutex);
  if (const ncclResult_t result = failure_of(comm)) return result;
  if (comm.pending != nullptr || comm.board == nullptr) {
    return refuse(&comm, ncclInvalidUsage, "double: a call is still in progress");
  }
  int looks = comm.is_blocking ? 0 : launch_looks.load();
  return begin(comm, [&comm, looks, operations = std::move(operations), stream]() mutable {
    return looks-- > 0 ? ncclInProgress : launch_now(comm, operations, stream);
  });
}

ncclResult_t end_group() {
  const std::vector<Launch> launches = std::exchange(group.launches, {});
  ncclResult_t result = std::exchange(group.error, ncclSuccess);
  if (result != ncclSuccess) return result;
  std::map<std::pair<ncclComm*, cudaStream_t>, std::vector<Operation>> by_comm;
  for (const Launch& one : launches) by_comm[{one.comm, one.stream}].push_back(one.operation);
  for (auto& [key, operations] : by_comm) {
    const ncclResult_t one = launch(*key.first, std::move(operations), key.second);
    if (result == ncclSuccess || result == ncclInProgress) {
      result = one == ncclSuccess ? result : one;
    }
  }
  return result;
}

ncclResult_t add(ncclComm_t comm, ncclDataType_t type, Operation operation, cudaStream_t stream) {
  ncclResult_t result = ncclSuccess;
  operation.type = type;
  operation.type_bytes = bytes_of(type);
  if (!is_live(comm)) {
    result = ncclInvalidArgument;
  } else if (operation.type_bytes == 0 || operation.peer < 0 || operation.peer >= comm->num_ranks) {
    result = refuse(comm, ncclInvalidArgument, "double: invalid type, peer or root");
  }
  if (result != ncclSuccess) {
    if (group.depth > 0) group.error = result;
    return result;
  }
  group.launches.push_back({comm, operation, stream});
  return group.depth > 0 ? ncclSuccess : end_group();
}

const std::byte* as_bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* as_bytes(void* data) { return static_cast<std::byte*>(data); }

}  // namespace
}  // namespace cudasim::nccl

// NOLINTBEGIN(readability-identifier-naming): NCCL's names
using namespace cudasim::nccl;
using Kind = cudasim::nccl::Operation::Kind;

extern "C" {

void ncclDoubleSetLaunchLooks(int looks) { launch_looks = looks; }

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return refuse(nullptr, ncclInvalidUsage, "double: no group is open");
  return --group.depth > 0 ? ncclSuccess : end_group();
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, type, {Kind::kAllReduce, as_bytes(send), as_bytes(recv), count}, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, type, {Kind::kReduceScatter, as_bytes(send), as_bytes(recv), count}, stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, type, {Kind::kAllGather, as_bytes(send), as_bytes(recv), count}, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, type, {Kind::kBroadcast, as_bytes(send), as_bytes(recv), count, 0, 1, root},
             stream);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add(comm, type, {Kind::kSend, as_bytes(send), nullptr, count, 0, 1, peer}, stream);
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(comm, type, {Kind::kRecv, nullptr, as_bytes(recv), count, 0, 1, peer}, stream);
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
