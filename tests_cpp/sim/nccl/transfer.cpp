// SPDX-License-Identifier: Apache-2.0
// Compiled as a kernel: the simulated device sees its accesses.
#include "transfer.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "cudasim/operations.h"
#include "nccl.h"

namespace cudasim::nccl {
namespace {

std::uint32_t load(const std::uint32_t& word) {
  return static_cast<std::uint32_t>(op_load(&word, 4, Order::kAcquire, Scope::kSys, CUDASIM_HERE));
}
std::uint64_t load(const std::uint64_t& word) {
  return op_load(&word, 8, Order::kAcquire, Scope::kSys, CUDASIM_HERE);
}
void store(std::uint64_t& word, std::uint64_t value) {
  op_store(&word, value, 8, Order::kRelease, Scope::kSys, CUDASIM_HERE);
}
void store(std::uint32_t& word, std::uint32_t value) {
  op_store(&word, value, 4, Order::kRelease, Scope::kSys, CUDASIM_HERE);
}

bool is_aligned(const void* a, const void* b, std::size_t bytes) {
  return ((reinterpret_cast<std::uintptr_t>(a) | reinterpret_cast<std::uintptr_t>(b)) % bytes) == 0;
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::size_t done = 0;
  if (is_aligned(to, from, 16)) {
    for (; done + 16 <= bytes; done += 16) {
      alignas(16) std::array<std::byte, 16> part;
      op_vector(part.data(), const_cast<std::byte*>(from + done), 16, false, CUDASIM_HERE);
      op_vector(part.data(), to + done, 16, true, CUDASIM_HERE);
    }
  } else if (is_aligned(to, from, 8)) {
    for (; done + 8 <= bytes; done += 8) {
      *reinterpret_cast<std::uint64_t*>(to + done) =
          *reinterpret_cast<const std::uint64_t*>(from + done);
    }
  }
  for (; done < bytes; ++done) to[done] = from[done];
}

/// One message of this rank with a peer.
struct Message {
  int peer;
  std::byte* data;
  Head head;
  std::uint64_t done = 0;
  bool is_over = false;
};

/// What is left of a message, part by part; one of no bytes is one empty part.
std::size_t next_part(const Message& message) {
  return std::min<std::uint64_t>(kSlotBytes, message.head.total - message.done);
}

class Rank {
 public:
  Rank(const Board& board, int rank) : board_(board), rank_(rank) {
    for (int peer = 0; peer < board.num_ranks; ++peer) {
      sent_.push_back(load(board.channel(rank, peer).tail));
      taken_.push_back(load(board.channel(peer, rank).head));
    }
  }

  bool is_stopped() const { return load(board_.line(rank_).stop) != kRuns; }

  /// Moves all messages; those with one peer in their order. False if this rank was stopped.
  bool exchange(std::vector<Message>& sends, std::vector<Message>& recvs) {
    for (;;) {
      std::vector<bool> is_busy(static_cast<std::size_t>(board_.num_ranks), false);
      bool is_done = true;
      for (Message& message : sends) is_done &= advance(message, is_busy, &Rank::send_part);
      is_busy.assign(is_busy.size(), false);
      for (Message& message : recvs) is_done &= advance(message, is_busy, &Rank::take_part);
      if (is_done) return true;
      if (is_stopped()) return false;
    }
  }

 private:
  bool advance(Message& message, std::vector<bool>& is_busy, bool (Rank::*part)(Message&)) {
    if (message.is_over) return true;
    const auto peer = static_cast<std::size_t>(message.peer);
    if (is_busy[peer]) return false;
    while (!message.is_over && (this->*part)(message)) {
    }
    is_busy[peer] = !message.is_over;
    return message.is_over;
  }

  bool send_part(Message& message) {
    Channel& channel = board_.channel(rank_, message.peer);
    std::uint64_t& tail = sent_[static_cast<std::size_t>(message.peer)];
    if (tail - load(channel.head) >= kNumSlots) return false;
    Slot& slot = channel.slots[tail % kNumSlots];
    const std::size_t bytes = next_part(message);
    slot.head = message.head;
    copy_bytes(reinterpret_cast<std::byte*>(slot.data.data()), message.data + message.done, bytes);
    store(channel.tail, ++tail);
    end_part(message, bytes);
    return true;
  }

  bool take_part(Message& message) {
    Channel& channel = board_.channel(message.peer, rank_);
    std::uint64_t& head = taken_[static_cast<std::size_t>(message.peer)];
    if (load(channel.tail) == head) return false;
    Slot& slot = channel.slots[head % kNumSlots];
    if (!means_the_same(slot.head, message)) return false;
    const std::size_t bytes = next_part(message);
    copy_bytes(message.data + message.done, reinterpret_cast<std::byte*>(slot.data.data()), bytes);
    store(channel.head, ++head);
    end_part(message, bytes);
    return true;
  }

  static void end_part(Message& message, std::size_t bytes) {
    message.done += bytes;
    message.is_over = message.done == message.head.total;
  }

  bool means_the_same(const Head& theirs, const Message& message) const {
    const Head& ours = message.head;
    if (theirs.kind == ours.kind && theirs.total == ours.total && theirs.detail == ours.detail) {
      return true;
    }
    std::array<char, sizeof(RankLine::text)> text{};
    (void)std::snprintf(text.data(), text.size(),
                        "double: rank %d sent %llu bytes of kind %llu, rank %d expected %llu bytes "
                        "of kind %llu",
                        message.peer, static_cast<unsigned long long>(theirs.total),
                        static_cast<unsigned long long>(theirs.kind), rank_,
                        static_cast<unsigned long long>(ours.total),
                        static_cast<unsigned long long>(ours.kind));
    for (const int rank : {rank_, message.peer}) fail(board_.line(rank), text);
    return false;
  }

  static void fail(RankLine& line, const std::array<char, sizeof(RankLine::text)>& text) {
    const RmwArguments arguments{kFailed, kRuns, false};
    const std::uint64_t old = op_rmw(&line.stop, arguments, 4, Rmw::kCompareExchange,
                                     Order::kAcqRel, Scope::kSys, CUDASIM_HERE);
    if (old != kRuns) return;
    line.error = ncclInvalidUsage;
    line.text = text;
    store(line.has_text, 1);
  }

  const Board& board_;
  int rank_;
  std::vector<std::uint64_t> sent_;   // by peer
  std::vector<std::uint64_t> taken_;  // by peer
};

Head head_of(const Operation& operation) {
  const bool is_message =
      operation.kind == Operation::Kind::kSend || operation.kind == Operation::Kind::kRecv;
  if (is_message) return {1, operation.bytes(), 0};
  return {static_cast<std::uint64_t>(operation.kind), operation.bytes(),
          static_cast<std::uint64_t>(operation.peer) * 256 +
              static_cast<std::uint64_t>(operation.type)};
}

std::byte* sendable(const std::byte* data) { return const_cast<std::byte*>(data); }

void copy_own(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to != from) copy_bytes(to, from, bytes);
}

// --- Sums -----------------------------------------------------------------------------------

template <class T>
void add_as(std::byte* sum, const std::byte* part, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    T a;
    T b;
    std::memcpy(&a, sum + i * sizeof(T), sizeof(T));
    std::memcpy(&b, part + i * sizeof(T), sizeof(T));
    const T c = static_cast<T>(a + b);
    std::memcpy(sum + i * sizeof(T), &c, sizeof(T));
  }
}

float float_of_bits(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float from_bfloat16(std::uint16_t bits) { return float_of_bits(std::uint32_t{bits} << 16); }

std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr int kHalfMantissa = 10;
constexpr int kHalfMinExponent = -14;

float from_float16(std::uint16_t bits) {
  const int exponent = (bits >> kHalfMantissa) & 31;
  const int mantissa = bits & 1023;
  float value = 0;
  if (exponent == 31) {
    value = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), kHalfMinExponent - kHalfMantissa);
  } else {
    value = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 15 - kHalfMantissa);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t to_float16(float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const auto with_sign = [&](int bits) { return static_cast<std::uint16_t>(sign | bits); };
  const float size = std::fabs(value);
  if (std::isnan(size)) return with_sign(0x7fff);
  if (size >= 65520.0F) return with_sign(0x7c00);
  if (size == 0) return sign;
  const int exponent = std::max(std::ilogb(size), kHalfMinExponent);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, kHalfMantissa - exponent)));
  // A mantissa that rounds up to the next power of two carries into the exponent.
  return with_sign(((exponent - kHalfMinExponent) << kHalfMantissa) + steps);
}

template <float (*from)(std::uint16_t), std::uint16_t (*to)(float)>
void add_short_floats(std::byte* sum, const std::byte* part, std::size_t count) {
  auto* const a = reinterpret_cast<std::uint16_t*>(sum);
  const auto* const b = reinterpret_cast<const std::uint16_t*>(part);
  for (std::size_t i = 0; i < count; ++i) a[i] = to(from(a[i]) + from(b[i]));
}

/// On the host's memory.
void add(int type, std::byte* sum, const std::byte* part, std::size_t count) {
  switch (type) {
    case ncclFloat32:
      return add_as<float>(sum, part, count);
    case ncclFloat64:
      return add_as<double>(sum, part, count);
    case ncclFloat16:
      return add_short_floats<from_float16, to_float16>(sum, part, count);
    case ncclBfloat16:
      return add_short_floats<from_bfloat16, to_bfloat16>(sum, part, count);
    case ncclInt64:
    case ncclUint64:
      return add_as<std::uint64_t>(sum, part, count);
    case ncclInt8:
    case ncclUint8:
      return add_as<std::uint8_t>(sum, part, count);
    default:
      return add_as<std::uint32_t>(sum, part, count);
  }
}

/// In steps of what a slot holds: this rank gives `send + r * stride` to rank r, and sums what it
/// gets, in the order of ranks.
bool reduce(Rank& self, const Board& board, int rank, const Operation& operation,
            std::size_t stride) {
  const std::size_t step = kSlotBytes / operation.type_bytes * operation.type_bytes;
  std::vector<std::byte> parts(static_cast<std::size_t>(board.num_ranks) * kSlotBytes);
  for (std::size_t begin = 0; begin == 0 || begin < operation.bytes(); begin += step) {
    const std::size_t bytes = std::min(step, operation.bytes() - begin);
    Head head = head_of(operation);
    head.detail += 65536 * operation.bytes();
    head.total = bytes;
    std::vector<Message> sends;
    std::vector<Message> recvs;
    for (int peer = 0; peer < board.num_ranks; ++peer) {
      const auto place = static_cast<std::size_t>(peer);
      std::byte* const from = sendable(operation.send) + place * stride + begin;
      std::byte* const to = parts.data() + place * kSlotBytes;
      if (peer == rank) {
        copy_bytes(to, from, bytes);
      } else {
        sends.push_back({peer, from, head});
        recvs.push_back({peer, to, head});
      }
    }
    if (!self.exchange(sends, recvs)) return false;
    for (int peer = 1; peer < board.num_ranks; ++peer) {
      add(operation.type, parts.data(), parts.data() + static_cast<std::size_t>(peer) * kSlotBytes,
          bytes / operation.type_bytes);
    }
    copy_bytes(operation.recv + begin, parts.data(), bytes);
  }
  return true;
}

bool run_collective(Rank& self, const Board& board, int rank, const Operation& operation) {
  const Head head = head_of(operation);
  const std::size_t bytes = operation.bytes();
  std::vector<Message> sends;
  std::vector<Message> recvs;
  switch (operation.kind) {
    case Operation::Kind::kAllGather:
      for (int peer = 0; peer < board.num_ranks; ++peer) {
        if (peer == rank) continue;
        sends.push_back({peer, sendable(operation.send), head});
        recvs.push_back({peer, operation.recv + static_cast<std::size_t>(peer) * bytes, head});
      }
      copy_own(operation.recv + static_cast<std::size_t>(rank) * bytes, operation.send, bytes);
      return self.exchange(sends, recvs);
    case Operation::Kind::kBroadcast:
      if (operation.peer != rank) {
        recvs.push_back({operation.peer, operation.recv, head});
      } else {
        for (int peer = 0; peer < board.num_ranks; ++peer) {
          if (peer != rank) sends.push_back({peer, sendable(operation.send), head});
        }
        copy_own(operation.recv, operation.send, bytes);
      }
      return self.exchange(sends, recvs);
    case Operation::Kind::kAllReduce:
      return reduce(self, board, rank, operation, 0);
    case Operation::Kind::kReduceScatter:
      return reduce(self, board, rank, operation, bytes);
    default:
      return true;
  }
}

/// This rank's messages to itself, in their order.
void copy_to_self(int rank, const std::vector<Operation>& operations) {
  std::vector<const Operation*> sends;
  for (const Operation& operation : operations) {
    if (operation.kind == Operation::Kind::kSend && operation.peer == rank) {
      sends.push_back(&operation);
    }
  }
  std::size_t num_taken = 0;
  for (const Operation& operation : operations) {
    if (operation.kind != Operation::Kind::kRecv || operation.peer != rank) continue;
    if (num_taken == sends.size()) return;
    const Operation& send = *sends[num_taken++];
    copy_bytes(operation.recv, send.send, std::min(send.bytes(), operation.bytes()));
  }
}

}  // namespace

void run_operations(const Board& board, int rank, const std::vector<Operation>& operations) {
  Rank self(board, rank);
  if (self.is_stopped()) return;
  std::vector<Message> sends;
  std::vector<Message> recvs;
  for (const Operation& operation : operations) {
    if (!run_collective(self, board, rank, operation)) return;
    if (operation.peer == rank) continue;
    if (operation.kind == Operation::Kind::kSend) {
      sends.push_back({operation.peer, sendable(operation.send), head_of(operation)});
    } else if (operation.kind == Operation::Kind::kRecv) {
      recvs.push_back({operation.peer, operation.recv, head_of(operation)});
    }
  }
  copy_to_self(rank, operations);
  (void)self.exchange(sends, recvs);
}

}  // namespace cudasim::nccl
