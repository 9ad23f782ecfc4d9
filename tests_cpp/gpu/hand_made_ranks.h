// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks made by hand for tests of kernels: each a simulated device with a window, tables, inputs
// and one stream, all driven by one host thread. What a round left is compared with the plans of
// the CPU.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cudasim/control.h"
#include "exec/device_params.h"
#include "gpu/kernels/kernels.h"
#include "plan/expert_map.h"
#include "plan/expert_rows.h"
#include "plan/send_plan.h"
#include "support/oracle.h"

namespace fanfold::testing {

/// What all rounds of some ranks have in common.
struct RanksSpec {
  int num_ranks = 1;
  int num_experts = 1;
  int top_k = 1;
  std::int64_t max_tokens = 1;          // M
  std::vector<std::int64_t> row_bytes;  // of each payload
  std::int64_t source_gap = 0;          // bytes between rows of the caller's payloads
  std::int64_t source_shift = 0;        // bytes from an aligned address to the first row
  Placement placement = {};
  std::vector<bool> active = {};  // empty: all
  DType id_dtype = DType::kInt32;
  bool has_weights = true;
  std::uint64_t timeout_ns = 10'000'000'000;
};

/// One round of all active ranks.
struct RoundSpec {
  std::int64_t round_max_tokens = 1;
  std::vector<RankTokens> tokens;        // [R]
  std::vector<std::int32_t> words = {};  // [R] token counts on the device; empty: none
  bool is_split = false;                 // the signal kernel waits for the peers
  bool is_expert_major = true;
  bool is_routed = false;     // along the routing of the round before
  bool keeps_weights = true;  // sent_weights
  int max_blocks = 4;
};

class HandMadeRanks {
 public:
  /// Configures config.devices = num_ranks. `slices` names each source's rows of the regions, so
  /// that no other may write them: then every round has m = M.
  HandMadeRanks(const RanksSpec& spec, cudasim::Config config, bool slices = true);
  ~HandMadeRanks();
  HandMadeRanks(const HandMadeRanks&) = delete;
  HandMadeRanks& operator=(const HandMadeRanks&) = delete;

  /// Enqueues dispatch, arrange and describe on all active ranks, waits, and compares all that they
  /// leave with what the plans say.
  void run(const RoundSpec& round);

  // Parts of `run`, for rounds that fail.
  void prepare(const RoundSpec& round);  // gives the ranks their inputs
  exec::DeviceDispatchSendParams dispatch_params(int rank) const;
  exec::DeviceSignalParams signal_params(int rank) const;
  exec::DeviceArrangeParams arrange_params(int rank) const;
  exec::DeviceDescribeParams describe_params(int rank) const;
  /// Makes the rank's device the current one.
  cudaStream_t stream(int rank) const;
  void sync() const;
  exec::DeviceReport& report(int rank) const;
  std::uint32_t& abort_word(int rank) const;
  exec::DeviceSlot slot(int rank) const;
  exec::DeviceControl control(int rank) const;

 private:
  struct Rank;
  void compare(int rank) const;
  void compare_sent(int rank) const;
  void compare_received(int rank) const;
  void compare_experts(int rank) const;
  bool is_active(int rank) const { return active_[static_cast<std::size_t>(rank)]; }
  exec::DeviceRound device_round(int rank) const;

  RanksSpec spec_;
  bool slices_;
  std::vector<bool> active_;
  plan::ExpertMap map_;
  // Offsets in every window.
  std::int64_t flags_offset_ = 0;
  std::int64_t store_offset_ = 0;
  std::int64_t tokens_offset_ = 0;  // from the store's base, as the others
  std::int64_t ids_offset_ = 0;
  std::int64_t weights_offset_ = 0;
  std::vector<std::int64_t> payload_offsets_;
  std::int64_t window_bytes_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  RoundSpec round_;
  std::vector<plan::SendPlan> plans_;  // [R]
  std::uint64_t epoch_ = 0;
};

/// Adds a failure for each report of the simulated devices.
void expect_no_reports();

}  // namespace fanfold::testing
