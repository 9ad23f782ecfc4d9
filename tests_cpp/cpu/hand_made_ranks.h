// SPDX-License-Identifier: Apache-2.0
#pragma once

// Contexts for ranks that never run: a phase can be called as any of them, on plain memory.

#include <memory>
#include <utility>
#include <vector>

#include "comm/control.h"
#include "comm/thread_group.h"
#include "cpu/backend.h"
#include "exec/flag_line.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {

/// The context of a phase that meets no peer.
inline exec::Context context_alone(base::StepHook& hook, int num_ranks, int rank = 0,
                                   bool streaming = false) {
  return exec::Context{
      &base::kernels(base::Isa::kAuto), &hook, nullptr, rank, num_ranks, streaming, nullptr};
}

class HandMadeRanks {
 public:
  explicit HandMadeRanks(int num_ranks)
      : groups_(comm::ThreadGroup::create(num_ranks)),
        windows_(comm::ThreadGroup::make_windows(num_ranks, comm::Control::bytes(num_ranks))) {
    for (const auto& group : groups_) {
      controls_.push_back(std::make_unique<comm::Control>(*group, windows_, "AllToAll 'test'"));
      lines_.emplace_back(static_cast<std::size_t>(num_ranks));
    }
  }

  int num_ranks() const noexcept { return static_cast<int>(groups_.size()); }
  comm::Control& control(int rank) { return *controls_[static_cast<std::size_t>(rank)]; }
  comm::Group& group(int rank) { return *groups_[static_cast<std::size_t>(rank)]; }

  exec::Context context(int rank, bool streaming = false) {
    exec::Context context = context_alone(hook_, num_ranks(), rank, streaming);
    context.control = &control(rank);
    return context;
  }

  /// The flag line of `source` in the window of `reader`.
  exec::FlagLine& line(int reader, int source) {
    return lines_[static_cast<std::size_t>(reader)][static_cast<std::size_t>(source)];
  }
  /// The lines that `rank` writes, by reader; those that it reads, by source.
  std::vector<exec::FlagLine*> lines_written_by(int rank) {
    std::vector<exec::FlagLine*> lines;
    for (int reader = 0; reader < num_ranks(); ++reader) lines.push_back(&line(reader, rank));
    return lines;
  }
  std::vector<exec::FlagLine*> lines_read_by(int rank) {
    std::vector<exec::FlagLine*> lines;
    for (int source = 0; source < num_ranks(); ++source) lines.push_back(&line(rank, source));
    return lines;
  }

 private:
  base::StepHook hook_{TestKnobs{}, 0};
  std::vector<std::unique_ptr<comm::Group>> groups_;
  comm::Windows windows_;
  std::vector<std::unique_ptr<comm::Control>> controls_;
  std::vector<std::vector<exec::FlagLine>> lines_;  // [reader][source]
};

}  // namespace fanfold::cpu
