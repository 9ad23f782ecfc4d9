// SPDX-License-Identifier: Apache-2.0
// The double of NCCL: communicators, their errors and their ends.
#include "comm.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>

namespace cudasim::nccl {
namespace {

constexpr unsigned kMagic = 0xcafebeef;
constexpr int kVersion = 23203;
constexpr int kUndefined = INT32_MIN;

std::atomic<int> version{kVersion};
constexpr int kLateLooks = 3;
std::atomic<int> late_looks{kLateLooks};

struct Registry {
  std::mutex mutex;  // guards the set
  std::set<ncclComm*> comms;
};

Registry& registry() {
  static Registry& all = *new Registry;
  return all;
}

thread_local std::string last_error_of_thread;  // of calls that have no communicator

ncclResult_t wait_for_peers(ncclComm& comm) {
  if (!comm.meeting->is_complete()) return ncclInProgress;
  comm.board = comm.meeting->board();
  return comm.board == nullptr ? ncclUnhandledCudaError : ncclSuccess;
}

void stop(ncclComm& comm, std::uint32_t how, ncclResult_t error, const char* text) {
  if (comm.board == nullptr) return;
  RankLine& line = comm.board->line(comm.rank);
  std::uint32_t expected = kRuns;
  const bool is_first = __atomic_compare_exchange_n(&line.stop, &expected, how, false,
                                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  if (!is_first) return;
  line.error = error;
  std::strncpy(line.text.data(), text, line.text.size() - 1);
  __atomic_store_n(&line.has_text, 1, __ATOMIC_RELEASE);
}

void forget(ncclComm* comm) {
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.comms.erase(comm);
  }
  forget_windows(*comm);
  if (comm->last_launch != nullptr) (void)cudaEventDestroy(comm->last_launch);
  delete comm;
}

ncclResult_t split_now(ncclComm& parent, std::uint32_t number, int color,
                       const ncclConfig_t* config, ncclComm_t* child) {
  const std::size_t place = number % 2;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int rank = 0; rank < parent.num_ranks; ++rank) {
    const Card& card = parent.meeting->card(rank);
    if (__atomic_load_n(&card.split_count[place], __ATOMIC_ACQUIRE) < number) return ncclInProgress;
    if (card.color[place] == color) members.emplace_back(card.key[place], rank);
  }
  *child = nullptr;
  if (color < 0) return ncclSuccess;
  std::sort(members.begin(), members.end());
  const auto own =
      std::find_if(members.begin(), members.end(),
                   [&](const std::pair<int, int>& member) { return member.second == parent.rank; });
  auto comm =
      make_comm(parent.meeting->name() + "-" + std::to_string(number) + "-" + std::to_string(color),
                static_cast<int>(members.size()), static_cast<int>(own - members.begin()), config);
  if (comm == nullptr) return ncclSystemError;
  comm->device = parent.device;
  const ncclResult_t result = publish(std::move(comm), child);
  return result == ncclInProgress ? ncclSuccess : result;  // the child's own affair
}

}  // namespace

bool is_live(const ncclComm* comm) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.comms.count(const_cast<ncclComm*>(comm)) != 0;
}

ncclResult_t refuse(ncclComm* comm, ncclResult_t result, std::string text) {
  (comm == nullptr ? last_error_of_thread : comm->last_error) = std::move(text);
  return result;
}

std::unique_ptr<ncclComm> make_comm(const std::string& name, int num_ranks, int rank,
                                    const ncclConfig_t* config) {
  auto comm = std::make_unique<ncclComm>();
  comm->meeting = Meeting::open(name, num_ranks);
  if (comm->meeting == nullptr) return nullptr;
  comm->rank = rank;
  comm->num_ranks = num_ranks;
  const int blocking = config == nullptr ? kUndefined : config->blocking;
  comm->is_blocking = blocking == kUndefined || blocking != 0;
  if (cudaGetDevice(&comm->device) != cudaSuccess) return nullptr;
  return comm;
}

ncclResult_t publish(std::unique_ptr<ncclComm> owned, ncclComm_t* out) {
  ncclComm* const comm = owned.release();
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.comms.insert(comm);
  }
  Card& card = comm->meeting->card(comm->rank);
  card.pid = ::getpid();
  card.device = comm->device;
  __atomic_store_n(&card.has_joined, 1, __ATOMIC_RELEASE);
  *out = comm;
  const std::lock_guard<std::recursive_mutex> lock(comm->mutex);
  return begin(*comm, [comm] { return wait_for_peers(*comm); });
}

ncclResult_t failure_of(ncclComm& comm) {
  if (comm.is_aborted) return ncclInvalidUsage;
  if (comm.board == nullptr) return ncclSuccess;
  const RankLine& line = comm.board->line(comm.rank);
  if (__atomic_load_n(&line.stop, __ATOMIC_ACQUIRE) != kFailed) return ncclSuccess;
  while (__atomic_load_n(&line.has_text, __ATOMIC_ACQUIRE) == 0) ::usleep(10);
  comm.last_error = line.text.data();
  return static_cast<ncclResult_t>(line.error);
}

ncclResult_t advance(ncclComm& comm) {
  if (const ncclResult_t result = failure_of(comm)) return result;
  if (comm.pending == nullptr) return ncclSuccess;
  const ncclResult_t result = comm.pending();
  if (result != ncclInProgress) comm.pending = nullptr;
  return result;
}

ncclResult_t begin(ncclComm& comm, std::function<ncclResult_t()> pending) {
  comm.pending = std::move(pending);
  ncclResult_t result = advance(comm);
  while (comm.is_blocking && result == ncclInProgress) {
    ::usleep(50);
    result = advance(comm);
  }
  return result;
}

ncclResult_t begin_late(ncclComm& comm, std::function<ncclResult_t()> pending) {
  if (comm.is_blocking) return begin(comm, std::move(pending));
  comm.pending = [looks = late_looks.load(), pending = std::move(pending)]() mutable {
    return looks-- > 0 ? ncclInProgress : pending();
  };
  return ncclSuccess;
}

}  // namespace cudasim::nccl

// NOLINTBEGIN(readability-identifier-naming): NCCL's names
using namespace cudasim::nccl;

extern "C" {

ncclResult_t ncclGetVersion(int* version_out) {
  if (version_out == nullptr) return ncclInvalidArgument;
  *version_out = version;
  return ncclSuccess;
}

void ncclDoubleSetVersion(int new_version) { version = new_version == 0 ? kVersion : new_version; }

void ncclDoubleSetLateLooks(int looks) { late_looks = looks < 0 ? kLateLooks : looks; }

void ncclDoubleFail(int rank, ncclResult_t error, const char* text) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (ncclComm* comm : all.comms) {
    if (comm->rank == rank) stop(*comm, kFailed, error, text);
  }
}

int ncclDoubleNumComms() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return static_cast<int>(all.comms.size());
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (id == nullptr) return ncclInvalidArgument;
  std::memset(id->internal, 0, sizeof id->internal);
  const std::string name = Meeting::new_name();
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (out == nullptr || num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks) {
    return refuse(nullptr, ncclInvalidArgument, "double: invalid rank or number of ranks");
  }
  if (config != nullptr && config->magic != kMagic) {
    return refuse(nullptr, ncclInvalidArgument, "double: ncclConfig_t is not initialised");
  }
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess) {
    return refuse(nullptr, ncclUnhandledCudaError, "double: no device");
  }
  auto comm = make_comm(std::string(id.internal, ::strnlen(id.internal, sizeof id.internal)),
                        num_ranks, rank, config);
  if (comm == nullptr) return refuse(nullptr, ncclSystemError, "double: no shared memory");
  return publish(std::move(comm), out);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child,
                           ncclConfig_t* config) {
  if (!is_live(comm) || child == nullptr) return ncclInvalidArgument;
  const std::lock_guard<std::recursive_mutex> lock(comm->mutex);
  if (const ncclResult_t result = failure_of(*comm)) return result;
  const std::uint32_t number = ++comm->num_splits;
  Card& card = comm->meeting->card(comm->rank);
  card.color[number % 2] = color;
  card.key[number % 2] = key;
  __atomic_store_n(&card.split_count[number % 2], number, __ATOMIC_RELEASE);
  const bool has_config = config != nullptr;
  const ncclConfig_t copy = has_config ? *config : ncclConfig_t{};
  return begin(*comm, [comm, number, color, child, has_config, copy] {
    return split_now(*comm, number, color, has_config ? &copy : nullptr, child);
  });
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int num_excluded, ncclComm_t* child,
                            ncclConfig_t* config, int) {
  if (!is_live(comm) || child == nullptr || excluded == nullptr || num_excluded < 1) {
    return ncclInvalidArgument;
  }
  const std::lock_guard<std::recursive_mutex> lock(comm->mutex);
  const std::set<int> lost(excluded, excluded + num_excluded);
  if (lost.count(comm->rank) != 0) {
    return refuse(comm, ncclInvalidArgument, "double: an excluded rank called ncclCommShrink");
  }
  const auto first = lost.begin();
  const int place =
      comm->rank - static_cast<int>(std::distance(first, lost.lower_bound(comm->rank)));
  std::string name = comm->meeting->name() + "-shrunk" + std::to_string(++comm->num_shrinks);
  for (const int rank : lost) name += "-" + std::to_string(rank);
  auto made = make_comm(name, comm->num_ranks - static_cast<int>(lost.size()), place, config);
  if (made == nullptr) return refuse(comm, ncclSystemError, "double: no shared memory");
  made->device = comm->device;
  *child = nullptr;
  if (failure_of(*comm) != ncclSuccess) return publish(std::move(made), child);
  const auto waiting = std::make_shared<std::unique_ptr<ncclComm>>(std::move(made));
  return begin_late(*comm, [waiting, child] {
    const ncclResult_t result = publish(std::move(*waiting), child);
    return result == ncclInProgress ? ncclSuccess : result;  // the child's own affair
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (!is_live(comm)) return ncclInvalidArgument;
  const std::lock_guard<std::recursive_mutex> lock(comm->mutex);
  if (const ncclResult_t result = failure_of(*comm)) return result;
  return begin(*comm, [comm] {
    if (has_graphs(*comm)) return ncclInProgress;
    if (comm->last_launch == nullptr) return ncclSuccess;
    const OnDevice current(comm->device);
    const cudaError_t error = cudaEventQuery(comm->last_launch);
    if (error == cudaErrorNotReady) return ncclInProgress;
    return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  if (!is_live(comm)) return ncclInvalidArgument;
  forget(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!is_live(comm)) return ncclInvalidArgument;
  stop(*comm, kAborted, ncclInvalidUsage, "double: aborted");
  while (has_graphs(*comm)) ::usleep(200);
  forget(comm);
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) {
  return is_live(comm) ? comm->last_error.c_str() : last_error_of_thread.c_str();
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!is_live(comm) || error == nullptr) return ncclInvalidArgument;
  const std::lock_guard<std::recursive_mutex> lock(comm->mutex);
  *error = advance(*comm);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  if (!is_live(comm) || count == nullptr) return ncclInvalidArgument;
  *count = comm->num_ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  if (!is_live(comm) || device == nullptr) return ncclInvalidArgument;
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  if (!is_live(comm) || rank == nullptr) return ncclInvalidArgument;
  *rank = comm->rank;
  return ncclSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
