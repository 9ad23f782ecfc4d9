// SPDX-License-Identifier: Apache-2.0
#include "fanfold/received.h"

#include "api/received_state.h"
#include "base/format.h"
#include "exchange/device_routing.h"
#include "fanfold/error.h"

namespace fanfold {
namespace {

template <class Pointer>
auto& checked(const Pointer& pointer) {
  if (pointer == nullptr) throw InvalidState("Received or Routing: holds nothing");
  return *pointer;
}

}  // namespace

std::string Round::describe(const std::string& owner_name) const {
  return base::str("round ", number, " of ", owner_name, " (generation ", generation, ")");
}

bool Received::State::is_open() const noexcept {
  const exchange::Slot& slot = slot_state();
  return slot.round == round_.number && slot.generation == round_.generation &&
         slot.state == exchange::SlotState::kReceived;
}

void Received::State::require_open() const {
  if (exchange_->is_forked_child()) {
    throw InvalidState(base::str(exchange_->what(), ": not usable in a forked child"));
  }
  if (is_open()) return;
  throw InvalidState(base::str(round_.describe(exchange_->what()),
                               " has ended; its received rows belong to a later round"));
}

Received::Received() = default;
Received::~Received() = default;
Received::Received(const Received&) = default;
Received::Received(Received&&) noexcept = default;
Received& Received::operator=(const Received&) = default;
Received& Received::operator=(Received&&) noexcept = default;
Received::Received(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}

const Round& Received::handle() const { return checked(state_).round(); }
bool Received::is_open() const noexcept { return state_ != nullptr && state_->is_open(); }

std::int64_t Received::round_max_tokens() const {
  checked(state_).require_open();
  return checked(state_).slot_state().round_max_tokens;
}

std::int64_t Received::num_tokens() const {
  checked(state_).require_open();
  return checked(state_).slot_state().plan().num_tokens;
}

const std::vector<TensorView>& Received::payloads() const {
  checked(state_).require_open();
  return checked(state_).payloads();
}

const TensorView& Received::scales() const {
  return checked(state_).lazy(checked(state_).scales, [&] {
    return checked(state_).exchange().scales_view(checked(state_).slot_state());
  });
}
const TensorView& Received::rank_counts() const {
  return checked(state_).lazy(checked(state_).rank_counts, [&] {
    return checked(state_).exchange().rank_counts_view(checked(state_).slot_state());
  });
}
const TensorView& Received::expert_counts() const {
  return checked(state_).lazy(checked(state_).expert_counts, [&] {
    return checked(state_).exchange().expert_counts_view(checked(state_).slot_state());
  });
}
const TensorView& Received::num_rows() const {
  return checked(state_).lazy(checked(state_).num_rows, [&] {
    return checked(state_).exchange().num_rows_view(checked(state_).slot_state());
  });
}
const TensorView& Received::offsets() const {
  return checked(state_).lazy(checked(state_).offsets, [&] {
    return checked(state_).exchange().offsets_view(checked(state_).slot_state());
  });
}
const TensorView& Received::topk_ids() const {
  return checked(state_).lazy(checked(state_).topk_ids, [&] {
    return checked(state_).exchange().topk_ids_view(checked(state_).slot_state());
  });
}
const TensorView& Received::topk_weights() const {
  return checked(state_).lazy(checked(state_).topk_weights, [&] {
    return checked(state_).exchange().topk_weights_view(checked(state_).slot_state());
  });
}
const TensorView& Received::source_rank() const {
  return checked(state_).lazy(checked(state_).source_rank, [&] {
    return checked(state_).exchange().source_rank_view(checked(state_).slot_state());
  });
}
const TensorView& Received::source_token() const {
  return checked(state_).lazy(checked(state_).source_token, [&] {
    return checked(state_).exchange().source_token_view(checked(state_).slot_state());
  });
}

HostCounts Received::host_counts() const {
  State& state = checked(state_);
  HostCounts counts;
  state.run([&] { counts = state.exchange().host_counts(state.slot_state()); });
  return counts;
}

Routing Received::routing() const {
  State& state = checked(state_);
  state.call([&] {
    if (!state.routing) state.routing = state.exchange().copy_routing(state.slot_state());
  });
  return Routing(state.routing);
}

std::shared_ptr<const void> Received::memory() const {
  checked(state_).require_open();
  return checked(state_).exchange().memory();
}

Routing::Routing() = default;
Routing::~Routing() = default;
Routing::Routing(const Routing&) = default;
Routing::Routing(Routing&&) noexcept = default;
Routing& Routing::operator=(const Routing&) = default;
Routing& Routing::operator=(Routing&&) noexcept = default;
Routing::Routing(std::shared_ptr<const Data> data) noexcept : data_(std::move(data)) {}

std::int64_t Routing::num_tokens() const { return checked(data_).plan.num_tokens; }
std::int64_t Routing::round_max_tokens() const { return checked(data_).round_max_tokens; }
const std::vector<std::int32_t>& Routing::rank_counts() const {
  const Data& data = checked(data_);
  return data.device != nullptr ? data.device->host_rank_counts() : data.rank_counts;
}

}  // namespace fanfold
