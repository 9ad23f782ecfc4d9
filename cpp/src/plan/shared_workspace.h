// SPDX-License-Identifier: Apache-2.0
#pragma once

// The offset table of an AllToAll that uses the memory of another one.

#include <string>

#include "fanfold/all_to_all_config.h"
#include "plan/workspace.h"

namespace fanfold::plan {

/// `own` moved into the memory of `owner`, which `owner_name` names in messages: the slots of one
/// are those of the other, and each slot holds the rows of whichever began the round.
///
/// Why no rank can spoil another's rows in a window. A peer may push the rows of round n + F into
/// slot n mod F of this rank as soon as it has pulled its own partial sums of round n, while a
/// third rank still pulls others from there. So the bytes that rows arrive in must never be bytes
/// that partial sums are pulled from, whichever two configurations the rounds have: in every slot
/// all of them keep arriving rows below the owner's `combine_offset` and what goes home above it.
/// Private memory is only touched by its rank, which has left one round before it begins the next.
/// @throws InvalidArgument  a part does not fit; the message has the bytes needed and available.
Workspace share_workspace(const AllToAllConfig& config, const Workspace& own,
                          const Workspace& owner, const std::string& owner_name);

}  // namespace fanfold::plan
