// SPDX-License-Identifier: Apache-2.0
// What all ranks must share, and how a difference is told.

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "api/config.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold::api {
namespace {

using ::testing::HasSubstr;
using Change = std::function<void(AllToAllConfig&)>;

AllToAllConfig resolved(const Change& change) {
  AllToAllConfig config;
  config.num_experts = 8;
  config.top_k = 2;
  config.max_tokens_per_rank = 16;
  config.hidden = 10;
  config.layout = Layout::kFlatByExpert;
  config.strategy = Strategy::kLowLatency;
  config.combine_dtype = DType::kBFloat16;
  change(config);
  return resolve(config, 4).config;
}

/// One change of each field that ranks must share.
std::map<std::string, Change> shared_fields() {
  return {
      {"device",
       [](AllToAllConfig& c) {
         c.device = DeviceType::kGpu;
         c.layout = Layout::kExpertMajor;
       }},
      {"num_experts", [](AllToAllConfig& c) { c.num_experts = 9; }},
      {"top_k", [](AllToAllConfig& c) { c.top_k = 3; }},
      {"max_tokens_per_rank", [](AllToAllConfig& c) { c.max_tokens_per_rank = 17; }},
      {"hidden", [](AllToAllConfig& c) { c.hidden = 9; }},
      {"dtype", [](AllToAllConfig& c) { c.dtype = DType::kFloat16; }},
      {"dispatch_row_bytes", [](AllToAllConfig& c) { c.extra_bytes_per_token = 3; }},
      {"combine_row_bytes", [](AllToAllConfig& c) { c.combine_row_bytes = 40; }},
      {"strategy", [](AllToAllConfig& c) { c.strategy = Strategy::kBroadcast; }},
      {"layout", [](AllToAllConfig& c) { c.layout = Layout::kExpertMajor; }},
      {"weighting", [](AllToAllConfig& c) { c.weighting = Weighting::kOrigin; }},
      {"placement", [](AllToAllConfig& c) { c.placement = Placement::round_robin(); }},
      {"combine_dtype", [](AllToAllConfig& c) { c.combine_dtype = DType::kFloat16; }},
      {"placement.logical_of_expert",
       [](AllToAllConfig& c) {
         c.placement = Placement::from_replicas({0, 0, 1, 1, 2, 2, 3, 3}, {0, 1, 2, 3, 4, 5, 6, 0});
       }},
      {"max_recv_rows", [](AllToAllConfig& c) { c.max_recv_rows = 9; }},
      {"expert_alignment", [](AllToAllConfig& c) { c.expert_alignment = 8; }},
      {"max_local_experts", [](AllToAllConfig& c) { c.max_local_experts = 3; }},
      {"dispatch_wire", [](AllToAllConfig& c) { c.dispatch_wire = Wire::kFp8E4M3; }},
      {"combine_wire", [](AllToAllConfig& c) { c.combine_wire = Wire::kFp8E4M3; }},
      {"wire_scale", [](AllToAllConfig& c) { c.wire_scale = WireScale::kUe8m0; }},
      {"channel_bytes", [](AllToAllConfig& c) { c.channel_bytes = 4096; }},
      {"max_in_flight", [](AllToAllConfig& c) { c.max_in_flight = 2; }},
      {"deterministic", [](AllToAllConfig& c) { c.deterministic = false; }},
      {"check_ids", [](AllToAllConfig& c) { c.check_ids = CheckIds::kDrop; }},
      {"row_guard_bytes", [](AllToAllConfig& c) { c.test_knobs.row_guard_bytes = 32; }},
      {"first_epoch", [](AllToAllConfig& c) { c.test_knobs.first_epoch = 2; }},
  };
}

std::string encoded(const Change& change) { return flatten(encode(resolved(change))); }

std::string encoded() {
  return encoded([](AllToAllConfig&) {});
}

TEST(ConfigEncodingTest, EverySharedFieldIsEncodedOnce) {
  const std::map<std::string, Change> fields = shared_fields();
  std::set<std::string> names;
  for (const auto& [name, value] : encode(resolved([](AllToAllConfig&) {}))) {
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(fields.count(name), 1U) << name << " has no test below";
  }
  EXPECT_EQ(names.size(), fields.size());
}

TEST(ConfigEncodingTest, EachDifferenceNamesItsFieldAndBothValues) {
  for (const auto& [name, change] : shared_fields()) {
    const std::string text = testing::expect_error<InvalidArgument>({}, [&, &change = change] {
      compare_encoded({encoded(), encoded(), encoded(change)}, "AllToAll 'moe'");
    });
    // A field may change others with it: `hidden` comes before the sizes that follow from it,
    // a wire behind them.
    const std::string first = name == "dispatch_wire"                 ? "dispatch_row_bytes"
                              : name == "placement.logical_of_expert" ? "placement"
                                                                      : name;
    EXPECT_THAT(text,
                HasSubstr("AllToAll 'moe': " + first + " differs between ranks: rank 0 has "));
    EXPECT_THAT(text, HasSubstr(", rank 2 has "));
  }
}

TEST(ConfigEncodingTest, ValuesAreNamedAsTheyAreWritten) {
  const auto text_of = [](const Change& change) {
    return testing::expect_error<InvalidArgument>(
        {}, [&] { compare_encoded({encoded(), encoded(change)}, "AllToAll"); });
  };
  EXPECT_EQ(text_of([](AllToAllConfig& c) { c.top_k = 3; }),
            "AllToAll: top_k differs between ranks: rank 0 has 2, rank 1 has 3");
  EXPECT_EQ(text_of([](AllToAllConfig& c) { c.check_ids = CheckIds::kDrop; }),
            "AllToAll: check_ids differs between ranks: rank 0 has raise, rank 1 has drop");
  EXPECT_THAT(text_of([](AllToAllConfig& c) {
                c.placement = Placement::from_table({0, 1, 2, 3, 3, 2, 1, 0});
              }),
              HasSubstr("rank 0 has linear, rank 1 has table 0 1 2 3 3 2 1 0"));
}

TEST(ConfigEncodingTest, TablesOfRanksAreCompared) {
  const auto table = [](std::int32_t last) {
    return encoded([last](AllToAllConfig& c) {
      c.placement = Placement::from_table({0, 1, 2, 3, 0, 1, 2, last});
    });
  };
  const auto replicas = [](std::int32_t last) {
    return encoded([last](AllToAllConfig& c) {
      c.placement = Placement::from_replicas({0, 1, 2, 3, 0, 1, 2, 3}, {0, 1, 2, 3, 4, 5, 6, last});
    });
  };
  EXPECT_THAT(testing::expect_error<InvalidArgument>(
                  {}, [&] { compare_encoded({replicas(0), replicas(1)}, "AllToAll"); }),
              HasSubstr("placement.logical_of_expert differs between ranks: rank 0 has 0 1 2 3 4 5 "
                        "6 0, rank 1 has 0 1 2 3 4 5 6 1"));
  EXPECT_NO_THROW(compare_encoded({table(3), table(3)}, "AllToAll"));
  EXPECT_THAT(testing::expect_error<InvalidArgument>(
                  {}, [&] { compare_encoded({table(3), table(2)}, "AllToAll"); }),
              HasSubstr("placement differs"));
}

TEST(ConfigEncodingTest, RanksMayDifferInNamesTimeoutsAndLocalKnobs) {
  const std::string other = encoded([](AllToAllConfig& c) {
    c.name = "another";
    c.timeout = std::chrono::seconds(1);
    c.debug_poison = true;
    c.test_knobs.delay_seed = 5;
    c.test_knobs.kill_at_step = 6;
    c.test_knobs.stop_at_step = 7;
    c.test_knobs.isa = "portable";
    c.test_knobs.streaming_stores = false;
    c.test_knobs.min_worker_bytes = 0;
  });
  EXPECT_EQ(other, encoded());
}

TEST(ConfigEncodingTest, DefaultsEqualTheirValuesWrittenOut) {
  EXPECT_EQ(encoded([](AllToAllConfig& c) {
              c.check_ids = CheckIds::kRaise;
              c.dispatch_row_bytes = 20;
              c.combine_row_bytes = 20;
            }),
            encoded());
}

TEST(ConfigEncodingTest, EveryRankComparesAllWithTheFirst) {
  const std::vector<std::string> by_rank = {"a=1\nb=2\n", "a=1\nb=2\n", "a=1\nb=3\n", "a=9\nb=2\n"};
  EXPECT_EQ(testing::expect_error<InvalidArgument>({}, [&] { compare_encoded(by_rank, "it"); }),
            "it: b differs between ranks: rank 0 has 2, rank 2 has 3");
  EXPECT_NO_THROW(compare_encoded({"a=1\n"}, "it"));
  EXPECT_NO_THROW(compare_encoded({"a=1\n", "a=1\n"}, "it"));
}

TEST(ConfigEncodingTest, OtherFieldsMeanAnotherVersion) {
  EXPECT_EQ(testing::expect_error<InvalidArgument>(
                {}, [] { compare_encoded({"a=1\n", "a=1\nb=2\n"}, "it"); }),
            "it: the configurations of rank 0 and rank 1 have different fields; all ranks must run "
            "one version");
}

}  // namespace
}  // namespace fanfold::api
