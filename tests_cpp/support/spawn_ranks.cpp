// SPDX-License-Identifier: Apache-2.0
#include "support/spawn_ranks.h"

#include <exception>
#include <mutex>
#include <thread>
#include <utility>

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
