// SPDX-License-Identifier: Apache-2.0

// What the processes do that gpu_processes_test.cpp starts.

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/format.h"
#include "cudasim/control.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "fanfold/fabric_memory.h"
#include "gpu/simulated_devices.h"
#include "support/spawn_processes.h"

namespace fanfold {
namespace {

using std::chrono::seconds;
using testing::RankArguments;
using testing::say;

constexpr std::int64_t kBytes = 3 << 20;

/// Each process sees one device, and another one than its peers.
cudasim::Config simulated(const RankArguments& arguments) {
  cudasim::Config config;
  config.multiprocess = true;
  config.driver.first_device = arguments.rank;
  return config;
}

Communicator join(const RankArguments& arguments) {
  return Communicator::processes(arguments.rank, arguments.num_ranks, arguments.rendezvous,
                                 seconds(20));
}

GpuMemoryConfig only(const std::string& kind) {
  GpuMemoryConfig config;
  config.kinds = {kind == "fabric" ? HandleKind::kFabric : HandleKind::kFileDescriptor};
  return config;
}

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

void expect_nothing_left(const cudasim::Stats& before) {
  const cudasim::Stats now = cudasim::stats();
  expect(now.handles == before.handles, "handles are left");
  expect(now.mappings == before.mappings, "mappings are left");
  expect(now.reservations == before.reservations, "reservations are left");
  expect(now.contexts == before.contexts, "contexts are left");
  expect(now.allocations == before.allocations, "allocations are left");
  expect(now.streams == before.streams, "streams are left");
}

/// Each rank writes into all windows; all read it.
void share_and_check(const RankArguments& arguments) {
  cudasim::configure(simulated(arguments));
  const cudasim::Stats before = cudasim::stats();
  Communicator comm = join(arguments);
  for (int round = 0; round < 3; ++round) {
    FabricMemory memory(comm, kBytes, only(arguments.extra));
    for (int rank = 0; rank < comm.num_ranks(); ++rank) {
      memory.data(rank)[100 + comm.rank()] =
          static_cast<std::byte>(10 * rank + comm.rank() + round);
    }
    comm.barrier();
    for (int rank = 0; rank < comm.num_ranks(); ++rank) {
      for (int writer = 0; writer < comm.num_ranks(); ++writer) {
        expect(
            memory.data(rank)[100 + writer] == static_cast<std::byte>(10 * rank + writer + round),
            "a byte in a window");
      }
    }
    memory.close();
  }
  expect_nothing_left(before);
  comm.close();
  say("done");
}

/// A rank dies at a driver call: "fabric 1 7", rank 1 at the seventh. The others say what they see
/// and stay clean.
void lose_a_rank(const RankArguments& arguments) {
  std::istringstream words(arguments.extra);
  std::string kind;
  int victim = 0;
  int call = 0;
  words >> kind >> victim >> call;
  cudasim::configure(simulated(arguments));
  const cudasim::Stats before = cudasim::stats();
  const int num_descriptors = testing::num_open_descriptors();
  {
    Communicator comm = join(arguments);
    if (arguments.rank == victim) cudasim::die_at_call(call);
    try {
      const FabricMemory memory(comm, kBytes, only(kind));
      comm.barrier();
      say("shared");
    } catch (const PeerLost& error) {
      say(base::str("lost ", error.rank()));
    }
  }
  expect_nothing_left(before);
  expect(testing::num_open_descriptors() == num_descriptors, "descriptors are left");
}

/// Rank 1 is of another user.
void be_another_user(const RankArguments& arguments) {
  cudasim::Config config = simulated(arguments);
  config.driver.uid = 1000 + arguments.rank;
  cudasim::configure(config);
  Communicator comm = join(arguments);
  try {
    const FabricMemory memory(comm, kBytes, only("fabric"));
    say("shared");
  } catch (const Error& error) {
    say(error.what());
  }
  comm.close();
}

/// There is no driver.
void have_no_driver(const RankArguments& arguments) {
  Communicator comm = join(arguments);
  try {
    const FabricMemory memory(comm, kBytes);
    say("shared");
  } catch (const Unsupported& error) {
    say(error.what());
  }
  comm.barrier();  // the CPU's work goes on
  comm.close();
}

/// The driver finds no device at first.
void have_no_device(const RankArguments& arguments) {
  cudasim::configure(simulated(arguments));
  Communicator comm = join(arguments);
  cudasim::fail_call("cuInit", 100);  // CUDA_ERROR_NO_DEVICE
  try {
    const FabricMemory memory(comm, kBytes);
    say("shared");
  } catch (const Unsupported& error) {
    say(error.what());
  }
  const FabricMemory memory(comm, kBytes);  // looks again
  say("shared");
  comm.close();
}

}  // namespace

namespace testing {

std::vector<Scenario> scenarios() {
  return {{"share_and_check", &share_and_check},
          {"lose_a_rank", &lose_a_rank},
          {"be_another_user", &be_another_user},
          {"have_no_driver", &have_no_driver},
          {"have_no_device", &have_no_device}};
}

}  // namespace testing
}  // namespace fanfold
