// SPDX-License-Identifier: Apache-2.0
#include "gpu/nccl.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "comm/communicator_impl.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"

namespace fanfold {
namespace {

/// A group of its own with the ranks of `communicator`, in their order.
Communicator same_ranks(Communicator& communicator, std::chrono::nanoseconds timeout) {
  std::optional<Communicator> host = communicator.split(0, communicator.rank(), timeout);
  return std::move(*host);
}

/// Ranks of a group of `num_ranks`, each once.
void check_lost(const std::vector<int>& lost, int num_ranks, int num_left) {
  std::vector<int> sorted = lost;
  std::sort(sorted.begin(), sorted.end());
  bool fits = !sorted.empty() && sorted.front() >= 0 && sorted.back() < num_ranks &&
              std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  fits = fits && static_cast<int>(lost.size()) + num_left == num_ranks;
  if (fits) return;
  throw InvalidArgument(base::str("lost: expected different ranks, which with the ", num_left,
                                  " survivors make ", num_ranks, ", got ", lost.size(), " ranks"));
}

}  // namespace

Communicator Communicator::from_nccl(Communicator& bootstrap, const NcclOptions& options) {
  const std::chrono::nanoseconds timeout = options.timeout.value_or(bootstrap.timeout());
  Communicator host = same_ranks(bootstrap, timeout);
  Impl& impl = *host.impl_;
  impl.set_device_collectives(
      gpu::make_nccl_collectives(impl.group(), options, timeout, impl.deadline(timeout)), timeout);
  return host;
}

Communicator Communicator::shrink(const std::vector<int>& lost, Communicator& survivors,
                                  std::optional<std::chrono::nanoseconds> timeout) {
  if (impl_ == nullptr) throw InvalidState("communicator: it was moved from");
  const Impl::Call call(*impl_, "shrink");
  comm::DeviceCollectives* const old = impl_->device_collectives();
  if (old == nullptr) {
    throw InvalidArgument(
        base::str("shrink: expected a communicator of kind nccl, got ", impl_->kind()));
  }
  check_lost(lost, old->num_ranks(), survivors.num_ranks());
  const std::chrono::nanoseconds length = timeout.value_or(impl_->timeout());
  Communicator host = same_ranks(survivors, length);
  Impl& impl = *host.impl_;
  impl.set_device_collectives(gpu::shrink_nccl_collectives(*old, lost, impl.group(),
                                                           impl_->timeout(), impl.deadline(length)),
                              impl_->timeout());
  return host;
}

void Communicator::check_device() {
  if (impl_ == nullptr) throw InvalidState("communicator: it was moved from");
  impl_->check_usable("check_device");
  if (impl_->device_collectives() != nullptr) impl_->device_collectives()->check();
}

}  // namespace fanfold
