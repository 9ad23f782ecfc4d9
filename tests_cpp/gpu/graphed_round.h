// SPDX-License-Identifier: Apache-2.0
#pragma once

// A round in a CUDA graph, with tokens that change between its replays.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gpu/gpu_case.h"
#include "gtest/gtest.h"
#include "support/oracle.h"

namespace fanfold::testing {

/// One captured round whose expert hands its rows back: x [T, H] float32 comes home once for each
/// rank (rank_major) or expert (expert_major) that it went to.
class GraphedRound {
 public:
  GraphedRound(AllToAll& all_to_all, std::int64_t rows, std::int64_t m)
      : all_to_all_(all_to_all),
        index_(all_to_all.config().device_index),
        stream_(test_device()->make_stream(index_)),
        capture_(index_, stream_.get()),
        ids_(DType::kInt64, rows, {all_to_all.config().top_k}),
        rows_(DType::kFloat32, rows, {all_to_all.config().hidden}),
        weights_(DType::kFloat32, rows, {all_to_all.config().top_k}),
        num_tokens_(DType::kInt32, 1, {}),
        out_(DType::kFloat32, rows, {all_to_all.config().hidden}) {
    for (std::int64_t i = 0; i < rows * all_to_all.config().top_k; ++i) {
      constexpr float kOne = 1.0F;
      std::memcpy(weights_.row(0) + 4 * i, &kOne, sizeof kOne);
    }
    for (TensorBuffer* each : {&ids_, &rows_, &weights_, &num_tokens_, &out_}) {
      each->move_to(index_, stream_.get());
    }
    inputs_.topk_ids = ids_.view();
    inputs_.payloads = {rows_.view()};
    if (all_to_all.config().weighting == Weighting::kCarried) {
      inputs_.topk_weights = weights_.view();
    }
    inputs_.num_tokens = num_tokens_.view();
    inputs_.round_max_tokens = m;
    inputs_.stream = stream_.get();
  }

  void capture() {
    capture_.begin();
    const Received received = all_to_all_.dispatch(inputs_);
    const TensorView x = received.payloads().front();
    CombineInputs combine;
    combine.y = all_to_all_.combine_buffer(received.handle());
    combine.out = out_.view();
    // The expert.
    check_cuda(cudaMemcpyAsync(combine.y.data, x.data,
                               static_cast<std::size_t>(x.num_elements() * size_of(x.dtype)),
                               cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream_.get())),
               "cudaMemcpyAsync");
    all_to_all_.combine(combine, received.handle());
    capture_.end();
  }

  /// Tokens of this replay, the same on every rank but for the values.
  void fill(std::int64_t num_tokens, std::uint64_t seed) {
    const AllToAllConfig& config = all_to_all_.config();
    expected_.assign(static_cast<std::size_t>(rows_.view().shape[0] * config.hidden), 0.0F);
    for (std::int64_t token = 0; token < rows_.view().shape[0]; ++token) {
      const auto first = static_cast<std::int64_t>(
          (seed * 7 + static_cast<std::uint64_t>(token * 3 + all_to_all_.rank())) %
          static_cast<std::uint64_t>(config.num_experts));
      // Two experts, or one and none.
      const std::int64_t ids[2] = {first, token % 3 == 2 ? -1 : (first + 2) % config.num_experts};
      std::memcpy(ids_.row(token), ids, sizeof ids);
      const int copies = num_copies(ids[0], ids[1]);
      for (std::int64_t column = 0; column < config.hidden; ++column) {
        const auto value = static_cast<float>(100 * all_to_all_.rank() + 10 * token + column) +
                           static_cast<float>(seed) * 1000.0F;
        std::memcpy(rows_.row(token) + 4 * column, &value, sizeof value);
        if (token >= num_tokens) continue;
        expected_[static_cast<std::size_t>(token * config.hidden + column)] =
            value * static_cast<float>(copies);
      }
    }
    const auto count = static_cast<std::int32_t>(num_tokens);
    std::memcpy(num_tokens_.row(0), &count, sizeof count);
    upload(ids_);
    upload(rows_);
    upload(num_tokens_);
  }

  void replay() { capture_.replay(); }

  void check_out(const std::string& where) {
    out_.fetch(stream_.get());
    const auto* got = reinterpret_cast<const float*>(out_.row(0));
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      ASSERT_EQ(got[i], expected_[i])
          << where << ", rank " << all_to_all_.rank() << ", element " << i;
    }
  }

 private:
  void upload(TensorBuffer& buffer) {
    test_device()->upload(index_, buffer.view().data, buffer.row(0),
                          buffer.view().shape[0] * buffer.view().row_stride_bytes(), stream_.get());
  }
  /// Linear placement: the ranks or experts that a token goes to.
  int num_copies(std::int64_t a, std::int64_t b) const {
    if (b < 0) return 1;
    if (all_to_all_.config().layout == Layout::kExpertMajor) return 2;
    const auto ranks = linear_placement(all_to_all_.config().num_experts, all_to_all_.num_ranks());
    return ranks[static_cast<std::size_t>(a)] == ranks[static_cast<std::size_t>(b)] ? 1 : 2;
  }

  AllToAll& all_to_all_;
  int index_;
  std::shared_ptr<void> stream_;
  Capture capture_;
  TensorBuffer ids_;
  TensorBuffer rows_;
  TensorBuffer weights_;  // ones
  TensorBuffer num_tokens_;
  TensorBuffer out_;
  DispatchInputs inputs_;
  std::vector<float> expected_;
};

}  // namespace fanfold::testing
