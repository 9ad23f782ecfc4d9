// SPDX-License-Identifier: Apache-2.0

// What an exchange is made of, and what of it may change between rounds.

#include <algorithm>
#include <string>
#include <utility>

#include "base/mapping.h"
#include "comm/communicator_impl.h"
#include "comm/failure.h"
#include "exchange/exchange.h"
#include "fanfold/allocator.h"
#include "plan/shared_workspace.h"

namespace fanfold::exchange {
namespace {

constexpr std::int64_t kMinLocalBytes = 4096;

}  // namespace

void Exchange::take_memory() {
  const int num_ranks = setup_.map.num_ranks;
  workspace_ = workspace_of(setup_.config, num_ranks, setup_.map.max_local_experts);
  if (setup_.workspace_of != nullptr) {
    const Exchange& owner = *setup_.workspace_of;
    workspace_ = plan::share_workspace(setup_.config, workspace_, owner.workspace(), owner.what());
    local_ = owner.local_;
  } else {
    const std::int64_t bytes = std::max(workspace_.local_bytes, kMinLocalBytes);
    if (setup_.allocator != nullptr) {
      local_ = setup_.allocator->allocate_private(bytes);
    } else if (is_on_gpu()) {
      local_ = setup_.device_backend(setup_.config.device_index)->allocate(bytes);
    } else {
      local_ = base::map_private(bytes);
    }
  }
  if (!is_on_gpu()) {
    staging_.resize(
        static_cast<std::size_t>(workspace_.max_tokens_per_rank * workspace_.top_k * 4));
  }
  slots_.resize(static_cast<std::size_t>(setup_.config.max_in_flight));
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].index = static_cast<int>(i);
    slots_[i].token_counts.resize(static_cast<std::size_t>(num_ranks));
    slots_[i].own_plan.source_rank = rank_;
    if (is_on_gpu()) continue;  // kernels plan
    plan::reserve_send_plan(slots_[i].own_plan, setup_.map, workspace_.top_k,
                            workspace_.max_tokens_per_rank);
  }
}

void Exchange::on_all_ranks(base::FunctionRef<void()> attempt) const {
  std::string failure;
  try {
    attempt();
  } catch (...) {
    failure = comm::Failure::current(rank_).encode();
  }
  const auto* begin = reinterpret_cast<const std::byte*>(failure.data());
  const Communicator::Bytes bytes(begin, begin + failure.size());
  const std::chrono::nanoseconds timeout(setup_.deadline.remaining_ns());
  for (const Communicator::Bytes& other : setup_.handle->all_gather_bytes(bytes, timeout)) {
    if (other.empty()) continue;
    comm::Failure::decode({reinterpret_cast<const char*>(other.data()), other.size()}).raise();
  }
}

void Exchange::end_setup() noexcept {
  setup_.handle = nullptr;
  setup_.allocator = nullptr;
  setup_.workspace_of.reset();
}

void Exchange::set_placement(const Placement& placement, plan::ExpertMap map,
                             std::uint64_t config_digest, std::uint32_t version) {
  setup_.config.placement = placement;
  setup_.config_digest = config_digest;
  setup_.map = std::move(map);
  placement_version_ = version;
}

}  // namespace fanfold::exchange
