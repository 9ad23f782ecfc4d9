// SPDX-License-Identifier: Apache-2.0
#include "exec/flag_line.h"

#include "base/clock.h"
#include "base/format.h"

namespace fanfold::exec {
namespace {

template <class Value>
std::string differ(const char* what, int rank, const Value& mine, int peer, const Value& got) {
  return base::str(what, ": rank ", rank, " has ", mine, ", rank ", peer, " has ", got);
}

}  // namespace

const char* name_of(CallKind kind) noexcept {
  switch (kind) {
    case CallKind::kNone:
      return "nothing";
    case CallKind::kDispatch:
      return "dispatch";
    case CallKind::kDispatchRouted:
      return "dispatch(routing=)";
    case CallKind::kCombine:
      return "combine";
    case CallKind::kCombineKeep:
      return "combine(release=False)";
    case CallKind::kRelease:
      return "release";
    case CallKind::kAck:
      return "acknowledgement";
  }
  return "unknown";
}

void publish(FlagLine& line, const FlagFields& fields) noexcept {
  FlagFields sent = fields;
  // Before the first store: fetching the line is part of the way.
  sent.sent_ns = base::now_ns();
  for (int i = 1; i < kFlagWords; ++i) {
    line.words[i].store(flag_word(sent, i), std::memory_order_relaxed);
  }
  line.words[0].store(sent.epoch, std::memory_order_release);
}

FlagFields read(const FlagLine& line) noexcept {
  std::uint64_t words[kFlagWords];
  for (int i = 0; i < kFlagWords; ++i) words[i] = line.words[i].load(std::memory_order_relaxed);
  return flag_fields(words);
}

std::string difference(const FlagFields& mine, int rank, const FlagFields& got, int peer) {
  if (got.kind != mine.kind) {
    return differ<std::string>("call", rank, name_of(mine.kind), peer, name_of(got.kind));
  }
  if (got.generation != mine.generation) {
    return differ("generation", rank, mine.generation, peer, got.generation);
  }
  if (got.member != mine.member) {
    return differ("AllToAll of the shared workspace, in order of creation", rank, mine.member, peer,
                  got.member);
  }
  if (got.round_max_tokens != mine.round_max_tokens) {
    return differ("round_max_tokens", rank, mine.round_max_tokens, peer, got.round_max_tokens);
  }
  if (got.placement_version != mine.placement_version) {
    return differ("placement version", rank, mine.placement_version, peer, got.placement_version);
  }
  if (got.mask_digest != mine.mask_digest) {
    return differ("digest of the active mask", rank, mine.mask_digest, peer, got.mask_digest);
  }
  if (got.num_payloads != mine.num_payloads) {
    const bool combine = mine.kind == CallKind::kCombine || mine.kind == CallKind::kCombineKeep;
    return differ(combine ? "hidden of the combine" : "number of payloads", rank, mine.num_payloads,
                  peer, got.num_payloads);
  }
  if (got.routing != mine.routing) {
    return differ("routing that is re-used", rank, mine.routing, peer, got.routing);
  }
  if (got.digest != mine.digest) {
    return differ("digest of the payload set (row bytes, dtypes, weights)", rank, mine.digest, peer,
                  got.digest);
  }
  return {};
}

std::string call_difference(const FlagFields& mine, int rank, const FlagFields& got, int peer,
                            std::uint64_t first_epoch) {
  if (got.kind != mine.kind || got.epoch == mine.epoch) return difference(mine, rank, got, peer);
  const std::int64_t my_round = round_of(mine.epoch, first_epoch);
  const std::int64_t their_round = round_of(got.epoch, first_epoch);
  if (my_round != their_round) return differ("round", rank, my_round, peer, their_round);
  return differ("earlier combines of the round", rank, mine.epoch >> 48, peer, got.epoch >> 48);
}

}  // namespace fanfold::exec
