// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the ranks of a group get when they share GPU memory.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "fanfold/error.h"
#include "gpu/device_context.h"
#include "gpu/fabric_windows.h"
#include "gpu/rank_groups.h"
#include "gtest/gtest.h"

namespace fanfold::gpu {

using testing::on_each_rank;
using testing::RankKind;
using testing::soon;

constexpr std::int64_t kBytes = 3 << 20;
constexpr std::int64_t kRounded = 4 << 20;  // the simulated granularity is 2 MiB
inline std::vector<HandleKind> all_kinds() {
  return {HandleKind::kFabric, HandleKind::kFileDescriptor, HandleKind::kSameProcess};
}

struct Case {
  RankKind ranks;
  HandleKind kind;
  int num_ranks;
  int num_devices;
};

inline std::ostream& operator<<(std::ostream& out, const Case& one) {
  return out << (one.ranks == RankKind::kThreads ? "threads" : "processes") << "_"
             << name_of(one.kind) << "_" << one.num_ranks << "_ranks_" << one.num_devices
             << "_devices";
}

inline std::string name_of_case(const ::testing::TestParamInfo<Case>& one) {
  return ::testing::PrintToString(one.param);
}

/// What each rank got, in rank order.
class Results {
 public:
  explicit Results(int num_ranks) : texts_(static_cast<std::size_t>(num_ranks)) {}
  void set(int rank, std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_[static_cast<std::size_t>(rank)] = std::move(text);
  }
  /// The text of all, which must be the same.
  std::string common() const {
    for (const std::string& text : texts_) EXPECT_EQ(text, texts_[0]);
    return texts_[0];
  }

 private:
  std::mutex mutex_;  // guards `texts_`
  std::vector<std::string> texts_;
};

inline std::string describe(const SharedWindows& shared) {
  std::string text = name_of(shared.kind);
  for (const std::string& reason : shared.passed_over) text += " | " + reason;
  return text;
}

/// The kind that was taken and the reasons, or the class and text of the exception.
inline std::string outcome(comm::Group& group, int device, const std::vector<HandleKind>& kinds) {
  try {
    const auto context = std::make_shared<const DeviceContext>(device);
    const SharedWindows shared = share_windows(group, context, kBytes, kinds, soon());
    return describe(shared);
  } catch (const CudaFailure& error) {
    return base::str("CudaFailure ", error.code(), " ", error.what());
  } catch (const Unsupported& error) {
    return base::str("Unsupported ", error.what());
  } catch (const InvalidArgument& error) {
    return base::str("InvalidArgument ", error.what());
  } catch (const OutOfMemory& error) {
    return base::str("OutOfMemory ", error.what());
  }
}

inline std::string common_outcome(RankKind ranks, int num_ranks,
                                  const std::vector<HandleKind>& kinds) {
  Results results(num_ranks);
  on_each_rank(ranks, num_ranks, [&](comm::Group& group) {
    results.set(group.rank(), outcome(group, group.rank(), kinds));
    (void)group.share_windows(64, soon());  // the group is still of use
  });
  return results.common();
}

}  // namespace fanfold::gpu
