// SPDX-License-Identifier: Apache-2.0
#pragma once

// Thread ranks whose communicators have collectives on simulated devices.

#include <functional>
#include <memory>

#include "comm/communicator_impl.h"
#include "gpu/test_collectives.h"
#include "support/spawn_ranks.h"

namespace fanfold::testing {

inline void spawn_collective_ranks(int num_ranks, int num_gpus,
                                   const std::function<void(Communicator&)>& body) {
  const std::shared_ptr<Mailboxes> mailboxes = make_mailboxes(num_ranks);
  spawn_ranks(num_ranks, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    communicator.impl()->set_device_collectives(
        make_test_collectives(mailboxes, rank, rank % num_gpus), communicator.impl()->timeout());
    body(communicator);
  });
}

}  // namespace fanfold::testing
