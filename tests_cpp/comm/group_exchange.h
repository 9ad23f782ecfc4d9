// SPDX-License-Identifier: Apache-2.0
#pragma once

// What Group::exchange promises, for the kinds of groups.

#include <unistd.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "comm/group.h"
#include "fanfold/error.h"
#include "gtest/gtest.h"

namespace fanfold::comm {

inline base::Deadline exchange_deadline() { return base::Deadline(std::chrono::seconds(20)); }

/// A parcel with `text`, and the same text behind a descriptor.
inline Parcel parcel_with(const std::string& text) {
  Parcel parcel;
  parcel.bytes = text;
  base::FileDescriptor memory = base::create_shared_memory(base::round_to_pages(1));
  EXPECT_EQ(::pwrite(memory.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  parcel.fds.push_back(std::move(memory));
  return parcel;
}

inline void expect_everyones_parcel(Group& group) {
  const auto name = [](int rank) { return base::str("rank ", rank); };
  std::vector<Parcel> all =
      group.exchange("showing", parcel_with(name(group.rank())), std::nullopt, exchange_deadline());
  ASSERT_EQ(all.size(), static_cast<std::size_t>(group.num_ranks()));
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    Parcel& parcel = all[static_cast<std::size_t>(rank)];
    EXPECT_EQ(parcel.peer, rank);
    EXPECT_EQ(parcel.bytes, name(rank));
    if (rank == group.rank()) {
      EXPECT_TRUE(parcel.fds.empty());
      continue;
    }
    const base::FileDescriptor fd = parcel.take_fd(0);
    std::string text(name(rank).size(), ' ');
    EXPECT_EQ(::pread(fd.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    EXPECT_EQ(text, name(rank));
  }
}

/// The last rank fails; all see it, and the group goes on.
inline void expect_one_failure_on_all(Group& group) {
  std::optional<Failure> failure;
  if (group.rank() == group.num_ranks() - 1) {
    failure = Failure{Failure::Kind::kCudaFailure, 801, "rank 2: cuMemCreate: not supported"};
  }
  try {
    (void)group.exchange("showing", {}, failure, exchange_deadline());
    ADD_FAILURE() << "expected CudaFailure";
  } catch (const CudaFailure& error) {
    EXPECT_STREQ(error.what(), "rank 2: cuMemCreate: not supported");
    EXPECT_EQ(error.code(), 801);
  }
  expect_everyones_parcel(group);
}

inline void expect_named_difference(Group& group) {
  EXPECT_THROW((void)group.exchange(group.rank() == 0 ? "showing" : "telling", {}, std::nullopt,
                                    exchange_deadline()),
               InvalidArgument);
  expect_everyones_parcel(group);
}

}  // namespace fanfold::comm
