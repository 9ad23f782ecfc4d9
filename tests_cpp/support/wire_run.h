// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs one rank's part of a round whose rows may travel packed, and compares every result with what
// naive loops give. RoundRun covers rows that travel as they are.

#include <cstdint>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"
#include "support/fp8_rows.h"
#include "support/oracle.h"
#include "support/round_run.h"

namespace fanfold::testing {

/// One round, as every rank knows it. Widths and types are of the round, not of the configuration.
struct WirePlan {
  Exchange exchange;
  Wire dispatch_wire = Wire::kNone;
  Wire combine_wire = Wire::kNone;
  WireScale wire_scale = WireScale::kFloat32;
  DType dtype = DType::kBFloat16;
  DType combine_dtype = DType::kBFloat16;
  DType y_dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  std::int64_t hidden = 0;    // of payload 0
  std::int64_t y_hidden = 0;  // of the results
  bool has_tags = true;       // a second payload of one int32
  bool zero_copy = true;
  bool new_weights = false;  // given to combine; Weighting::kOrigin
  bool specials = false;     // infinities and NaN among the numbers
  std::uint64_t seed = 1;
};

/// A round of `config` in its own widths and types.
WirePlan make_wire_plan(const AllToAllConfig& config, int num_ranks, RoutingKind kind,
                        std::int64_t round_max_tokens, std::uint64_t seed);

/// Mismatches are gtest failures.
class WireRun {
 public:
  WireRun(AllToAll& all_to_all, WirePlan plan);

  /// What the calls below give; a test may change it first.
  DispatchInputs inputs;

  void dispatch();
  void dispatch_send();
  void dispatch_recv();
  void combine(bool release = true);
  void combine_send(bool release = true);
  void combine_recv(bool release = true);
  const Received& received() const { return received_; }
  const Round& handle() const { return round_; }

 private:
  std::vector<float> payload_row(int source, std::int64_t token) const;
  std::vector<float> result_row(int rank, std::int32_t expert, int source,
                                std::int64_t token) const;
  void check_received() const;
  void check_numbers(const std::byte* row, const std::byte* scales, int source,
                     std::int64_t token) const;
  void fill_results();
  void check_out() const;
  /// What comes home from `rank` for one token, as numbers.
  std::vector<float> partial(int rank, std::int64_t token) const;
  std::vector<float> expected_row(std::int64_t token) const;

  AllToAll& all_to_all_;
  WirePlan plan_;
  int rank_;
  std::uint64_t num_combines_ = 0;
  TensorBuffer ids_;
  TensorBuffer weights_;
  TensorBuffer new_weights_;
  TensorBuffer rows_;
  TensorBuffer tags_;
  TensorBuffer results_;
  TensorBuffer out_;
  CombineInputs combine_inputs_;
  Received received_;
  Round round_;
};

}  // namespace fanfold::testing
