// SPDX-License-Identifier: Apache-2.0

// How the shards of a sequence come together for a RoutingCapture.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/format.h"
#include "capture/check.h"
#include "exec/device_backend.h"
#include "fanfold/all_to_all.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "fanfold/routing_capture.h"
#include "gpu/backend.h"

namespace fanfold {
namespace {

using base::str;
using Counts = std::vector<std::int64_t>;

/// A number of shards or a rank that is not the group's would have rows read that nobody sent.
void check_ranks(const Communicator& communicator, const CaptureLayout& shards) {
  const auto num_shards = static_cast<std::int64_t>(shards.counts.size());
  if (num_shards != communicator.num_ranks()) {
    throw InvalidArgument(str("layout.counts: expected ", communicator.num_ranks(),
                              " numbers of rows, one per rank of the communicator, got ",
                              num_shards));
  }
  if (shards.rank != communicator.rank()) {
    throw InvalidArgument(str("layout.rank: expected ", communicator.rank(),
                              ", this rank of the communicator, got ", shards.rank));
  }
}

/// Rows of a GPU: each is a token that goes to every rank, as if each rank had one expert, and the
/// token chose all of them.
class DeviceGather {
 public:
  DeviceGather(Communicator& communicator, int device, std::int64_t max_rows,
               std::int64_t max_row_bytes)
      : communicator_(communicator),
        device_(device),
        max_rows_(max_rows),
        max_row_bytes_(max_row_bytes) {}

  /// `counts` has a number for every rank, and for this one that of the rows of `send`.
  const std::int32_t* operator()(const TensorView& send, const TensorView& recv,
                                 const Counts& counts, void* stream) {
    const std::int64_t num_rows = *std::max_element(counts.begin(), counts.end());
    if (num_rows == 0) return nullptr;  // on every rank
    if (exchange_ == nullptr) make(stream);
    DispatchInputs inputs;
    inputs.topk_ids = everyone(send.shape[0]);
    inputs.payloads = {send};
    inputs.round_max_tokens = num_rows;
    inputs.stream = stream;
    const Received received = exchange_->dispatch(inputs);
    const auto* const rows = static_cast<const std::byte*>(received.payloads()[0].data);
    auto* to = static_cast<std::byte*>(recv.data);
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
      const std::int64_t bytes = counts[rank] * recv.row_bytes();
      const auto source = static_cast<std::int64_t>(rank) * num_rows * recv.row_bytes();
      if (bytes > 0) backend_->copy(to, rows + source, bytes, stream);
      to += bytes;
    }
    const auto* const sent = static_cast<const std::byte*>(received.rank_counts().data);
    backend_->copy(received_.get(), sent, count_bytes(), stream);
    exchange_->release(received.handle(), stream);
    return reinterpret_cast<const std::int32_t*>(received_.get());
  }

 private:
  void make(void* stream) {
    auto backend = gpu::make_backend(device_);
    if (backend->capture_of(stream) != 0) capture::refuse_first_shards_in_graph();
    const int num_ranks = communicator_.num_ranks();
    AllToAllConfig config;
    config.num_experts = num_ranks;
    config.top_k = num_ranks;
    config.max_tokens_per_rank = max_rows_ + num_ranks;  // padding
    config.hidden = 1;
    config.dtype = DType::kFloat32;
    config.dispatch_row_bytes = max_row_bytes_;
    config.strategy = Strategy::kOneSided;
    config.layout = Layout::kRankMajor;
    config.device = DeviceType::kGpu;
    config.device_index = device_;
    config.name = "shards of a RoutingCapture";
    std::vector<std::int32_t> ranks;
    for (std::int64_t row = 0; row < config.max_tokens_per_rank; ++row) {
      for (int rank = 0; rank < num_ranks; ++rank) ranks.push_back(rank);
    }
    const auto bytes = static_cast<std::int64_t>(ranks.size() * sizeof ranks[0]);
    ranks_ = backend->allocate(bytes);
    backend->upload(ranks_.get(), ranks.data(), bytes);
    received_ = backend->allocate(count_bytes());
    exchange_ = std::make_unique<AllToAll>(communicator_, config);
    backend_ = std::move(backend);
  }

  std::int64_t count_bytes() const {
    return communicator_.num_ranks() * static_cast<std::int64_t>(sizeof(std::int32_t));
  }

  TensorView everyone(std::int64_t num_rows) const {
    TensorView view(static_cast<void*>(ranks_.get()), DType::kInt32,
                    {num_rows, communicator_.num_ranks()});
    view.device = DeviceType::kGpu;
    view.device_index = device_;
    return view;
  }

  Communicator& communicator_;
  int device_;
  std::int64_t max_rows_;
  std::int64_t max_row_bytes_;
  std::shared_ptr<exec::DeviceBackend> backend_;
  std::shared_ptr<std::byte> ranks_;     // in [rows, num_ranks] int32
  std::shared_ptr<std::byte> received_;  // [num_ranks] int32: rows of the last call
  std::unique_ptr<AllToAll> exchange_;
};

}  // namespace

GatherRows gather_rows(Communicator& communicator, const RoutingCaptureConfig& config) {
  if (config.device == DeviceType::kCpu) {
    return [&communicator](const TensorView& send, const TensorView& recv,
                           const CaptureLayout& shards, void* /*stream*/) -> const std::int32_t* {
      check_ranks(communicator, shards);
      communicator.all_gather_v(send, recv, shards.counts);
      return nullptr;
    };
  }
  const std::int64_t width = std::int64_t{config.top_k} + config.num_shared_experts;
  const auto gather = std::make_shared<DeviceGather>(communicator, config.device_index,
                                                     config.max_tokens, 8 * width);
  return [&communicator, gather](const TensorView& send, const TensorView& recv,
                                 const CaptureLayout& shards, void* stream) {
    check_ranks(communicator, shards);
    return (*gather)(send, recv, shards.counts, stream);
  };
}

}  // namespace fanfold
