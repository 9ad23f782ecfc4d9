// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "base/format.h"
#include "comm/bootstrap.h"
#include "comm/communicator_impl.h"
#include "comm/rendezvous.h"
#include "comm/thread_group.h"
#include "comm/transport_join.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"

namespace fanfold {
namespace {

base::Deadline deadline_of(std::chrono::nanoseconds timeout) {
  if (timeout.count() >= 0) return base::Deadline(timeout);
  throw InvalidArgument(
      base::str("timeout: expected 0 or more, got ", timeout.count(), " nanoseconds"));
}

std::shared_ptr<Communicator::Impl> with_channel(std::unique_ptr<comm::Group> group,
                                                 base::Deadline deadline,
                                                 std::chrono::nanoseconds timeout) {
  auto channel = comm::Channel::create(*group, "Communicator", deadline);
  return std::make_shared<Communicator::Impl>(std::move(group), std::move(channel), timeout);
}

}  // namespace

std::vector<Communicator> Communicator::threads(int num_ranks, std::chrono::nanoseconds timeout) {
  comm::check_num_ranks(num_ranks);
  (void)deadline_of(timeout);
  std::vector<std::unique_ptr<comm::Group>> groups = comm::ThreadGroup::create(num_ranks);
  const comm::Windows windows =
      comm::ThreadGroup::make_windows(num_ranks, comm::Channel::window_bytes(num_ranks));
  std::vector<Communicator> ranks;
  for (auto& group : groups) {
    auto channel = std::make_unique<comm::Channel>(*group, windows, "Communicator");
    ranks.push_back(
        Communicator(std::make_shared<Impl>(std::move(group), std::move(channel), timeout)));
  }
  return ranks;
}

Communicator Communicator::processes(int rank, int num_ranks, const std::string& rendezvous,
                                     std::chrono::nanoseconds timeout) {
  comm::check_num_ranks(num_ranks);
  comm::check_rank(rank, num_ranks);
  const base::Deadline deadline = deadline_of(timeout);
  auto group = comm::join_group({rendezvous, rank, num_ranks}, deadline);
  return Communicator(with_channel(std::move(group), deadline, timeout));
}

Communicator Communicator::from_env(std::chrono::nanoseconds timeout) {
  const base::Deadline deadline = deadline_of(timeout);
  auto group = comm::join_group(comm::rendezvous_from_env(), deadline);
  return Communicator(with_channel(std::move(group), deadline, timeout));
}

Communicator Communicator::from_callbacks(int rank, int num_ranks,
                                          const AllGatherCallback& all_gather,
                                          const BarrierCallback& barrier,
                                          std::chrono::nanoseconds timeout) {
  comm::check_num_ranks(num_ranks);
  comm::check_rank(rank, num_ranks);
  const base::Deadline deadline = deadline_of(timeout);
  auto group = comm::join_with_callbacks(rank, num_ranks, all_gather, barrier, deadline);
  return Communicator(with_channel(std::move(group), deadline, timeout));
}

Communicator Communicator::from_transport(std::shared_ptr<Transport> transport, TransportUse use,
                                          std::chrono::nanoseconds timeout) {
  const base::Deadline deadline = deadline_of(timeout);
  auto group = comm::join_over_transport(std::move(transport), use, deadline);
  return Communicator(with_channel(std::move(group), deadline, timeout));
}

}  // namespace fanfold
