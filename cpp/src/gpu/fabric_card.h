// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the ranks tell each other while they share GPU memory.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "fanfold/allocator.h"
#include "gpu/nvml.h"

namespace fanfold::gpu {

/// How one rank's part of a step went.
struct Verdict {
  std::string reason;  // empty: well
  int code = 0;        // the CUresult, where the driver failed

  bool is_good() const noexcept { return reason.empty(); }
};

/// What a rank needs and has, before anything is made.
struct Offer {
  std::uint64_t nonce;
  std::int64_t bytes;
  std::int64_t granularity;
  HandleKind kind;
  bool has_domain;
  NvlinkDomain domain;
};

/// Names the memory of one rank.
struct Ticket {
  std::uint64_t token;  // of the allocation: other groups and other allocations have others
  std::int64_t bytes;
  std::int32_t rank;
  HandleKind kind;
  std::array<std::byte, 64> handle;  // kFabric: the driver's; kSameProcess: the number
};

/// A verdict and, unless it is bad, a card, as bytes on their way.
std::string encode(const Verdict& verdict, const void* card, std::size_t bytes);
Verdict decode_verdict(const std::string& message);
/// Fills `card` from a message with a good verdict; false if it does not hold one.
bool decode_card(const std::string& message, void* card, std::size_t bytes);

}  // namespace fanfold::gpu
