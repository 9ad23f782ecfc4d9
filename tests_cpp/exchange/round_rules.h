// SPDX-License-Identifier: Apache-2.0
#pragma once

// The transition table of one rank's round: which call is legal where. The protocol model explores
// exactly these orders, and the library is held to them call by call.

#include <cstdint>

namespace fanfold::testing {

enum class RoundStage : std::uint8_t {
  kFree,         // not begun, or ended by a combine
  kSent,         // dispatch_send
  kReceived,     // dispatch_recv
  kCombineSent,  // combine_send
  kKeepSent,     // combine_send with release=false
  kReleased,     // ended by release: peers may still hold its rows
};

enum class RoundCall : std::uint8_t {
  kDispatchSend,
  kDispatchRecv,
  kCombineSend,
  kCombineSendKeep,  // release=false: the round is received again after combine_recv
  kCombineRecv,
  kRelease,
};

/// For kDispatchSend `stage` is that of the slot's previous round, otherwise the stage of the round
/// itself. What is not allowed is InvalidState and changes nothing.
constexpr bool is_allowed(RoundStage stage, RoundCall call) {
  switch (call) {
    case RoundCall::kDispatchSend:
      return stage == RoundStage::kFree || stage == RoundStage::kReleased;
    case RoundCall::kDispatchRecv:
      return stage == RoundStage::kSent;
    case RoundCall::kCombineSend:
    case RoundCall::kCombineSendKeep:
      return stage == RoundStage::kReceived;
    case RoundCall::kCombineRecv:
      return stage == RoundStage::kCombineSent || stage == RoundStage::kKeepSent;
    case RoundCall::kRelease:
      return stage == RoundStage::kReceived;
  }
  return false;
}

/// The stage after a call that was allowed at `stage`.
constexpr RoundStage stage_after(RoundStage stage, RoundCall call) {
  switch (call) {
    case RoundCall::kDispatchSend:
      return RoundStage::kSent;
    case RoundCall::kDispatchRecv:
      return RoundStage::kReceived;
    case RoundCall::kCombineSend:
      return RoundStage::kCombineSent;
    case RoundCall::kCombineSendKeep:
      return RoundStage::kKeepSent;
    case RoundCall::kCombineRecv:
      return stage == RoundStage::kKeepSent ? RoundStage::kReceived : RoundStage::kFree;
    case RoundCall::kRelease:
      return RoundStage::kReleased;
  }
  return RoundStage::kFree;
}

constexpr const char* name_of(RoundCall call) {
  switch (call) {
    case RoundCall::kDispatchSend:
      return "dispatch_send";
    case RoundCall::kDispatchRecv:
      return "dispatch_recv";
    case RoundCall::kCombineSend:
      return "combine_send";
    case RoundCall::kCombineSendKeep:
      return "combine_send(release=false)";
    case RoundCall::kCombineRecv:
      return "combine_recv";
    case RoundCall::kRelease:
      return "release";
  }
  return "unknown";
}

}  // namespace fanfold::testing
