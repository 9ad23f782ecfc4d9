// SPDX-License-Identifier: Apache-2.0
#include "capture/snapshot_ring.h"

#include <algorithm>
#include <cstring>

namespace fanfold::capture {
namespace {

constexpr std::int64_t kTokensAtATime =
    64;  // so that a token's line is in the cache for all layers

/// kBytes 0: `cell_bytes`, known at run time only.
template <std::int64_t kBytes>
void interleave_cells(const std::byte* layers, std::int64_t layer_bytes, int num_layers,
                      std::int64_t num_tokens, std::int64_t cell_bytes, std::byte* out) noexcept {
  const std::int64_t bytes = kBytes == 0 ? cell_bytes : kBytes;
  for (std::int64_t first = 0; first < num_tokens; first += kTokensAtATime) {
    const std::int64_t last = std::min(num_tokens, first + kTokensAtATime);
    for (int layer = 0; layer < num_layers; ++layer) {
      const std::byte* from = layers + layer * layer_bytes;
      for (std::int64_t token = first; token < last; ++token) {
        std::memcpy(out + (token * num_layers + layer) * bytes, from + token * bytes,
                    static_cast<std::size_t>(bytes));
      }
    }
  }
}

}  // namespace

SnapshotRing::SnapshotRing(std::vector<std::shared_ptr<std::byte>> places)
    : places_(std::move(places)), held_(std::make_unique<std::atomic<bool>[]>(places_.size())) {}

int SnapshotRing::take() noexcept {
  for (std::size_t place = 0; place < places_.size(); ++place) {
    // Acquire: what the last holder read of the place, it read before. Pairs with `give`.
    if (!held_[place].exchange(true, std::memory_order_acquire)) return static_cast<int>(place);
  }
  return -1;
}

void SnapshotRing::give(int place) noexcept {
  // Release: pairs with `take`.
  held_[static_cast<std::size_t>(place)].store(false, std::memory_order_release);
}

int SnapshotRing::num_held() const noexcept {
  int held = 0;
  for (std::size_t place = 0; place < places_.size(); ++place) {
    held += held_[place].load(std::memory_order_relaxed) ? 1 : 0;  // a count, orders nothing
  }
  return held;
}

void interleave_layers(const std::byte* layers, std::int64_t layer_bytes, int num_layers,
                       std::int64_t num_tokens, std::int64_t cell_bytes, std::byte* out) noexcept {
  auto* interleave = &interleave_cells<0>;
  if (cell_bytes == 4) interleave = &interleave_cells<4>;
  if (cell_bytes == 8) interleave = &interleave_cells<8>;
  if (cell_bytes == 16) interleave = &interleave_cells<16>;
  if (cell_bytes == 32) interleave = &interleave_cells<32>;
  interleave(layers, layer_bytes, num_layers, num_tokens, cell_bytes, out);
}

}  // namespace fanfold::capture
