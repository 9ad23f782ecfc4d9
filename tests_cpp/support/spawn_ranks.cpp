// SPDX-License-Identifier: Apache-2.0
#include "support/spawn_ranks.h"

#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "support/loopback_transport.h"

namespace fanfold::testing {
namespace {

/// Keeps the first exception of several threads.
class FirstError {
 public:
  void keep_current() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_ == nullptr) error_ = std::current_exception();
  }
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;  // guards error_ while threads run
  std::exception_ptr error_;
};

}  // namespace

void spawn_ranks(int num_ranks, const std::function<void(Communicator&)>& body,
                 std::chrono::nanoseconds timeout) {
  std::vector<Communicator> ranks = Communicator::threads(num_ranks, timeout);
  FirstError first;
  std::vector<std::thread> threads;
  for (Communicator& rank : ranks) {
    threads.emplace_back([&first, &body, &rank] {
      Communicator own = std::move(rank);
      try {
        body(own);
      } catch (...) {
        first.keep_current();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  first.rethrow();
}

const char* name_of(GroupKind kind) noexcept {
  return kind == GroupKind::kThreads ? "Threads" : "Loopback";
}

std::vector<Communicator> make_ranks(GroupKind kind, int num_ranks,
                                     std::chrono::nanoseconds timeout) {
  if (kind == GroupKind::kThreads) return Communicator::threads(num_ranks, timeout);
  LoopbackNetwork network(num_ranks);
  std::vector<std::unique_ptr<Communicator>> made(static_cast<std::size_t>(num_ranks));
  spawn_on(network, num_ranks, [&](int rank, std::shared_ptr<Transport> transport) {
    made[static_cast<std::size_t>(rank)] = std::make_unique<Communicator>(
        Communicator::from_transport(std::move(transport), TransportUse::kAlways, timeout));
  });
  std::vector<Communicator> ranks;
  for (const std::unique_ptr<Communicator>& rank : made) ranks.push_back(std::move(*rank));
  return ranks;
}

void spawn_ranks(GroupKind kind, int num_ranks, const std::function<void(Communicator&)>& body,
                 std::chrono::nanoseconds timeout) {
  if (kind == GroupKind::kThreads) return spawn_ranks(num_ranks, body, timeout);
  LoopbackNetwork::Options options;
  options.max_delay = std::chrono::microseconds(50);
  spawn_loopback_ranks(num_ranks, body, options, timeout);
}

void spawn_ranks(std::vector<Communicator>& ranks, const std::function<void(Communicator&)>& body) {
  FirstError first;
  std::vector<std::thread> threads;
  for (Communicator& rank : ranks) {
    threads.emplace_back([&first, &body, &rank] {
      try {
        body(rank);
      } catch (...) {
        first.keep_current();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  first.rethrow();
}

}  // namespace fanfold::testing
