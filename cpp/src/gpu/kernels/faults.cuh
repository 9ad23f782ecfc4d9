// SPDX-License-Identifier: Apache-2.0
#pragma once

// Deliberate faults of the kernels, each of which the simulated device must report: they show that
// its checks see what they should. Only a build for the simulated device, with
// FANFOLD_SEEDED_FAULTS, has them; in all others `has` is false when it is compiled.

#include "gpu/device/device.cuh"

namespace fanfold::gpu {

/// What is wrong. tests_cpp/gpu/seeded_faults_test.cpp says what must be reported for each, and
/// capture_faults_test.cpp tells for those of a RoutingCapture.
enum class Fault : int {
  kNone,
  // flags.cuh
  kDoesNotWaitForKernel,  // words of the kernel before are read while it runs
  kNoBarrierBeforeCount,  // a block counts itself while its threads still write
  kRelaxedCount,          // blocks count themselves without release and acquire
  kNoFenceBeforeEpoch,    // the epoch is stored without a fence
  kFenceOfDevice,         // that fence does not reach other devices
  kRelaxedWait,           // the epoch is read without acquire
  kAcquireOfDevice,       // that acquire does not reach other devices
  kAnyEpoch,              // any epoch but zero is taken for the one that is waited for
  kSkipsLastPeer,         // the last peer is not waited for
  kEpochBeforeWords,      // the epoch is stored before the words of the line
  kStagesInOwnBlock,      // what collectives carry to a peer is staged in the block of this rank
  // tiles.cuh
  kNoBarrierBetweenTiles,  // a tile is begun while threads still work at the one before
  kTagWithoutEpoch,        // counts of earlier rounds are taken for this round's
  kLooksBackOnce,          // only the 32 tiles before are added
  kNoBarrierBeforeBallot,  // columns of rows are read while they are written
  kPlacesFromOne,          // a row's place is one too high
  kPlacesOfNextColumn,     // the rows before are those of another column
  // rows.cuh
  kDropsLastUnit,  // the last unit of a segment is not copied
  // dispatch_send.cu
  kNoBarrierBeforeKeys,  // the ranks of a tile's tokens are read while they are written
  kSendsToInactive,      // rows go to ranks that are masked out
  kRowsOfReader,         // rows lie where the reader's own would
  kCopyByToken,          // the copy of an expert that a token takes does not depend on its rank
  kEveryBlockAnnounces,  // flags are raised by a block that is not the last
  kCountersStay,         // the next kernel finds no tile left
  kTokensOfWord,         // a token count on the device is taken for more than the rows given
  // compact_rows.cu
  kKeepsBehindTokens,    // rows behind a rank's tokens are looked at
  kCompactCountersStay,  // the next kernel finds no tile left
  // arrange.cu
  kPadsLastRow,             // the ids of each source's last row are overwritten
  kNoBarrierBeforeRepeats,  // experts of rows are compared while they are written
  kWeightOfFirst,           // weights of repeats are not added
  kOffsetsInclusive,        // an expert's offset counts its own rows
  kArrangeCountersStay,     // the next kernel finds no tile left
  // describe_rows.cu
  kDescribesPadding,  // one row more than came is described
  // sanitize.cu
  kSanitizesLastRow,  // the last row with a token is taken for padding
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
  // begin_step.cu
  kSinksStay,      // sinks keep what was written before the step
  kErrorOutlives,  // the error of the step before is this one's
  // record_ids.cu
  kKeepsPhysical,           // ids are not turned into logical ones
  kLastExpertIsWrong,       // the last id that is right is refused
  kAnyErrorOfKernel,        // not the first wrong id of a record is named
  kRecordCountersStay,      // the blocks of the next kernel are counted on
  kNoBarrierBeforeLook,     // errors are looked for while threads still find them
  kRecordsOverOtherRows,    // a row of the step is replaced without being asked
  kPartlyWrittenIsWritten,  // rows of a sink are taken if one id was written
  // copy_snapshot.cu
  kSnapshotOfOldSteps,  // rows of earlier steps are taken for this one's
  kBitsOfFirstLane,     // 32 rows are said to be recorded if the first one was
  kSkipsLastCell,       // the last cell of a snapshot is not written
};

#if defined(FANFOLD_SEEDED_FAULTS)
/// Defined by the test.
bool has(Fault fault);
#else
__device__ constexpr bool has(Fault) { return false; }
#endif

}  // namespace fanfold::gpu
