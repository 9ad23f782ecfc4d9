// SPDX-License-Identifier: Apache-2.0
#pragma once

// The memory of snapshots: a fixed number of places, each held by one snapshot at a time.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "capture/row_set.h"
#include "fanfold/routing_capture.h"

namespace fanfold {

namespace capture {

/// Threads: `take` by one at a time; places may come back on any.
class SnapshotRing {
 public:
  explicit SnapshotRing(std::vector<std::shared_ptr<std::byte>> places);

  /// A free place, now held; -1 if there is none.
  int take() noexcept;
  void give(int place) noexcept;
  std::byte* data(int place) noexcept { return places_[static_cast<std::size_t>(place)].get(); }
  int num_held() const noexcept;

 private:
  std::vector<std::shared_ptr<std::byte>> places_;
  std::unique_ptr<std::atomic<bool>[]> held_;
};

/// Copies ids from layer after layer to token after token.
/// @param layers  [num_layers] rows of `cell_bytes` bytes per token, `layer_bytes` apart.
/// @param out     [num_tokens, num_layers] cells.
void interleave_layers(const std::byte* layers, std::int64_t layer_bytes, int num_layers,
                       std::int64_t num_tokens, std::int64_t cell_bytes, std::byte* out) noexcept;

}  // namespace capture

namespace capture {

/// What a snapshot knows beside the ids.
struct SnapshotContents {
  std::int64_t step_id = 0;
  std::vector<int> missing_layers;
  std::vector<std::int64_t> missing_rows;
  std::vector<RowSet> recorded;  // per slot; empty when nothing is missing
};

/// Contents that come after the snapshot was made.
class LateContents {
 public:
  LateContents() = default;
  virtual ~LateContents() = default;
  LateContents(const LateContents&) = delete;
  LateContents& operator=(const LateContents&) = delete;

  /// Waits for them and the ids. Threads: any, at the same time.
  /// @throws InvalidArgument, InvalidState  something was wrong with what the step recorded.
  virtual const SnapshotContents& wait() = 0;
  virtual bool is_ready() = 0;
};

}  // namespace capture

struct RoutingSnapshot::State {
  explicit State(std::shared_ptr<capture::SnapshotRing> ring_) : ring(std::move(ring_)) {}
  ~State() {
    if (place >= 0) ring->give(place);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const capture::SnapshotContents& known() const { return late ? late->wait() : contents; }

  std::shared_ptr<capture::SnapshotRing> ring;
  int place = -1;
  const std::byte* ids = nullptr;  // within the place
  RoutingSpec spec;
  std::int64_t num_tokens = 0;
  std::vector<int> layers;  // the model's number of each slot
  capture::SnapshotContents contents;
  std::unique_ptr<capture::LateContents> late;  // if set, in place of `contents`
};

}  // namespace fanfold
