// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a Routing keeps on a GPU.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "exec/device_backend.h"
#include "plan/send_plan.h"

namespace fanfold::exchange {

class DeviceExchange;

/// Copies of a round's counts and indices in memory of their own. T rows given to its dispatch.
/// Threads: any.
struct DeviceRouting {
  std::shared_ptr<exec::DeviceBackend> backend;
  std::weak_ptr<DeviceExchange> exchange;  // that made it
  int num_ranks = 0;
  exec::Stream stream = nullptr;          // that the copies were enqueued on
  std::shared_ptr<std::byte> memory;      // holds all of these
  std::int32_t* num_tokens = nullptr;     // [1] of the rows given
  std::int32_t* rank_counts = nullptr;    // [R]
  std::int32_t* rows_per_rank = nullptr;  // [R]
  std::int32_t* sent_ids = nullptr;       // [T, K]
  float* sent_weights = nullptr;          // [T, K] (weighting origin)
  plan::Target* targets = nullptr;        // [T, P]
  std::int32_t* topk_ids = nullptr;       // [R, m, K]
  float* topk_weights = nullptr;          // [R, m, K]
  std::int32_t* source_tokens = nullptr;  // [R, m]

  /// Rows that each rank sent here. Waits for `stream` when first asked: for the device
  /// would be for peers, too, where they share it.
  /// @throws PeerError, InvalidArgument  what kernels of the exchange that made it have reported:
  ///         those that wrote the counts may be among them.
  const std::vector<std::int32_t>& host_rank_counts() const;

 private:
  mutable std::mutex mutex_;  // guards host_rank_counts_
  mutable std::vector<std::int32_t> host_rank_counts_;
};

}  // namespace fanfold::exchange
