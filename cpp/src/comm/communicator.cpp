// SPDX-License-Identifier: Apache-2.0
#include "fanfold/communicator.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/format.h"
#include "comm/communicator_impl.h"
#include "comm/device_calls.h"
#include "comm/tensor_checks.h"
#include "fanfold/error.h"

namespace fanfold {
namespace {

using Timeout = std::optional<std::chrono::nanoseconds>;
using Stream = std::optional<void*>;

const std::byte* bytes_of(const TensorView& view) {
  return static_cast<const std::byte*>(view.data);
}

std::byte* mutable_bytes_of(const TensorView& view) { return static_cast<std::byte*>(view.data); }

Communicator::Impl& checked(const std::shared_ptr<Communicator::Impl>& impl) {
  if (impl == nullptr) throw InvalidState("communicator: it was moved from");
  return *impl;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;
Communicator::~Communicator() = default;

int Communicator::rank() const { return checked(impl_).group().rank(); }

int Communicator::num_ranks() const { return checked(impl_).group().num_ranks(); }

std::string Communicator::kind() const { return checked(impl_).kind(); }

std::vector<int> Communicator::hosts() const { return checked(impl_).group().hosts(); }

bool Communicator::shares_memory() const noexcept {
  return impl_ != nullptr && impl_->group().shares_memory();
}

std::chrono::nanoseconds Communicator::timeout() const { return checked(impl_).timeout(); }

std::optional<int> Communicator::device_index() const {
  comm::DeviceCollectives* const device = checked(impl_).device_collectives();
  return device == nullptr ? std::nullopt : std::optional<int>(device->device());
}

void Communicator::barrier(Timeout timeout) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "barrier");
  impl.channel().barrier(deadline);
}

void Communicator::all_gather_v(const TensorView& send, const TensorView& recv,
                                const std::vector<std::int64_t>& counts, Timeout timeout,
                                Stream stream) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "all_gather_v");
  if (comm::is_on_gpu({send, recv}))
    return comm::all_gather_v(impl, send, recv, counts, stream, deadline);
  const std::int64_t sum = comm::check_counts("counts", counts, num_ranks());
  const auto own = static_cast<std::size_t>(rank());
  comm::check_tensor("send", send);
  comm::check_rows("send", send, send, counts[own]);
  comm::check_rows("recv", recv, send, sum);
  const auto before = static_cast<std::ptrdiff_t>(own);
  const std::int64_t first =
      std::accumulate(counts.begin(), counts.begin() + before, std::int64_t{0});
  const bool in_place = send.data == mutable_bytes_of(recv) + first * send.row_bytes();
  if (!in_place) comm::check_apart(send, recv);
  impl.channel().all_gather_v(bytes_of(send), mutable_bytes_of(recv), comm::row_type(send), counts,
                              deadline);
}

void Communicator::reduce_scatter_v(const TensorView& send, const TensorView& recv,
                                    const std::vector<std::int64_t>& counts, Timeout timeout,
                                    Stream stream) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "reduce_scatter_v");
  if (comm::is_on_gpu({send, recv}))
    return comm::reduce_scatter_v(impl, send, recv, counts, stream, deadline);
  const std::int64_t sum = comm::check_counts("counts", counts, num_ranks());
  comm::check_tensor("send", send);
  comm::check_addable("send", send);
  comm::check_rows("send", send, send, sum);
  comm::check_rows("recv", recv, send, counts[static_cast<std::size_t>(rank())]);
  comm::check_apart(send, recv);
  impl.channel().reduce_scatter_v(bytes_of(send), mutable_bytes_of(recv), comm::row_type(send),
                                  counts, deadline);
}

void Communicator::all_to_all(const TensorView& send, const TensorView& recv, Timeout timeout,
                              Stream stream) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "all_to_all");
  if (comm::is_on_gpu({send, recv})) return comm::all_to_all(impl, send, recv, stream, deadline);
  comm::check_tensor("send", send);
  if (send.shape[0] % num_ranks() != 0) {
    throw InvalidArgument(base::str("send: expected a multiple of ", num_ranks(),
                                    " rows, one block per rank, got ", send.describe()));
  }
  comm::check_rows("recv", recv, send, send.shape[0]);
  comm::check_apart(send, recv);
  const comm::RowType block{send.dtype, send.num_elements() / num_ranks()};
  impl.channel().all_to_all(bytes_of(send), mutable_bytes_of(recv), block, deadline);
}

void Communicator::all_to_all_v(const TensorView& send, const TensorView& recv,
                                const std::vector<std::int64_t>& send_counts,
                                const std::vector<std::int64_t>& recv_counts, Timeout timeout,
                                Stream stream) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "all_to_all_v");
  if (comm::is_on_gpu({send, recv})) {
    return comm::all_to_all_v(impl, send, recv, send_counts, recv_counts, stream, deadline);
  }
  const std::int64_t sent = comm::check_counts("send_counts", send_counts, num_ranks());
  const std::int64_t received = comm::check_counts("recv_counts", recv_counts, num_ranks());
  comm::check_tensor("send", send);
  comm::check_rows("send", send, send, sent);
  comm::check_rows("recv", recv, send, received);
  comm::check_apart(send, recv);
  impl.channel().all_to_all_v(bytes_of(send), mutable_bytes_of(recv), comm::row_type(send),
                              send_counts, recv_counts, deadline);
}

void Communicator::broadcast(const TensorView& tensor, int root, Timeout timeout, Stream stream) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "broadcast");
  if (comm::is_on_gpu({tensor})) return comm::broadcast(impl, tensor, root, stream, deadline);
  comm::check_tensor("tensor", tensor);
  if (root < 0 || root >= num_ranks()) {
    throw InvalidArgument(
        base::str("root: expected a rank of 0 to ", num_ranks() - 1, ", got ", root));
  }
  impl.channel().broadcast(mutable_bytes_of(tensor), comm::whole_type(tensor), root, deadline);
}

void Communicator::all_reduce(const TensorView& send, const TensorView& recv, Timeout timeout,
                              Stream stream) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "all_reduce");
  if (comm::is_on_gpu({send, recv})) return comm::all_reduce(impl, send, recv, stream, deadline);
  comm::check_tensor("send", send);
  comm::check_addable("send", send);
  comm::check_rows("recv", recv, send, send.shape[0]);
  if (send.data != recv.data) comm::check_apart(send, recv);
  impl.channel().all_reduce(bytes_of(send), mutable_bytes_of(recv), comm::whole_type(send),
                            deadline);
}

std::vector<Communicator::Bytes> Communicator::all_gather_bytes(const Bytes& bytes,
                                                                Timeout timeout) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "all_gather_bytes");
  return impl.channel().all_gather_bytes(bytes.data(), static_cast<std::int64_t>(bytes.size()),
                                         deadline);
}

std::optional<Communicator> Communicator::split(int color, int key, Timeout timeout) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "split");
  const std::vector<std::int64_t> given =
      impl.channel().all_gather_values({color, key}, deadline, "split");
  std::vector<std::tuple<std::int64_t, int>> order;  // key, rank
  for (int other = 0; color >= 0 && other < num_ranks(); ++other) {
    const auto place = 2 * static_cast<std::size_t>(other);
    if (given[place] == color) order.emplace_back(given[place + 1], other);
  }
  std::sort(order.begin(), order.end());
  std::vector<int> members;
  members.reserve(order.size());
  for (const auto& entry : order) members.push_back(std::get<1>(entry));
  std::unique_ptr<comm::Group> group = impl.group().split(members, deadline);
  if (group == nullptr) return std::nullopt;
  auto channel = comm::Channel::create(*group, "Communicator", deadline);
  auto child = std::make_shared<Impl>(std::move(group), std::move(channel), impl.timeout());
  if (comm::DeviceCollectives* const device = impl.device_collectives()) {
    child->set_device_collectives(device->on_group(child->group(), deadline));
  }
  return Communicator(std::move(child));
}

void Communicator::abort(const std::string& reason) { checked(impl_).abort(reason); }

void Communicator::reset(Timeout timeout) {
  Impl& impl = checked(impl_);
  const base::Deadline deadline = impl.deadline(timeout);
  const Impl::Call call(impl, "reset");
  impl.channel().reset(deadline);
  if (impl.device_collectives() != nullptr) impl.device_collectives()->reset(deadline);
}

void Communicator::close(Timeout timeout) {
  if (is_closed()) return;
  impl_->close(impl_->deadline(timeout));
}

bool Communicator::is_closed() const noexcept { return impl_ == nullptr || impl_->is_closed(); }

}  // namespace fanfold
