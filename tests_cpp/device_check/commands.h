// SPDX-License-Identifier: Apache-2.0
#pragma once

// What device_check can do; each prints its lines and says whether all was well.

#include <cstdint>
#include <string>

#include "fanfold/all_to_all.h"

namespace fanfold::device_check {

/// Sizes of a case. Ranks are threads of this process, each with a stream, on the devices in turn.
struct Options {
  int ranks = 4;
  int tokens = 64;  // of each rank
  int hidden = 512;
  int top_k = 8;
  int experts = 64;
  int rounds = 50;
  Layout layout = Layout::kRankMajor;
  bool graph = false;  // rounds: captured once and replayed
  int timeout_ms = 2000;
  std::uint64_t seed = 1;
  std::string library;  // nccl: its file; empty: the process's or the system's
};

/// The device, how memory is shared, and whether as many streams run at once as there are ranks.
bool probe(const Options& options);
/// Random rounds, whose results must equal those of the CPU bit for bit.
bool rounds(const Options& options);
/// Every collective over NCCL, also in a graph, with `tokens` times `hidden` numbers for each rank.
bool nccl(const Options& options);
/// Times of a phase and of a round, beside a copy of the same bytes.
bool bench(const Options& options);

}  // namespace fanfold::device_check
