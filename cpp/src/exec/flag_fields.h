// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a flag line says, and how it is packed into eight words: the same on the CPU and in kernels.

#include <cstdint>

namespace fanfold::exec {

/// What the sender of a flag is doing.
enum class CallKind : std::uint16_t {
  kNone,
  kDispatch,        // new routing
  kDispatchRouted,  // payloads along an earlier routing
  kCombine,         // ends the round
  kCombineKeep,     // the round stays open
  kRelease,         // an empty combine
  kAck,             // has pulled the rows of a kCombineKeep
};

/// Contents of a line. All but `epoch`, `sent_ns` and the two counts must be equal on both sides.
struct FlagFields {
  std::uint64_t epoch = 0;
  std::uint32_t generation = 0;
  CallKind kind = CallKind::kNone;
  std::uint16_t member = 0;  // of the AllToAlls that share a workspace, in order of creation
  std::uint32_t round_max_tokens = 0;   // m
  std::uint32_t num_tokens = 0;         // T of the sender
  std::uint32_t num_rows = 0;           // rows for the reader; of a combine: how they come home
  std::uint32_t num_payloads = 0;       // or the hidden size of a combine
  std::uint64_t digest = 0;             // of the payload set; 0 for a combine
  std::uint32_t placement_version = 0;  // of the sender's placement
  std::uint32_t mask_digest = 0;        // of the sender's active mask
  std::uint64_t routing = 0;            // identity of the routing that is re-used
  std::int64_t sent_ns = 0;             // when it was published; not compared
};

constexpr int kFlagWords = 8;

constexpr std::uint64_t pair(std::uint32_t low, std::uint32_t high) noexcept {
  return low | (std::uint64_t{high} << 32);
}
constexpr std::uint32_t low(std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(word);
}
constexpr std::uint32_t high(std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(word >> 32);
}

/// Word `index` of the line; word 0, the epoch, is stored last.
constexpr std::uint64_t flag_word(const FlagFields& fields, int index) noexcept {
  switch (index) {
    case 0:
      return fields.epoch;
    case 1:
      return pair(fields.generation,
                  static_cast<std::uint32_t>(fields.kind) | (std::uint32_t{fields.member} << 16));
    case 2:
      return pair(fields.round_max_tokens, fields.num_tokens);
    case 3:
      return pair(fields.num_rows, fields.num_payloads);
    case 4:
      return fields.digest;
    case 5:
      return pair(fields.placement_version, fields.mask_digest);
    case 6:
      return fields.routing;
    default:
      return static_cast<std::uint64_t>(fields.sent_ns);
  }
}

/// What eight words say.
constexpr FlagFields flag_fields(const std::uint64_t* words) noexcept {
  FlagFields fields;
  fields.epoch = words[0];
  fields.generation = low(words[1]);
  fields.kind = static_cast<CallKind>(high(words[1]) & 0xffffU);
  fields.member = static_cast<std::uint16_t>(high(words[1]) >> 16);
  fields.round_max_tokens = low(words[2]);
  fields.num_tokens = high(words[2]);
  fields.num_rows = low(words[3]);
  fields.num_payloads = high(words[3]);
  fields.digest = words[4];
  fields.placement_version = low(words[5]);
  fields.mask_digest = high(words[5]);
  fields.routing = words[6];
  fields.sent_ns = static_cast<std::int64_t>(words[7]);
  return fields;
}

}  // namespace fanfold::exec
