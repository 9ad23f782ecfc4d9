// SPDX-License-Identifier: Apache-2.0
// The switch of stacks that this program was linked with.
#include "switch.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace cudasim {
namespace {

constexpr int kNumFibers = 5;
constexpr int kNumTurns = 200;

/// What the flows of control share; `turns` counts those of all.
struct Turns {
  Continuation caller;
  std::array<Continuation, kNumFibers> fibers;
  std::array<std::uint64_t, kNumFibers> sums{};
  int current = 0;
  int turns = 0;
};
Turns* shared = nullptr;

/// Locals that a switch must keep: on the stack, in registers, in floating-point ones.
void take_turns() {
  const int me = shared->current;
  std::array<std::uint64_t, 64> on_stack{};
  std::uint64_t sum = 0;
  double halves = 0;
  for (std::uint64_t turn = 1;; ++turn) {
    on_stack[turn % on_stack.size()] += turn * static_cast<std::uint64_t>(me + 1);
    sum += turn * static_cast<std::uint64_t>(me + 1);
    halves += 0.5;
    ++shared->turns;
    const auto fiber = static_cast<std::size_t>(me);
    shared->sums[fiber] = sum;
    switch_stack(shared->fibers[fiber], shared->caller);
    std::uint64_t kept = 0;
    for (const std::uint64_t part : on_stack) kept += part;
    if (kept != sum || halves * 2 != static_cast<double>(turn)) std::abort();
  }
}

TEST(SwitchTest, EveryFlowOfControlKeepsWhatIsItsOwn) {
  constexpr std::size_t kStackBytes = 256 << 10;
  static Turns turns;  // continuations are never freed
  shared = &turns;
  std::vector<std::vector<char>> stacks(kNumFibers, std::vector<char>(kStackBytes));
  for (int fiber = 0; fiber < kNumFibers; ++fiber) {
    const auto at = static_cast<std::size_t>(fiber);
    prepare(turns.fibers[at], stacks[at].data(), kStackBytes, &take_turns);
  }
  for (int turn = 1; turn <= kNumTurns; ++turn) {
    for (int fiber = 0; fiber < kNumFibers; ++fiber) {
      turns.current = fiber;
      const auto at = static_cast<std::size_t>(fiber);
      switch_stack(turns.caller, turns.fibers[at]);
      const auto last = static_cast<std::uint64_t>(turn);
      ASSERT_EQ(turns.sums[at], last * (last + 1) / 2 * (at + 1));
    }
  }
  EXPECT_EQ(turns.turns, kNumFibers * kNumTurns);
  // A prepared one begins anew, wherever it was.
  turns.current = 0;
  prepare(turns.fibers[0], stacks[0].data(), kStackBytes, &take_turns);
  switch_stack(turns.caller, turns.fibers[0]);
  EXPECT_EQ(turns.sums[0], 1U);
}

}  // namespace
}  // namespace cudasim
