// SPDX-License-Identifier: Apache-2.0
#pragma once

// Collectives between thread ranks on simulated devices: a kernel of one block for each launch.

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/device_collectives.h"

namespace fanfold::testing {

struct Mailboxes;

/// What `num_ranks` ranks share.
std::shared_ptr<Mailboxes> make_mailboxes(int num_ranks);

std::unique_ptr<comm::DeviceCollectives> make_test_collectives(std::shared_ptr<Mailboxes> mailboxes,
                                                               int rank, int device);

}  // namespace fanfold::testing
