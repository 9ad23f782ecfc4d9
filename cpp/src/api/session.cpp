// SPDX-License-Identifier: Apache-2.0
#include "api/session.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::api {

using base::str;
using exchange::Slot;
using exchange::SlotState;

Session::Call::Call(Session& session, const std::string& what) : session_(session) {
  if (!session_.is_busy_.exchange(true, std::memory_order_acquire)) return;
  throw InvalidState(str(what,
                         ": another thread is inside a call on this object, or on one of the same "
                         "workspace; one call at a time"));
}

Slot& Session::next_slot(const Member& member) const {
  const std::size_t index = next_index();
  const Member& user = slot_users_[index];
  if (user != nullptr && user->slots()[index].is_open()) {
    const Slot& used = user->slots()[index];
    const std::string whose = user == member ? "" : str(" of ", user->what());
    throw InvalidState(
        str(member->what(), ": dispatch of round ", next_round(), " needs the slot of round ",
            used.round, whose, ", which is ", exchange::name_of(used.state),
            "; combine or release it first (max_in_flight is ", slot_users_.size(), ")"));
  }
  return member->slots()[index];
}

void Session::settle_next_slot(base::Deadline deadline) {
  const std::size_t index = next_index();
  const Member& user = slot_users_[index];
  if (user == nullptr || user->slots()[index].state != SlotState::kReleased) return;
  user->settle(user->slots()[index], deadline);
  user->slots()[index].state = SlotState::kFree;
}

void Session::end_rounds() noexcept {
  const auto end = [](exchange::Exchange& member) {
    for (Slot& slot : member.slots()) {
      slot.state = SlotState::kFree;
      slot.round = -1;
      member.forget_routing(slot);
    }
  };
  // A user need not be a member any more.
  for (Member& user : slot_users_) {
    if (user != nullptr) end(*user);
    user.reset();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Member& member : members_) end(*member);
}

Session::OpenRound Session::open_round() const noexcept {
  for (std::size_t index = 0; index < slot_users_.size(); ++index) {
    const Member& user = slot_users_[index];
    if (user == nullptr || !user->slots()[index].is_open()) continue;
    return {user, &user->slots()[index]};
  }
  return {};
}

void Session::add(const Member& member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.push_back(member);
  ++num_made_;
}

bool Session::remove(const Member& member) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.erase(std::remove(members_.begin(), members_.end(), member), members_.end());
  return members_.empty();
}

std::vector<Session::Member> Session::members() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return members_;
}

void Session::fail(std::exception_ptr failure) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  failure_ = std::move(failure);
  has_failed_.store(failure_ != nullptr, std::memory_order_release);
}

std::exception_ptr Session::failure() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

}  // namespace fanfold::api
