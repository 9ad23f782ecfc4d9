// SPDX-License-Identifier: Apache-2.0
#include "comm/failure.h"

#include <cstring>
#include <exception>
#include <new>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr std::size_t kHeadBytes = 1 + sizeof(std::int32_t);

}  // namespace

Failure Failure::current(int rank) {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    return {Kind::kInvalidArgument, 0, error.what()};
  } catch (const Unsupported& error) {
    return {Kind::kUnsupported, 0, error.what()};
  } catch (const SystemFailure& error) {
    return {Kind::kSystemFailure, error.code(), base::str("rank ", rank, ": ", error.what())};
  } catch (const CudaFailure& error) {
    return {Kind::kCudaFailure, error.code(), base::str("rank ", rank, ": ", error.what())};
  } catch (const PeerTimeout& error) {
    return {Kind::kPeerTimeout, error.rank(), error.what()};
  } catch (const PeerAborted& error) {
    return {Kind::kPeerAborted, error.rank(), error.what()};
  } catch (const PeerLost& error) {
    return {Kind::kPeerLost, error.rank(), error.what()};
  } catch (const OutOfMemory& error) {
    return {Kind::kOutOfMemory, 0, base::str("rank ", rank, ": ", error.what())};
  } catch (const std::bad_alloc&) {
    return {Kind::kOutOfMemory, 0, base::str("rank ", rank, " is out of memory")};
  } catch (const std::exception& error) {
    return {Kind::kInvalidState, 0, base::str("rank ", rank, ": ", error.what())};
  }
}

void Failure::raise() const {
  switch (kind) {
    case Kind::kInvalidArgument:
      throw InvalidArgument(message);
    case Kind::kInvalidState:
      throw InvalidState(message);
    case Kind::kUnsupported:
      throw Unsupported(message);
    case Kind::kSystemFailure:
      throw SystemFailure(message, code);
    case Kind::kOutOfMemory:
      throw OutOfMemory(message);
    case Kind::kCudaFailure:
      throw CudaFailure(message, code);
    case Kind::kPeerTimeout:
      throw PeerTimeout(message, code);
    case Kind::kPeerAborted:
      throw PeerAborted(message, code, message);
    case Kind::kPeerLost:
      throw PeerLost(message, code);
  }
  throw InvalidState(message);
}

std::string Failure::encode() const {
  std::string bytes(kHeadBytes, '\0');
  const auto number = static_cast<std::int32_t>(code);
  bytes[0] = static_cast<char>(kind);
  std::memcpy(&bytes[1], &number, sizeof number);
  return bytes + message;
}

Failure Failure::decode(const std::string& bytes) {
  if (bytes.size() < kHeadBytes) return {Kind::kInvalidState, 0, "a peer sent a malformed error"};
  std::int32_t number = 0;
  std::memcpy(&number, &bytes[1], sizeof number);
  return {static_cast<Kind>(bytes[0]), number, bytes.substr(kHeadBytes)};
}

Failure peer_is_gone(const std::string& call, int rank, const std::string& reason) {
  return {Failure::Kind::kPeerLost, rank, base::str(call, ": rank ", rank, " is gone: ", reason)};
}

Failure peer_is_late(const std::string& call, int rank, base::Deadline deadline) {
  return {
      Failure::Kind::kPeerTimeout, rank,
      base::str(call, ": rank ", rank, " did not arrive within ",
                base::format_duration(deadline.timeout_ns()), "; every rank must make this call")};
}

Failure peer_gave_up(const std::string& call, int rank) {
  return {Failure::Kind::kPeerAborted, rank,
          base::str(call, ": rank ", rank, " gave up waiting for another rank")};
}

Failure calls_differ(const std::string& first, int rank, const std::string& other) {
  return {Failure::Kind::kInvalidArgument, 0,
          base::str("expected the same call on every rank, got '", first, "' on rank 0 and '",
                    other, "' on rank ", rank)};
}

}  // namespace fanfold::comm
