// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exceptions that the library throws. A message says what was wrong, what was expected and what
// was got; data such as a rank is a member, never parsed from the text.

#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "fanfold/export.h"

namespace fanfold {

/// Base of every exception of this library.
class FANFOLD_EXPORT Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
  Error(const Error&) noexcept;
  Error& operator=(const Error&) noexcept;
  ~Error() override;
};

/// The caller's value, shape, dtype or device does not fit. State: unchanged. From a receiving
/// call: the ranks' calls differ; the AllToAll is failed until `reset()`.
class FANFOLD_EXPORT InvalidArgument : public Error {
 public:
  explicit InvalidArgument(const std::string& message);
  InvalidArgument(const InvalidArgument&) noexcept;
  InvalidArgument& operator=(const InvalidArgument&) noexcept;
  ~InvalidArgument() override;
};

/// Wrong order of calls, or use after close, reset or fork. State: unchanged.
class FANFOLD_EXPORT InvalidState : public Error {
 public:
  explicit InvalidState(const std::string& message);
  InvalidState(const InvalidState&) noexcept;
  InvalidState& operator=(const InvalidState&) noexcept;
  ~InvalidState() override;
};

/// Built without it, or the machine or strategy lacks it. State: unchanged.
class FANFOLD_EXPORT Unsupported : public Error {
 public:
  explicit Unsupported(const std::string& message);
  Unsupported(const Unsupported&) noexcept;
  Unsupported& operator=(const Unsupported&) noexcept;
  ~Unsupported() override;
};

/// A call of the operating system failed. State: the object is unusable.
class FANFOLD_EXPORT SystemFailure : public Error {
 public:
  /// @param code  the errno of the failed call.
  SystemFailure(const std::string& message, int code);
  SystemFailure(const SystemFailure&) noexcept;
  SystemFailure& operator=(const SystemFailure&) noexcept;
  ~SystemFailure() override;
  int code() const noexcept { return code_; }

 private:
  int code_;
};

/// A call of the CUDA driver or runtime failed. State: the object is unusable.
class FANFOLD_EXPORT CudaFailure : public Error {
 public:
  /// @param code  the CUresult or cudaError_t of the failed call.
  CudaFailure(const std::string& message, int code);
  CudaFailure(const CudaFailure&) noexcept;
  CudaFailure& operator=(const CudaFailure&) noexcept;
  ~CudaFailure() override;
  int code() const noexcept { return code_; }

 private:
  int code_;
};

/// A std::bad_alloc that says which memory ran out. State: unchanged, on every rank.
class FANFOLD_EXPORT OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message);
  OutOfMemory(const OutOfMemory&) noexcept;
  OutOfMemory& operator=(const OutOfMemory&) noexcept;
  ~OutOfMemory() override;
  const char* what() const noexcept override;

 private:
  std::shared_ptr<const std::string> message_;  // shared: copies must not throw
};

/// More rows than the caller gave room for. State: unchanged, on every rank.
class FANFOLD_EXPORT CapacityExceeded : public Error {
 public:
  explicit CapacityExceeded(const std::string& message);
  CapacityExceeded(const CapacityExceeded&) noexcept;
  CapacityExceeded& operator=(const CapacityExceeded&) noexcept;
  ~CapacityExceeded() override;
};

/// Base of the errors that name a peer.
class FANFOLD_EXPORT PeerError : public Error {
 public:
  PeerError(const std::string& message, int rank);
  PeerError(const PeerError&) noexcept;
  PeerError& operator=(const PeerError&) noexcept;
  ~PeerError() override;
  /// The rank concerned, in the communicator of the call that threw.
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// A rank is late. State: the AllToAll is failed until `reset()`; a Communicator likewise.
class FANFOLD_EXPORT PeerTimeout : public PeerError {
 public:
  PeerTimeout(const std::string& message, int rank);
  PeerTimeout(const PeerTimeout&) noexcept;
  PeerTimeout& operator=(const PeerTimeout&) noexcept;
  ~PeerTimeout() override;
};

/// A rank called `abort` or `reset`. State: as after PeerTimeout.
class FANFOLD_EXPORT PeerAborted : public PeerError {
 public:
  PeerAborted(const std::string& message, int rank, std::string reason);
  PeerAborted(const PeerAborted&) noexcept;
  PeerAborted& operator=(const PeerAborted&) noexcept;
  ~PeerAborted() override;
  /// What the peer gave as its reason.
  const std::string& reason() const noexcept { return reason_; }

 private:
  std::string reason_;
};

/// A rank is gone: its process ended or it closed its communicator. State: the communicator and all
/// that was made from it are broken; close them.
class FANFOLD_EXPORT PeerLost : public PeerError {
 public:
  PeerLost(const std::string& message, int rank);
  PeerLost(const PeerLost&) noexcept;
  PeerLost& operator=(const PeerLost&) noexcept;
  ~PeerLost() override;
};

}  // namespace fanfold
