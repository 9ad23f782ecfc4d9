// SPDX-License-Identifier: Apache-2.0
#include "comm/device_calls.h"

#include <algorithm>

#include "base/format.h"
#include "comm/rank_index.h"
#include "comm/tensor_checks.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

using Counts = std::vector<std::int64_t>;
using Span = DeviceCollectives::Span;

constexpr DeviceType kGpu = DeviceType::kGpu;

/// Who carries a call, and where it is enqueued.
struct Way {
  Way(DeviceCollectives& carrier, void* on, base::Deadline deadline) : device(carrier), stream(on) {
    device.limit_calls(deadline);
  }
  ~Way() { device.limit_calls(std::nullopt); }
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;
  DeviceCollectives& device;
  void* stream;
};

Way way_of(Communicator::Impl& impl, const TensorView& first, std::optional<void*> stream,
           base::Deadline deadline) {
  DeviceCollectives* const device = impl.device_collectives();
  if (device == nullptr) {
    throw InvalidArgument(base::str("communicator of kind ", impl.kind(),
                                    ": expected a tensor on cpu, got ", first.describe(),
                                    "; one made by from_nccl takes GPU tensors"));
  }
  if (!stream) {
    throw InvalidArgument(
        base::str("stream: expected a CUDA stream for ", first.describe(), ", got none"));
  }
  return {*device, *stream, deadline};
}

void check_place(const char* name, const TensorView& view, const DeviceCollectives& device) {
  if (view.device == kGpu && view.device_index == device.device()) return;
  throw InvalidArgument(base::str(name, ": expected a tensor on GPU ", device.device(),
                                  ", the communicator's, got ", view.describe()));
}

bool are_equal(const Counts& counts) {
  return std::all_of(counts.begin(), counts.end(),
                     [&](std::int64_t count) { return count == counts.front(); });
}

std::vector<Span> spans_of(const Counts& counts, std::int64_t row_bytes) {
  std::vector<Span> spans;
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    spans.push_back({begin, count * row_bytes});
    begin += count * row_bytes;
  }
  return spans;
}

std::byte* bytes_of(const TensorView& view) { return static_cast<std::byte*>(view.data); }

}  // namespace

bool is_on_gpu(std::initializer_list<std::reference_wrapper<const TensorView>> tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const TensorView& view) { return view.device == kGpu; });
}

void all_gather_v(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                  const Counts& counts, std::optional<void*> stream, base::Deadline deadline) {
  const auto [device, on] = way_of(impl, send, stream, deadline);
  const std::int64_t sum = check_counts("counts", counts, device.num_ranks());
  const std::int64_t own = counts[index(device.rank())];
  check_place("send", send, device);
  check_place("recv", recv, device);
  check_rows("send", send, send, own, kGpu);
  check_rows("recv", recv, send, sum, kGpu);
  const std::vector<Span> from = spans_of(counts, send.row_bytes());
  if (send.data != bytes_of(recv) + from[index(device.rank())].offset) check_apart(send, recv);
  if (are_equal(counts)) {
    device.all_gather(send.data, recv.data, own * send.row_bytes(), on);
    return;
  }
  const std::vector<Span> to(counts.size(), Span{0, own * send.row_bytes()});
  device.all_to_all_v(send.data, to, recv.data, from, on);
}

void reduce_scatter_v(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                      const Counts& counts, std::optional<void*> stream, base::Deadline deadline) {
  const auto [device, on] = way_of(impl, send, stream, deadline);
  const std::int64_t sum = check_counts("counts", counts, device.num_ranks());
  const std::int64_t own = counts[index(device.rank())];
  check_place("send", send, device);
  check_place("recv", recv, device);
  check_addable("send", send);
  check_rows("send", send, send, sum, kGpu);
  check_rows("recv", recv, send, own, kGpu);
  check_apart(send, recv);
  if (!are_equal(counts)) {
    throw Unsupported(
        "counts: expected the same number of rows for every rank on a GPU, got "
        "different ones");
  }
  const std::int64_t row_elements = send.row_bytes() / size_of(send.dtype);
  device.reduce_scatter(send.data, recv.data, send.dtype, own * row_elements, on);
}

void all_to_all(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                std::optional<void*> stream, base::Deadline deadline) {
  const auto [device, on] = way_of(impl, send, stream, deadline);
  check_place("send", send, device);
  check_place("recv", recv, device);
  check_tensor("send", send, kGpu);
  if (send.shape[0] % device.num_ranks() != 0) {
    throw InvalidArgument(base::str("send: expected a multiple of ", device.num_ranks(),
                                    " rows, one block per rank, got ", send.describe()));
  }
  check_rows("recv", recv, send, send.shape[0], kGpu);
  check_apart(send, recv);
  device.all_to_all(send.data, recv.data, send.shape[0] / device.num_ranks() * send.row_bytes(),
                    on);
}

void all_to_all_v(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                  const Counts& send_counts, const Counts& recv_counts, std::optional<void*> stream,
                  base::Deadline deadline) {
  const auto [device, on] = way_of(impl, send, stream, deadline);
  const std::int64_t sent = check_counts("send_counts", send_counts, device.num_ranks());
  const std::int64_t received = check_counts("recv_counts", recv_counts, device.num_ranks());
  check_place("send", send, device);
  check_place("recv", recv, device);
  check_rows("send", send, send, sent, kGpu);
  check_rows("recv", recv, send, received, kGpu);
  check_apart(send, recv);
  device.all_to_all_v(send.data, spans_of(send_counts, send.row_bytes()), recv.data,
                      spans_of(recv_counts, send.row_bytes()), on);
}

void broadcast(Communicator::Impl& impl, const TensorView& tensor, int root,
               std::optional<void*> stream, base::Deadline deadline) {
  const auto [device, on] = way_of(impl, tensor, stream, deadline);
  check_place("tensor", tensor, device);
  check_tensor("tensor", tensor, kGpu);
  device.broadcast(tensor.data, tensor.num_elements() * size_of(tensor.dtype), root, on);
}

void all_reduce(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                std::optional<void*> stream, base::Deadline deadline) {
  const auto [device, on] = way_of(impl, send, stream, deadline);
  check_place("send", send, device);
  check_place("recv", recv, device);
  check_tensor("send", send, kGpu);
  check_addable("send", send);
  check_rows("recv", recv, send, send.shape[0], kGpu);
  if (send.data != recv.data) check_apart(send, recv);
  device.all_reduce(send.data, recv.data, send.dtype, send.num_elements(), on);
}

}  // namespace fanfold::comm
