// SPDX-License-Identifier: Apache-2.0
#include "gpu/fabric_card.h"

#include <algorithm>
#include <cstring>

namespace fanfold::gpu {
namespace {

// code, length of the reason, reason, card
constexpr std::size_t kHeadBytes = 2 * sizeof(std::int32_t);
constexpr std::size_t kMaxReasonBytes = 4096;

struct Head {
  std::int32_t code;
  std::int32_t reason_bytes;
};

bool read_head(const std::string& message, Head* head) {
  if (message.size() < kHeadBytes) return false;
  std::memcpy(head, message.data(), kHeadBytes);
  return head->reason_bytes >= 0 &&
         static_cast<std::size_t>(head->reason_bytes) <= message.size() - kHeadBytes;
}

}  // namespace

std::string encode(const Verdict& verdict, const void* card, std::size_t bytes) {
  const std::string reason = verdict.reason.substr(0, kMaxReasonBytes);
  const Head head{verdict.code, static_cast<std::int32_t>(reason.size())};
  std::string message(reinterpret_cast<const char*>(&head), kHeadBytes);
  message += reason;
  if (verdict.is_good()) message.append(static_cast<const char*>(card), bytes);
  return message;
}

Verdict decode_verdict(const std::string& message) {
  Head head{};
  if (!read_head(message, &head)) return {"a rank sent a malformed message", 0};
  return {message.substr(kHeadBytes, static_cast<std::size_t>(head.reason_bytes)), head.code};
}

bool decode_card(const std::string& message, void* card, std::size_t bytes) {
  Head head{};
  if (!read_head(message, &head) || head.reason_bytes != 0) return false;
  if (message.size() != kHeadBytes + bytes) return false;
  std::memcpy(card, message.data() + kHeadBytes, bytes);
  return true;
}

}  // namespace fanfold::gpu
