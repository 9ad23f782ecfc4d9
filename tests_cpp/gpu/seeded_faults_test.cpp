// SPDX-License-Identifier: Apache-2.0

// Each deliberate fault of the kernels (gpu/kernels/faults.cuh) shows: as a report of the simulated
// device, as an error of a call, or in what comes out. Without one nothing shows.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "cudasim/control.h"
#include "gmock/gmock.h"
#include "gpu/fault_scenario.h"
#include "gpu/kernels/faults.cuh"
#include "gtest/gtest.h"

namespace fanfold::gpu {
namespace {

Fault& current_fault() {
  static Fault fault = Fault::kNone;
  return fault;
}

}  // namespace

bool has(Fault fault) { return fault == current_fault(); }

namespace {

using fanfold::testing::FaultOutcome;
using fanfold::testing::FaultScenario;

// --- Scenarios ----------------------------------------------------------------------------------

FaultScenario base() {
  FaultScenario s;
  s.name = "by_rank";
  return s;
}
FaultScenario by_rank() { return base(); }
FaultScenario staged() {
  FaultScenario s = base();
  s.name = "staged";
  s.in_place = false;
  return s;
}
// Each kernel of a round has several blocks.
FaultScenario more_tokens() {
  FaultScenario s = staged();
  s.name = "more_tokens";
  s.tokens = 12;
  return s;
}
FaultScenario split() {
  FaultScenario s = base();
  s.name = "split";
  s.in_place = false;
  s.whole_calls = false;
  s.max_in_flight = 2;
  return s;
}
FaultScenario crowded() {
  FaultScenario s = staged();
  s.name = "crowded";
  s.num_devices = 1;
  s.runs_between_ranks = true;
  s.tokens = 40;
  s.hidden = 16;
  s.num_rounds = 1;
  s.resident_blocks = 3;
  return s;
}
FaultScenario masked() {
  FaultScenario s = base();
  s.name = "masked";
  s.masks_last = true;
  return s;
}
FaultScenario counted() {
  FaultScenario s = base();
  s.name = "counted";
  s.counts_on_device = true;
  return s;
}
FaultScenario by_expert() {
  FaultScenario s = base();
  s.name = "by_expert";
  s.layout = Layout::kExpertMajor;
  s.weighting = Weighting::kCarried;
  s.has_replicas = true;
  s.num_experts = 8;
  return s;
}
FaultScenario kept_open() {
  FaultScenario s = by_expert();
  s.name = "kept_open";
  s.weighting = Weighting::kOrigin;
  s.num_combines = 2;
  return s;
}
FaultScenario kept_open_by_rank() {
  FaultScenario s = base();
  s.name = "kept_open_by_rank";
  s.num_combines = 3;
  s.waits_between_combines = false;
  return s;
}
FaultScenario packed() {
  FaultScenario s = by_expert();
  s.name = "packed";
  s.strategy = Strategy::kLowLatency;
  s.combine_wire = Wire::kFp8E4M3;
  s.hidden = 300;
  s.num_rounds = 1;
  return s;
}
FaultScenario many_tiles() {
  FaultScenario s = base();
  s.name = "many_tiles";
  s.num_ranks = 1;
  s.tokens = 60;
  s.hidden = 8;
  s.resident_blocks = 60;
  s.num_rounds = 1;
  return s;
}
FaultScenario long_tiles() {
  FaultScenario s = by_expert();
  s.name = "long_tiles";
  s.num_ranks = 2;
  s.tokens = 100;
  s.hidden = 8;
  s.resident_blocks = 1;
  s.num_rounds = 1;
  return s;
}

FaultScenario in_blocks() {
  FaultScenario s = more_tokens();
  s.name = "in_blocks";
  s.strategy = Strategy::kBatched;
  return s;
}
FaultScenario gathered() {
  FaultScenario s = more_tokens();
  s.name = "gathered";
  s.strategy = Strategy::kGatherScatter;
  s.counts_on_device = true;
  return s;
}

using MakeScenario = FaultScenario (*)();
constexpr MakeScenario kAll[] = {by_rank, staged,     more_tokens, split,     crowded,
                                 masked,  counted,    by_expert,   kept_open, kept_open_by_rank,
                                 packed,  many_tiles, long_tiles,  in_blocks, gathered};
constexpr std::uint64_t kSeeds[] = {1, 2, 3, 4, 5, 6};
// Until a fault shows, most at once: ranks are threads, so a seed is not the whole schedule.
constexpr std::uint64_t kMostSeeds = 30;

/// What comes out without a fault.
const FaultOutcome& right_outcome(MakeScenario make) {
  static std::map<std::string, FaultOutcome> known;
  const FaultScenario scenario = make();
  auto found = known.find(scenario.name);
  if (found == known.end()) {
    current_fault() = Fault::kNone;
    found = known.emplace(scenario.name, fanfold::testing::run(scenario, 100)).first;
  }
  return found->second;
}

/// How a fault showed: "race" and other reports, "error", "result"; empty: it did not.
std::vector<std::string> signs_of(MakeScenario make, std::uint64_t seed, Fault fault,
                                  std::string* text) {
  const FaultOutcome& right = right_outcome(make);
  current_fault() = fault;
  const FaultOutcome outcome = fanfold::testing::run(make(), seed);
  current_fault() = Fault::kNone;
  std::vector<std::string> signs = outcome.kinds;
  if (outcome.has_failed) signs.emplace_back("error");
  if (!outcome.has_failed && outcome.results != right.results) signs.emplace_back("result");
  *text = outcome.text;
  return signs;
}

/// The same, in one line each, then the text.
std::string signs_here(MakeScenario make, std::uint64_t seed, Fault fault) {
  std::string text;
  std::string lines;
  for (const std::string& sign : signs_of(make, seed, fault, &text)) lines += sign + "\n";
  return lines + "(" + text + ")";
}

/// The same in a process of its own, since a fault may write anywhere; "crash": it has ended that
/// process.
std::string signs_in_child(MakeScenario make, std::uint64_t seed, Fault fault) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string lines = signs_here(make, seed, fault);
    (void)!::write(ends[1], lines.data(), lines.size());
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string lines;
  char buffer[4096];
  for (ssize_t size = 0; (size = ::read(ends[0], buffer, sizeof buffer)) > 0;) {
    lines.append(buffer, static_cast<std::size_t>(size));
  }
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) lines += "crash\n";
  return lines;
}

constexpr const char* kNeedsAccesses =
    "the simulated device sees no accesses under a sanitizer; preset sim runs this";

class RightKernelsTest : public ::testing::TestWithParam<MakeScenario> {};

TEST_P(RightKernelsTest, ShowNothingAndGiveTheSameEveryTime) {
  if (!cudasim::sees_accesses()) GTEST_SKIP() << kNeedsAccesses;
  ASSERT_FALSE(right_outcome(GetParam()).has_failed) << right_outcome(GetParam()).text;
  ASSERT_FALSE(right_outcome(GetParam()).results.empty());
  for (const std::uint64_t seed : kSeeds) {
    std::string text;
    EXPECT_THAT(signs_of(GetParam(), seed, Fault::kNone, &text), ::testing::IsEmpty())
        << "seed " << seed << ": " << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, RightKernelsTest, ::testing::ValuesIn(kAll),
                         [](const auto& param) { return std::string(param.param().name); });

// --- Faults -------------------------------------------------------------------------------------

struct SeededFault {
  Fault fault;
  const char* name;
  MakeScenario scenario;
  const char* sign;  // must be seen; or one of several
};

void PrintTo(const SeededFault& seeded, std::ostream* out) { *out << seeded.name; }

#define FANFOLD_FAULT(name, scenario, sign) \
  SeededFault { Fault::name, #name, scenario, sign }
const SeededFault kFaults[] = {
    // flags.cuh
    FANFOLD_FAULT(kDoesNotWaitForKernel, by_rank, "race"),
    FANFOLD_FAULT(kNoBarrierBeforeCount, staged, "race"),
    FANFOLD_FAULT(kRelaxedCount, staged, "race"),
    FANFOLD_FAULT(kNoFenceBeforeEpoch, by_rank, "race"),
    FANFOLD_FAULT(kFenceOfDevice, by_rank, "race"),
    FANFOLD_FAULT(kRelaxedWait, by_rank, "race"),
    FANFOLD_FAULT(kAcquireOfDevice, by_rank, "race"),
    FANFOLD_FAULT(kAnyEpoch, by_rank, "race"),
    FANFOLD_FAULT(kSkipsLastPeer, by_rank, "race"),
    FANFOLD_FAULT(kEpochBeforeWords, by_rank, "error"),
    FANFOLD_FAULT(kStagesInOwnBlock, in_blocks, "error"),
    // tiles.cuh
    FANFOLD_FAULT(kNoBarrierBetweenTiles, long_tiles, "race or crash"),
    FANFOLD_FAULT(kTagWithoutEpoch, split, "result"),
    FANFOLD_FAULT(kLooksBackOnce, many_tiles, "result"),
    FANFOLD_FAULT(kNoBarrierBeforeBallot, by_rank, "race"),
    FANFOLD_FAULT(kPlacesFromOne, by_rank, "result"),
    FANFOLD_FAULT(kPlacesOfNextColumn, by_expert, "result"),
    // rows.cuh
    FANFOLD_FAULT(kDropsLastUnit, by_rank, "result"),
    // dispatch_send.cu
    FANFOLD_FAULT(kNoBarrierBeforeKeys, by_rank, "race"),
    FANFOLD_FAULT(kSendsToInactive, masked, "result"),
    FANFOLD_FAULT(kRowsOfReader, by_rank, "race"),
    FANFOLD_FAULT(kCopyByToken, by_expert, "result"),
    FANFOLD_FAULT(kEveryBlockAnnounces, by_rank, "race"),
    FANFOLD_FAULT(kCountersStay, by_rank, "result"),
    FANFOLD_FAULT(kTokensOfWord, counted, "result"),
    // compact_rows.cu
    FANFOLD_FAULT(kKeepsBehindTokens, gathered, "result or uninit"),
    FANFOLD_FAULT(kCompactCountersStay, gathered, "result or error"),
    // arrange.cu
    FANFOLD_FAULT(kPadsLastRow, by_rank, "result"),
    FANFOLD_FAULT(kNoBarrierBeforeRepeats, by_expert, "race"),
    FANFOLD_FAULT(kWeightOfFirst, by_expert, "result"),
    FANFOLD_FAULT(kOffsetsInclusive, by_expert, "result"),
    FANFOLD_FAULT(kArrangeCountersStay, by_expert, "race or error"),
    // describe_rows.cu
    FANFOLD_FAULT(kDescribesPadding, by_rank, "result"),
    // sanitize.cu
    FANFOLD_FAULT(kSanitizesLastRow, by_rank, "result"),
    // combine_send.cu
    FANFOLD_FAULT(kSendsOneRowLess, staged, "result"),
    FANFOLD_FAULT(kSendsToNextRow, staged, "result"),
    FANFOLD_FAULT(kAnnouncesFirst, staged, "race"),
    FANFOLD_FAULT(kCombineCountersStay, more_tokens, "race"),
    FANFOLD_FAULT(kCombineDoesNotWait, staged, "race"),
    FANFOLD_FAULT(kLaunchesWhileWaiting, crowded, "error"),
    FANFOLD_FAULT(kListNotReady, by_expert, "race"),
    // sum_rows.cu
    FANFOLD_FAULT(kSkipsLastTarget, by_rank, "result"),
    FANFOLD_FAULT(kAddsBackwards, kept_open, "result"),
    FANFOLD_FAULT(kPullsNextRow, by_rank, "result"),
    FANFOLD_FAULT(kRowsBehindStay, counted, "result"),
    FANFOLD_FAULT(kAcksFirst, kept_open_by_rank, "race"),
    FANFOLD_FAULT(kCombineNotCounted, kept_open_by_rank, "error"),
    // numbers.cuh
    FANFOLD_FAULT(kScaleOfWarp, packed, "result"),
};
#undef FANFOLD_FAULT

class SeededFaultTest : public ::testing::TestWithParam<SeededFault> {};

TEST_P(SeededFaultTest, Shows) {
  if (!cudasim::sees_accesses()) GTEST_SKIP() << kNeedsAccesses;
  const SeededFault& seeded = GetParam();
  const std::string wanted = seeded.sign;
  std::string seen;
  // Collectives work in the process that has loaded NCCL only; their faults stay within bounds.
  const Strategy strategy = seeded.scenario().strategy;
  const bool is_here = strategy == Strategy::kBatched || strategy == Strategy::kGatherScatter;
  for (std::uint64_t seed = 1; seed <= kMostSeeds; ++seed) {
    seen = is_here ? signs_here(seeded.scenario, seed, seeded.fault)
                   : signs_in_child(seeded.scenario, seed, seeded.fault);
    std::istringstream lines(seen);
    for (std::string sign; std::getline(lines, sign) && sign[0] != '(';) {
      if (wanted.find(sign) != std::string::npos) return;
    }
  }
  FAIL() << "expected a " << seeded.sign << ", got at last " << seen;
}

INSTANTIATE_TEST_SUITE_P(Kernels, SeededFaultTest, ::testing::ValuesIn(kFaults),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace fanfold::gpu
