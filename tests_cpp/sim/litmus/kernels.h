// SPDX-License-Identifier: Apache-2.0
#pragma once

// Kernels of the litmus tests: each does one thing that is right, or wrong in one way. These
// functions enqueue one launch; the kernels are in the .cu file that the comment names.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fanfold::gpu::litmus {

/// What all kernels are given. Each part has a page of its own.
struct Words {
  int* data = nullptr;            // payload
  std::uint32_t* flag = nullptr;  // zero at the start
  int* out = nullptr;             // results, zero at the start
  int mode = 0;                   // which way the kernel goes
};

// message_passing.cu: `who` 0 writes and announces, 1 waits and reads.

/// How a flag is written and read.
enum Passing : int {
  kReleaseAcquire,   // st.release.sys, ld.acquire.sys
  kFences,           // fence.sys and relaxed store; relaxed load and fence.sys
  kRelaxed,          // neither
  kGpuFence,         // fence.gpu and relaxed store; relaxed load and fence.sys
  kGpuRelease,       // st.release.gpu, ld.acquire.sys
  kReleaseRelaxed,   // st.release.sys, relaxed load without a fence
  kAtomics,          // atom.add.acq_rel.sys on both sides
  kCompareExchange,  // atom.cas.acq_rel.sys on both sides
  kPlainStore,       // an ordinary store of the flag
  kWide,             // st.release.sys and ld.acquire.sys of 8 bytes
  kGpuScopeBoth,     // st.release.gpu, ld.acquire.gpu
  kGpuAcquire,       // st.release.sys, ld.acquire.gpu
};
cudaError_t message_passing(const Words& words, int who, cudaStream_t stream);

/// How 64 writers hand over to the one that releases.
enum Gathering : int { kBlockBarrier, kWarpBarrier, kNoBarrier, kNamedBarrier };
cudaError_t many_writers(const Words& words, int who, cudaStream_t stream);

/// Blocks that write and count themselves; the last one reads all. kAcqRelCounter or
/// kRelaxedCounter.
enum Counting : int { kAcqRelCounter, kRelaxedCounter, kFencedCounter };
cudaError_t last_block_reads(const Words& words, int num_blocks, cudaStream_t stream);

/// 0 tells 1, which tells 2, which reads what 0 wrote. mode 1: the one in the middle is relaxed.
cudaError_t chain(const Words& words, int who, cudaStream_t stream);
/// Hundreds of relaxed polls that see an older release, then the one that counts, then a fence.
cudaError_t long_poll(const Words& words, int who, cudaStream_t stream);
/// Two flags written in order by relaxed stores; out[0] = 99 if they were seen in the other order.
cudaError_t two_flags(const Words& words, int who, cudaStream_t stream);
/// Writes data[0..31]; reads it into out[0..31].
cudaError_t put(const Words& words, cudaStream_t stream);
cudaError_t get(const Words& words, cudaStream_t stream);
/// A relaxed flag; mode 1: after a write of data[100].
cudaError_t announce(const Words& words, cudaStream_t stream);
/// Waits for the flag, reads data[0]; mode 1: data[100] too.
cudaError_t consume(const Words& words, cudaStream_t stream);

// block.cu: what happens inside of one block, of 32 threads if nothing else is said.

/// How lanes exchange through shared memory.
enum Exchange : int { kSyncWarp, kShuffleOnly, kNothing };
cudaError_t warp_exchange(const Words& words, cudaStream_t stream);

enum Access : int {
  kInside,
  kSharedPastEnd,
  kDynamicPastEnd,
  kGlobalPastEnd,
  kMisalignedVector,
  kWildAddress,
  kMisalignedWord,
};
cudaError_t access(const Words& words, cudaStream_t stream);
/// One thread stores to data[index].
cudaError_t store_at(const Words& words, int index, cudaStream_t stream);
/// One thread loads data[index].
cudaError_t load_at(const Words& words, int index, cudaStream_t stream);

/// Two producer warps, one consumer warp and a named barrier (96 threads).
enum Named : int { kRight, kWrongCount, kMissingArrive, kOddCount };
cudaError_t named_barrier(const Words& words, cudaStream_t stream);

enum Barriers : int { kSamePlace, kTwoPlaces, kLeaveBefore };
/// 64 threads meet at __syncthreads, or should.
cudaError_t block_barrier(const Words& words, cudaStream_t stream);

enum Lanes : int { kFullMask, kHalfMask, kNotInMask, kDivergent, kLeftLane };
cudaError_t shuffle(const Words& words, cudaStream_t stream);

// progress.cu: who waits for whom.

/// All blocks wait until all have come: num_blocks must be resident together.
cudaError_t grid_barrier(const Words& words, int num_blocks, cudaStream_t stream);
/// One block waits for a flag that nobody sets; mode 1: it gives up after 0.3 virtual seconds, and
/// then writes out[0] = 1.
cudaError_t wait_for_ever(const Words& words, cudaStream_t stream);
/// The first block that runs writes its number to out[0].
cudaError_t first_block(const Words& words, int num_blocks, cudaStream_t stream);
/// 32 blocks of one thread add one to out[0]: mode 0 by a load and a store, mode 1 atomically.
cudaError_t add_one(const Words& words, cudaStream_t stream);

// overlap.cu: programmatic dependent launch.

enum Dependent : int {
  kReadAfterWait,
  kReadBeforeWait,
  kNeverWait,
};
/// Writes data[0..31], letting dependents start before (mode 1) or after that.
cudaError_t primary(const Words& words, cudaStream_t stream);
cudaError_t dependent(const Words& words, bool is_programmatic, cudaStream_t stream);

}  // namespace fanfold::gpu::litmus
