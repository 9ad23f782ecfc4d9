// SPDX-License-Identifier: Apache-2.0
#pragma once

// An error of one rank on its way to the others, so that a collective call fails alike on all.

#include <cstddef>
#include <cstdint>
#include <string>

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

}  // namespace fanfold::comm
