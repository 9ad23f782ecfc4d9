// SPDX-License-Identifier: Apache-2.0
#include "access.h"

#include "checks.h"
#include "state.h"

namespace cudasim {
namespace {

[[noreturn]] void illegal_address(const std::string& what, PositionId position) {
  report_once("oob", position, [&] {
    return what + " by " + describe(*self()) + " at " + describe_position(position);
  });
  stop_thread(cudaErrorIllegalAddress);
}

std::string verb_and_bytes(bool is_write, std::size_t bytes) {
  return std::string(is_write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes";
}

/// Lets others run at an ordinary access: at random, and where a thread makes very many in a row.
void preempt() {
  constexpr std::size_t kMaxRun = std::size_t{1} << 16;
  const double preempt = engine.config.preempt;
  const bool at_random = preempt > 0 && random_fraction() < preempt;
  if (at_random || engine.stats.accesses % kMaxRun == 0) suspend(FiberState::kReady);
}

}  // namespace

void stop_thread(cudaError_t error) {
  fail_device(*self()->block->run->device, error);
  for (;;) suspend(FiberState::kDead);
}

void access_memory(std::uintptr_t address, std::size_t bytes, bool is_write, Strength strength,
                   PositionId position) {
  if (!is_in_arena(address)) return;
  ++engine.stats.accesses;
  Fiber& fiber = *self();
  const int device = fiber.block->run->device->id;
  const Mapping* const mapping = find_mapping(address);
  if (mapping == nullptr) {
    illegal_address(verb_and_bytes(is_write, bytes) + " at an address without memory", position);
  }
  if (((mapping->devices >> device) & 1) == 0) {
    illegal_address(verb_and_bytes(is_write, bytes) + " where rank " + std::to_string(device) +
                        " has no access (" + mapping->physical->what + " of rank " +
                        std::to_string(mapping->physical->device) + ")",
                    position);
  }
  if (mapping->physical->kind == MemoryKind::kShared && mapping != fiber.block->shared) {
    illegal_address(verb_and_bytes(is_write, bytes) + " of another block's shared memory",
                    position);
  }
  const Accessor accessor{fiber.base, fiber.slot, fiber.clock, device};
  if (!check_access(accessor, *mapping, {address, bytes, is_write, strength, position})) {
    stop_thread(cudaErrorIllegalAddress);
  }
  if (strength == Strength::kWeak) preempt();
}

void op_vector(void* reg, void* memory, unsigned bytes, bool is_write, Loc loc) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  if (address % bytes != 0) {
    report_once("align", position_of(loc), [&] {
      return verb_and_bytes(is_write, bytes) + " at a misaligned address by " + describe(*self()) +
             " at " + describe(loc);
    });
    stop_thread(cudaErrorMisalignedAddress);
  }
  access_memory(address, bytes, is_write, Strength::kWeak, position_of(loc));
  __builtin_memcpy(is_write ? memory : reg, is_write ? reg : memory, bytes);
}

void op_trap(const char* what, Loc loc) {
  self()->loc = loc;
  report("trap", std::string(what) + " by " + describe(*self()) + " at " + describe(loc));
  stop_thread(cudaErrorLaunchFailure);
}

}  // namespace cudasim
