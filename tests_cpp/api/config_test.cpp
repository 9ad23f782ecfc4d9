// SPDX-License-Identifier: Apache-2.0
// Every rule of a configuration: which exception, in which words.

#include "api/config.h"

#include <climits>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/kernels.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold::api {
namespace {

using ::testing::HasSubstr;
using Change = std::function<void(AllToAllConfig&)>;

constexpr int kNumRanks = 4;
constexpr Strategy kStrategies[] = {
    Strategy::kBroadcast, Strategy::kGatherScatter,  Strategy::kBatched,   Strategy::kOneSided,
    Strategy::kTwoSided,  Strategy::kHighThroughput, Strategy::kLowLatency};

AllToAllConfig small_config() {
  AllToAllConfig config;
  config.num_experts = 8;
  config.top_k = 2;
  config.max_tokens_per_rank = 16;
  config.hidden = 10;
  return config;
}

AllToAllConfig changed(const Change& change) {
  AllToAllConfig config = small_config();
  change(config);
  return config;
}

AllToAllConfig resolved(const Change& change) { return resolve(changed(change), kNumRanks).config; }

template <class Error = InvalidArgument>
std::string error_of(const Change& change, int num_ranks = kNumRanks) {
  return testing::expect_error<Error>({}, [&] { resolve(changed(change), num_ranks); });
}

// --- Ranges -----------------------------------------------------------------------------------

/// A field with a least and a greatest value.
struct Range {
  const char* name;
  std::int64_t low;
  std::int64_t high;
  std::function<void(AllToAllConfig&, std::int64_t)> set;
};

std::vector<Range> ranges() {
  return {
      {"num_experts", 1, 1 << 24,
       [](AllToAllConfig& c, std::int64_t v) { c.num_experts = static_cast<int>(v); }},
      {"top_k", 1, 1024, [](AllToAllConfig& c, std::int64_t v) { c.top_k = static_cast<int>(v); }},
      {"max_tokens_per_rank", 1, 1 << 30,
       [](AllToAllConfig& c, std::int64_t v) {
         c.max_tokens_per_rank = v;
         c.top_k = 1;
       }},
      {"hidden", 1, std::int64_t{1} << 40,
       [](AllToAllConfig& c, std::int64_t v) {
         c.hidden = v;
         c.dispatch_row_bytes = c.combine_row_bytes = 8;
       }},
      {"extra_bytes_per_token", 0, std::int64_t{1} << 40,
       [](AllToAllConfig& c, std::int64_t v) {
         c.extra_bytes_per_token = v;
         c.dispatch_row_bytes = 8;
       }},
      {"max_in_flight", 1, 64,
       [](AllToAllConfig& c, std::int64_t v) { c.max_in_flight = static_cast<int>(v); }},
      {"row_guard_bytes", 0, 4096,
       [](AllToAllConfig& c, std::int64_t v) { c.test_knobs.row_guard_bytes = v; }},
      {"dispatch_row_bytes", 1, std::int64_t{1} << 40,
       [](AllToAllConfig& c, std::int64_t v) { c.dispatch_row_bytes = v; }},
      {"combine_row_bytes", 1, std::int64_t{1} << 40,
       [](AllToAllConfig& c, std::int64_t v) { c.combine_row_bytes = v; }},
      {"max_recv_rows", 1, INT32_MAX,
       [](AllToAllConfig& c, std::int64_t v) {
         c.layout = Layout::kFlat;
         c.max_recv_rows = v;
       }},
      {"expert_alignment", 1, 65536,
       [](AllToAllConfig& c, std::int64_t v) {
         c.layout = Layout::kFlatByExpert;
         c.expert_alignment = v;
       }},
      {"channel_bytes", 4096, std::int64_t{1} << 30,
       [](AllToAllConfig& c, std::int64_t v) { c.channel_bytes = v; }},
      {"max_local_experts", 0, 8,
       [](AllToAllConfig& c, std::int64_t v) { c.max_local_experts = static_cast<int>(v); }},
  };
}

TEST(ConfigRangeTest, ATimeoutIsMoreThanNothing) {
  const auto with = [](std::int64_t ns) {
    return [ns](AllToAllConfig& c) { c.timeout = std::chrono::nanoseconds(ns); };
  };
  EXPECT_NO_THROW(resolve(changed(with(1)), 1));
  EXPECT_NO_THROW(resolve(changed(with(INT64_MAX)), 1));
  EXPECT_EQ(error_of(with(0), 1), "timeout: expected more than 0 s, got 0 us");
}

TEST(ConfigRangeTest, TheLeastAndTheGreatestValuesAreTaken) {
  for (const Range& range : ranges()) {
    for (const std::int64_t value : {range.low, range.high}) {
      // One token, so that no product of fields is too large.
      EXPECT_NO_THROW(resolve(changed([&](AllToAllConfig& c) {
                                c.max_tokens_per_rank = 1;
                                range.set(c, value);
                              }),
                              1))
          << range.name << " " << value;
    }
  }
}

TEST(ConfigRangeTest, ValuesOutsideAreRefusedWithTheRange) {
  for (const Range& range : ranges()) {
    std::vector<std::int64_t> outside = {range.low - 1};
    if (range.high != INT64_MAX) outside.push_back(range.high + 1);
    for (const std::int64_t value : outside) {
      EXPECT_EQ(error_of([&](AllToAllConfig& c) { range.set(c, value); }, 1),
                std::string(range.name) + ": expected a value in [" + std::to_string(range.low) +
                    ", " + std::to_string(range.high) + "], got " + std::to_string(value));
    }
  }
}

TEST(ConfigRangeTest, RanksAreOneToThousandTwentyFour) {
  const auto nothing = [](AllToAllConfig&) {};
  EXPECT_NO_THROW(resolve(small_config(), 1));
  EXPECT_NO_THROW(resolve(small_config(), 1024));
  EXPECT_EQ(error_of(nothing, 0), "num_ranks: expected a value in [1, 1024], got 0");
  EXPECT_EQ(error_of(nothing, 1025), "num_ranks: expected a value in [1, 1024], got 1025");
}

TEST(ConfigRangeTest, IdsOfAllRowsCanBeCountedInThirtyOneBits) {
  const auto tokens = [](std::int64_t max_tokens) {
    return [max_tokens](AllToAllConfig& c) {
      c.top_k = 8;
      c.max_tokens_per_rank = max_tokens;
    };
  };
  EXPECT_NO_THROW(resolved(tokens((1 << 26) - 1)));
  EXPECT_EQ(error_of(tokens(1 << 26)),
            "max_tokens_per_rank * num_ranks * top_k: expected a value in [1, 2147483647], got "
            "2147483648");
  EXPECT_THAT(error_of(
                  [](AllToAllConfig& c) {
                    c.top_k = 1024;
                    c.max_tokens_per_rank = 1 << 30;
                  },
                  1024),
              HasSubstr("got 1125899906842624"));
}

TEST(ConfigRangeTest, GuardsAreMultiplesOfSixteen) {
  for (const std::int64_t guard : {16, 48, 4096}) {
    EXPECT_NO_THROW(resolved([guard](AllToAllConfig& c) { c.test_knobs.row_guard_bytes = guard; }));
  }
  EXPECT_EQ(error_of([](AllToAllConfig& c) { c.test_knobs.row_guard_bytes = 40; }),
            "row_guard_bytes: expected a multiple of 16, got 40");
}

TEST(ConfigRangeTest, TheFirstEpochLeavesRoomForTheCountOfCombines) {
  const auto epoch = [](std::uint64_t first) {
    return [first](AllToAllConfig& c) { c.test_knobs.first_epoch = first; };
  };
  EXPECT_NO_THROW(resolved(epoch((std::uint64_t{1} << 47) - 1)));
  EXPECT_EQ(error_of(epoch(0)), "first_epoch: expected a value in [1, 2^47), got 0");
  EXPECT_EQ(error_of(epoch(std::uint64_t{1} << 47)),
            "first_epoch: expected a value in [1, 2^47), got 140737488355328");
}

TEST(ConfigRangeTest, TheInstructionSetMustBeKnownAndPresent) {
  EXPECT_EQ(error_of([](AllToAllConfig& c) { c.test_knobs.isa = "sse2"; }),
            "isa: expected auto, portable, avx2 or avx512, got 'sse2'");
  for (const char* const isa : {"auto", "portable", "avx2", "avx512"}) {
    const auto set = [isa](AllToAllConfig& c) { c.test_knobs.isa = isa; };
    if (base::is_supported(base::isa_from_name(isa))) {
      EXPECT_NO_THROW(resolved(set)) << isa;
    } else {
      EXPECT_EQ(
          error_of<Unsupported>(set),
          std::string("isa: expected an instruction set of this processor and build, got ") + isa);
    }
  }
}

// --- Types and sizes --------------------------------------------------------------------------

TEST(ConfigSizeTest, RowsAreHiddenElementsUnlessSaidOtherwise) {
  const AllToAllConfig config = resolved([](AllToAllConfig& c) {
    c.dtype = DType::kFloat16;
    c.combine_dtype = DType::kFloat32;
    c.extra_bytes_per_token = 7;
  });
  EXPECT_EQ(config.dispatch_row_bytes, 10 * 2 + 7);
  EXPECT_EQ(config.combine_row_bytes, 10 * 4);
}

TEST(ConfigSizeTest, GivenRowBytesAreKept) {
  const AllToAllConfig config = resolved([](AllToAllConfig& c) {
    c.extra_bytes_per_token = 7;
    c.dispatch_row_bytes = 5;
    c.combine_row_bytes = 64;
  });
  EXPECT_EQ(config.dispatch_row_bytes, 5);
  EXPECT_EQ(config.combine_row_bytes, 64);
}

TEST(ConfigSizeTest, CombineRowsHaveRoomForWholeWords) {
  const auto combine_row = [](std::int64_t hidden) {
    return *resolved([hidden](AllToAllConfig& c) { c.hidden = hidden; }).combine_row_bytes;
  };
  EXPECT_EQ(combine_row(1), 4);
  EXPECT_EQ(combine_row(2), 4);
  EXPECT_EQ(combine_row(7), 16);
}

TEST(ConfigSizeTest, RowsOfFieldsWithinTheirRangesMayStillBeTooLong) {
  EXPECT_EQ(error_of([](AllToAllConfig& c) { c.hidden = std::int64_t{1} << 40; }),
            "dispatch_row_bytes: expected a value in [1, 1099511627776], got 2199023255552");
}

TEST(ConfigSizeTest, PartialsTakeTheTypeOfTheRows) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    EXPECT_EQ(resolved([dtype](AllToAllConfig& c) { c.dtype = dtype; }).combine_dtype, dtype);
  }
}

TEST(ConfigSizeTest, RowsThatCannotBeAddedNeedACombineType) {
  const auto eight_bits = [](AllToAllConfig& c) { c.dtype = DType::kFloat8E4M3; };
  EXPECT_EQ(error_of(eight_bits),
            "combine_dtype: expected float32, float16 or bfloat16 to be given, since rows of dtype "
            "float8_e4m3fn cannot be added; got none");
  const AllToAllConfig config = resolved([&](AllToAllConfig& c) {
    eight_bits(c);
    c.combine_dtype = DType::kBFloat16;
  });
  EXPECT_EQ(config.combine_dtype, DType::kBFloat16);
  EXPECT_EQ(config.dispatch_row_bytes, 10);
  EXPECT_EQ(config.combine_row_bytes, 20);
}

TEST(ConfigSizeTest, TheCombineTypeMustBeOneThatAdds) {
  EXPECT_EQ(error_of([](AllToAllConfig& c) { c.combine_dtype = DType::kFloat64; }),
            "combine_dtype: expected float32, float16 or bfloat16, got float64");
}

// --- Strategies, layouts, weightings ----------------------------------------------------------

TEST(ConfigChoiceTest, AutoTakesOneSidedWhereItGivesTheLayout) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    const ResolvedConfig chosen =
        resolve(changed([layout](AllToAllConfig& c) { c.layout = layout; }), kNumRanks);
    EXPECT_EQ(chosen.config.strategy, Strategy::kOneSided);
    EXPECT_EQ(chosen.choice,
              "one_sided: all ranks share the memory of this machine, and it moves each row once");
  }
}

TEST(ConfigChoiceTest, AutoTakesGatherScatterForGathered) {
  const ResolvedConfig chosen =
      resolve(changed([](AllToAllConfig& c) { c.layout = Layout::kGathered; }), kNumRanks);
  EXPECT_EQ(chosen.config.strategy, Strategy::kGatherScatter);
  EXPECT_EQ(chosen.choice,
            "gather_scatter: layout gathered wants every row on every rank, and sums go home once");
}

TEST(ConfigChoiceTest, AutoTakesHighThroughputForExactlyTheRowsThatArrive) {
  for (const Layout layout : {Layout::kFlat, Layout::kFlatByExpert}) {
    const auto flat = [layout](AllToAllConfig& c) { c.layout = layout; };
    const ResolvedConfig chosen = resolve(changed(flat), kNumRanks);
    EXPECT_EQ(chosen.config.strategy, Strategy::kHighThroughput);
    EXPECT_EQ(chosen.choice, std::string("high_throughput: layout ") + name_of(layout) +
                                 " of as many rows as arrive, in symmetric memory that grows with "
                                 "them");
    const auto bounded = [&flat](AllToAllConfig& c) {
      flat(c);
      c.max_recv_rows = 5;
    };
    EXPECT_EQ(resolved(bounded).strategy, Strategy::kOneSided);
  }
}

TEST(ConfigChoiceTest, AutoTakesLowLatencyForWires) {
  for (const bool home : {false, true}) {
    const ResolvedConfig chosen = resolve(changed([home](AllToAllConfig& c) {
                                            c.layout = Layout::kExpertMajor;
                                            (home ? c.combine_wire : c.dispatch_wire) =
                                                Wire::kFp8E4M3;
                                          }),
                                          kNumRanks);
    EXPECT_EQ(chosen.config.strategy, Strategy::kLowLatency);
    EXPECT_EQ(chosen.choice, "low_latency: the strategy that packs rows for the wire");
  }
}

TEST(ConfigChoiceTest, ANamedStrategyIsTaken) {
  for (const Strategy strategy : kStrategies) {
    const ResolvedConfig chosen = resolve(changed([strategy](AllToAllConfig& c) {
                                            c.strategy = strategy;
                                            c.layout = Layout::kFlat;
                                          }),
                                          kNumRanks);
    EXPECT_EQ(chosen.config.strategy, strategy);
    EXPECT_EQ(chosen.choice, std::string(name_of(strategy)) + ": asked for by name");
    EXPECT_EQ(exchange::capabilities_of(strategy).strategy, strategy);
  }
}

TEST(ConfigChoiceTest, ALayoutThatTheStrategyLacksIsUnsupported) {
  const auto error = [](Strategy strategy, Layout layout) {
    return error_of<Unsupported>([&](AllToAllConfig& c) {
      c.strategy = strategy;
      c.layout = layout;
    });
  };
  EXPECT_EQ(error(Strategy::kOneSided, Layout::kGathered),
            "layout: strategy one_sided gives rank_major, expert_major, flat, flat_by_expert; got "
            "gathered");
  EXPECT_EQ(error(Strategy::kHighThroughput, Layout::kRankMajor),
            "layout: strategy high_throughput gives flat, flat_by_expert; got rank_major");
}

TEST(ConfigChoiceTest, TheLayoutsOfAStrategyAreThoseThatItGives) {
  for (const Strategy strategy : kStrategies) {
    const Capabilities record = exchange::capabilities_of(strategy);
    for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor,
                                Layout::kFlat, Layout::kFlatByExpert}) {
      const auto with = [&](AllToAllConfig& c) {
        c.strategy = strategy;
        c.layout = layout;
      };
      if (::testing::Value(record.layouts, ::testing::Contains(layout))) {
        EXPECT_EQ(resolved(with).layout, layout);
      } else {
        error_of<Unsupported>(with);
        EXPECT_THAT(record.native_layouts, ::testing::Not(::testing::Contains(layout)));
      }
    }
  }
}

TEST(ConfigChoiceTest, OnlyLayoutsPerExpertWeighElsewhereThanAtTheExperts) {
  for (const Weighting weighting : {Weighting::kCarried, Weighting::kOrigin}) {
    const auto of_layout = [weighting](Layout layout) {
      return [weighting, layout](AllToAllConfig& c) {
        c.weighting = weighting;
        c.layout = layout;
      };
    };
    EXPECT_NO_THROW(resolved(of_layout(Layout::kExpertMajor)));
    EXPECT_NO_THROW(resolved(of_layout(Layout::kFlatByExpert)));
    for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kFlat}) {
      EXPECT_EQ(error_of(of_layout(layout)), std::string("weighting: layout ") + name_of(layout) +
                                                 " expects applied, got " + name_of(weighting));
    }
  }
}

// --- Limits and wires -------------------------------------------------------------------------

TEST(ConfigLimitTest, OnlyFlatRowsHaveALimitOfTheirOwn) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor}) {
    EXPECT_EQ(error_of([layout](AllToAllConfig& c) {
                c.layout = layout;
                c.max_recv_rows = 5;
              }),
              std::string("max_recv_rows: expected none (only flat and flat_by_expert have it), "
                          "got 5 with layout ") +
                  name_of(layout));
  }
}

TEST(ConfigLimitTest, OnlyGroupsAreAligned) {
  for (const Layout layout :
       {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor, Layout::kFlat}) {
    EXPECT_EQ(error_of([layout](AllToAllConfig& c) {
                c.layout = layout;
                c.expert_alignment = 2;
              }),
              std::string("expert_alignment: expected 1 (only flat_by_expert has groups), got 2 "
                          "with layout ") +
                  name_of(layout));
  }
}

TEST(ConfigWireTest, OnlyLowLatencyPacksRows) {
  for (const Strategy strategy : kStrategies) {
    if (strategy == Strategy::kLowLatency) continue;
    for (const bool home : {false, true}) {
      EXPECT_EQ(error_of<Unsupported>([&](AllToAllConfig& c) {
                  c.strategy = strategy;
                  c.layout = Layout::kFlatByExpert;
                  (home ? c.combine_wire : c.dispatch_wire) = Wire::kFp8E4M3;
                }),
                std::string(home ? "combine_wire" : "dispatch_wire") + ": strategy " +
                    name_of(strategy) +
                    " sends rows as they are (low_latency packs them); got fp8_e4m3");
    }
  }
}

TEST(ConfigWireTest, ResultsArePackedWhereTheyAreSums) {
  EXPECT_EQ(error_of([](AllToAllConfig& c) { c.combine_wire = Wire::kFp8E4M3; }),
            "combine_wire: expected none (it packs the sums of layouts per expert), got fp8_e4m3 "
            "with layout rank_major");
}

TEST(ConfigWireTest, WhatIsPackedMustBeNumbers) {
  EXPECT_EQ(error_of([](AllToAllConfig& c) {
              c.dispatch_wire = Wire::kFp8E4M3;
              c.dtype = DType::kFloat8E4M3;
              c.combine_dtype = DType::kBFloat16;
            }),
            "dtype: expected float32, float16 or bfloat16 (dispatch_wire packs it), got "
            "float8_e4m3fn");
}

TEST(ConfigWireTest, PackedRowsTakeOneBytePerElementAndTheirScales) {
  const auto row_bytes = [](std::int64_t hidden, WireScale scale) {
    return *resolved([&](AllToAllConfig& c) {
              c.hidden = hidden;
              c.dtype = DType::kBFloat16;
              c.dispatch_wire = Wire::kFp8E4M3;
              c.wire_scale = scale;
              c.extra_bytes_per_token = 3;
            }).dispatch_row_bytes;
  };
  EXPECT_EQ(row_bytes(10, WireScale::kFloat32), 12 + 4 + 3);
  EXPECT_EQ(row_bytes(256, WireScale::kFloat32), 256 + 2 * 4 + 3);
  EXPECT_EQ(row_bytes(256, WireScale::kUe8m0), 256 + 4 + 3);
  EXPECT_EQ(row_bytes(257, WireScale::kUe8m0), 260 + 4 + 3);
}

TEST(ConfigChoiceTest, IdsAreCheckedUnlessTheyAreToBeDropped) {
  const auto checks = [](CheckIds given) {
    return resolved([given](AllToAllConfig& c) { c.check_ids = given; }).check_ids;
  };
  EXPECT_EQ(checks(CheckIds::kAuto), CheckIds::kRaise);
  EXPECT_EQ(checks(CheckIds::kRaise), CheckIds::kRaise);
  EXPECT_EQ(checks(CheckIds::kDrop), CheckIds::kDrop);
}

}  // namespace
}  // namespace fanfold::api
