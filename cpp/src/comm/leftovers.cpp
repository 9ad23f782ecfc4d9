// SPDX-License-Identifier: Apache-2.0
#include "comm/leftovers.h"

#include <cstdint>
#include <utility>

#include "base/keep_forever.h"

namespace fanfold::comm {

struct Leftovers::ThreadEnd {
  std::shared_ptr<Leftovers> leftovers = std::make_shared<Leftovers>();

  ThreadEnd() = default;
  ThreadEnd(const ThreadEnd&) = delete;
  ThreadEnd& operator=(const ThreadEnd&) = delete;
  ~ThreadEnd() {
    {
      const std::lock_guard<std::mutex> lock(leftovers->mutex_);
      leftovers->has_ended_ = true;
    }
    leftovers->close_all();
  }
};

std::shared_ptr<Leftovers> Leftovers::of_this_thread() {
  thread_local ThreadEnd own;
  return own.leftovers;
}

Leftovers::~Leftovers() = default;

void Leftovers::add(std::shared_ptr<Transport> transport, std::vector<Posted> posted,
                    std::chrono::nanoseconds timeout) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_ended_) return;
    all_.push_back({std::move(transport), std::move(posted), timeout});
    num_.store(all_.size(), std::memory_order_relaxed);
  } catch (...) {
    return;  // as if this rank had died
  }
}

/// Returns whether all have been taken.
bool Leftovers::send_posted(const One& one) noexcept {
  try {
    for (const Posted& message : one.posted) {
      const auto size = static_cast<std::int64_t>(message.bytes.size());
      one.transport->send(message.peer, {{message.bytes.data(), size}});
    }
  } catch (...) {
    return false;
  }
  return true;
}

void Leftovers::take_and_close() noexcept {
  std::vector<One> taken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(all_);
    num_.store(0, std::memory_order_relaxed);
  }
  for (One& one : taken) {
    if (guard_.is_child()) {
      base::keep_forever(one.transport);  // what it holds belongs to the parent
      continue;
    }
    (void)send_posted(one);  // nobody is left whom an error could be told
    one.transport->close(one.timeout);
  }
}

}  // namespace fanfold::comm
