// SPDX-License-Identifier: Apache-2.0
#include "comm/remote_windows.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "base/format.h"
#include "base/mapping.h"
#include "comm/raise_to.h"
#include "comm/rank_index.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr std::uint64_t kTopBit = std::uint64_t{1} << 63U;

template <class Word>
std::atomic<Word>& word_at(std::byte* base, std::uint64_t offset) noexcept {
  return *reinterpret_cast<std::atomic<Word>*>(base + offset);
}

}  // namespace

RemoteWindows::RemoteWindows(std::shared_ptr<MessageHub> hub, std::uint64_t group, std::uint64_t id,
                             std::vector<int> ranks, std::int64_t bytes)
    : hub_(std::move(hub)),
      group_(group),
      id_(id),
      ranks_(std::move(ranks)),
      bytes_(base::round_to_pages(bytes)),
      memory_(base::map_private(bytes_ * static_cast<std::int64_t>(ranks_.size()))) {}

MessageHead RemoteWindows::head_of(int owner, const Stores& stores) const {
  MessageHead head;
  head.kind = MessageKind::kStores;
  head.count = static_cast<std::uint32_t>(stores.records_.size());
  head.group = group_;
  head.object = id_;
  head.owner = owner;
  return head;
}

namespace {

MessageHub::Parts parts_of(const MessageHead& head, const std::vector<Store>& records,
                           const std::vector<Transport::Part>& bytes) {
  MessageHub::Parts parts{head.part()};
  parts.push_back({reinterpret_cast<const std::byte*>(records.data()),
                   static_cast<std::int64_t>(records.size() * sizeof(Store))});
  parts.insert(parts.end(), bytes.begin(), bytes.end());
  return parts;
}

}  // namespace

void RemoteWindows::send(int peer, int owner, const Stores& stores) {
  const MessageHead head = head_of(owner, stores);
  hub_->send(ranks_[index(peer)], parts_of(head, stores.records_, stores.parts_));
}

void RemoteWindows::post(int peer, int owner, const Stores& stores) noexcept {
  queue(peer, owner, stores);
  send_queued();
}

void RemoteWindows::queue(int peer, int owner, const Stores& stores) noexcept {
  try {
    const MessageHead head = head_of(owner, stores);
    hub_->queue(ranks_[index(peer)], parts_of(head, stores.records_, stores.parts_));
  } catch (...) {
    hub_->defer_current();  // no memory for a few words
  }
}

void RemoteWindows::apply(const MessageHead& head, const std::vector<std::byte>& message) const {
  const auto fail = [&] {
    throw InvalidState(base::str("transport '", hub_->kind(), "': a message does not fit the ",
                                 bytes_, " bytes of window ", id_, " of rank ", head.owner));
  };
  const std::uint64_t records_bytes = std::uint64_t{head.count} * sizeof(Store);
  if (head.owner < 0 || index(head.owner) >= ranks_.size() ||
      message.size() - sizeof head < records_bytes) {
    fail();
  }
  std::byte* const base = data(head.owner);
  const auto size = static_cast<std::uint64_t>(bytes_);
  const std::byte* record = message.data() + sizeof head;
  const std::byte* bytes = record + records_bytes;
  std::uint32_t num_skipped = 0;
  std::uint64_t bytes_left = message.size() - sizeof head - records_bytes;
  for (std::uint32_t i = 0; i < head.count; ++i, record += sizeof(Store)) {
    Store store{};
    std::memcpy(&store, record, sizeof store);
    const bool is_plain = store.kind == Store::Kind::kBytes;
    const std::uint64_t length =
        is_plain ? store.value : (store.kind == Store::Kind::kRaise32 ? 4 : 8);
    if (store.offset > size || length > size - store.offset) fail();
    if (is_plain ? length > bytes_left : store.offset % length != 0) fail();
    if (num_skipped > 0 && !is_plain) {
      --num_skipped;
      continue;
    }
    switch (store.kind) {
      case Store::Kind::kIfLower:
        // Acquire: of what another thread stored in the name of a message.
        if ((word_at<std::uint64_t>(base, store.offset).load(std::memory_order_acquire) &
             ~kTopBit) >= store.value) {
          num_skipped = store.num_guarded;
        }
        break;
      case Store::Kind::kBytes:
        std::memcpy(base + store.offset, bytes, length);
        bytes += length;
        bytes_left -= length;
        break;
      case Store::Kind::kSet64:  // acquire: whoever waits for the word
        word_at<std::uint64_t>(base, store.offset).store(store.value, std::memory_order_release);
        break;
      case Store::Kind::kRaise32:
        raise_to(word_at<std::uint32_t>(base, store.offset),
                 static_cast<std::uint32_t>(store.value));
        break;
    }
  }
}

}  // namespace fanfold::comm
