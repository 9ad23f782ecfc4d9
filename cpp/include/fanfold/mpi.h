// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks that MPI started. Part of the component `mpi`, target fanfold::mpi; the core needs no MPI.

#include <mpi.h>

#include <chrono>

#include "fanfold/communicator.h"
#include "fanfold/mpi_export.h"

namespace fanfold {

/// The ranks of an MPI communicator, with the same numbers, as `Communicator::from_transport`:
/// through shared memory where all are on one host (`kind()` is then "processes"), else, or with
/// kAlways, through MPI ("mpi"). Collective.
///
/// Works on a duplicate of `communicator`, whose errors are returned and become exceptions; the
/// caller's messages and error handlers are left alone. `close()` frees the duplicate. Where ranks
/// end otherwise, or MPI was finalized first, it stays until the process ends, so that no late
/// message can reach a communicator made later. Call `close()` before MPI_Finalize.
///
/// Threads: with MPI_THREAD_SINGLE or FUNNELED the main thread alone may call the communicator and
/// what is made from it; others get InvalidState. With SERIALIZED the caller sees to it that no two
/// threads are in MPI at once, be it through this library. Through shared memory all this ends when
/// the call returns: MPI only serves to meet.
///
/// @param timeout  the default deadline of the communicator's calls, and that of each of the two
///                 steps here: the duplication, and the meeting of the ranks.
/// @throws InvalidState     MPI is not initialised or is finalized, or its level is below
///                          SERIALIZED and this is not the thread that initialised it.
/// @throws InvalidArgument  `communicator` is MPI_COMM_NULL or an intercommunicator, or `timeout`
///                          is negative. Nothing was sent.
/// @throws Unsupported      kSharedMemory, and the ranks are on different hosts.
/// @throws PeerTimeout      a rank did not call it in time. While the communicator is being
///                          duplicated, rank() is -1, since MPI does not tell who is late, and
///                          `communicator` cannot be given again: MPI takes nothing back.
/// @throws PeerLost         a rank ended.
/// @throws SystemFailure    a call of MPI failed, in MPI's words; code() is EIO. Errors of the
///                          duplication itself go to the error handler of `communicator` first.
FANFOLD_MPI_EXPORT Communicator from_mpi(MPI_Comm communicator,
                                         TransportUse use = TransportUse::kAuto,
                                         std::chrono::nanoseconds timeout = kDefaultTimeout);

}  // namespace fanfold
