// SPDX-License-Identifier: Apache-2.0

// Names of the enumerations of the public configuration.

#include <utility>

#include "base/format.h"
#include "fanfold/all_to_all_config.h"
#include "fanfold/error.h"

namespace fanfold {
namespace {

/// The value in [0, last] whose name is `name`.
template <class Enum>
Enum from_name(const char* what, std::string_view name, Enum last) {
  std::string known;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    const auto value = static_cast<Enum>(i);
    if (name == name_of(value)) return value;
    known += base::str(i == 0 ? "" : ", ", name_of(value));
  }
  throw InvalidArgument(base::str(what, ": expected one of ", known, "; got \"", name, '"'));
}

}  // namespace

const char* name_of(Strategy value) noexcept {
  switch (value) {
    case Strategy::kAuto:
      return "auto";
    case Strategy::kBroadcast:
      return "broadcast";
    case Strategy::kGatherScatter:
      return "gather_scatter";
    case Strategy::kBatched:
      return "batched";
    case Strategy::kOneSided:
      return "one_sided";
    case Strategy::kTwoSided:
      return "two_sided";
    case Strategy::kHighThroughput:
      return "high_throughput";
    case Strategy::kLowLatency:
      return "low_latency";
  }
  return "unknown";
}

const char* name_of(Layout value) noexcept {
  switch (value) {
    case Layout::kRankMajor:
      return "rank_major";
    case Layout::kGathered:
      return "gathered";
    case Layout::kExpertMajor:
      return "expert_major";
    case Layout::kFlat:
      return "flat";
    case Layout::kFlatByExpert:
      return "flat_by_expert";
  }
  return "unknown";
}

const char* name_of(Weighting value) noexcept {
  switch (value) {
    case Weighting::kApplied:
      return "applied";
    case Weighting::kCarried:
      return "carried";
    case Weighting::kOrigin:
      return "origin";
  }
  return "unknown";
}

const char* name_of(CheckIds value) noexcept {
  switch (value) {
    case CheckIds::kAuto:
      return "auto";
    case CheckIds::kRaise:
      return "raise";
    case CheckIds::kDrop:
      return "drop";
  }
  return "unknown";
}

const char* name_of(SanitizePolicy value) noexcept {
  switch (value) {
    case SanitizePolicy::kPadding:
      return "padding";
    case SanitizePolicy::kPaddingAndNonLocal:
      return "padding_and_non_local";
    case SanitizePolicy::kToLocal:
      return "to_local";
  }
  return "unknown";
}

const char* name_of(Wire value) noexcept {
  switch (value) {
    case Wire::kNone:
      return "none";
    case Wire::kFp8E4M3:
      return "fp8_e4m3";
  }
  return "unknown";
}

const char* name_of(WireScale value) noexcept {
  switch (value) {
    case WireScale::kFloat32:
      return "float32";
    case WireScale::kUe8m0:
      return "ue8m0";
  }
  return "unknown";
}

Strategy strategy_from_name(std::string_view name) {
  return from_name("strategy", name, Strategy::kLowLatency);
}
Layout layout_from_name(std::string_view name) {
  return from_name("layout", name, Layout::kFlatByExpert);
}
Weighting weighting_from_name(std::string_view name) {
  return from_name("weighting", name, Weighting::kOrigin);
}
CheckIds check_ids_from_name(std::string_view name) {
  return from_name("check_ids", name, CheckIds::kDrop);
}
SanitizePolicy sanitize_policy_from_name(std::string_view name) {
  return from_name("policy", name, SanitizePolicy::kToLocal);
}
Wire wire_from_name(std::string_view name) { return from_name("wire", name, Wire::kFp8E4M3); }
WireScale wire_scale_from_name(std::string_view name) {
  return from_name("wire_scale", name, WireScale::kUe8m0);
}

Placement placement_from_name(std::string_view name) {
  if (name == "linear") return Placement::linear();
  if (name == "round_robin") return Placement::round_robin();
  throw InvalidArgument(
      base::str("placement: expected linear, round_robin or a table of ranks; got \"", name, '"'));
}

Placement Placement::linear() { return {}; }

Placement Placement::round_robin() {
  Placement placement;
  placement.kind = Kind::kRoundRobin;
  return placement;
}

Placement Placement::from_table(std::vector<std::int32_t> rank_of_expert) {
  Placement placement;
  placement.kind = Kind::kTable;
  placement.table = std::move(rank_of_expert);
  return placement;
}

Placement Placement::from_replicas(std::vector<std::int32_t> rank_of_expert,
                                   std::vector<std::int32_t> logical_of_expert) {
  Placement placement = from_table(std::move(rank_of_expert));
  placement.logical_of_expert = std::move(logical_of_expert);
  return placement;
}

}  // namespace fanfold
