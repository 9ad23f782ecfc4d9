// SPDX-License-Identifier: Apache-2.0

// What the processes do that processes_test.cpp starts.

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "support/spawn_processes.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RankArguments;
using testing::say;

Communicator join(const RankArguments& arguments) {
  return Communicator::processes(arguments.rank, arguments.num_ranks, arguments.rendezvous,
                                 seconds(20));
}

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

TensorView view(std::vector<std::int64_t>& values) {
  return TensorView(static_cast<void*>(values.data()), DType::kInt64,
                    {static_cast<std::int64_t>(values.size())});
}

/// Open descriptors of this process that are memfds.
int num_memfds() {
  int num = 0;
  DIR* const directory = ::opendir("/proc/self/fd");
  while (const dirent* entry = ::readdir(directory)) {
    std::array<char, 256> target{};
    const std::string name = std::string("/proc/self/fd/") + entry->d_name;
    if (::readlink(name.c_str(), target.data(), target.size() - 1) > 0 &&
        std::strstr(target.data(), "memfd") != nullptr) {
      ++num;
    }
  }
  ::closedir(directory);
  return num;
}

void check_collectives(Communicator& comm) {
  const int num_ranks = comm.num_ranks();
  std::vector<std::int64_t> values(300'000);
  std::iota(values.begin(), values.end(), comm.rank());
  std::vector<std::int64_t> sum(values.size());
  comm.all_reduce(view(values), view(sum));
  const std::int64_t ranks = num_ranks * (num_ranks - 1) / 2;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    expect(sum[i] == num_ranks * static_cast<std::int64_t>(i) + ranks, "all_reduce");
  }
  std::vector<std::int64_t> all(values.size() * static_cast<std::size_t>(num_ranks));
  comm.all_gather_v(view(values), view(all),
                    std::vector<std::int64_t>(static_cast<std::size_t>(num_ranks), 300'000));
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(num_ranks); ++rank) {
    expect(all[rank * 300'000 + 7] == static_cast<std::int64_t>(rank) + 7, "all_gather_v");
  }
  std::vector<std::int64_t> back(all.size());
  comm.all_to_all(view(all), view(back));
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto place = static_cast<std::size_t>(rank) * 300'000 + 299'999;
    expect(back[place] == comm.rank() + 299'999, "all_to_all");
  }
}

void work(const RankArguments& arguments) {
  Communicator comm = join(arguments);
  check_collectives(comm);
  expect(num_memfds() == 0, "a memfd stayed open");
  std::optional<Communicator> part = comm.split(comm.rank() % 2, -comm.rank());
  if (!part.has_value()) throw std::runtime_error("split");
  Communicator child = std::move(*part);
  check_collectives(child);
  Allocator allocator(child);
  const SymmetricMemory memory = allocator.allocate(100'000);
  const int next = (child.rank() + 1) % child.num_ranks();
  memory.data(next)[99'999] = static_cast<std::byte>(child.rank() + 1);
  child.barrier();
  const int previous = (child.rank() + child.num_ranks() - 1) % child.num_ranks();
  expect(memory.data(child.rank())[99'999] == static_cast<std::byte>(previous + 1), "allocator");
  expect(num_memfds() == 0, "a memfd stayed open");
  child.close();
  comm.barrier();
  comm.close();
  say("done");
}

/// `extra`: "<victim>" or "<victim> fork". The victim says "ready" and does nothing more; the
/// others wait for it in a barrier and say what they saw, and when.
void wait_for_victim(const RankArguments& arguments) {
  Communicator comm = join(arguments);
  const bool is_victim = std::stoi(arguments.extra) == comm.rank();
  comm.barrier();
  if (is_victim && arguments.extra.find("fork") != std::string::npos && ::fork() == 0) {
    ::close(STDOUT_FILENO);
    ::sleep(3);  // holds the sockets of its parent meanwhile
    ::_exit(0);
  }
  say("ready");
  if (is_victim) {
    (void)testing::listen();
    return;
  }
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      comm.barrier();
    } catch (const PeerLost& error) {
      say("lost " + std::to_string(error.rank()) + " at " + std::to_string(base::now_ns()) + " " +
          error.what());
    }
  }
  try {
    (void)comm.split(0, 0);
  } catch (const PeerLost& error) {
    say("split lost " + std::to_string(error.rank()));
  }
  comm.close();
}

/// The peers find a frozen rank, wait for "go", and reset with it once it runs again.
void reset_after_freeze(const RankArguments& arguments) {
  Communicator comm = join(arguments);
  comm.barrier();
  say("ready");
  if (comm.rank() != 1) {
    try {
      comm.barrier(milliseconds(200));
    } catch (const PeerTimeout& error) {
      say("timeout " + std::to_string(error.rank()));
    }
  }
  (void)testing::listen();
  comm.reset();
  check_collectives(comm);
  comm.close();
  say("done");
}

void use_in_forked_child(const RankArguments& arguments) {
  std::optional<Communicator> comm = join(arguments);
  std::optional<Allocator> allocator(*comm);
  std::optional<SymmetricMemory> memory = allocator->allocate(10'000);
  const pid_t child = ::fork();
  if (child == 0) {
    int num_refused = 0;
    const auto refused = [&](auto call) {
      try {
        call();
      } catch (const InvalidState&) {
        ++num_refused;
      }
    };
    refused([&] { comm->barrier(); });
    refused([&] { (void)comm->split(0, 0); });
    refused([&] { comm->reset(); });
    refused([&] { comm->close(); });
    refused([&] { comm->abort("child"); });
    refused([&] { (void)allocator->allocate(10); });
    refused([&] { Allocator another(*comm); });
    memory.reset();
    allocator.reset();
    comm.reset();  // must not be seen by the peers
    ::_exit(num_refused == 7 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  expect(status == 0, "a call in the forked child was not refused");
  check_collectives(*comm);
  memory->data(0)[comm->rank()] = std::byte{1};
  expect(comm->split(0, 0).has_value(), "split after a fork");
  comm->barrier();
  comm->close();
  say("done");
}

void join_from_env(const RankArguments&) {
  Communicator comm = Communicator::from_env(seconds(20));
  check_collectives(comm);
  comm.close();
  say("rank " + std::to_string(comm.rank()) + " of " + std::to_string(comm.num_ranks()));
}

void only_join(const RankArguments& arguments) {
  say("start");
  Communicator comm = join(arguments);
  comm.close();
  say("done");
}

/// Waits for its turn, to be destroyed in the order that the test chooses, without a close.
void leave_on_command(const RankArguments& arguments) {
  {
    Communicator comm = join(arguments);
    comm.barrier();
    say("ready");
    (void)testing::listen();
  }
  say("done");
}

}  // namespace

namespace testing {

std::vector<Scenario> scenarios() {
  return {{"work", work},
          {"wait_for_victim", wait_for_victim},
          {"reset_after_freeze", reset_after_freeze},
          {"use_in_forked_child", use_in_forked_child},
          {"join_from_env", join_from_env},
          {"only_join", only_join},
          {"leave_on_command", leave_on_command}};
}

}  // namespace testing
}  // namespace fanfold
