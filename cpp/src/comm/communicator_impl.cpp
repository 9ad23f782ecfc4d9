// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator_impl.h"

#include <exception>
#include <utility>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold {

Communicator::Impl::Impl(std::unique_ptr<comm::Group> group, std::unique_ptr<comm::Channel> channel,
                         std::chrono::nanoseconds timeout)
    : group_(std::move(group)), channel_(std::move(channel)), timeout_(timeout) {}

Communicator::Impl::~Impl() {
  if (group_->is_forked_child()) return;
  if (device_ != nullptr) device_->leave();  // memory of it may hold it still
  device_.reset();
  channel_.reset();
  group_->leave();
}

base::Deadline Communicator::Impl::deadline(std::optional<std::chrono::nanoseconds> timeout) const {
  const std::chrono::nanoseconds length = timeout.value_or(timeout_);
  if (length.count() < 0) {
    throw InvalidArgument(
        base::str("timeout: expected 0 or more, got ", length.count(), " nanoseconds"));
  }
  return base::Deadline(length);
}

void Communicator::Impl::check_usable(const char* call) const {
  if (group_->is_forked_child()) {
    throw InvalidState(base::str(call,
                                 ": expected the process that made the communicator, got a forked "
                                 "child; make communicators after fork, or start with exec"));
  }
  if (is_closed()) throw InvalidState(base::str(call, ": the communicator is closed"));
}

void Communicator::Impl::abort(const std::string& reason) {
  check_usable("abort");
  const std::lock_guard<std::mutex> lock(channel_mutex_);
  if (channel_ != nullptr) channel_->abort(reason);
  if (device_ != nullptr) device_->abort();
}

void Communicator::Impl::close(base::Deadline deadline) {
  const Call call(*this, "close");
  closed_.store(true, std::memory_order_release);  // acquire: is_closed
  std::exception_ptr device_error;
  if (device_ != nullptr) {  // while the peers still see this rank
    try {
      device_->close(deadline);
    } catch (...) {
      device_error = std::current_exception();
    }
  }
  // Before the wait, so that peers that are in an exchange of this group see it too. First the
  // channel: who is gone without having left it counts as dead.
  channel_->control().mark_left();
  group_->leave();
  const auto finish = [&] {
    {
      const std::lock_guard<std::mutex> lock(channel_mutex_);
      channel_.reset();
    }
    group_->finish(deadline);
  };
  try {
    channel_->close(deadline);
  } catch (...) {
    finish();
    throw;
  }
  finish();
  if (device_error != nullptr) std::rethrow_exception(device_error);
}

Communicator::Impl::Call::Call(Impl& impl, const char* name) : impl_(impl) {
  impl_.check_usable(name);
  impl_.group_->check_thread(name);
  if (impl_.is_running_.exchange(true, std::memory_order_acquire)) {
    throw InvalidState(base::str(name,
                                 ": another thread is inside a call of this communicator; make one "
                                 "call at a time"));
  }
  if (impl_.is_closed()) {  // by the call that has just ended
    impl_.is_running_.store(false, std::memory_order_release);
    throw InvalidState(base::str(name, ": the communicator is closed"));
  }
}

Communicator::Impl::Call::~Call() { impl_.is_running_.store(false, std::memory_order_release); }

}  // namespace fanfold
