// SPDX-License-Identifier: Apache-2.0
#pragma once

// A rank that is a process with a simulated device of its own.
//
// Kernels of a simulated device run while a thread of their process waits for them. So each rank
// waits for its stream before it waits for its peers in any other way.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cudasim/control.h"
#include "fanfold/all_to_all.h"
#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "gpu/gpu_case.h"
#include "gpu/simulated_devices.h"
#include "gtest/gtest.h"
#include "support/spawn_processes.h"

namespace fanfold::testing {

inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

inline void expect_equal_stats(const cudasim::Stats& now, const cudasim::Stats& before) {
  expect(now.handles == before.handles, "handles are left");
  expect(now.mappings == before.mappings, "mappings are left");
  expect(now.reservations == before.reservations, "reservations are left");
  expect(now.contexts == before.contexts, "contexts are left");
  expect(now.allocations == before.allocations, "allocations are left");
  expect(now.host_allocations == before.host_allocations, "page-locked memory is left");
  expect(now.streams == before.streams, "streams are left");
  expect(now.graphs == before.graphs, "graphs are left");
}

/// Calls `body` on a rank with a device of its own. At the end nothing is left of it, on the device
/// or otherwise, and neither a comparison nor the device has found a fault. `num_unpinned`: calls
/// of cuMemHostRegister that `body` makes fail.
inline void on_gpu(const RankArguments& arguments, const std::function<void(Communicator&)>& body,
                   int num_unpinned = 0) {
  cudasim::Config config;
  config.multiprocess = true;
  config.host_threads = 2;
  config.resident_blocks = 2;
  config.driver.first_device = arguments.rank;
  cudasim::configure(config);
  const cudasim::Stats before = cudasim::stats();
  const int num_descriptors = num_open_descriptors();
  {
    TestGpu gpu;
    Communicator communicator = Communicator::processes(
        arguments.rank, arguments.num_ranks, arguments.rendezvous, std::chrono::seconds(20));
    body(communicator);
  }
  expect_equal_stats(cudasim::stats(), before);
  expect(num_open_descriptors() == num_descriptors, "descriptors are left");
  std::map<std::string, int> calls = cudasim::calls();
  expect(calls["cuMemHostRegister"] == calls["cuMemHostUnregister"] + num_unpinned,
         "memory is left page-locked");
  for (const cudasim::Report& report : cudasim::reports()) {
    throw std::runtime_error(report.kind + ": " + report.text);
  }
  expect(!::testing::Test::HasFailure(), "a comparison failed");
  say("done");
}

/// GPU memory by one kind of handle.
inline Allocator allocator_of(Communicator& communicator, const std::string& kind) {
  GpuMemoryConfig memory;
  memory.kinds = {kind == "fabric" ? HandleKind::kFabric : HandleKind::kFileDescriptor};
  return Allocator(communicator, memory);
}

inline AllToAllConfig config_of(const std::string& layout = "rank_major") {
  const bool by_expert = layout == "expert_major";
  AllToAllConfig config = gpu_config(by_expert ? Layout::kExpertMajor : Layout::kRankMajor);
  if (by_expert) config.weighting = Weighting::kCarried;
  config.max_in_flight = 2;
  config.extra_bytes_per_token = 1;
  return config;
}

inline RoundPlan plan_of(const AllToAll& all_to_all, std::uint64_t seed, std::int64_t m) {
  return make_round(all_to_all.config(), all_to_all.num_ranks(), RoutingKind::kUneven, m, seed);
}

/// A round of another size, and of another set of what travels, than that of the next seed.
inline RoundRun make_run(AllToAll& all_to_all, std::uint64_t seed) {
  RoundPlan plan = plan_of(all_to_all, seed, 1 + static_cast<std::int64_t>(seed % 4));
  if (seed % 2 == 0) plan.payloads.resize(1);
  if (seed % 3 == 0 && all_to_all.config().weighting == Weighting::kApplied) {
    plan.exchange.has_weights = false;
  }
  plan.zero_copy = seed % 4 < 2;
  return RoundRun(all_to_all, std::move(plan));
}

inline void run_varied_round(AllToAll& all_to_all, std::uint64_t seed) {
  RoundRun round = make_run(all_to_all, seed);
  round.dispatch();
  round.combine();
}

/// After a failure that every rank knows of.
inline void recover(Communicator& communicator, AllToAll& all_to_all) {
  all_to_all.reset();
  expect(!all_to_all.is_failed(), "still failed after the reset");
  for (std::uint64_t seed = 5; seed < 8; ++seed) run_varied_round(all_to_all, seed);
  communicator.barrier();
  all_to_all.close();
  communicator.close();
}

/// Of gpu_loss_scenarios.cpp.
std::vector<Scenario> loss_scenarios();

}  // namespace fanfold::testing
