// SPDX-License-Identifier: Apache-2.0
// The model's reset, and how states are named and kept small.

#include <algorithm>
#include <string>

#include "exchange/protocol_state.h"

namespace fanfold::testing {
/// Who calls reset uses nothing of its generation any more.
void ProtocolRules::give_up_generation(ModelState& state, int rank) const {
  const auto own = static_cast<std::size_t>(rank);
  for (std::size_t other = 0; other < kModelRanks; ++other) {
    state.rows_in_use[own][other] = {};
    state.dispatch_unread[own][other] = {};
    state.combine_unread[own][other] = {};
    state.ack_unread[own][other] = {};
    state.partials_in_use[other][own] = {};
  }
}

/// Abort words to all peers, then the announcement to all, then waits for the announcement of each.
void ProtocolRules::step_reset(ModelState& state, int rank) const {
  ModelRank& me = at(state, rank);
  const auto own = static_cast<std::size_t>(rank);
  const int phase = me.step / num_peers();
  const int other = peer(rank, me.step % num_peers());
  const auto there = static_cast<std::size_t>(other);
  const auto next = static_cast<Byte>(me.generation + 1);
  if (phase == 0) {
    at(state, other).abort_word = std::max(at(state, other).abort_word, next);
  } else if (phase == 1) {
    state.reset_epoch[there][own][next % 2] = me.highest_epoch;
    state.reset_generation[there][own] = next;
  } else if (!has_fault(ProtocolFault::kResetWithoutGroupMaximum)) {
    me.highest_epoch = std::max(me.highest_epoch, state.reset_epoch[own][there][next % 2]);
  }
  ++me.step;
  const int num_phases = has_fault(ProtocolFault::kResetWithoutBarrier) ? 2 : 3;
  if (me.step == num_phases * num_peers()) finish_reset(state, rank);
}

void ProtocolRules::finish_reset(ModelState& state, int rank) const {
  ModelRank& me = at(state, rank);
  ++me.generation;
  const bool restarts_at_one = has_fault(ProtocolFault::kEpochsRestartAtOne);
  me.epoch_base = static_cast<Byte>(restarts_at_one ? 1 : me.highest_epoch + 1);
  me.next_round = 0;
  me.stage = {};
  me.round = {};
  me.num_combines = {};
  me.is_failed = 0;
  me.doing = Doing::kNothing;
  me.step = 0;
  me.call = {};
  me.script_at = 0;
  if (state.script_generation < me.generation) {
    state.script_generation = me.generation;
    state.script = {};
    state.script_size = 0;
  }
}

/// Forgets the calls that every rank has begun, so that states that differ in the past only are
/// one.
void ProtocolRules::trim_script(ModelState& state) const {
  Byte begun = state.script_size;
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    ModelRank& me = at(state, rank);
    const bool is_out = me.is_failed != 0 || me.doing == Doing::kReset;
    if (me.generation != state.script_generation || is_out) me.script_at = 0;
    if (me.generation == state.script_generation && is_out) continue;
    begun = std::min(begun, me.script_at);
  }
  if (begun == 0) return;
  std::copy(state.script.begin() + begun, state.script.end(), state.script.begin());
  std::fill(state.script.end() - begun, state.script.end(), ModelCall{});
  state.script_size = static_cast<Byte>(state.script_size - begun);
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    ModelRank& me = at(state, rank);
    me.script_at = static_cast<Byte>(me.script_at - std::min(me.script_at, begun));
  }
}

std::string ProtocolRules::describe(const ModelMove& move, const ModelState& state) const {
  const ModelRank& me = state.ranks[move.rank];
  std::string who = "rank " + std::to_string(move.rank) + ": ";
  const auto named = [](const ModelCall& call) {
    return std::string(name_of(call.call)) + " of round " + std::to_string(call.round);
  };
  switch (move.kind) {
    case ModelMove::Kind::kStep:
      return who + (me.doing == Doing::kReset ? "reset" : named(me.call)) + ", step " +
             std::to_string(me.step);
    case ModelMove::Kind::kStartCall:
    case ModelMove::Kind::kAppendCall:
      return who + "begins " + named(move.call);
    case ModelMove::Kind::kStartReset:
      return who + "begins reset";
    case ModelMove::Kind::kFail:
      return who + named(me.call) + " gives up";
    case ModelMove::Kind::kAbort:
      return who + "abort";
  }
  return who;
}

}  // namespace fanfold::testing
