// SPDX-License-Identifier: Apache-2.0
// Strong operations: loads, stores and read-modify-writes with an order and a scope, and fences.
// What orders what follows the PTX memory model, as README.md says.

#include <algorithm>

#include "access.h"
#include "block.h"
#include "state.h"

namespace cudasim {

Release snapshot(const Fiber& fiber, Scope scope) {
  return {fiber.base,     fiber.slot, fiber.clock, scope, fiber.block->run->device->id,
          fiber.block->id};
}

void acquire(Fiber& fiber, const Release& release) {
  if (release.slot == fiber.slot || value_of(fiber.base, release.slot) >= release.clock) return;
  fiber.base = raised(joined(fiber.base, release.base), release.slot, release.clock);
}

namespace {

/// Values that a stale load may go back to.
constexpr std::size_t kMaxHistory = 8;

bool acquires(Order order) { return order == Order::kAcquire || order == Order::kAcqRel; }
bool releases(Order order) { return order == Order::kRelease || order == Order::kAcqRel; }

/// Does each of release and reader lie in the other's scope?
bool covers(const Release& release, const Fiber& fiber, Scope reader) {
  switch (std::min(release.scope, reader)) {
    case Scope::kSys:
      return true;
    case Scope::kGpu:
      return release.device == fiber.block->run->device->id;
    default:
      return release.block == fiber.block->id;
  }
}

// Atomic also for other processes.
std::uint64_t load_raw(const void* address, unsigned bytes) {
  return bytes == 4 ? __atomic_load_n(static_cast<const std::uint32_t*>(address), __ATOMIC_SEQ_CST)
                    : __atomic_load_n(static_cast<const std::uint64_t*>(address), __ATOMIC_SEQ_CST);
}

void store_raw(void* address, std::uint64_t value, unsigned bytes) {
  if (bytes == 4) {
    __atomic_store_n(static_cast<std::uint32_t*>(address), static_cast<std::uint32_t>(value),
                     __ATOMIC_SEQ_CST);
  } else {
    __atomic_store_n(static_cast<std::uint64_t*>(address), value, __ATOMIC_SEQ_CST);
  }
}

bool exchange_raw(void* address, std::uint64_t& expected, std::uint64_t value, unsigned bytes) {
  if (bytes == 8) {
    return __atomic_compare_exchange_n(static_cast<std::uint64_t*>(address), &expected, value,
                                       false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  }
  auto old = static_cast<std::uint32_t>(expected);
  const bool done = __atomic_compare_exchange_n(static_cast<std::uint32_t*>(address), &old,
                                                static_cast<std::uint32_t>(value), false,
                                                __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  expected = old;
  return done;
}

/// What the read-modify-write makes of `old`, in type T.
template <class T>
T modified(Rmw kind, T old, T value, T expected) {
  switch (kind) {
    case Rmw::kExchange:
      return value;
    case Rmw::kCompareExchange:
      return old == expected ? value : old;
    case Rmw::kMax:
      return std::max(old, value);
    case Rmw::kMin:
      return std::min(old, value);
    default:
      return static_cast<T>(old + value);
  }
}

template <class T>
T modified_bits(Rmw kind, T old, T value) {
  switch (kind) {
    case Rmw::kOr:
      return old | value;
    case Rmw::kAnd:
      return old & value;
    case Rmw::kXor:
      return old ^ value;
    case Rmw::kIncrement:
      return old >= value ? T{0} : static_cast<T>(old + 1);
    default:  // kDecrement
      return old == 0 || old > value ? value : static_cast<T>(old - 1);
  }
}

template <class U, class S, class F>
std::uint64_t modified_as(Rmw kind, std::uint64_t old, const RmwArguments& arguments) {
  const auto old_value = static_cast<U>(old);
  const auto value = static_cast<U>(arguments.value);
  const auto expected = static_cast<U>(arguments.expected);
  if (kind == Rmw::kAddFloat) {
    return to_bits(from_bits<F>(old) + from_bits<F>(arguments.value));
  }
  if (kind >= Rmw::kOr) return modified_bits<U>(kind, old_value, value);
  if (arguments.is_signed && (kind == Rmw::kMax || kind == Rmw::kMin)) {
    return static_cast<U>(modified<S>(kind, static_cast<S>(old_value), static_cast<S>(value), 0));
  }
  return modified<U>(kind, old_value, value, expected);
}

std::uint64_t modified(Rmw kind, std::uint64_t old, const RmwArguments& arguments, unsigned bytes) {
  return bytes == 4 ? modified_as<std::uint32_t, std::int32_t, float>(kind, old, arguments)
                    : modified_as<std::uint64_t, std::int64_t, double>(kind, old, arguments);
}

/// What is known of the location, null where nothing needs to be.
StrongLocation* location_of(const void* address) {
  if (!engine.config.race && engine.config.stale <= 0) return nullptr;
  const Mapping* const mapping = find_mapping(address);
  if (mapping == nullptr) return nullptr;
  return &mapping->physical->strong[mapping->offset_of(reinterpret_cast<std::uintptr_t>(address))];
}

bool may_be_stale(const void* address) {
  if (engine.config.stale <= 0 || engine.config.multiprocess) return false;
  return find_mapping(address)->physical->kind != MemoryKind::kHost;
}

/// In host memory a value that no kernel has stored is the host's, which publishes all it knew.
void take_host_store(StrongLocation& location, const void* address, std::uint64_t value) {
  if (find_mapping(address)->physical->kind != MemoryKind::kHost) return;
  if (location.has_last_value && location.last_value == value) return;
  location.has_last_value = true;
  location.last_value = value;
  const ClockPointer host = host_snapshot();
  location.releases = {{host, kHostSlot, value_of(host, kHostSlot), Scope::kSys, -1, 0}};
}

/// Remembers a release for a later fence: the latest of each thread, so that long polls cost
/// nothing.
void remember(Fiber& fiber, const void* address, const Release& release, Scope reader) {
  if (value_of(fiber.base, release.slot) >= release.clock) return;
  for (Observation& old : fiber.observations) {
    if (old.location != address || old.reader != reader || old.release.slot != release.slot ||
        old.release.scope != release.scope) {
      continue;
    }
    if (old.release.clock < release.clock) old.release = release;
    return;
  }
  fiber.observations.push_back({address, reader, release});
}

/// Takes the remembered releases that `is_meant` and the scopes allow.
template <class F>
void take_observations(Fiber& fiber, Scope scope, F&& is_meant) {
  auto& list = fiber.observations;
  const auto is_taken = [&](const Observation& seen) {
    if (!is_meant(seen) || !covers(seen.release, fiber, std::min(seen.reader, scope))) return false;
    acquire(fiber, seen.release);
    return true;
  };
  list.erase(std::remove_if(list.begin(), list.end(), is_taken), list.end());
}

/// The running thread has read the value that `releases` published.
void observe(Fiber& fiber, const void* address, const std::vector<Release>& published, Order order,
             Scope scope) {
  for (auto it = published.rbegin(); it != published.rend(); ++it) {
    if (!acquires(order)) {
      remember(fiber, address, *it, scope);
    } else if (covers(*it, fiber, scope)) {
      acquire(fiber, *it);
    }
  }
  if (acquires(order)) {
    take_observations(fiber, scope,
                      [&](const Observation& seen) { return seen.location == address; });
  }
}

/// Drops what an observer of `fresh` learns anyway.
void drop_implied(std::vector<Release>& published, const Release& fresh) {
  const auto is_implied = [&](const Release& old) {
    if (old.scope > fresh.scope) return false;
    const bool same_reach =
        fresh.scope == Scope::kSys ||
        (old.device == fresh.device && (fresh.scope == Scope::kGpu || old.block == fresh.block));
    if (!same_reach) return false;
    if (old.slot == fresh.slot) return old.clock <= fresh.clock;
    return value_of(fresh.base, old.slot) >= old.clock;
  };
  published.erase(std::remove_if(published.begin(), published.end(), is_implied), published.end());
}

void add_release(std::vector<Release>& published, const Release& fresh) {
  drop_implied(published, fresh);
  published.push_back(fresh);
}

/// The running thread stores a value: what will its observers learn?
void publish(Fiber& fiber, StrongLocation& location, Order order, Scope scope, bool is_rmw) {
  auto& published = location.releases;
  if (!is_rmw) {
    // A thread's own earlier release of the location goes on through its later strong stores.
    published.erase(std::remove_if(published.begin(), published.end(),
                                   [&](const Release& r) { return r.slot != fiber.slot; }),
                    published.end());
    for (Release& own : published) own.scope = std::min(own.scope, scope);
  }
  if (fiber.has_fence) {
    for (const Release& fence : fiber.fences) {
      if (fence.clock == 0) continue;
      Release release = fence;
      release.scope = std::min(fence.scope, scope);
      add_release(published, release);
    }
  }
  if (releases(order)) {
    add_release(published, snapshot(fiber, scope));
    ++fiber.clock;
  }
}

/// Keeps the value that is about to be replaced, for stale loads.
void keep_old_value(StrongLocation& location, const Fiber& fiber, std::uint64_t value) {
  location.history.push_back({value, location.releases, fiber.slot, fiber.clock});
  if (location.history.size() > kMaxHistory) {
    location.history.pop_front();
    ++location.num_forgotten;
  }
  location.seen[fiber.slot] = location.num_forgotten + location.history.size();
}

/// Number of values before the one that the load is to return.
std::size_t choose_value(StrongLocation& location, const Fiber& fiber) {
  const std::size_t latest = location.num_forgotten + location.history.size();
  std::size_t chosen = latest;
  if (random_fraction() < engine.config.stale) {
    const std::size_t oldest = std::max(location.num_forgotten, location.seen[fiber.slot]);
    while (chosen > oldest) {
      const auto& older = location.history[chosen - 1 - location.num_forgotten];
      // The thread knows of the newer store: coherence.
      const bool must_see = older.next_slot == fiber.slot ||
                            value_of(fiber.base, older.next_slot) >= older.next_clock;
      if (must_see) break;
      --chosen;
      if (random_fraction() < 0.5) break;
    }
  }
  location.seen[fiber.slot] = chosen;
  if (chosen < latest) engine.has_progress = true;  // the next look may show more
  return chosen;
}

/// The running thread is about to make a strong operation.
Fiber& begin_operation(Loc loc) {
  Fiber& fiber = *self();
  fiber.loc = loc;
  fiber.polls.timer_reads = 0;
  ++engine.stats.strong_ops;
  return fiber;
}

void check_address(const void* address, unsigned bytes, bool is_write, Scope scope, Loc loc) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  if (value % bytes != 0) {
    report_once("align", position_of(loc), [&] {
      return "strong operation of " + std::to_string(bytes) + " bytes at a misaligned address by " +
             describe(*self()) + " at " + describe(loc);
    });
    stop_thread(cudaErrorMisalignedAddress);
  }
  access_memory(value, bytes, is_write, strength_of(scope), position_of(loc));
}

}  // namespace

std::uint64_t op_load(const void* address, unsigned bytes, Order order, Scope scope, Loc loc) {
  Fiber& fiber = begin_operation(loc);
  if (fiber.polls.has(address) && fiber.polls.knows(address, load_raw(address, bytes))) {
    suspend(FiberState::kPolling);
  } else {
    maybe_yield();
  }
  check_address(address, bytes, false, scope, loc);
  std::uint64_t value = load_raw(address, bytes);
  if (StrongLocation* const location = location_of(address)) {
    take_host_store(*location, address, value);
    const std::size_t latest = location->num_forgotten + location->history.size();
    const std::size_t chosen = may_be_stale(address) ? choose_value(*location, fiber) : latest;
    if (chosen < latest) {
      const auto& older = location->history[chosen - location->num_forgotten];
      value = older.value;
      observe(fiber, address, older.releases, order, scope);
    } else {
      observe(fiber, address, location->releases, order, scope);
    }
  }
  fiber.polls.add(address, value);
  return value;
}

void op_store(void* address, std::uint64_t value, unsigned bytes, Order order, Scope scope,
              Loc loc) {
  Fiber& fiber = begin_operation(loc);
  maybe_yield();
  check_address(address, bytes, true, scope, loc);
  if (StrongLocation* const location = location_of(address)) {
    if (may_be_stale(address)) keep_old_value(*location, fiber, load_raw(address, bytes));
    publish(fiber, *location, order, scope, false);
    location->has_last_value = true;
    location->last_value = value;
  }
  store_raw(address, value, bytes);
  fiber.polls.clear();
  made_progress();
  maybe_yield();
}

std::uint64_t op_rmw(void* address, const RmwArguments& arguments, unsigned bytes, Rmw kind,
                     Order order, Scope scope, Loc loc) {
  Fiber& fiber = begin_operation(loc);
  const auto result_of = [&](std::uint64_t v) { return modified(kind, v, arguments, bytes); };
  if (fiber.polls.has(address)) {
    const std::uint64_t now = load_raw(address, bytes);
    if (fiber.polls.knows(address, now) && result_of(now) == now) suspend(FiberState::kPolling);
  }
  maybe_yield();
  const bool is_compare = kind == Rmw::kCompareExchange;
  check_address(address, bytes, !is_compare, scope, loc);
  std::uint64_t old = load_raw(address, bytes);
  const bool stores = !is_compare || old == arguments.expected;  // else it is a load
  if (is_compare && stores) check_address(address, bytes, true, scope, loc);
  StrongLocation* const location = location_of(address);
  if (location != nullptr) {
    take_host_store(*location, address, old);
    observe(fiber, address, location->releases, order, scope);
    if (stores && may_be_stale(address)) keep_old_value(*location, fiber, old);
    if (stores) publish(fiber, *location, order, scope, true);
  }
  while (!exchange_raw(address, old, result_of(old), bytes)) {
  }
  const std::uint64_t value = result_of(old);
  if (location != nullptr) {
    location->has_last_value = true;
    location->last_value = value;
  }
  if (value == old) {
    fiber.polls.add(address, old);
  } else {
    fiber.polls.clear();
    made_progress();
  }
  maybe_yield();
  return old;
}

void op_fence(Order order, Scope scope, Loc loc) {
  Fiber& fiber = *self();
  fiber.loc = loc;
  if (engine.config.race && order != Order::kRelaxed) {
    take_observations(fiber, scope, [](const Observation&) { return true; });
    fiber.fences[static_cast<std::size_t>(scope)] = snapshot(fiber, scope);
    fiber.has_fence = true;
    ++fiber.clock;
  }
  maybe_yield();
}

std::uint64_t op_globaltimer() {
  // Whoever only looks at the clock lets time pass.
  constexpr int kMaxReads = 64;
  Fiber& fiber = *self();
  if (++fiber.polls.timer_reads > kMaxReads) suspend(FiberState::kPolling);
  return engine.now_ns;
}

void op_nanosleep(unsigned ns, Loc loc) {
  Fiber& fiber = *self();
  if (fiber.polls.seen.empty()) fiber.loc = loc;  // else what it waits for says more
  const std::uint64_t end_ns = engine.now_ns + ns;
  do {
    suspend(FiberState::kPolling);
  } while (engine.now_ns < end_ns);
}

}  // namespace cudasim
