// SPDX-License-Identifier: Apache-2.0
#include "fanfold/error.h"

#include <utility>

// Everything is defined here, so that each class has one type_info across shared libraries.

namespace fanfold {

Error::Error(const std::string& message) : std::runtime_error(message) {}
Error::Error(const Error&) noexcept = default;
Error& Error::operator=(const Error&) noexcept = default;
Error::~Error() = default;

InvalidArgument::InvalidArgument(const std::string& message) : Error(message) {}
InvalidArgument::InvalidArgument(const InvalidArgument&) noexcept = default;
InvalidArgument& InvalidArgument::operator=(const InvalidArgument&) noexcept = default;
InvalidArgument::~InvalidArgument() = default;

InvalidState::InvalidState(const std::string& message) : Error(message) {}
InvalidState::InvalidState(const InvalidState&) noexcept = default;
InvalidState& InvalidState::operator=(const InvalidState&) noexcept = default;
InvalidState::~InvalidState() = default;

Unsupported::Unsupported(const std::string& message) : Error(message) {}
Unsupported::Unsupported(const Unsupported&) noexcept = default;
Unsupported& Unsupported::operator=(const Unsupported&) noexcept = default;
Unsupported::~Unsupported() = default;

SystemFailure::SystemFailure(const std::string& message, int code) : Error(message), code_(code) {}
SystemFailure::SystemFailure(const SystemFailure&) noexcept = default;
SystemFailure& SystemFailure::operator=(const SystemFailure&) noexcept = default;
SystemFailure::~SystemFailure() = default;

CudaFailure::CudaFailure(const std::string& message, int code) : Error(message), code_(code) {}
CudaFailure::CudaFailure(const CudaFailure&) noexcept = default;
CudaFailure& CudaFailure::operator=(const CudaFailure&) noexcept = default;
CudaFailure::~CudaFailure() = default;

OutOfMemory::OutOfMemory(std::string message)
    : message_(std::make_shared<const std::string>(std::move(message))) {}
OutOfMemory::OutOfMemory(const OutOfMemory&) noexcept = default;
OutOfMemory& OutOfMemory::operator=(const OutOfMemory&) noexcept = default;
OutOfMemory::~OutOfMemory() = default;
const char* OutOfMemory::what() const noexcept { return message_->c_str(); }

CapacityExceeded::CapacityExceeded(const std::string& message) : Error(message) {}
CapacityExceeded::CapacityExceeded(const CapacityExceeded&) noexcept = default;
CapacityExceeded& CapacityExceeded::operator=(const CapacityExceeded&) noexcept = default;
CapacityExceeded::~CapacityExceeded() = default;

PeerError::PeerError(const std::string& message, int rank) : Error(message), rank_(rank) {}
PeerError::PeerError(const PeerError&) noexcept = default;
PeerError& PeerError::operator=(const PeerError&) noexcept = default;
PeerError::~PeerError() = default;

PeerTimeout::PeerTimeout(const std::string& message, int rank) : PeerError(message, rank) {}
PeerTimeout::PeerTimeout(const PeerTimeout&) noexcept = default;
PeerTimeout& PeerTimeout::operator=(const PeerTimeout&) noexcept = default;
PeerTimeout::~PeerTimeout() = default;

PeerAborted::PeerAborted(const std::string& message, int rank, std::string reason)
    : PeerError(message, rank), reason_(std::move(reason)) {}
PeerAborted::PeerAborted(const PeerAborted&) noexcept = default;
PeerAborted& PeerAborted::operator=(const PeerAborted&) noexcept = default;
PeerAborted::~PeerAborted() = default;

PeerLost::PeerLost(const std::string& message, int rank) : PeerError(message, rank) {}
PeerLost::PeerLost(const PeerLost&) noexcept = default;
PeerLost& PeerLost::operator=(const PeerLost&) noexcept = default;
PeerLost::~PeerLost() = default;

}  // namespace fanfold
