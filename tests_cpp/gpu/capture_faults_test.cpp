// SPDX-License-Identifier: Apache-2.0

// Each deliberate fault of the kernels of a RoutingCapture (gpu/kernels/faults.cuh) shows: in what
// snapshots hold, in what is thrown, or as a report of the simulated device. Without one nothing
// shows.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "capture/capture_case.h"
#include "capture/test_capture.h"
#include "cudasim/control.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/kernels/faults.cuh"
#include "gpu/test_gpu.h"
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

using testing::ids_view;
using testing::TestCapture;

constexpr int kRows = 600;  // of a record: several blocks

/// All that a run shows.
class Outcome {
 public:
  /// What `call` throws, or its result.
  template <class Call>
  void add(const char* what, Call&& call) {
    text_ += what;
    try {
      text_ += call();
    } catch (const Error& error) {
      text_ += error.what();
    }
    text_ += '\n';
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::string text_of(const RoutingSnapshot& snapshot) {
  std::string text;
  for (const std::int64_t id : testing::numbers_of(snapshot.array())) {
    text += std::to_string(id) + ' ';
  }
  for (const std::int64_t missing : snapshot.missing_rows()) {
    text += "missing " + std::to_string(missing) + ' ';
  }
  return text;
}

/// Ids below 4, of which `wrong` rows from `first` on are not.
testing::Ids many_ids(int first = 0, int wrong = 0) {
  testing::Ids ids;
  for (int row = 0; row < kRows; ++row) {
    const bool is_wrong = row >= first && row < first + wrong;
    ids.insert(ids.end(), {row % 4, is_wrong ? 100 + row : 3});
  }
  return ids;
}

void run_steps(Outcome& outcome) {
  RoutingCaptureConfig config = testing::small_capture(2, kRows);
  config.logical_of_expert = {5, 6, 7, 1};
  TestCapture capture(config);
  const TensorView sink = capture.sink(0);
  auto* const written = static_cast<std::int32_t*>(sink.data);
  const auto record = [&](const char* what, int layer, const testing::Ids& ids) {
    outcome.add(what, [&] {
      capture.record(layer, ids_view(ids, 2));
      return "";
    });
  };
  const auto show = [&](const char* what, std::int64_t num_tokens) {
    outcome.add(what, [&] { return text_of(capture.snapshot(num_tokens)); });
  };
  capture.begin_step(1);
  record("many", 0, many_ids());
  record("few", 1, {0, 3, 2, 1});
  show("complete rows: ", 2);
  show("rows of two layers: ", kRows);

  capture.begin_step(2);
  record("other", 1, {1, 1});
  show("nothing of the first step: ", 3);
  record("wrong in many rows", 0, many_ids(90, 400));
  show("lost: ", 1);

  capture.begin_step(3);
  show("after an error: ", 1);
  record("again wrong in many rows", 0, many_ids(500, 100));
  capture.begin_step(4);
  record("wrong in the last of few", 0, {0, 1, 2, 3, 0, 1, 2, 9});

  capture.begin_step(5);
  record("first", 1, {0, 1});
  record("with other ids", 1, {0, 2});

  written[0] = 1;
  written[1] = 1;
  capture.begin_step(6);
  capture.import_sink(0, 1);
  show("sink of the step before: ", 1);
  written[0] = 1;
  outcome.add("partly written: ", [&] {
    capture.import_sink(0, 1);
    return "";
  });
}

/// With what the device reported.
std::string outcome_of(Fault fault, std::uint64_t seed) {
  cudasim::Config config;
  config.seed = seed;
  config.resident_blocks = 2;
  cudasim::clear_reports();
  cudasim::configure(config);
  current_fault() = fault;
  Outcome outcome;
  {
    const testing::TestGpu gpu;
    run_steps(outcome);
  }
  current_fault() = Fault::kNone;
  std::string text = outcome.text();
  for (const cudasim::Report& report : cudasim::reports()) text += report.kind + report.text;
  cudasim::clear_reports();
  return text;
}

TEST(CaptureFaultsTest, WithoutAFaultEverySeedShowsTheSame) {
  const std::string expected = outcome_of(Fault::kNone, 1);
  EXPECT_THAT(expected, ::testing::HasSubstr("got 190 at row 90, column 1 of layer 0"));
  EXPECT_THAT(expected, ::testing::HasSubstr("got 600 at row 500, column 1 of layer 0"));
  EXPECT_THAT(expected, ::testing::HasSubstr("got 9 at row 3, column 1 of layer 0"));
  EXPECT_THAT(expected, ::testing::HasSubstr("token 0 of layer 1"));
  EXPECT_THAT(expected, ::testing::HasSubstr("column 1 of row 0 not written"));
  for (std::uint64_t seed = 2; seed <= 4; ++seed) {
    EXPECT_EQ(outcome_of(Fault::kNone, seed), expected) << "seed " << seed;
  }
}

class EachCaptureFault : public ::testing::TestWithParam<Fault> {};

TEST_P(EachCaptureFault, Shows) {
  const std::string expected = outcome_of(Fault::kNone, 1);
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    if (outcome_of(GetParam(), seed) != expected) return;
  }
  ADD_FAILURE() << "nothing shows";
}

INSTANTIATE_TEST_SUITE_P(
    Faults, EachCaptureFault,
    ::testing::Values(Fault::kSinksStay, Fault::kErrorOutlives, Fault::kKeepsPhysical,
                      Fault::kLastExpertIsWrong, Fault::kAnyErrorOfKernel,
                      Fault::kRecordCountersStay, Fault::kNoBarrierBeforeLook,
                      Fault::kRecordsOverOtherRows, Fault::kPartlyWrittenIsWritten,
                      Fault::kSnapshotOfOldSteps, Fault::kBitsOfFirstLane, Fault::kSkipsLastCell),
    [](const auto& each) { return std::to_string(static_cast<int>(each.param)); });

}  // namespace
}  // namespace fanfold::gpu
