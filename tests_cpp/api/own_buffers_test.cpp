// SPDX-License-Identifier: Apache-2.0
// AllToAlls in memory that the caller brought, and creation that runs out of memory on one rank.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/random_bits.h"
#include "support/round_run.h"
#include "support/sanitizer.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_ranks;

/// A caller's private memory: full of bytes that are not zero, counted.
class Source {
 public:
  std::shared_ptr<std::byte> allocate(std::int64_t bytes) {
    const std::size_t size = static_cast<std::size_t>(bytes + 127) / 128 * 128;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(128, size));
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0xab, size);
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_[memory] = bytes;
    return {memory, [this](std::byte* data) {
              const std::lock_guard<std::mutex> guard(mutex_);
              ranges_.erase(data);
              std::free(data);
            }};
  }
  bool holds(const void* data) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [start, bytes] : ranges_) {
      if (data >= start && data < start + bytes) return true;
    }
    return false;
  }
  std::size_t num_given() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ranges_.size();
  }

 private:
  mutable std::mutex mutex_;  // guards ranges_: the ranks are threads
  std::map<std::byte*, std::int64_t> ranges_;
};

class Arrays {
 public:
  Arrays(int num_ranks, std::int64_t bytes) : arrays_(static_cast<std::size_t>(num_ranks)) {
    for (auto& array : arrays_) array.assign(static_cast<std::size_t>(bytes), std::byte{0xab});
  }
  std::vector<OwnBuffer> all() {
    std::vector<OwnBuffer> buffers;
    for (auto& array : arrays_) {
      buffers.push_back({array.data(), static_cast<std::int64_t>(array.size())});
    }
    return buffers;
  }
  bool hold(int rank, const void* data) const {
    const auto& array = arrays_[static_cast<std::size_t>(rank)];
    return data >= array.data() && data < array.data() + array.size();
  }

 private:
  std::vector<std::vector<std::byte>> arrays_;
};

AllToAllConfig config_of(Strategy strategy, Layout layout) {
  AllToAllConfig config;
  config.num_experts = 7;
  config.top_k = 3;
  config.max_tokens_per_rank = 6;
  config.hidden = 19;
  config.dtype = DType::kFloat32;
  config.strategy = strategy;
  config.layout = layout;
  config.weighting = is_per_expert(layout) ? Weighting::kCarried : Weighting::kApplied;
  config.max_in_flight = 2;
  config.test_knobs.delay_seed = 3;
  config.name = "moe";
  return config;
}

void run_rounds(AllToAll& all_to_all) {
  std::uint64_t seed = 1;
  for (const RoutingKind kind : testing::all_routings()) {
    RoundRun round(all_to_all, testing::make_round(all_to_all.config(), all_to_all.num_ranks(),
                                                   kind, 6, ++seed));
    round.dispatch();
    if (::testing::Test::HasFailure()) return;
    round.combine();
  }
}

using Kind = std::pair<Strategy, Layout>;
class OwnMemoryTest : public ::testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Threads, OwnMemoryTest,
                         ::testing::Values(Kind{Strategy::kOneSided, Layout::kRankMajor},
                                           Kind{Strategy::kOneSided, Layout::kExpertMajor},
                                           Kind{Strategy::kLowLatency, Layout::kExpertMajor},
                                           Kind{Strategy::kHighThroughput, Layout::kFlat},
                                           Kind{Strategy::kHighThroughput, Layout::kFlatByExpert},
                                           Kind{Strategy::kBroadcast, Layout::kGathered},
                                           Kind{Strategy::kBroadcast, Layout::kRankMajor},
                                           Kind{Strategy::kGatherScatter, Layout::kFlat},
                                           Kind{Strategy::kBatched, Layout::kExpertMajor},
                                           Kind{Strategy::kTwoSided, Layout::kRankMajor},
                                           Kind{Strategy::kTwoSided, Layout::kFlat}),
                         [](const auto& param) {
                           return std::string(name_of(param.param.first)) + "_" +
                                  name_of(param.param.second);
                         });

TEST_P(OwnMemoryTest, RoundsNeedNothingFromTheMemoryTheyAreGiven) {
  constexpr int kNumRanks = 3;
  Arrays arrays(kNumRanks, std::int64_t{8} << 20);
  Source source;
  spawn_ranks(kNumRanks, [&](Communicator& communicator) {
    Allocator allocator(communicator, arrays.all());
    allocator.set_private_memory([&](std::int64_t bytes) { return source.allocate(bytes); });
    for (int i = 0; i < 3; ++i) {
      AllToAll all_to_all(communicator, config_of(GetParam().first, GetParam().second), &allocator);
      EXPECT_EQ(allocator.stats().num_blocks, 1);
      EXPECT_GT(allocator.stats().in_use, 0);
      run_rounds(all_to_all);
      if (::testing::Test::HasFailure()) return;
      all_to_all.close();
      EXPECT_EQ(allocator.stats().in_use, 0);
    }
    EXPECT_EQ(allocator.stats().num_reused, 2);
    allocator.trim();
    communicator.close();
  });
  EXPECT_EQ(source.num_given(), 0U);
}

TEST(OwnMemoryTest2, ReceivedRowsLieInTheCallersMemory) {
  Arrays arrays(2, std::int64_t{1} << 20);
  Source source;
  spawn_ranks(2, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    Allocator allocator(communicator, arrays.all());
    allocator.set_private_memory([&](std::int64_t bytes) { return source.allocate(bytes); });
    AllToAll rows(communicator, config_of(Strategy::kOneSided, Layout::kRankMajor), &allocator);
    AllToAll experts(communicator, config_of(Strategy::kOneSided, Layout::kExpertMajor),
                     &allocator);
    RoundRun first(rows, testing::make_round(rows.config(), 2, RoutingKind::kUniform, 6, 1));
    first.dispatch();
    EXPECT_TRUE(arrays.hold(rank, first.received().payloads()[0].data));
    EXPECT_TRUE(source.holds(first.received().rank_counts().data));
    first.combine();
    RoundRun second(experts, testing::make_round(experts.config(), 2, RoutingKind::kUniform, 6, 1));
    second.dispatch();
    EXPECT_TRUE(source.holds(second.received().payloads()[0].data));
    second.combine();
    rows.close();
    experts.close();
    communicator.close();
  });
}

TEST(OwnMemoryTest2, BuffersThatAreTooSmallAreRefusedOnEveryRankAndStayUsable) {
  Arrays arrays(2, std::int64_t{32} << 10);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, arrays.all());
    AllToAllConfig config = config_of(Strategy::kOneSided, Layout::kRankMajor);
    config.hidden = 4096;
    expect_error<CapacityExceeded>({"allocate", "bytes", "free"},
                                   [&] { AllToAll refused(communicator, config, &allocator); });
    EXPECT_EQ(allocator.stats().in_use, 0);
    config.hidden = 4;
    AllToAll all_to_all(communicator, config, &allocator);
    run_rounds(all_to_all);
    all_to_all.close();
    communicator.close();
  });
}

TEST(OwnMemoryTest2, AViewThatOutlivesTheCloseDelaysTheReuse) {
  AllToAllConfig config = config_of(Strategy::kOneSided, Layout::kRankMajor);
  Arrays arrays(2, AllToAll::required_bytes(2, config) + 4096);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, arrays.all());
    std::shared_ptr<const void> view;
    {
      AllToAll all_to_all(communicator, config, &allocator);
      run_rounds(all_to_all);
      if (communicator.rank() == 0) view = all_to_all.memory();
      all_to_all.close();
    }
    expect_error<CapacityExceeded>({"allocate"},
                                   [&] { AllToAll refused(communicator, config, &allocator); });
    view.reset();
    AllToAll all_to_all(communicator, config, &allocator);
    run_rounds(all_to_all);
    all_to_all.close();
    communicator.close();
  });
}

// --- Out of memory ------------------------------------------------------------------------------

class OutOfMemoryTest : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Threads, OutOfMemoryTest,
                         ::testing::Values(Kind{Strategy::kOneSided, Layout::kRankMajor},
                                           Kind{Strategy::kHighThroughput, Layout::kFlat},
                                           Kind{Strategy::kBroadcast, Layout::kRankMajor},
                                           Kind{Strategy::kTwoSided, Layout::kRankMajor}),
                         [](const auto& param) { return std::string(name_of(param.param.first)); });

TEST_P(OutOfMemoryTest, OneRankWithoutPrivateMemoryEndsCreationOnAllAtOnce) {
  constexpr int kNumRanks = 3;
  Source source;
  spawn_ranks(kNumRanks, [&](Communicator& communicator) {
    Allocator allocator(communicator);
    const auto config = config_of(GetParam().first, GetParam().second);
    for (int poor = 0; poor < kNumRanks; ++poor) {
      allocator.set_private_memory([&](std::int64_t bytes) {
        if (communicator.rank() == poor) throw std::bad_alloc();
        return source.allocate(bytes);
      });
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THROW(AllToAll(communicator, config, &allocator), std::bad_alloc);
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
    }
    allocator.set_private_memory([](std::int64_t) {
      return std::shared_ptr<std::byte>(std::shared_ptr<std::byte>(),
                                        reinterpret_cast<std::byte*>(64));
    });
    expect_error<InvalidArgument>({"private memory", "multiple of 128"},
                                  [&] { AllToAll refused(communicator, config, &allocator); });
    allocator.set_private_memory({});
    AllToAll all_to_all(communicator, config, &allocator);
    run_rounds(all_to_all);
    all_to_all.close();
    communicator.close();
  });
  EXPECT_EQ(source.num_given(), 0U);
}

}  // namespace
}  // namespace fanfold
