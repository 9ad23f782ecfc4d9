// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the strategies over collectives share: a private channel of the group, so that a failure
// here leaves the communicator usable, and the head with which every phase compares the calls.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/channel.h"
#include "exchange/exchange.h"
#include "exchange/shared_window.h"

namespace fanfold::exchange {

/// What a rank says of its call before any of its rows. Whole cache lines, so that rows which
/// follow it keep their alignment.
struct alignas(2 * base::kCacheLine) CallHead {
  exec::FlagFields fields;
  std::uint64_t known_counts = 0;  // digest of num_tokens_per_rank; 0: not given
};

/// Nothing has to settle before a slot is used again: peers touch no private memory, and layout
/// gathered has reasons of its own (gathering.h).
class Collective : public Exchange {
 public:
  Collective(Setup setup, base::Deadline deadline);

  std::uint32_t generation() const noexcept override { return channel_->control().generation(); }
  void settle(Slot&, base::Deadline) override {}
  void release(Slot& slot) override { poison_received(slot); }
  void abort(const std::string& reason) noexcept override { channel_->abort(reason); }
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) override;
  void check() const override;
  void leave() noexcept override { channel_->control().mark_left(); }
  void close(base::Deadline deadline) override;
  void detach() noexcept override;
  bool is_forked_child() const noexcept override;
  void use_name() override { channel_->control().set_what(what()); }
  std::byte* slot_base(const Slot& slot) const noexcept override {
    return local_.get() + workspace_.slot_offset + slot.index * workspace_.slot_stride;
  }
  std::shared_ptr<const void> memory() const override { return local_; }

 protected:
  /// The head of this rank's dispatch; remembers it in the slot.
  CallHead dispatch_head(Slot& slot, const DispatchCall& call) const;
  CallHead combine_head(const Slot& slot, const CombineInputs& inputs, std::int64_t hidden) const;
  /// Takes what `parts` hold of the heads, with which every stream begins; true when the step has
  /// completed them.
  bool take_heads(const std::vector<comm::Channel::Incoming>& parts);
  /// Compares `heads_` with `mine`.
  /// @throws InvalidArgument  a call differs; every rank then throws, as each differs from one.
  void compare_heads(const Slot& slot, const char* phase, const exec::FlagFields& mine) const;
  /// compare_heads, then takes every rank's T and compares the counts that callers knew before.
  void accept_dispatch(Slot& slot, const DispatchCall& call);
  std::byte* combine_rows(const Slot& slot) const noexcept {
    return slot_base(slot) + slot.store.combine_offset;
  }
  const SharedChannel& shared() const noexcept { return shared_; }
  std::byte* scratch() const noexcept { return local_.get() + workspace_.local_scratch_offset; }
  /// Rows that came home, one rank after the other.
  std::byte* mine() const noexcept { return local_.get() + workspace_.local_mine_offset; }

  std::shared_ptr<comm::Channel> channel_;
  std::vector<CallHead> heads_;            // [R] of the call under way
  std::vector<const std::byte*> sources_;  // [R] this rank's rows on each rank, as they came home

 private:
  SharedChannel shared_;  // where `channel_` comes from
};

}  // namespace fanfold::exchange
