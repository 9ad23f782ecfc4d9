// SPDX-License-Identifier: Apache-2.0
#pragma once

// What stands behind a Received.

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api/session.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"
#include "fanfold/received.h"

namespace fanfold {

class Received::State {
 public:
  State(std::shared_ptr<api::Session> session, std::shared_ptr<exchange::Exchange> exchange,
        int slot, const Round& round)
      : session_(std::move(session)), exchange_(std::move(exchange)), slot_(slot), round_(round) {
    payloads_ = exchange_->payload_views(slot_state());
  }

  const Round& round() const noexcept { return round_; }
  bool is_open() const noexcept;
  /// @throws InvalidState  the round ended.
  void require_open() const;
  exchange::Exchange& exchange() const noexcept { return *exchange_; }
  exchange::Slot& slot_state() const noexcept {
    return exchange_->slots()[static_cast<std::size_t>(slot_)];
  }
  const std::vector<TensorView>& payloads() const noexcept { return payloads_; }

  /// Views made on first use; a view is valid only while the round is open.
  struct Lazy {
    TensorView view;
    bool made = false;
  };
  template <class Make>
  const TensorView& lazy(Lazy& entry, Make&& make) {
    require_open();
    if (!entry.made) {
      run([&] {
        entry.view = make();
        entry.made = true;
      });
    }
    return entry.view;
  }
  /// As a call of AllToAll: one at a time, in an open round.
  /// @throws InvalidState  the round ended, or another thread is inside a call.
  template <class Body>
  void call(Body&& body) {
    require_open();
    const api::Session::Call guard(*session_, exchange_->what());
    require_open();
    body();
  }
  /// … whose errors, but for refusals, leave the AllToAll failed.
  template <class Body>
  void run(Body&& body) {
    call([&] {
      std::exception_ptr refusal;
      session_->run(*exchange_, [&] {
        try {
          body();
        } catch (const InvalidState&) {
          refusal = std::current_exception();
        }
      });
      if (refusal != nullptr) std::rethrow_exception(refusal);
    });
  }
  Lazy scales, rank_counts, expert_counts, offsets, num_rows, topk_ids, topk_weights, source_rank,
      source_token;
  std::shared_ptr<const Routing::Data> routing;

 private:
  std::shared_ptr<api::Session> session_;
  std::shared_ptr<exchange::Exchange> exchange_;
  int slot_;
  Round round_;
  std::vector<TensorView> payloads_;
};

}  // namespace fanfold
