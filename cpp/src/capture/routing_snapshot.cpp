// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "base/format.h"
#include "capture/check.h"
#include "capture/snapshot_ring.h"
#include "fanfold/error.h"
#include "fanfold/routing_capture.h"

namespace fanfold {
namespace {

using StatePtr = std::shared_ptr<const RoutingSnapshot::State>;

/// A copy: what it holds stays while the caller reads.
StatePtr held(const StatePtr& state) {
  if (state == nullptr) {
    throw InvalidState("snapshot: expected one that is held, got one that was released");
  }
  return state;
}

/// Of one that is there.
TensorView array_of(const RoutingSnapshot::State& state) {
  return {static_cast<const void*>(state.ids),
          state.spec.dtype,
          {state.num_tokens, state.spec.num_layers, state.spec.top_k}};
}

}  // namespace

RoutingSnapshot::RoutingSnapshot() = default;
RoutingSnapshot::~RoutingSnapshot() = default;
RoutingSnapshot::RoutingSnapshot(const RoutingSnapshot&) = default;
RoutingSnapshot::RoutingSnapshot(RoutingSnapshot&&) noexcept = default;
RoutingSnapshot& RoutingSnapshot::operator=(const RoutingSnapshot&) = default;
RoutingSnapshot& RoutingSnapshot::operator=(RoutingSnapshot&&) noexcept = default;
RoutingSnapshot::RoutingSnapshot(std::shared_ptr<const State> state) noexcept
    : state_(std::move(state)) {}

void RoutingSnapshot::wait() const { (void)held(state_)->known(); }
bool RoutingSnapshot::is_ready() const {
  const StatePtr kept = held(state_);
  return kept->late == nullptr || kept->late->is_ready();
}

TensorView RoutingSnapshot::array() const {
  const StatePtr kept = held(state_);
  (void)kept->known();
  return array_of(*kept);
}
const RoutingSpec& RoutingSnapshot::spec() const { return held(state_)->spec; }
std::int64_t RoutingSnapshot::step_id() const { return held(state_)->known().step_id; }
std::int64_t RoutingSnapshot::num_tokens() const { return held(state_)->num_tokens; }
const std::vector<int>& RoutingSnapshot::missing_layers() const {
  return held(state_)->known().missing_layers;
}
const std::vector<std::int64_t>& RoutingSnapshot::missing_rows() const {
  return held(state_)->known().missing_rows;
}

RoutingRows RoutingSnapshot::rows(std::int64_t first, std::int64_t num_tokens,
                                  std::int64_t first_position) const {
  const StatePtr kept = held(state_);
  const State& state = *kept;
  const capture::SnapshotContents& contents = state.known();
  if (first < 0 || num_tokens < 0 || first > state.num_tokens ||
      num_tokens > state.num_tokens - first) {
    capture::refuse("rows", base::str("tokens within the ", state.num_tokens, " of the snapshot"),
                    base::str(num_tokens, " from ", first, " on"));
  }
  std::string missing;
  for (std::size_t slot = 0; slot < contents.recorded.size(); ++slot) {
    if (contents.recorded[slot].count(first, num_tokens) == num_tokens) continue;
    missing += base::str(missing.empty() ? "" : ", ", state.layers[slot]);
  }
  if (!missing.empty()) {
    throw InvalidState(base::str("rows: expected every layer to be recorded for tokens [", first,
                                 ", ", first + num_tokens, ") of step ", contents.step_id,
                                 ", got none or only some of layers ", missing));
  }
  TensorView part = array_of(state);
  part.data = static_cast<std::byte*>(part.data) + first * state.spec.row_bytes();
  part.shape[0] = num_tokens;
  return copy_rows(state.spec, part, first_position);
}

std::vector<std::int64_t> RoutingSnapshot::expert_histogram() const {
  const StatePtr kept = held(state_);
  const State& state = *kept;
  (void)state.known();
  return fanfold::expert_histogram(copy_rows(state.spec, array_of(state)));
}

}  // namespace fanfold
