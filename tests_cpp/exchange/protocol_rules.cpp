// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "exchange/protocol_state.h"

namespace fanfold::testing {
ModelState ProtocolRules::initial() const {
  ModelState state{};
  for (ModelRank& rank : state.ranks) rank.epoch_base = 1;
  state.aborts_left = byte(options_.num_aborts);
  return state;
}

bool ProtocolRules::allows(const ModelRank& rank, const ModelCall& call) const {
  const RoundStage stage = stage_of(rank, slot_of(call.round));
  if (call.call == RoundCall::kDispatchSend) {
    if (call.round != rank.next_round || call.round >= options_.num_rounds) return false;
    return has_fault(ProtocolFault::kDispatchSendIgnoresOpenSlot) || is_allowed(stage, call.call);
  }
  if (rank.round[static_cast<std::size_t>(slot_of(call.round))] != call.round) return false;
  if (call.call == RoundCall::kRelease && stage == RoundStage::kSent) {
    return has_fault(ProtocolFault::kReleaseBeforeReceive);
  }
  if (call.call == RoundCall::kCombineSendKeep &&
      (!options_.keeps_open ||
       rank.num_combines[static_cast<std::size_t>(slot_of(call.round))] != 0)) {
    return false;
  }
  return is_allowed(stage, call.call);
}

void ProtocolRules::list_calls(const ModelRank& rank, Byte index,
                               std::vector<ModelMove>& out) const {
  const auto offer = [&](RoundCall call, int round) {
    const ModelCall candidate{call, byte(round)};
    if (allows(rank, candidate)) out.push_back({index, ModelMove::Kind::kAppendCall, candidate});
  };
  offer(RoundCall::kDispatchSend, rank.next_round);
  const int oldest = std::max(0, rank.next_round - options_.max_in_flight);
  for (int round = oldest; round < rank.next_round; ++round) {
    for (const RoundCall call :
         {RoundCall::kDispatchRecv, RoundCall::kCombineSend, RoundCall::kCombineSendKeep,
          RoundCall::kCombineRecv, RoundCall::kRelease}) {
      offer(call, round);
    }
  }
}

bool ProtocolRules::is_waiting(const ModelState& state, int rank, bool* is_ready) const {
  const ModelRank& me = at(state, rank);
  *is_ready = true;
  if (me.doing == Doing::kReset) {
    if (me.step < 2 * num_peers()) return false;
    const int from = peer(rank, me.step - 2 * num_peers());
    *is_ready = at(state.reset_generation, rank, from) > me.generation &&
                state.aborter != rank + 1;  // the generation stands still while it aborts
    return true;
  }
  if (me.doing != Doing::kCall) return false;
  const int slot = slot_of(me.call.round);
  if (me.call.call == RoundCall::kCombineRecv && me.step >= num_pull_steps(rank) + num_peers()) {
    const int acknowledging = peer(rank, me.step - num_pull_steps(rank) - num_peers());
    *is_ready =
        at(state.ack_flag, rank, acknowledging, slot) == combine_epoch_of(me, me.call.round, slot);
    return true;
  }
  if (me.step >= num_peers()) return false;
  const int from = peer(rank, me.step);
  switch (me.call.call) {
    case RoundCall::kDispatchSend: {  // only the steps before num_peers(): of a released slot
      const int previous = me.round[static_cast<std::size_t>(slot)];
      *is_ready = at(state.combine_flag, rank, from, slot) == combine_epoch_of(me, previous, slot);
      return true;
    }
    case RoundCall::kDispatchRecv:
      if (has_fault(ProtocolFault::kDispatchRecvSkipsAPeer) && me.step == 0) return false;
      *is_ready = at(state.dispatch_flag, rank, from, slot) == epoch_of(me, me.call.round);
      return true;
    case RoundCall::kCombineRecv:
      if (has_fault(ProtocolFault::kCombineRecvWaitsForSourcesOnly) && !pulls(rank)) return false;
      *is_ready =
          at(state.combine_flag, rank, from, slot) == combine_epoch_of(me, me.call.round, slot);
      return true;
    case RoundCall::kCombineSend:
    case RoundCall::kCombineSendKeep:
    case RoundCall::kRelease:
      break;
  }
  return false;
}

void ProtocolRules::moves(const ModelState& state, std::vector<ModelMove>& out) const {
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    const ModelRank& me = at(state, rank);
    const Byte index = byte(rank);
    const bool may_fail = me.generation < options_.num_resets;
    if (me.doing != Doing::kNothing) {
      bool is_ready = true;
      const bool is_wait = is_waiting(state, rank, &is_ready);
      if (is_ready) out.push_back({index, ModelMove::Kind::kStep, {}});
      const bool is_aborted = me.abort_word == me.generation + 1;
      if (is_wait && me.doing == Doing::kCall && may_fail &&
          (is_aborted || options_.waits_time_out)) {
        out.push_back({index, ModelMove::Kind::kFail, {}});
      }
    } else {
      if (me.is_failed == 0 && me.generation == state.script_generation) {
        if (me.script_at < state.script_size) {
          out.push_back({index, ModelMove::Kind::kStartCall, state.script[me.script_at]});
        } else {
          list_calls(me, index, out);
        }
      }
      if (may_fail) out.push_back({index, ModelMove::Kind::kStartReset, {}});
    }
    const bool starts_abort = state.aborter == 0 && state.aborts_left > 0 && may_fail;
    if (starts_abort || state.aborter == rank + 1) {
      out.push_back({index, ModelMove::Kind::kAbort, {}});
    }
  }
}

bool ProtocolRules::is_finished(const ModelState& state) const {
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    const ModelRank& me = at(state, rank);
    if (me.generation != options_.num_resets || me.doing != Doing::kNothing || me.is_failed != 0 ||
        me.next_round != options_.num_rounds || me.script_at != state.script_size) {
      return false;
    }
    for (int slot = 0; slot < options_.max_in_flight; ++slot) {
      const RoundStage stage = stage_of(me, slot);
      if (stage != RoundStage::kFree && stage != RoundStage::kReleased) return false;
    }
  }
  return state.aborter == 0;
}

std::string ProtocolRules::take(const ModelMove& move, ModelState& state) const {
  ModelRank& me = at(state, move.rank);
  std::string broken;
  switch (move.kind) {
    case ModelMove::Kind::kStep:
      if (me.doing == Doing::kReset) {
        step_reset(state, move.rank);
      } else {
        broken = step_call(state, move.rank);
      }
      break;
    case ModelMove::Kind::kAppendCall:
      state.script[state.script_size++] = move.call;
      start_call(state, move.rank, move.call);
      break;
    case ModelMove::Kind::kStartCall:
      if (!allows(me, move.call)) return "a rank may not take the step that another rank took";
      start_call(state, move.rank, move.call);
      break;
    case ModelMove::Kind::kStartReset:
      me.doing = Doing::kReset;
      me.step = 0;
      me.abort_word = std::max(me.abort_word, byte(me.generation + 1));
      give_up_generation(state, move.rank);
      break;
    case ModelMove::Kind::kFail:
      me.is_failed = 1;
      me.doing = Doing::kNothing;
      me.step = 0;
      me.call = {};
      break;
    case ModelMove::Kind::kAbort:
      go_on_with_abort(state, move.rank);
      break;
  }
  trim_script(state);
  return broken;
}

void ProtocolRules::start_call(ModelState& state, int rank, const ModelCall& call) const {
  ModelRank& me = at(state, rank);
  me.doing = Doing::kCall;
  me.call = call;
  me.step = 0;
  ++me.script_at;
  if (call.call != RoundCall::kDispatchSend) return;
  me.highest_epoch = std::max(me.highest_epoch, byte(epoch_of(me, call.round)));
  const bool must_settle = stage_of(me, slot_of(call.round)) == RoundStage::kReleased &&
                           !has_fault(ProtocolFault::kDispatchSendIgnoresReleasedSlot);
  if (!must_settle) me.step = byte(num_peers());
}

void ProtocolRules::go_on_with_abort(ModelState& state, int rank) const {
  if (state.aborter == 0) {
    state.aborter = byte(rank + 1);
    --state.aborts_left;
    return;
  }
  ModelRank& reached = at(state, state.abort_at);
  reached.abort_word = std::max(reached.abort_word, byte(at(state, rank).generation + 1));
  if (++state.abort_at == options_.num_ranks) state.aborter = state.abort_at = 0;
}

std::string ProtocolRules::step_call(ModelState& state, int rank) const {
  const ModelCall call = at(state, rank).call;
  switch (call.call) {
    case RoundCall::kDispatchSend:
      return step_dispatch_send(state, rank, call);
    case RoundCall::kDispatchRecv:
      return step_dispatch_recv(state, rank, call);
    case RoundCall::kCombineSend:
    case RoundCall::kCombineSendKeep:
      return step_combine_send(state, rank, call);
    case RoundCall::kCombineRecv:
      return step_combine_recv(state, rank, call);
    case RoundCall::kRelease:
      return step_release(state, rank, call);
  }
  return {};
}

void ProtocolRules::finish_call(ModelState& state, int rank) const {
  ModelRank& me = at(state, rank);
  const auto slot = static_cast<std::size_t>(slot_of(me.call.round));
  me.stage[slot] =
      static_cast<Byte>(stage_after(stage_of(me, static_cast<int>(slot)), me.call.call));
  if (me.call.call == RoundCall::kCombineRecv) ++me.num_combines[slot];
  if (me.call.call == RoundCall::kDispatchSend) {
    me.round[slot] = me.call.round;
    me.num_combines[slot] = 0;
    ++me.next_round;
  }
  me.doing = Doing::kNothing;
  me.step = 0;
  me.call = {};
}

}  // namespace fanfold::testing
