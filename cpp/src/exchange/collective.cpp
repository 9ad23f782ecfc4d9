// SPDX-License-Identifier: Apache-2.0
#include "exchange/collective.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/format.h"
#include "base/mapping.h"
#include "comm/communicator_impl.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

static_assert(std::is_trivially_copyable_v<CallHead>);

/// Never 0, which means that a caller gave none.
template <class Counts>
std::uint64_t digest_of(const Counts& counts) noexcept {
  std::uint64_t digest = base::kDigestSeed;
  for (const auto count : counts) {
    digest = base::mix_digest(digest, static_cast<std::uint64_t>(std::int64_t{count}));
  }
  return digest == 0 ? 1 : digest;
}

template <class Counts>
std::string describe(const Counts& counts) {
  std::string text = "[";
  for (std::size_t i = 0; i < counts.size(); ++i) text += base::str(i == 0 ? "" : ", ", counts[i]);
  return text + "]";
}

}  // namespace

Collective::Collective(Setup setup, base::Deadline deadline) : Exchange(std::move(setup)) {
  if (setup_.workspace_of != nullptr) {
    shared_ = static_cast<const Collective&>(*setup_.workspace_of).shared_;
  } else {
    std::shared_ptr<std::byte> own_blocks;
    const std::int64_t block_bytes =
        workspace_.symmetric_bytes - comm::Channel::window_bytes(num_ranks());
    if (block_bytes > 0 && !setup_.communicator->group().shares_memory()) {
      on_all_ranks([&] { own_blocks = base::map_private(block_bytes); });
    }
    shared_ = make_channel(setup_, workspace_.symmetric_bytes, deadline);
    shared_.own_blocks = std::move(own_blocks);
  }
  channel_ = shared_.channel;
  heads_.resize(static_cast<std::size_t>(num_ranks()));
  sources_.resize(static_cast<std::size_t>(num_ranks()));
  exec::Context context{};
  context.kernels = &base::kernels(base::isa_from_name(setup_.config.test_knobs.isa.c_str()));
  context.hook = &hook_;
  context.rank = rank_;
  context.num_ranks = num_ranks();
  context.streaming = setup_.config.test_knobs.streaming_stores;
  backend_ = setup_.backend(context);
}

void Collective::close(base::Deadline deadline) {
  shared_.close(deadline);
  detach();
}

void Collective::detach() noexcept {
  shared_ = SharedChannel();
  channel_.reset();
  Exchange::detach();
}

std::uint64_t Collective::reset(std::uint64_t max_epoch, base::Deadline deadline) {
  channel_->set_round(-1);
  channel_->reset(deadline);
  const auto epochs = channel_->all_gather_values({static_cast<std::int64_t>(max_epoch)}, deadline,
                                                  "reset of an AllToAll");
  return static_cast<std::uint64_t>(*std::max_element(epochs.begin(), epochs.end())) + 1;
}

void Collective::check() const {
  const comm::WaitFor nobody{rank_, "check", -1};
  channel_->control().throw_if_aborted(nobody);
  channel_->control().throw_if_lost(nobody);
}

bool Collective::is_forked_child() const noexcept {
  return setup_.communicator->group().is_forked_child();
}

CallHead Collective::dispatch_head(Slot& slot, const DispatchCall& call) const {
  slot.sent = dispatch_fields(slot);
  CallHead head;
  head.fields = slot.sent;
  if (call.inputs->num_tokens_per_rank) {
    head.known_counts = digest_of(*call.inputs->num_tokens_per_rank);
  }
  return head;
}

CallHead Collective::combine_head(const Slot& slot, const CombineInputs& inputs,
                                  std::int64_t hidden) const {
  CallHead head;
  head.fields = combine_fields(
      slot, inputs.release ? exec::CallKind::kCombine : exec::CallKind::kCombineKeep, hidden);
  return head;
}

bool Collective::take_heads(const std::vector<comm::Channel::Incoming>& parts) {
  constexpr std::int64_t kBytes{sizeof(CallHead)};
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const comm::Channel::Incoming& part = parts[rank];
    const std::int64_t bytes = std::min(part.bytes, kBytes - part.begin);
    if (part.data == nullptr || bytes <= 0) continue;
    std::memcpy(reinterpret_cast<std::byte*>(&heads_[rank]) + part.begin, part.data,
                static_cast<std::size_t>(bytes));
  }
  const comm::Channel::Incoming& other = parts[static_cast<std::size_t>((rank_ + 1) % num_ranks())];
  if (other.data == nullptr) return other.begin == 0;  // this is the only rank
  return other.begin < kBytes && other.begin + other.bytes >= kBytes;
}

void Collective::compare_heads(const Slot& slot, const char* phase,
                               const exec::FlagFields& mine) const {
  for (int peer = 0; peer < num_ranks(); ++peer) {
    const std::string difference =
        exec::call_difference(mine, rank_, heads_[static_cast<std::size_t>(peer)].fields, peer,
                              config().test_knobs.first_epoch);
    if (difference.empty()) continue;
    throw InvalidArgument(base::str(what(), ": ", phase, " of round ", slot.round,
                                    " differs between ranks: ", difference,
                                    "; call reset() on every rank"));
  }
}

void Collective::accept_dispatch(Slot& slot, const DispatchCall& call) {
  compare_heads(slot, "dispatch", slot.sent);
  std::transform(heads_.begin(), heads_.end(), slot.token_counts.begin(), [](const CallHead& head) {
    return static_cast<std::int32_t>(head.fields.num_tokens);
  });
  if (call.inputs->num_tokens_per_rank) {
    const auto& known = *call.inputs->num_tokens_per_rank;
    for (std::size_t rank = 0; rank < known.size(); ++rank) {
      if (known[rank] == slot.token_counts[rank]) continue;
      throw InvalidArgument(base::str("num_tokens_per_rank: expected ", slot.token_counts[rank],
                                      " tokens of rank ", rank, " in round ", slot.round, ", got ",
                                      known[rank], "; call reset() on every rank"));
    }
  }
  const std::uint64_t actual = digest_of(slot.token_counts);
  for (std::size_t rank = 0; rank < heads_.size(); ++rank) {
    if (heads_[rank].known_counts == 0 || heads_[rank].known_counts == actual) continue;
    throw InvalidArgument(base::str("num_tokens_per_rank of rank ", rank, ": expected ",
                                    describe(slot.token_counts), " in round ", slot.round,
                                    ", got other counts; call reset() on every rank"));
  }
}

}  // namespace fanfold::exchange
