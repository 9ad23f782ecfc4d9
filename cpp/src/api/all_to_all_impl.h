// SPDX-License-Identifier: Apache-2.0
#pragma once

// What stands behind an AllToAll: the order of its calls.

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "api/session.h"
#include "exchange/exchange.h"
#include "fanfold/all_to_all.h"
#include "fanfold/error.h"

namespace fanfold {

/// The calls of AllToAll have checked nothing yet but their tensors; here their order is kept.
class AllToAll::Impl {
 public:
  /// `owner`: the AllToAll whose workspace it uses; null: its own.
  Impl(Communicator& communicator, const AllToAllConfig& config, Allocator* allocator,
       const Impl* owner);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // What a call may do. Each public call holds one `Call` while it runs.
  class Call : public api::Session::Call {
   public:
    explicit Call(const Impl& impl) : api::Session::Call(impl.session(), impl.what()) {}
  };

  const std::string& what() const noexcept { return exchange_->what(); }
  exchange::Exchange& exchange() const noexcept { return *exchange_; }
  api::Session& session() const noexcept { return *session_; }
  const std::string& choice() const noexcept { return choice_; }
  const Metainfo& metainfo() const noexcept { return metainfo_; }
  std::int64_t num_dropped() const noexcept { return num_dropped_; }
  bool is_closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  const AllToAllConfig& config() const noexcept { return exchange_->config(); }
  base::Deadline deadline(const std::optional<std::chrono::nanoseconds>& timeout) const {
    return base::Deadline(timeout.value_or(config().timeout));
  }

  void require_usable() const;
  void require_not_failed() const;
  void require_two_phase(const char* call) const;
  /// No member of the session has an open round.
  void require_no_open_round(const char* call) const;
  /// Runs data movement; any error leaves the AllToAll failed.
  template <class Body>
  void run(Body&& body) const {
    if (session_->num_made() > 1) exchange_->use_name();
    session_->run(*exchange_, body);
  }

  /// The slot of a round that has not ended. @throws InvalidState
  exchange::Slot& slot_of(const Round& round, const char* call) const;
  /// … and is in the state that `call` needs.
  exchange::Slot& slot_of(const Round& round, exchange::SlotState expected, const char* call) const;
  void use_stream(exchange::Slot& slot, const std::optional<void*>& stream, const char* call) {
    session_->prepare(*exchange_, [&] { exchange_->use_stream(slot, stream, call); });
  }
  Round dispatch_send(const exchange::DispatchCall& call);
  Received dispatch_recv(const Round& round, base::Deadline deadline);
  void combine_send(exchange::Slot& slot, const exchange::CombineCall& call);
  void combine_recv(exchange::Slot& slot, const exchange::CombineCall& call);
  void end_open_rounds() noexcept;
  void set_active(const std::vector<bool>& active);
  void set_placement(const Placement& placement, base::Deadline deadline);
  void abort(const std::string& reason);
  void reset(base::Deadline deadline);
  void close(base::Deadline deadline);

 private:
  /// Of this AllToAll, else null.
  const exchange::Slot* open_slot() const noexcept;
  void mark_closed() noexcept;

  std::shared_ptr<api::Session> session_;
  std::shared_ptr<exchange::Exchange> exchange_;
  std::string choice_;
  Metainfo metainfo_{{}};
  std::uint64_t id_ = 0;
  std::atomic<bool> closed_{false};
  std::mutex abort_mutex_;  // keeps `abort` away from memory that `close` gives back
  std::int64_t num_dropped_ = 0;
};

}  // namespace fanfold
