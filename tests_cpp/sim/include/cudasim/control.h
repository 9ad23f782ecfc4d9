// SPDX-License-Identifier: Apache-2.0
#pragma once

// What tests use to steer the simulated devices and to read what was found. Neither kernels nor the
// code under test include this.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cudasim/driver_config.h"

namespace cudasim {

/// How the devices behave from configure() on. Equal configurations give equal runs, as long as one
/// host thread drives them.
struct Config {
  std::uint64_t seed = 1;
  int devices = 1;
  /// Blocks that a device holds at a time, of all its kernels; also its number of multiprocessors.
  int resident_blocks = 16;
  /// Issues the blocks of a kernel in random order.
  bool shuffle_blocks = false;
  /// Chooses the next thread at random, else in turn.
  bool random_schedule = true;
  /// Probability of a switch to another thread at an ordinary memory access.
  double preempt = 0.0;
  /// Probability that a strong load returns an older value that the memory model allows. 0 where
  /// accesses are not seen.
  double stale = 0.0;
  /// Checks that conflicting accesses are ordered. Needs kernels compiled with the compiler's
  /// callbacks (cudasim_kernel_options); without them there is nothing to check.
  bool race = true;
  /// Reports reads of device memory that nobody has written.
  bool init = true;
  /// The start of a kernel counts as a release fence after its predecessors.
  bool boundary_release = false;
  /// Devices of other processes share this one's memory: what they write is not seen as an access,
  /// and a deadlock is known only after wall_limit_s.
  bool multiprocess = false;
  /// Host threads that drive the devices. With more than one a deadlock is known after
  /// wall_limit_s, unless all of them wait in the simulator.
  int host_threads = 1;
  /// Stack of one CUDA thread.
  std::size_t stack_bytes = std::size_t{64} << 10;
  /// Virtual time without progress that counts as a deadlock.
  std::uint64_t deadlock_ns = 20'000'000'000;
  /// Real time without progress, where another process or host thread might still act.
  double wall_limit_s = 5;
  /// What the driver and the management library tell about the machine.
  DriverConfig driver;
};

/// One kind of fault at one place (or pair of places). Kinds: race, oob, owner, uninit, align,
/// barrier, warp, deadlock, trap, stack, launch, driver.
struct Report {
  std::string kind;
  std::string text;
  int count = 1;
};

/// What exists now (first block), and what was done so far.
struct Stats {
  std::size_t allocations = 0;
  std::size_t host_allocations = 0;
  std::size_t mappings = 0;
  std::size_t reservations = 0;
  std::size_t handles = 0;
  std::size_t contexts = 0;
  std::size_t streams = 0;
  std::size_t events = 0;
  std::size_t graphs = 0;

  std::size_t switches = 0;
  std::size_t accesses = 0;
  std::size_t strong_ops = 0;
  std::size_t kernels = 0;
  std::size_t fibers = 0;
};

/// Starts a run: takes the configuration, forgets errors and pending work; memory, streams and
/// reports stay.
void configure(const Config& config);

/// Do the checks see ordinary accesses of kernels? Not in a build with a real sanitizer, where
/// Config::race and Config::init count as off, and bounds, owners and alignment are checked only
/// for strong and vector operations.
bool sees_accesses();

std::vector<Report> reports();
void clear_reports();
Stats stats();
/// Virtual time of the devices, in nanoseconds.
std::uint64_t now_ns();

/// Names a part of device memory. Bytes of an allocation that has named parts and lie in none are
/// red zones. `writers` and `readers` have a bit for each device that may write or read it.
void annotate(const void* address, std::size_t bytes, const char* name,
              std::uint64_t writers = ~std::uint64_t{0}, std::uint64_t readers = ~std::uint64_t{0});

/// Makes the nth call of that API function from now on return `error` without doing anything;
/// "launch" is a kernel launch.
void fail_call(const char* call, int error, int nth = 1);
/// The same for every call from now on.
void fail_every(const char* call, int error);
/// Kills this process at the nth API function from now on, before it does anything.
void die_at_call(int nth);
void clear_faults();

/// How often each API function was called since clear_calls().
std::map<std::string, int> calls();
void clear_calls();

}  // namespace cudasim
