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
    case Strategy::kOneSided:
      return "one_sided";
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

Strategy strategy_from_name(std::string_view name) {
  return from_name("strategy", name, Strategy::kOneSided);
}
Layout layout_from_name(std::string_view name) {
  return from_name("layout", name, Layout::kExpertMajor);
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

}  // namespace fanfold
