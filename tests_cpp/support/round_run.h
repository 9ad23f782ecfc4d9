// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs one rank's part of a round with made-up rows and compares every result with the oracle.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"
#include "support/oracle.h"
#include "support/routing_generators.h"

namespace fanfold::testing {

enum class Values : std::uint8_t {
  kOrdinary,
  kSpecial,  // also zeros of both signs, subnormals, infinities, NaN and the largest numbers
};

struct PayloadSpec {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> row_shape;
};

/// One round, as every rank knows it.
struct RoundPlan {
  Exchange exchange;
  std::vector<PayloadSpec> payloads;
  std::uint64_t seed = 1;  // of payload bytes and results
  std::int64_t hidden = 0;
  DType y_dtype = DType::kFloat32;
  DType combine_dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  Values values = Values::kOrdinary;
  bool zero_copy = true;
  bool new_weights_at_combine = false;  // Weighting::kOrigin
  DType id_dtype = DType::kInt64;
  std::int64_t row_padding = 0;  // elements between the rows of every input
  std::string label;             // for messages
};

/// A round of `config` with the hidden payload and, if the configuration has room for it, a second
/// payload of one byte per token.
RoundPlan make_round(const AllToAllConfig& config, int num_ranks, RoutingKind kind,
                     std::int64_t round_max_tokens, std::uint64_t seed);

/// Memory of a tensor: rows of `row_shape`, `row_padding` elements apart.
class TensorBuffer {
 public:
  TensorBuffer() = default;
  TensorBuffer(const TensorBuffer&) = delete;
  TensorBuffer& operator=(const TensorBuffer&) = delete;
  TensorBuffer(TensorBuffer&&) = default;
  TensorBuffer& operator=(TensorBuffer&&) = default;
  TensorBuffer(DType dtype, std::int64_t num_rows, const std::vector<std::int64_t>& row_shape,
               std::int64_t row_padding = 0);
  TensorView view() const { return view_; }
  /// Of the host's copy, where it lies on a device.
  std::byte* row(std::int64_t index);
  const std::byte* row(std::int64_t index) const;
  /// It lies on a GPU from now on, as the host has written it.
  void move_to(int device_index, void* stream);
  /// Brings its bytes to the host's copy, behind what is on `stream`.
  void fetch(void* stream);
  /// Remembers the bytes; `is_unchanged` compares with them.
  void remember() { remembered_ = bytes_; }
  bool is_unchanged() const { return remembered_ == bytes_; }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::byte> remembered_;
  std::shared_ptr<std::byte> device_bytes_;
  TensorView view_;
};

/// Whether the layout's tensors have two leading dimensions: [R, m, ...], [L, R*m, ...].
bool has_groups(Layout layout) noexcept;
/// Rows of a received payload or result, over all dimensions but those of a row.
std::int64_t num_rows_of(const TensorView& view, Layout layout);
/// Start of one of them.
std::byte* row_of(const TensorView& view, Layout layout, std::int64_t index);
/// Whether results lie where they are sent from, so that in place they have the type that travels.
bool results_travel_in_place(const AllToAllConfig& config);

/// One rank's part in one round. Mismatches are gtest failures.
class RoundRun {
 public:
  RoundRun(AllToAll& all_to_all, RoundPlan plan);

  /// The inputs that the calls below give; a test may change them first.
  DispatchInputs inputs;

  void dispatch();
  void dispatch_send();
  void dispatch_recv();
  /// Each combine of the round has results of its own.
  void combine(bool release = true);
  void combine_send(bool release = true);
  void combine_recv(bool release = true);
  void release();
  /// Fills the results of the next combine and returns its inputs; the calls above do it
  /// themselves. Every rank must call it equally often.
  CombineInputs prepare_combine(bool release = true);

  /// Compares what was received with the oracle once more.
  void check_received() const;
  const Received& received() const { return received_; }
  const Round& handle() const { return round_; }
  const RoundPlan& plan() const { return plan_; }
  /// On a GPU: what the calls are enqueued on.
  void* stream() const { return stream_.get(); }
  /// Waits for it; throws what kernels have reported.
  void synchronize() const;

 private:
  void fill_inputs();
  void check_payload(std::size_t index, const ExpectedRows& rows) const;
  void check_side_tensors(const ExpectedRows& rows) const;
  void fill_y(const TensorView& y) const;
  void check_out();
  float element(const ResultIndex& index) const;
  bool is_on_gpu() const { return stream_ != nullptr; }
  /// On a GPU `buffer` goes there, once the host has written it.
  void place(TensorBuffer& buffer) const;
  /// `view`, or a copy of it that the host reaches, valid until the next call.
  TensorView on_host(const TensorView& view) const;
  std::vector<std::int32_t> ints_of(const TensorView& view) const;
  std::string where() const;

  AllToAll& all_to_all_;
  RoundPlan plan_;
  int rank_;
  std::shared_ptr<void> stream_;  // on a GPU
  mutable std::vector<std::byte> copied_;
  std::vector<TensorBuffer> payloads_;
  TensorBuffer ids_;
  TensorBuffer weights_;
  TensorBuffer new_weights_;
  TensorBuffer staged_y_;
  TensorBuffer out_;
  CombineInputs combine_inputs_;
  std::uint64_t num_combines_ = 0;
  Received received_;
  Round round_;
};

}  // namespace fanfold::testing
