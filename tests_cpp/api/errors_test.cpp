// SPDX-License-Identifier: Apache-2.0
// Input that does not fit: one test per rule, its type and its text. The error is local, nothing
// was sent, and a corrected call goes on with the same round.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/round_run.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_ranks;
using ::testing::TestWithParam;
using ::testing::ValuesIn;

AllToAllConfig small_config() {
  AllToAllConfig config;
  config.num_experts = 6;
  config.top_k = 2;
  config.max_tokens_per_rank = 4;
  config.hidden = 8;
  config.dtype = DType::kFloat32;
  config.strategy = Strategy::kOneSided;
  config.name = "moe";
  return config;
}

testing::RoundPlan small_plan(const AllToAllConfig& config, std::uint64_t seed = 1) {
  return testing::make_round(config, 2, RoutingKind::kUniform, 4, seed);
}

/// A rule's name and the words of its message.
struct Rule {
  const char* name;
  std::vector<std::string> words;
};

template <class Param>
std::string name_of_rule(const ::testing::TestParamInfo<Param>& param) {
  return param.param.rule.name;
}

// --- Configuration ----------------------------------------------------------------------------

struct BadConfig {
  Rule rule;
  std::function<void(AllToAllConfig&)> spoil;
};
void PrintTo(const BadConfig& bad, std::ostream* out) { *out << bad.rule.name; }

class BadConfigTest : public TestWithParam<BadConfig> {};

TEST_P(BadConfigTest, IsRefusedByNameAndValue) {
  spawn_ranks(2, [&](Communicator& communicator) {
    AllToAllConfig bad = small_config();
    GetParam().spoil(bad);
    expect_error<InvalidArgument>(GetParam().rule.words,
                                  [&] { AllToAll refused(communicator, bad); });
    expect_error<InvalidArgument>(GetParam().rule.words, [&] { AllToAll::required_bytes(2, bad); });
    AllToAll good(communicator, small_config());
    RoundRun round(good, small_plan(small_config()));
    round.dispatch();
    round.combine();
    good.close();
  });
}

std::vector<BadConfig> bad_configs() {
  using C = AllToAllConfig;
  return {
      {{"NoExperts", {"num_experts", "0"}}, [](C& c) { c.num_experts = 0; }},
      {{"NoTopK", {"top_k", "1024", "0"}}, [](C& c) { c.top_k = 0; }},
      {{"LargeTopK", {"top_k", "1024", "1025"}}, [](C& c) { c.top_k = 1025; }},
      {{"NoTokens", {"max_tokens_per_rank", "0"}}, [](C& c) { c.max_tokens_per_rank = 0; }},
      {{"NoHidden", {"hidden", "0"}}, [](C& c) { c.hidden = 0; }},
      {{"NegativeExtra", {"extra_bytes_per_token", "-1"}},
       [](C& c) { c.extra_bytes_per_token = -1; }},
      {{"NoDispatchRow", {"dispatch_row_bytes", "0"}}, [](C& c) { c.dispatch_row_bytes = 0; }},
      {{"NegativeCombineRow", {"combine_row_bytes", "-4"}}, [](C& c) { c.combine_row_bytes = -4; }},
      {{"NoSlots", {"max_in_flight", "64", "0"}}, [](C& c) { c.max_in_flight = 0; }},
      {{"ManySlots", {"max_in_flight", "64", "65"}}, [](C& c) { c.max_in_flight = 65; }},
      {{"NoTimeout", {"timeout", "0"}}, [](C& c) { c.timeout = std::chrono::nanoseconds(0); }},
      {{"UnsummableDtype", {"combine_dtype", "float8_e4m3fn"}},
       [](C& c) { c.dtype = DType::kFloat8E4M3; }},
      {{"UnsummableCombineDtype", {"combine_dtype", "float32", "int32"}},
       [](C& c) { c.combine_dtype = DType::kInt32; }},
      {{"ShortTable", {"placement", "6", "5"}},
       [](C& c) { c.placement = Placement::from_table({0, 1, 0, 1, 0}); }},
      {{"TableNamesNoRank", {"placement", "rank 2", "expert 3"}},
       [](C& c) { c.placement = Placement::from_table({0, 1, 0, 2, 0, 1}); }},
      {{"TableNamesNegativeRank", {"placement", "rank -1", "expert 5"}},
       [](C& c) { c.placement = Placement::from_table({0, 1, 0, 1, 0, -1}); }},
      {{"CarriedByRankMajor", {"weighting", "rank_major", "applied", "carried"}},
       [](C& c) { c.weighting = Weighting::kCarried; }},
      {{"OriginByGathered", {"weighting", "gathered", "applied", "origin"}},
       [](C& c) {
         c.strategy = Strategy::kBroadcast;
         c.layout = Layout::kGathered;
         c.weighting = Weighting::kOrigin;
       }},
      {{"UnknownIsa", {"isa", "mmx"}}, [](C& c) { c.test_knobs.isa = "mmx"; }},
      {{"OddGuard", {"row_guard_bytes", "16", "5"}},
       [](C& c) { c.test_knobs.row_guard_bytes = 5; }},
      {{"NoFirstEpoch", {"first_epoch", "0"}}, [](C& c) { c.test_knobs.first_epoch = 0; }},
  };
}

INSTANTIATE_TEST_SUITE_P(Rule, BadConfigTest, ValuesIn(bad_configs()), name_of_rule<BadConfig>);

TEST(BadConfigTest, ALayoutThatTheStrategyLacksIsUnsupported) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAllConfig gathered = small_config();
    gathered.layout = Layout::kGathered;
    expect_error<Unsupported>({"layout", "one_sided", "rank_major", "expert_major", "gathered"},
                              [&] { AllToAll refused(communicator, gathered); });
  });
}

// --- Dispatch ---------------------------------------------------------------------------------

/// Memory that spoiled inputs may point to.
struct Scrap {
  std::vector<std::int64_t> ids = std::vector<std::int64_t>(64, 0);
  std::vector<float> rows = std::vector<float>(256, 1.0F);
  std::int32_t number = 0;
};

struct BadDispatch {
  Rule rule;
  std::function<void(DispatchInputs&, Scrap&)> spoil;
  Layout layout = Layout::kRankMajor;
  Weighting weighting = Weighting::kApplied;
};
void PrintTo(const BadDispatch& bad, std::ostream* out) { *out << bad.rule.name; }

class BadDispatchTest : public TestWithParam<BadDispatch> {
 protected:
  static void run(AllToAllConfig config) {
    config.layout = GetParam().layout;
    config.weighting = GetParam().weighting;
    spawn_ranks(2, [&](Communicator& communicator) {
      AllToAll all_to_all(communicator, config);
      for (std::uint64_t i = 0; i < 2; ++i) {
        RoundRun round(all_to_all, small_plan(config, i));
        if (all_to_all.rank() == static_cast<int>(i)) refuse(all_to_all, round);
        round.dispatch();
        round.combine();
      }
      all_to_all.close();
    });
  }

  static void refuse(AllToAll& all_to_all, const RoundRun& round) {
    DispatchInputs bad = round.inputs;
    Scrap scrap;
    GetParam().spoil(bad, scrap);
    expect_error<InvalidArgument>(GetParam().rule.words, [&] { all_to_all.dispatch(bad); });
    EXPECT_FALSE(all_to_all.is_failed());
    if (!all_to_all.capabilities().two_phase) return;
    expect_error<InvalidArgument>(GetParam().rule.words, [&] { all_to_all.dispatch_send(bad); });
  }
};

TEST_P(BadDispatchTest, IsRefusedBeforeAnythingIsSent) { run(small_config()); }

TEST_P(BadDispatchTest, IsRefusedByBroadcastInTheSameWords) {
  AllToAllConfig config = small_config();
  config.strategy = Strategy::kBroadcast;
  run(config);
}

std::vector<BadDispatch> bad_ids() {
  using In = DispatchInputs;
  return {
      {{"NoIds", {"topk_ids", "none"}}, [](In& in, Scrap&) { in.topk_ids = TensorView(); }},
      {{"FloatIds", {"topk_ids", "int64", "float32"}},
       [](In& in, Scrap&) { in.topk_ids.dtype = DType::kFloat32; }},
      {{"UnsignedByteIds", {"topk_ids", "uint8"}},
       [](In& in, Scrap&) { in.topk_ids.dtype = DType::kUInt8; }},
      {{"WrongTopK", {"topk_ids", "2]", "[4, 3]"}},
       [](In& in, Scrap& s) { in.topk_ids = TensorView(s.ids.data(), DType::kInt64, {4, 3}); }},
      {{"FlatIds", {"topk_ids", "[8]"}},
       [](In& in, Scrap& s) { in.topk_ids = TensorView(s.ids.data(), DType::kInt64, {8}); }},
      {{"StridedIds", {"topk_ids", "contiguous"}},
       [](In& in, Scrap& s) {
         in.topk_ids = TensorView(s.ids.data(), DType::kInt64, {4, 2});
         in.topk_ids.strides[1] = 3;
       }},
      {{"NullIds", {"topk_ids", "null"}}, [](In& in, Scrap&) { in.topk_ids.data = nullptr; }},
      {{"GpuIds", {"topk_ids", "cpu", "cuda:0"}},
       [](In& in, Scrap&) { in.topk_ids.device = DeviceType::kGpu; }},
      {{"LargeId", {"topk_ids", "6", "got 7", "row 2", "column 1"}},
       [](In& in, Scrap& s) {
         s.ids[5] = 7;
         in.topk_ids = TensorView(s.ids.data(), DType::kInt64, {4, 2});
       }},
      {{"HugeId", {"topk_ids", "9223372036854775807", "row 0", "column 0"}},
       [](In& in, Scrap& s) {
         s.ids[0] = INT64_MAX;
         in.topk_ids = TensorView(s.ids.data(), DType::kInt64, {4, 2});
       }},
      {{"TooManyTokens", {"4", "max_tokens_per_rank", "5"}},
       [](In& in, Scrap& s) {
         in.topk_ids = TensorView(s.ids.data(), DType::kInt64, {5, 2});
         in.topk_weights = TensorView();
         in.payloads = {TensorView(s.rows.data(), DType::kFloat32, {5, 8})};
       }},
      {{"MoreTokensThanTheRound", {"3", "round_max_tokens", "4"}},
       [](In& in, Scrap&) { in.round_max_tokens = 3; }},
      {{"RoundBeyondCapacity", {"round_max_tokens", "4", "5"}},
       [](In& in, Scrap&) { in.round_max_tokens = 5; }},
      {{"NegativeRound", {"round_max_tokens", "-1"}},
       [](In& in, Scrap&) { in.round_max_tokens = -1; }},
      {{"LargeInvalidId", {"invalid_expert_id", "4294967296"}},
       [](In& in, Scrap&) { in.invalid_expert_id = std::int64_t{1} << 32; }},
  };
}

std::vector<BadDispatch> bad_rows() {
  using In = DispatchInputs;
  return {
      {{"NoPayload", {"payloads", "16", "0"}}, [](In& in, Scrap&) { in.payloads.clear(); }},
      {{"ManyPayloads", {"payloads", "16", "17"}},
       [](In& in, Scrap& s) {
         in.payloads.assign(17, TensorView(s.rows.data(), DType::kUInt8, {4, 1}));
       }},
      {{"PayloadOfOtherLength", {"payloads[0]", "[4, ...]", "[3, 8]"}},
       [](In& in, Scrap& s) {
         in.payloads = {TensorView(s.rows.data(), DType::kFloat32, {3, 8})};
       }},
      {{"SecondPayloadOfOtherLength", {"payloads[1]", "[5, 1]"}},
       [](In& in, Scrap& s) {
         in.payloads[0].shape[1] = 4;
         in.payloads.push_back(TensorView(s.rows.data(), DType::kUInt8, {5, 1}));
       }},
      {{"EmptyRows", {"payloads[0]", "at least one byte", "[4, 0]"}},
       [](In& in, Scrap& s) {
         in.payloads = {TensorView(s.rows.data(), DType::kFloat32, {4, 0})};
       }},
      {{"WideRows", {"payloads", "32", "dispatch_row_bytes", "33"}},
       [](In& in, Scrap& s) {
         in.payloads.push_back(TensorView(s.rows.data(), DType::kUInt8, {4, 1}));
       }},
      {{"StridedRow", {"payloads[0]", "contiguous"}},
       [](In& in, Scrap&) { in.payloads[0].strides[1] = 2; }},
      {{"NullPayload", {"payloads[0]", "null"}},
       [](In& in, Scrap&) { in.payloads[0].data = nullptr; }},
      {{"GpuPayload", {"payloads[0]", "cpu", "cuda:0"}},
       [](In& in, Scrap&) { in.payloads[0].device = DeviceType::kGpu; }},
      {{"WeightsOfOtherType", {"topk_weights", "float32 [4, 2]", "bfloat16"}},
       [](In& in, Scrap&) { in.topk_weights.dtype = DType::kBFloat16; }},
      {{"WeightsOfOtherShape", {"topk_weights", "float32 [4, 2]", "[4, 3]"}},
       [](In& in, Scrap& s) {
         in.topk_weights = TensorView(s.rows.data(), DType::kFloat32, {4, 3});
       }},
      {{"NoWeightsToCarry", {"topk_weights", "carried", "none"}},
       [](In& in, Scrap&) { in.topk_weights = TensorView(); },
       Layout::kExpertMajor,
       Weighting::kCarried},
      {{"CountsOfOtherLength", {"num_tokens_per_rank", "2", "3"}},
       [](In& in, Scrap&) { in.num_tokens_per_rank = {4, 4, 4}; }},
      {{"OwnCountDiffers", {"num_tokens_per_rank", "4", "3"}},
       [](In& in, Scrap&) { in.num_tokens_per_rank = {3, 3}; }},
      {{"NumTokensOfOtherType", {"num_tokens", "int32", "int64"}},
       [](In& in, Scrap& s) { in.num_tokens = TensorView(s.ids.data(), DType::kInt64, {1}); }},
      {{"NegativeNumTokens", {"num_tokens", "-1"}},
       [](In& in, Scrap& s) {
         s.number = -1;
         in.num_tokens = TensorView(&s.number, DType::kInt32, {1});
       }},
      {{"NumTokensBeyondRows", {"num_tokens", "4", "5"}},
       [](In& in, Scrap& s) {
         s.number = 5;
         in.num_tokens = TensorView(&s.number, DType::kInt32, {1});
       }},
  };
}

INSTANTIATE_TEST_SUITE_P(Ids, BadDispatchTest, ValuesIn(bad_ids()), name_of_rule<BadDispatch>);
INSTANTIATE_TEST_SUITE_P(Rows, BadDispatchTest, ValuesIn(bad_rows()), name_of_rule<BadDispatch>);

// --- Combine ----------------------------------------------------------------------------------

struct BadCombine {
  Rule rule;
  std::function<void(CombineInputs&, Scrap&, const Received&)> spoil;
};
void PrintTo(const BadCombine& bad, std::ostream* out) { *out << bad.rule.name; }

class BadCombineTest : public TestWithParam<BadCombine> {};

TEST_P(BadCombineTest, IsRefusedAndTheRoundGoesOn) {
  for (const Strategy strategy : {Strategy::kOneSided, Strategy::kBroadcast}) {
    AllToAllConfig config = small_config();
    config.strategy = strategy;
    spawn_ranks(2, [&](Communicator& communicator) {
      AllToAll all_to_all(communicator, config);
      RoundRun round(all_to_all, small_plan(config));
      round.dispatch();
      CombineInputs bad = round.prepare_combine();
      if (all_to_all.rank() == 0) {
        Scrap scrap;
        GetParam().spoil(bad, scrap, round.received());
        expect_error<InvalidArgument>(GetParam().rule.words,
                                      [&] { all_to_all.combine(bad, round.handle()); });
        EXPECT_FALSE(all_to_all.is_failed());
      }
      round.combine();
      all_to_all.close();
    });
  }
}

std::vector<BadCombine> bad_combines() {
  using In = CombineInputs;
  return {
      {{"IntegerResults", {"y", "float32", "int32"}},
       [](In& in, Scrap&, const Received&) { in.y.dtype = DType::kInt32; }},
      {{"ResultsOfOtherShape", {"y", "[2, 4, hidden]", "[2, 3, 8]"}},
       [](In& in, Scrap&, const Received&) { in.y.shape[1] = 3; }},
      {{"FlatResults", {"y", "[2, 4, hidden]", "[8, 8]"}},
       [](In& in, Scrap& s, const Received&) {
         in.y = TensorView(s.rows.data(), DType::kFloat32, {8, 8});
       }},
      {{"WideResults", {"hidden of the combine", "combine_row_bytes", "9"}},
       [](In& in, Scrap& s, const Received&) {
         in.y = TensorView(s.rows.data(), DType::kFloat32, {2, 4, 9});
       }},
      {{"StridedResults", {"y", "contiguous"}},
       [](In& in, Scrap& s, const Received&) {
         in.y = TensorView(s.rows.data(), DType::kFloat32, {2, 4, 8});
         in.y.strides[0] = 40;
       }},
      {{"NullResults", {"y", "null"}},
       [](In& in, Scrap&, const Received&) { in.y.data = nullptr; }},
      {{"GpuResults", {"y", "cpu", "cuda:0"}},
       [](In& in, Scrap&, const Received&) { in.y.device = DeviceType::kGpu; }},
      {{"ReceivedRowsAsResults", {"y", "combine buffer of round 0", "AllToAll"}},
       [](In& in, Scrap&, const Received& received) { in.y = received.payloads()[0]; }},
      {{"OutOfOtherType", {"out", "float32", "[4, 8]", "float64"}},
       [](In& in, Scrap&, const Received&) { in.out.dtype = DType::kFloat64; }},
      {{"OutOfOtherLength", {"out", "[4, 8]", "[3, 8]"}},
       [](In& in, Scrap&, const Received&) { in.out.shape[0] = 3; }},
      {{"OutOfOtherHidden", {"out", "[4, 8]", "[4, 7]"}},
       [](In& in, Scrap&, const Received&) { in.out.shape[1] = 7; }},
      {{"NoOut", {"out", "[4, 8]"}},
       [](In& in, Scrap&, const Received&) { in.out = TensorView(); }},
      {{"NullOut", {"out", "null"}},
       [](In& in, Scrap&, const Received&) { in.out.data = nullptr; }},
      {{"OutInsideTheWorkspace", {"out", "outside this AllToAll"}},
       [](In& in, Scrap&, const Received& received) {
         in.out = TensorView(received.payloads()[0].data, DType::kFloat32, {4, 8});
       }},
      {{"WeightsThatNobodyMultiplies", {"topk_weights", "origin"}},
       [](In& in, Scrap& s, const Received&) {
         in.topk_weights = TensorView(s.rows.data(), DType::kFloat32, {4, 2});
       }},
  };
}

INSTANTIATE_TEST_SUITE_P(Rule, BadCombineTest, ValuesIn(bad_combines()), name_of_rule<BadCombine>);

}  // namespace
}  // namespace fanfold
