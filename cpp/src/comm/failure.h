// SPDX-License-Identifier: Apache-2.0
#pragma once

// An error of one rank on its way to the others, so that a collective call fails alike on all.

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"

namespace fanfold::comm {

/// One of the library's errors as plain data.
struct Failure {
  enum class Kind : std::uint8_t {
    kInvalidArgument,
    kInvalidState,
    kUnsupported,
    kSystemFailure,
    kCudaFailure,
    kOutOfMemory,
    kPeerTimeout,
    kPeerAborted,
    kPeerLost,
  };

  Kind kind = Kind::kInvalidState;
  int code = 0;  // errno, CUDA's code or rank, by kind
  std::string message;

  /// The exception being handled, as the peers of `rank` are to see it. Call in a catch block.
  static Failure current(int rank);
  /// Throws it.
  [[noreturn]] void raise() const;

  std::string encode() const;
  static Failure decode(const std::string& bytes);
};

// Why a meeting of all ranks fails; `call` names it.
Failure peer_is_gone(const std::string& call, int rank, const std::string& reason);
Failure peer_is_late(const std::string& call, int rank, base::Deadline deadline);
/// `rank` timed out on somebody.
Failure peer_gave_up(const std::string& call, int rank);
/// Rank 0 made call `first`, `rank` made `other`.
Failure calls_differ(const std::string& first, int rank, const std::string& other);

}  // namespace fanfold::comm
