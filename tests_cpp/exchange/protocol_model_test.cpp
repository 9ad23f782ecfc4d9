// SPDX-License-Identifier: Apache-2.0
// The protocol, visited whole: no order of the ranks' steps overwrites what somebody still reads,
// or leaves a rank waiting for ever.

#include "exchange/protocol_model.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "support/sanitizer.h"

namespace fanfold::testing {
namespace {

std::string text_of(const ProtocolReport& report) {
  std::string text = report.violation;
  for (const std::string& line : report.trace) text += "\n  " + line;
  return text;
}

void expect_sound(const ProtocolOptions& options, std::int64_t least_states) {
  const ProtocolReport report = explore_protocol(options);
  EXPECT_EQ(report.violation, "") << text_of(report);
  EXPECT_GE(report.num_states, least_states);  // the search went somewhere
  ::testing::Test::RecordProperty("num_states", std::to_string(report.num_states));
}

TEST(ProtocolModelTest, TwoRanksMayTakeTheirStepsInAnyOrder) {
  for (const int max_in_flight : {1, 2}) {
    for (const bool rank_zero_pulls : {true, false}) {
      ProtocolOptions options;
      options.max_in_flight = max_in_flight;
      options.rank_zero_pulls = rank_zero_pulls;
      expect_sound(options, 300);
    }
  }
}

TEST(ProtocolModelTest, ThreeRanksMayTakeTheirStepsInAnyOrder) {
  for (const int max_in_flight : {1, 2}) {
    if (kIsSanitizer && max_in_flight == 2) continue;  // one thread, nothing to find
    ProtocolOptions options;
    options.num_ranks = 3;
    options.max_in_flight = max_in_flight;
    expect_sound(options, 9'000);
    options.rank_zero_pulls = false;
    expect_sound(options, 9'000);
  }
}

TEST(ProtocolModelTest, ARoundKeptOpenIsAcknowledgedBeforeItCombinesAgain) {
  ProtocolOptions options;
  options.keeps_open = true;
  for (const int max_in_flight : {1, 2}) {
    options.max_in_flight = max_in_flight;
    expect_sound(options, 1'000);
  }
  options.max_in_flight = 1;
  options.num_ranks = 3;
  expect_sound(options, 30'000);
  options.num_ranks = 2;
  options.num_resets = 1;
  options.num_aborts = 1;
  expect_sound(options, 100'000);
}

TEST(ProtocolModelTest, AResetBetweenAnyTwoCallsBringsAllRanksBack) {
  ProtocolOptions options;
  options.num_resets = 1;
  expect_sound(options, 5'000);
  if (kIsSanitizer) return;
  options.max_in_flight = 2;
  expect_sound(options, 100'000);
  options.max_in_flight = 1;
  options.num_ranks = 3;
  options.num_rounds = 2;
  expect_sound(options, 100'000);
}

TEST(ProtocolModelTest, AnAbortAtAnyTimeEndsEveryWaitAndResetHeals) {
  ProtocolOptions options;
  options.num_resets = 1;
  options.num_aborts = 1;
  expect_sound(options, 10'000);
  if (kIsSanitizer) return;
  options.max_in_flight = 2;
  expect_sound(options, 100'000);
  options.max_in_flight = 1;
  options.num_ranks = 3;
  options.num_rounds = 1;
  expect_sound(options, 100'000);
}

TEST(ProtocolModelTest, WaitsMayTimeOutAndResetsMayFollowEachOther) {
  ProtocolOptions options;
  options.num_rounds = 2;
  options.num_resets = kIsSanitizer ? 1 : 2;
  options.num_aborts = 1;
  options.waits_time_out = true;
  expect_sound(options, 5'000);
  options.max_in_flight = 2;
  options.num_rounds = 1;
  expect_sound(options, 2'000);
}

// --- The model can fail ------------------------------------------------------------------------

struct SeededFault {
  const char* name;
  ProtocolFault fault;
  const char* breaks;  // words of the violation
  int num_resets = 0;
};
void PrintTo(const SeededFault& seeded, std::ostream* out) { *out << seeded.name; }

class SeededFaultTest : public ::testing::TestWithParam<SeededFault> {};

TEST_P(SeededFaultTest, IsFound) {
  for (const int max_in_flight : {1, 2}) {
    ProtocolOptions options;
    options.max_in_flight = max_in_flight;
    options.fault = GetParam().fault;
    options.num_resets = GetParam().num_resets;
    options.keeps_open = options.fault == ProtocolFault::kKeepWithoutAcknowledgement;
    options.rank_zero_pulls = options.fault != ProtocolFault::kCombineRecvWaitsForSourcesOnly;
    const ProtocolReport report = explore_protocol(options);
    EXPECT_NE(report.violation.find(GetParam().breaks), std::string::npos) << text_of(report);
    EXPECT_FALSE(report.trace.empty());
  }
}

constexpr SeededFault kSeededFaults[] = {
    {"CombineRecvWaitsForSourcesOnly", ProtocolFault::kCombineRecvWaitsForSourcesOnly,
     "overwrites rows that are still in use"},
    {"DispatchSendIgnoresOpenSlot", ProtocolFault::kDispatchSendIgnoresOpenSlot,
     "overwrites rows that are still in use"},
    {"DispatchSendIgnoresReleasedSlot", ProtocolFault::kDispatchSendIgnoresReleasedSlot,
     "overwrites rows that are still in use"},
    {"DispatchFlagBeforeRows", ProtocolFault::kDispatchFlagBeforeRows,
     "overwrites rows that are still in use"},
    {"CombineFlagBeforeRows", ProtocolFault::kCombineFlagBeforeRows, "partials"},
    {"DispatchRecvSkipsAPeer", ProtocolFault::kDispatchRecvSkipsAPeer, "reads other rows"},
    {"KeepWithoutAcknowledgement", ProtocolFault::kKeepWithoutAcknowledgement,
     "overwrites partials"},
    {"ReleaseBeforeReceive", ProtocolFault::kReleaseBeforeReceive, "unread combine flag"},
    {"ResetWithoutBarrier", ProtocolFault::kResetWithoutBarrier, "older generation", 1},
    {"ResetWithoutGroupMaximum", ProtocolFault::kResetWithoutGroupMaximum, "reads other rows", 1},
    {"EpochsRestartAtOne", ProtocolFault::kEpochsRestartAtOne, "reads other rows", 1},
};

INSTANTIATE_TEST_SUITE_P(Model, SeededFaultTest, ::testing::ValuesIn(kSeededFaults),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace fanfold::testing
