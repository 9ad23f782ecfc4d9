// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks an AllToAllConfig, fills in its defaults and encodes it for comparison.

#include <string>
#include <utility>
#include <vector>

#include "fanfold/all_to_all.h"

namespace fanfold::api {

/// A configuration whose optional fields are set, and why its strategy was picked.
struct ResolvedConfig {
  AllToAllConfig config;
  std::string choice;
};

/// `no_memory`: why the ranks reach no memory of each other; empty: they do.
/// @throws InvalidArgument, Unsupported
ResolvedConfig resolve(const AllToAllConfig& config, int num_ranks,
                       const std::string& no_memory = "");

/// Names and values.
using Fields = std::vector<std::pair<std::string, std::string>>;

/// What all ranks must share.
Fields encode(const AllToAllConfig& config);
Fields encode(const Placement& placement);

/// @throws InvalidArgument  naming the first field that differs and both values. Symmetric: every
///         rank compares all with rank 0 and throws the same.
void compare_encoded(const std::vector<std::string>& by_rank, const std::string& what);

/// One string from `encode`'s pairs.
std::string flatten(const Fields& fields);

}  // namespace fanfold::api
