// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a message of a TransportGroup looks like (its header says what each kind is for).

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "fanfold/transport.h"

namespace fanfold::comm {

enum class MessageKind : std::uint32_t {
  kStores,   // `count` Store records, then the bytes of those that have some, in order
  kOffer,    // a piece of what a rank brings to an exchange; `count` = 1: more pieces follow
  kVerdict,  // a piece of what it says once it has everyone's offer; likewise
  kLeft,     // nothing more
};

/// In front of every message. Numbers are in the byte order of the machine; `magic` tells if that
/// of the sender is another.
struct MessageHead {
  static constexpr std::uint64_t kMagic = 0x31666f6c646e6166;  // "fandlof1"

  std::uint64_t magic = kMagic;
  MessageKind kind{};
  std::uint32_t count = 0;
  std::uint64_t group = 0;
  std::uint64_t object = 0;  // kStores: the window; kOffer, kVerdict: number of the exchange
  std::int32_t owner = 0;    // kStores: whose window, as a rank of the group
  std::int32_t reserved = 0;

  /// As the bytes of one message part; `this` must outlive it.
  Transport::Part part() const noexcept {
    return {reinterpret_cast<const std::byte*>(this), sizeof *this};
  }
  /// False if `bytes` do not begin with one.
  bool read(const std::vector<std::byte>& bytes) noexcept {
    if (bytes.size() < sizeof *this) return false;
    std::memcpy(this, bytes.data(), sizeof *this);
    return magic == kMagic;
  }
};

/// One store into a window.
struct Store {
  enum class Kind : std::uint32_t {
    kBytes,    // plain bytes, as many as `value` says
    kSet64,    // an atomic word of 64 bits, release
    kRaise32,  // an atomic word of 32 bits, unless it is higher already, release
    kIfLower,  // none; the `num_guarded` stores that follow are only made if the lower 63 bits of
               // the word are below `value`
  };

  Kind kind;
  std::uint32_t num_guarded;
  std::uint64_t offset;
  std::uint64_t value;
};

static_assert(std::is_trivially_copyable_v<MessageHead> && sizeof(MessageHead) == 40);
static_assert(std::is_trivially_copyable_v<Store> && sizeof(Store) == 24);

}  // namespace fanfold::comm
