// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks that are threads of one process.

#include <memory>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "comm/group.h"

namespace fanfold::comm {

/// A rank of a group of threads. A window has one mapping, which all ranks use.
class ThreadGroup final : public Group {
 public:
  /// What the ranks of one group share.
  struct Shared;

  /// All ranks of a new group, made by one thread; element r is rank r.
  static std::vector<std::unique_ptr<Group>> create(int num_ranks);
  /// What `share_windows` returns to every rank, made by one thread without waiting.
  static Windows make_windows(int num_ranks, std::int64_t bytes);

  ThreadGroup(int rank, std::shared_ptr<Shared> shared);
  ~ThreadGroup() override;

  const char* kind() const noexcept override { return "threads"; }
  Windows share_windows(std::int64_t bytes, base::Deadline deadline) override;
  Windows reserve_windows(std::int64_t bytes, base::Deadline deadline) override;
  std::vector<Parcel> exchange(const std::string& call, Parcel own,
                               const std::optional<Failure>& failure,
                               base::Deadline deadline) override;
  std::unique_ptr<Group> split(const std::vector<int>& members, base::Deadline deadline) override;
  std::string lost_reason(int rank) const override;
  void leave() noexcept override;
  bool is_forked_child() const noexcept override { return guard_.is_child(); }

 private:
  struct Offer;
  struct Meeting;
  Windows make_windows(const char* call, std::int64_t bytes, base::Pages pages,
                       base::Deadline deadline);
  std::shared_ptr<Meeting> meet(Offer offer, base::Deadline deadline);
  void fail_meeting(Meeting& meeting, const std::string& call, base::Deadline deadline) const;
  int missing_rank(const Meeting& meeting) const;

  std::shared_ptr<Shared> shared_;
  base::ForkGuard guard_;
  std::int64_t num_calls_ = 0;  // collective calls so far: ranks meet in calls of equal number
};

}  // namespace fanfold::comm
