// SPDX-License-Identifier: Apache-2.0
// Warp operations: lanes named in a mask meet. Only kSync orders memory accesses, as CUDA
// documents.

#include <algorithm>

#include "block.h"
#include "state.h"

namespace cudasim {
namespace {

struct Lanes {
  unsigned existing = 0;
  unsigned live = 0;
};

Lanes lanes_of(const Block& block, unsigned warp) {
  Lanes lanes;
  const auto end = static_cast<unsigned>(
      std::min<std::size_t>((warp + 1) * std::size_t{kWarpThreads}, block.threads.size()));
  for (unsigned i = warp * kWarpThreads; i < end; ++i) {
    const unsigned bit = 1u << (i % kWarpThreads);
    lanes.existing |= bit;
    if (block.threads[i]->state != FiberState::kDone) lanes.live |= bit;
  }
  return lanes;
}

bool has_lane(unsigned mask, unsigned lane) { return ((mask >> lane) & 1u) != 0; }

std::uint64_t combined(WarpOp op, std::uint64_t a, std::uint64_t b) {
  const auto signed_of = [](std::uint64_t v) { return static_cast<std::int32_t>(v); };
  switch (op) {
    case WarpOp::kReduceAdd:
      return (a + b) & 0xffffffffu;
    case WarpOp::kReduceMin:
      return std::min(a, b);
    case WarpOp::kReduceMax:
      return std::max(a, b);
    case WarpOp::kReduceMinSigned:
      return signed_of(b) < signed_of(a) ? b : a;
    case WarpOp::kReduceMaxSigned:
      return signed_of(a) < signed_of(b) ? b : a;
    case WarpOp::kReduceAnd:
      return a & b;
    case WarpOp::kReduceOr:
      return a | b;
    default:
      return a ^ b;
  }
}

std::uint64_t reduction(const WarpMeeting& meeting) {
  const auto first = static_cast<unsigned>(__builtin_ctz(meeting.mask));
  std::uint64_t all = meeting.values[first];
  for (unsigned lane = first + 1; lane < kWarpThreads; ++lane) {
    if (has_lane(meeting.mask, lane)) all = combined(meeting.op, all, meeting.values[lane]);
  }
  return all;
}

/// The lanes whose value satisfies the predicate.
template <class F>
std::uint64_t lanes_where(const WarpMeeting& meeting, F&& predicate) {
  std::uint64_t lanes = 0;
  for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
    if (has_lane(meeting.mask, lane) && predicate(meeting.values[lane])) lanes |= 1ull << lane;
  }
  return lanes;
}

std::uint64_t result_for(const WarpMeeting& meeting, unsigned lane) {
  const auto equals_mine = [&](std::uint64_t v) { return v == meeting.values[lane]; };
  switch (meeting.op) {
    case WarpOp::kSync:
      return 0;
    case WarpOp::kShuffle: {
      // What a lane outside the mask would give is undefined: the reader's own value.
      const unsigned source = static_cast<unsigned>(meeting.sources[lane]) % kWarpThreads;
      return meeting.values[has_lane(meeting.mask, source) ? source : lane];
    }
    case WarpOp::kBallot:
      return lanes_where(meeting, [](std::uint64_t v) { return v != 0; });
    case WarpOp::kMatchAny:
      return lanes_where(meeting, equals_mine);
    case WarpOp::kMatchAll:
      return lanes_where(meeting, equals_mine) == meeting.mask ? meeting.mask : 0;
    default:
      return reduction(meeting);
  }
}

/// The meeting that the running lane is to join, perhaps a new one.
std::list<WarpMeeting>::iterator find_meeting(std::list<WarpMeeting>& meetings, unsigned mask,
                                              unsigned bit, WarpOp op, Loc loc) {
  const auto found = std::find_if(meetings.begin(), meetings.end(), [&](const WarpMeeting& m) {
    return m.mask == mask && (m.arrived & bit) == 0;
  });
  if (found != meetings.end()) return found;
  WarpMeeting& fresh = meetings.emplace_back();
  fresh.mask = mask;
  fresh.op = op;
  fresh.loc = loc;
  return std::prev(meetings.end());
}

void check_mask(unsigned mask, unsigned bit, const Lanes& lanes, Loc loc) {
  if ((mask & bit) == 0) {
    report("warp", "lane is not in its own mask at " + describe(loc) + ": " + describe(*self()));
  }
  if ((mask & lanes.existing & ~lanes.live) != 0) {
    report("warp", "mask at " + describe(loc) +
                       " names lanes that have left the kernel: " + describe(*self()));
  }
}

/// All lanes are there: each gets its result; the others can go on.
void complete(WarpMeeting& meeting, Fiber& running) {
  for (Fiber* const fiber : meeting.waiting) fiber->result = result_for(meeting, fiber->lane);
  running.result = result_for(meeting, running.lane);
  for (Fiber* const fiber : meeting.waiting) {
    fiber->state = FiberState::kReady;
    engine.ready.push_back(fiber);
  }
  if (meeting.op == WarpOp::kSync) {
    std::vector<Fiber*> all = meeting.waiting;
    all.push_back(&running);
    join_clocks(all, {});
  }
  engine.has_met = true;
}

}  // namespace

std::uint64_t op_warp(WarpOp op, unsigned mask, std::uint64_t value, int source, Loc loc) {
  Fiber& fiber = *self();
  const unsigned warp = fiber.index / kWarpThreads;
  const unsigned bit = 1u << fiber.lane;
  const Lanes lanes = lanes_of(*fiber.block, warp);
  fiber.loc = loc;
  check_mask(mask, bit, lanes, loc);
  auto& meetings = fiber.block->meetings[warp];
  const auto meeting = find_meeting(meetings, (mask & lanes.live) | bit, bit, op, loc);
  const bool is_other_call = op != WarpOp::kSync && meeting->loc.line != loc.line;
  if (meeting->op != op || is_other_call) {
    report("warp", "lanes of one mask meet in different warp operations: at " +
                       describe(meeting->loc) + " and at " + describe(loc) + " by " +
                       describe(fiber));
  }
  meeting->arrived |= bit;
  meeting->values[fiber.lane] = value;
  meeting->sources[fiber.lane] = source;
  if (meeting->arrived != meeting->mask) {
    meeting->waiting.push_back(&fiber);
    suspend(FiberState::kWarp);
    return fiber.result;
  }
  complete(*meeting, fiber);
  meetings.erase(meeting);
  const std::uint64_t result = fiber.result;
  maybe_yield();
  return result;
}

unsigned op_active_mask() {
  const Fiber& fiber = *self();
  return lanes_of(*fiber.block, fiber.index / kWarpThreads).live;
}

}  // namespace cudasim
