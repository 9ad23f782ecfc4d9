// SPDX-License-Identifier: Apache-2.0
// The model's calls, step by step.

#include <string>

#include "exchange/protocol_state.h"

namespace fanfold::testing {
namespace {

Byte stamp_of(const ModelRank& rank, int round) {
  return byte(rank.generation * 64 + epoch_of(rank, round));
}
Byte combine_stamp_of(const ModelRank& rank, int round, int slot) {
  return byte(rank.generation * 64 + combine_epoch_of(rank, round, slot));
}

/// Whether `to` takes part in the generation in which `me` publishes something, or soon will.
bool takes_part(const ModelRank& to, const ModelRank& me) {
  if (to.generation != me.generation) return to.generation < me.generation;
  return to.doing != Doing::kReset;
}

std::string breach(int rank, const char* what, int other, int round) {
  return "rank " + std::to_string(rank) + " " + what + " " + std::to_string(other) + " in round " +
         std::to_string(round);
}

}  // namespace

std::string ProtocolRules::write_rows(ModelState& state, int rank, int to,
                                      const ModelCall& call) const {
  const int slot = slot_of(call.round);
  if (at(state, to).generation > at(state, rank).generation) {
    return breach(rank, "writes rows of an older generation to rank", to, call.round);
  }
  if (at(state.rows_in_use, to, rank, slot) != 0) {
    return breach(rank, "overwrites rows that are still in use on rank", to, call.round);
  }
  at(state.rows_stamp, to, rank, slot) = stamp_of(at(state, rank), call.round);
  return {};
}

std::string ProtocolRules::publish_dispatch(ModelState& state, int rank, int to,
                                            const ModelCall& call) const {
  const int slot = slot_of(call.round);
  if (at(state.dispatch_unread, to, rank, slot) != 0) {
    return breach(rank, "overwrites an unread dispatch flag of rank", to, call.round);
  }
  at(state.dispatch_flag, to, rank, slot) = byte(epoch_of(at(state, rank), call.round));
  if (!takes_part(at(state, to), at(state, rank))) return {};
  // A rank that has released the round already neither reads the flag nor uses the rows.
  const Byte epoch = at(state.dispatch_flag, to, rank, slot);
  if (at(state.combine_flag, rank, to, slot) == epoch) return {};
  at(state.dispatch_unread, to, rank, slot) = 1;
  at(state.rows_in_use, to, rank, slot) = 1;
  return {};
}

std::string ProtocolRules::publish_combine(ModelState& state, int rank, int to,
                                           const ModelCall& call) const {
  const int slot = slot_of(call.round);
  if (at(state.combine_unread, to, rank, slot) != 0) {
    return breach(rank, "overwrites an unread combine flag of rank", to, call.round);
  }
  at(state.combine_flag, to, rank, slot) =
      byte(combine_epoch_of(at(state, rank), call.round, slot));
  if (call.call != RoundCall::kCombineSendKeep) {
    at(state.rows_in_use, rank, to, slot) = 0;
    at(state.dispatch_unread, rank, to, slot) = 0;  // will not be read, if it was not
  }
  if (!takes_part(at(state, to), at(state, rank))) return {};
  at(state.combine_unread, to, rank, slot) = 1;
  if (call.call != RoundCall::kRelease && pulls(to)) at(state.partials_in_use, rank, to, slot) = 1;
  return {};
}

std::string ProtocolRules::step_dispatch_send(ModelState& state, int rank,
                                              const ModelCall& call) const {
  ModelRank& me = at(state, rank);
  const int slot = slot_of(call.round);
  if (me.step < num_peers()) {  // of a released round: the peers must have left its rows
    at(state.combine_unread, rank, peer(rank, me.step), slot) = 0;
    ++me.step;
    return {};
  }
  const int index = (me.step - num_peers()) / 2;
  const bool is_first = (me.step - num_peers()) % 2 == 0;
  const int to = peer(rank, index);
  const bool writes = is_first != has_fault(ProtocolFault::kDispatchFlagBeforeRows);
  std::string broken =
      writes ? write_rows(state, rank, to, call) : publish_dispatch(state, rank, to, call);
  if (++me.step == 3 * num_peers()) finish_call(state, rank);
  return broken;
}

std::string ProtocolRules::read_rows(const ModelState& state, int rank,
                                     const ModelCall& call) const {
  for (int i = 0; i < num_peers(); ++i) {
    const int from = peer(rank, i);
    if (at(state.rows_stamp, rank, from, slot_of(call.round)) !=
        stamp_of(at(state, rank), call.round)) {
      return breach(rank, "reads other rows than those of rank", from, call.round);
    }
  }
  return {};
}

std::string ProtocolRules::write_partials(ModelState& state, int rank,
                                          const ModelCall& call) const {
  const int slot = slot_of(call.round);
  for (int i = 0; i < num_peers(); ++i) {
    const int by = peer(rank, i);
    if (at(state.partials_in_use, rank, by, slot) != 0) {
      return breach(rank, "overwrites partials that are yet to be pulled by rank", by, call.round);
    }
  }
  at(state.partials_stamp, rank, slot) = combine_stamp_of(at(state, rank), call.round, slot);
  return {};
}

std::string ProtocolRules::step_dispatch_recv(ModelState& state, int rank,
                                              const ModelCall& call) const {
  ModelRank& me = at(state, rank);
  at(state.dispatch_unread, rank, peer(rank, me.step), slot_of(call.round)) = 0;
  if (++me.step < num_peers()) return {};
  finish_call(state, rank);
  std::string broken = read_rows(state, rank, call);
  // From here on the experts may write their results in place.
  return broken.empty() ? write_partials(state, rank, call) : broken;
}

std::string ProtocolRules::step_combine_send(ModelState& state, int rank,
                                             const ModelCall& call) const {
  ModelRank& me = at(state, rank);
  const int fold_step = has_fault(ProtocolFault::kCombineFlagBeforeRows) ? num_peers() : 0;
  std::string broken;
  if (me.step == fold_step) {
    broken = read_rows(state, rank, call);
    if (broken.empty()) broken = write_partials(state, rank, call);
  } else {
    const int index = fold_step == 0 ? me.step - 1 : me.step;
    broken = publish_combine(state, rank, peer(rank, index), call);
  }
  if (++me.step == 1 + num_peers()) finish_call(state, rank);
  return broken;
}

std::string ProtocolRules::step_combine_recv(ModelState& state, int rank,
                                             const ModelCall& call) const {
  ModelRank& me = at(state, rank);
  const int slot = slot_of(call.round);
  const bool keeps = stage_of(me, slot) == RoundStage::kKeepSent;
  std::string broken;
  if (me.step < num_peers()) {
    at(state.combine_unread, rank, peer(rank, me.step), slot) = 0;
  } else if (me.step < num_pull_steps(rank)) {
    const int from = peer(rank, me.step - num_peers());
    if (at(state.partials_stamp, from, slot) != combine_stamp_of(me, call.round, slot)) {
      broken = breach(rank, "pulls other partials than those of rank", from, call.round);
    }
    at(state.partials_in_use, from, rank, slot) = 0;
  } else {
    broken = step_acknowledge(state, rank, call);
  }
  const int num_ack_phases = !keeps                                                  ? 0
                             : has_fault(ProtocolFault::kKeepWithoutAcknowledgement) ? 1
                                                                                     : 2;
  if (++me.step != num_pull_steps(rank) + num_ack_phases * num_peers()) return broken;
  finish_call(state, rank);
  // The experts may write the results of the next combine in place.
  return broken.empty() && keeps ? write_partials(state, rank, call) : broken;
}

/// Of a round that is kept open: an acknowledgement to each peer, then one from each.
std::string ProtocolRules::step_acknowledge(ModelState& state, int rank,
                                            const ModelCall& call) const {
  ModelRank& me = at(state, rank);
  const int slot = slot_of(call.round);
  const int index = me.step - num_pull_steps(rank);
  const int other = peer(rank, index % num_peers());
  if (index >= num_peers()) {
    at(state.ack_unread, rank, other, slot) = 0;
    return {};
  }
  if (at(state.ack_unread, other, rank, slot) != 0) {
    return breach(rank, "overwrites an unread acknowledgement of rank", other, call.round);
  }
  at(state.ack_flag, other, rank, slot) = byte(combine_epoch_of(me, call.round, slot));
  if (takes_part(at(state, other), me)) at(state.ack_unread, other, rank, slot) = 1;
  return {};
}

std::string ProtocolRules::step_release(ModelState& state, int rank, const ModelCall& call) const {
  ModelRank& me = at(state, rank);
  std::string broken = publish_combine(state, rank, peer(rank, me.step), call);
  if (++me.step == num_peers()) finish_call(state, rank);
  return broken;
}

}  // namespace fanfold::testing
