// SPDX-License-Identifier: Apache-2.0
#include "fanfold/mpi.h"
#include "mpi/mpi_transport.h"

namespace fanfold {

Communicator from_mpi(MPI_Comm communicator, TransportUse use, std::chrono::nanoseconds timeout) {
  return Communicator::from_transport(mpi::MpiTransport::create(communicator, timeout), use,
                                      timeout);
}

}  // namespace fanfold
