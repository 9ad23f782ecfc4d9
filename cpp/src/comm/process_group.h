// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks that are processes of one machine.

#include <memory>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "base/mapping.h"
#include "comm/group.h"
#include "comm/star.h"

namespace fanfold::comm {

/// A rank of a group of processes. Windows are anonymous shared memory whose descriptors travel
/// through the star. A peer is gone when its pidfd says so or its word in the group's page is set.
class ProcessGroup final : public Group {
 public:
  /// Makes rank 0 of a group, whose peers call `join`, from a connection and a pidfd of each peer
  /// (its own places are empty). Collective with them.
  static std::unique_ptr<ProcessGroup> host(std::vector<base::FileDescriptor> links,
                                            std::vector<base::FileDescriptor> pidfds,
                                            base::Deadline deadline);
  /// Makes rank `rank` from its connection to rank 0.
  static std::unique_ptr<ProcessGroup> join(int rank, int num_ranks, base::FileDescriptor link,
                                            base::Deadline deadline);

  ProcessGroup(int rank, int num_ranks, Star star, std::vector<base::FileDescriptor> pidfds,
               std::shared_ptr<base::Mapping> page);
  ~ProcessGroup() override;

  const char* kind() const noexcept override { return "processes"; }
  Windows share_windows(std::int64_t bytes, base::Deadline deadline) override;
  Windows reserve_windows(std::int64_t bytes, base::Deadline deadline) override;
  std::vector<Parcel> exchange(const std::string& call, Parcel own,
                               const std::optional<Failure>& failure,
                               base::Deadline deadline) override;
  std::unique_ptr<Group> split(const std::vector<int>& members, base::Deadline deadline) override;
  bool tells_deaths() const noexcept override { return true; }
  std::string lost_reason(int rank) const override;
  void leave() noexcept override;
  bool is_forked_child() const noexcept override { return guard_.is_child(); }

 private:
  struct LeftWord;
  LeftWord& left_word(int rank) const noexcept;
  void check_usable(const char* call) const;
  std::vector<Parcel> invitations(const std::vector<int>& members, base::FileDescriptor* page,
                                  std::vector<base::FileDescriptor>* links) const;
  std::unique_ptr<Group> accept_invitation(const std::vector<int>& members,
                                           std::vector<Parcel> received);
  Windows make_windows(const char* name, std::int64_t bytes, base::Pages pages,
                       base::Deadline deadline);
  std::vector<base::FileDescriptor> pidfds_of(const std::vector<int>& members) const;
  std::vector<Parcel> pass_on(Star::Phase phase, const std::string& call,
                              std::vector<Parcel> parcels, const std::optional<Failure>& failure,
                              base::Deadline deadline);

  Star star_;
  std::vector<base::FileDescriptor> pidfds_;  // by rank
  std::shared_ptr<base::Mapping> page_;       // one LeftWord per rank
  base::ForkGuard guard_;
  bool has_left_ = false;
};

}  // namespace fanfold::comm
