// SPDX-License-Identifier: Apache-2.0

// What each strategy can do, and which file makes it.

#include <algorithm>

#include "exchange/exchange.h"

namespace fanfold::exchange {
namespace {

// Every layout but gathered is a local copy away from rows that lie by source.
std::vector<Layout> routed_layouts() {
  return {Layout::kRankMajor, Layout::kExpertMajor, Layout::kFlat, Layout::kFlatByExpert};
}

std::vector<Layout> all_layouts() {
  std::vector<Layout> layouts = routed_layouts();
  layouts.push_back(Layout::kGathered);
  return layouts;
}

}  // namespace

Capabilities capabilities_of(Strategy strategy, DeviceType device) {
  Capabilities record;
  record.strategy = strategy;
  record.layouts = routed_layouts();
  record.native_layouts = {Layout::kRankMajor};
  record.id_dtypes = {DType::kInt16, DType::kInt32, DType::kInt64, DType::kUInt32};
  record.workers = true;
  record.max_payloads = AllToAll::kMaxPayloads;
  record.max_top_k = AllToAll::kMaxTopK;
  record.max_ranks = AllToAll::kMaxRanks;
  switch (strategy) {
    case Strategy::kBroadcast:
    case Strategy::kGatherScatter:
      record.layouts = all_layouts();
      record.native_layouts = {Layout::kGathered};
      record.deterministic = false;
      record.error_bound =
          "deterministic = false: the same partials; their sum over the ranks is taken in float32 "
          "in any order, then rounded to combine_dtype before it becomes the dtype of out. From "
          "the stated sum that is at most 2^-23 (num_ranks - 1) times the sum of the partials' "
          "magnitudes, and half a unit in the last place of combine_dtype, unless the sum "
          "overflows it. Weighting origin has no partials and keeps the stated sum.";
      break;
    case Strategy::kOneSided:
      record.two_phase = true;
      record.rank_mask = true;
      break;
    case Strategy::kLowLatency:
      record.two_phase = true;
      record.rank_mask = true;
      record.wires = true;
      break;
    case Strategy::kHighThroughput:
      record.layouts = {Layout::kFlat, Layout::kFlatByExpert};
      record.native_layouts = {Layout::kFlat, Layout::kFlatByExpert};
      record.rank_mask = true;
      break;
    case Strategy::kTwoSided:
      record.native_layouts = {Layout::kRankMajor, Layout::kFlat};
      break;
    case Strategy::kBatched:
    case Strategy::kAuto:
      break;
  }
  if (device == DeviceType::kGpu) {
    record.layouts = {Layout::kRankMajor, Layout::kExpertMajor};
    record.graph_safe = true;
    // Sums are always in the stated order.
    record.deterministic = true;
    record.error_bound.clear();
    if (record.native_layouts.front() == Layout::kGathered) {
      record.native_layouts = {Layout::kRankMajor};
    }
    record.workers = false;
    record.max_top_k = exec::kMaxDeviceTopK;
    record.max_ranks = exec::kMaxDeviceRanks;
  }
  return record;
}

std::shared_ptr<Exchange> make_exchange(Setup setup, base::Deadline deadline) {
  if (setup.config.device == DeviceType::kGpu) {
    return plan::store_kind(setup.config.strategy) == plan::StoreKind::kWindow
               ? make_on_device(std::move(setup), deadline)
               : make_collective_on_device(std::move(setup), deadline);
  }
  switch (setup.config.strategy) {
    case Strategy::kBroadcast:
      return make_broadcast(std::move(setup), deadline);
    case Strategy::kGatherScatter:
      return make_gather_scatter(std::move(setup), deadline);
    case Strategy::kBatched:
      return make_batched(std::move(setup), deadline);
    case Strategy::kTwoSided:
      return make_two_sided(std::move(setup), deadline);
    case Strategy::kHighThroughput:
      return make_high_throughput(std::move(setup), deadline);
    case Strategy::kOneSided:
    case Strategy::kLowLatency:
    case Strategy::kAuto:  // resolved before
      break;
  }
  return make_one_sided(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
