// SPDX-License-Identifier: Apache-2.0
#pragma once

// The configuration of an AllToAll as Python gives it.

#include "convert.h"
#include "fanfold/all_to_all_config.h"

namespace fanfold::python {

/// "linear", "round_robin", a sequence with the rank of each expert, or an object with the
/// attributes `rank_of_expert` and `logical_of_expert`.
/// @throws InvalidArgument
Placement to_placement(nb::handle value);

/// `fields` by the names of AllToAllConfig and TestKnobs; absent ones keep the defaults of the
/// header. @throws InvalidArgument  naming the field
AllToAllConfig to_config(const nb::dict& fields);

/// The other way, by the names of the arguments of Python's AllToAll; test knobs left out.
nb::dict to_dict(const AllToAllConfig& config);

}  // namespace fanfold::python
