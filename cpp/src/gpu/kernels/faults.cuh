// SPDX-License-Identifier: Apache-2.0
#pragma once

// Deliberate faults of the kernels, each of which the simulated device must report: they show that
// its checks see what they should. Only a build for the simulated device, with
// FANFOLD_SEEDED_FAULTS, has them; in all others `has` is false when it is compiled.

#include "gpu/device/device.cuh"

namespace fanfold::gpu {

/// What is wrong. tests_cpp/gpu/seeded_faults_test.cpp says what must be reported for each.
enum class Fault : int {
  kNone,
  // flags.cuh
  kNoBarrierBeforeCount,  // a block counts itself while its threads still write
  kRelaxedCount,          // blocks count themselves without release and acquire
  kNoFenceBeforeEpoch,    // the epoch is stored without a fence
  kFenceOfDevice,         // that fence does not reach other devices
  kRelaxedWait,           // the epoch is read without acquire
  kAcquireOfDevice,       // that acquire does not reach other devices
  kAnyEpoch,              // any epoch but zero is taken for the one that is waited for
  kSkipsLastPeer,         // the last peer is not waited for
  kEpochBeforeWords,      // the epoch is stored before the words of the line
  // combine_send.cu
  kSendsOneRowLess,       // the last received row is left out
  kSendsToNextRow,        // rows go one row too far
  kAnnouncesFirst,        // the first block announces, whatever the others do
  kCombineCountersStay,   // the counters are not reset
  kCombineDoesNotWait,    // the peers' flags are not waited for
  kListNotReady,          // lanes read the list of rows without having met its writers
  kLaunchesWhileWaiting,  // the next kernel's blocks come while the last block waits
  // sum_rows.cu
  kSkipsLastTarget,    // the last row of a token is not added
  kAddsBackwards,      // rows are added in the order of falling ranks
  kPullsNextRow,       // rows are pulled from one row too far
  kRowsBehindStay,     // rows of `out` behind the tokens are not cleared
  kAcksFirst,          // the acknowledgement is raised before the rows are pulled
  kCombineNotCounted,  // a later combine of the round has the epoch of this one
  // numbers.cuh
  kScaleOfWarp,  // two blocks of a row share the larger scale
};

#if defined(FANFOLD_SEEDED_FAULTS)
/// Defined by the test.
bool has(Fault fault);
#else
__device__ constexpr bool has(Fault) { return false; }
#endif

}  // namespace fanfold::gpu
