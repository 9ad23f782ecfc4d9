// SPDX-License-Identifier: Apache-2.0
#pragma once

// NCCL's binary interface, as far as the library uses it: nothing needs its header or links it.
// A test compares this with the real header where that is installed.

#include <climits>
#include <cstddef>

// NOLINTBEGIN(readability-identifier-naming): NCCL's names
struct ncclComm;
struct ncclWindow_vidmem;

namespace fanfold::gpu::nccl {

using Comm = ncclComm*;
using Window = ncclWindow_vidmem*;
using Stream = void*;  // cudaStream_t

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,
};

enum DataType : int {
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0 };

struct UniqueId {
  char internal[128];  // NOLINT(modernize-avoid-c-arrays)
};

inline constexpr int kUndefined = INT_MIN;
inline constexpr int kShrinkAbort = 1;      // ends what runs on the old communicator first
inline constexpr int kWindowSymmetric = 1;  // the same offset on every rank
inline constexpr std::size_t kWindowAlignment = 4096;

/// ncclConfig_t as of 2.19. Later versions append members, and take a shorter one for what it is by
/// `size` and `version`.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21900;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

// name, version that brought it, signature
#define FANFOLD_NCCL_FUNCTIONS(X)                                                                 \
  X(ncclGetVersion, 20300, Result(int*))                                                          \
  X(ncclGetUniqueId, 20300, Result(UniqueId*))                                                    \
  X(ncclCommInitRankConfig, 21400, Result(Comm*, int, UniqueId, int, Config*))                    \
  X(ncclCommFinalize, 21400, Result(Comm))                                                        \
  X(ncclCommDestroy, 20300, Result(Comm))                                                         \
  X(ncclCommAbort, 20400, Result(Comm))                                                           \
  X(ncclGetErrorString, 20300, const char*(Result))                                               \
  X(ncclGetLastError, 21300, const char*(Comm))                                                   \
  X(ncclCommGetAsyncError, 20400, Result(Comm, Result*))                                          \
  X(ncclCommCount, 20300, Result(Comm, int*))                                                     \
  X(ncclCommCuDevice, 20300, Result(Comm, int*))                                                  \
  X(ncclCommUserRank, 20300, Result(Comm, int*))                                                  \
  X(ncclGroupStart, 20300, Result())                                                              \
  X(ncclGroupEnd, 20300, Result())                                                                \
  X(ncclAllReduce, 20300, Result(const void*, void*, std::size_t, DataType, RedOp, Comm, Stream)) \
  X(ncclReduceScatter, 20300,                                                                     \
    Result(const void*, void*, std::size_t, DataType, RedOp, Comm, Stream))                       \
  X(ncclAllGather, 20300, Result(const void*, void*, std::size_t, DataType, Comm, Stream))        \
  X(ncclBroadcast, 20300, Result(const void*, void*, std::size_t, DataType, int, Comm, Stream))   \
  X(ncclSend, 20700, Result(const void*, std::size_t, DataType, int, Comm, Stream))               \
  X(ncclRecv, 20700, Result(void*, std::size_t, DataType, int, Comm, Stream))                     \
  X(ncclMemAlloc, 21900, Result(void**, std::size_t))                                             \
  X(ncclMemFree, 21900, Result(void*))                                                            \
  X(ncclCommWindowRegister, 22700, Result(Comm, void*, std::size_t, Window*, int))                \
  X(ncclCommWindowDeregister, 22700, Result(Comm, Window))                                        \
  X(ncclCommShrink, 22700, Result(Comm, int*, int, Comm*, Config*, int))                          \
  X(ncclGetPeerDevicePointer, 22900, Result(Window, std::size_t, int, void**))

template <class Signature>
using Pointer = Signature*;

/// Pointers to NCCL's functions; null where the version found does not have one.
struct Functions {
#define FANFOLD_NCCL_FIELD(name, since, ...) Pointer<__VA_ARGS__> name = nullptr;
  FANFOLD_NCCL_FUNCTIONS(FANFOLD_NCCL_FIELD)
#undef FANFOLD_NCCL_FIELD
};

}  // namespace fanfold::gpu::nccl
// NOLINTEND(readability-identifier-naming)
