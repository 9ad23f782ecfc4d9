// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks whose rows, windows and flags are made by hand, each on a simulated device of its own, all
// driven by one host thread: the combine kernels without the rest of the library.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/kernels.h"
#include "cudasim/control.h"
#include "exec/device_params.h"
#include "gpu/kernels/kernels.h"
#include "gtest/gtest.h"
#include "plan/expert_rows.h"
#include "plan/send_plan.h"
#include "plan/wire.h"
#include "support/number_codec.h"
#include "support/random_bits.h"
#include "support/same_bytes.h"

namespace fanfold::testing {

/// Memory of a device, written by copies only, so that the checks know what was written.
class DeviceMemory {
 public:
  DeviceMemory(int device, std::int64_t bytes) : device_(device), bytes_(bytes) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1))),
              cudaSuccess);
    data_ = static_cast<std::byte*>(data);
  }
  DeviceMemory(int device, const Bytes& bytes)
      : DeviceMemory(device, static_cast<std::int64_t>(bytes.size())) {
    put(0, bytes.data(), bytes_);
  }
  template <class T>
  DeviceMemory(int device, const std::vector<T>& values)
      : DeviceMemory(device, static_cast<std::int64_t>(values.size() * sizeof(T))) {
    put(0, static_cast<const void*>(values.data()), bytes_);
  }
  ~DeviceMemory() { (void)cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  template <class T = std::byte>
  T* at(std::int64_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }
  void put(std::int64_t offset, const void* from, std::int64_t bytes) const {
    if (bytes == 0) return;
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    EXPECT_EQ(
        cudaMemcpy(data_ + offset, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice),
        cudaSuccess);
  }
  Bytes get(std::int64_t offset, std::int64_t bytes) const {
    Bytes got(static_cast<std::size_t>(bytes));
    if (bytes == 0) return got;
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(got.data(), data_ + offset, got.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return got;
  }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  int device_;
  std::int64_t bytes_;
  std::byte* data_;
};

enum class Fold : std::uint8_t { kStaged, kPlain, kCarried, kOrigin };

struct CombineShape {
  int num_ranks = 3;
  std::int64_t round_max_tokens = 5;  // m
  int num_tokens = -1;                // of every rank; -1: m, m - 1, m, ...
  int top_k = 3;
  int num_local_experts = 2;
  std::int64_t hidden = 64;
  DType y = DType::kBFloat16;
  DType combine = DType::kBFloat16;
  DType out = DType::kBFloat16;
  Fold fold = Fold::kCarried;
  Wire wire = Wire::kNone;
  WireScale wire_scale = WireScale::kFloat32;
  bool specials = false;    // infinities, NaN, subnormals, zeros
  bool misaligned = false;  // y and out begin at their second element
  int rows_behind = 0;      // of out, behind the tokens
  int left_out = -1;        // a rank that is not active
  bool one_device = false;  // all ranks share device 0
  std::uint64_t seed = 20240401;

  std::string describe() const {
    return "ranks " + std::to_string(num_ranks) + ", hidden " + std::to_string(hidden) + ", " +
           name_of(y) + " by " + name_of(combine) + " to " + name_of(out) + ", fold " +
           std::to_string(static_cast<int>(fold)) + ", wire " +
           std::to_string(static_cast<int>(wire)) + "/" +
           std::to_string(static_cast<int>(wire_scale)) + ", K " + std::to_string(top_k) +
           (misaligned ? ", misaligned" : "") + ", seed " + std::to_string(seed);
  }
};

class CombineRanks {
 private:
  struct Rank {
    cudaStream_t stream = nullptr;
    // Of this rank's tokens.
    std::vector<std::int32_t> ids;  // [T, K]
    std::vector<float> weights;     // [T, K]
    std::vector<plan::Target> targets;
    std::vector<std::int32_t> rows_per_rank;
    // Of what it received.
    std::vector<std::int32_t> rank_counts;
    std::vector<plan::ExpertRow> pairs;
    Bytes y;
    Bytes rows;      // expected
    Bytes expected;  // out
    // Where the device has it.
    std::unique_ptr<DeviceMemory> window, windows, rank_of, local_of, active, control, slot;
    std::unique_ptr<DeviceMemory> device_targets, sent_ids, topk_weights, counts, device_pairs;
    std::unique_ptr<DeviceMemory> device_y, out;
    exec::DeviceReport* report = nullptr;
    std::uint32_t* abort_any = nullptr;
    exec::DeviceCombineSendParams send{};
    exec::DeviceSumParams sum{};
  };

 public:
  static constexpr std::uint64_t kEpoch = 7;
  static constexpr std::uint64_t kTimeoutNs = 2'000'000;

  explicit CombineRanks(const CombineShape& shape, int max_blocks = 3);
  ~CombineRanks();
  CombineRanks(const CombineRanks&) = delete;
  CombineRanks& operator=(const CombineRanks&) = delete;

  /// What the phases of `rank` are told; tests may change it.
  exec::DeviceCombineSendParams& send_params(int rank) { return ranks_[index(rank)]->send; }
  exec::DeviceSumParams& sum_params(int rank) { return ranks_[index(rank)]->sum; }

  // Each enqueues on the rank's stream.
  void send(int rank);
  void signal(int rank, const exec::DeviceFlags& flags, bool announces, bool waits);
  void sum(int rank);
  /// All active ranks send, then all sum.
  void combine() {
    for (const int rank : active_) send(rank);
    for (const int rank : active_) sum(rank);
  }
  void wait();
  /// Lets the devices run, for less than half a timeout.
  void run_a_while(int rank) {
    const std::uint64_t end = cudasim::now_ns() + kTimeoutNs / 20;
    while (cudasim::now_ns() < end) (void)cudaStreamQuery(ranks_[index(rank)]->stream);
  }
  /// New results of the experts, and what is expected of them. Nothing may be under way.
  void make_results(std::uint64_t seed);
  /// Rows that travel and rows of out are those expected, and nothing else was written.
  void expect_results() const;

  const std::vector<int>& active() const noexcept { return active_; }
  const exec::DeviceReport& report(int rank) const { return *ranks_[index(rank)]->report; }
  exec::DeviceSlot slot(int rank) const;
  Bytes out(int rank) const {
    return ranks_[index(rank)]->out->get(0, ranks_[index(rank)]->out->bytes());
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  int device_of(int rank) const { return shape_.one_device ? 0 : rank; }
  bool is_active(int rank) const { return rank != shape_.left_out; }
  int num_tokens(int rank) const {
    const int even = static_cast<int>(shape_.round_max_tokens) - (rank % 2);
    return shape_.num_tokens >= 0 ? shape_.num_tokens : std::max(even, 0);
  }
  bool is_packed() const { return shape_.wire != Wire::kNone; }
  void choose_experts(int rank);
  void number_rows();
  void place(int rank);
  void make_params(int rank);
  void expect_rows(int rank);
  void expect_out(int rank);
  Bytes numbers(DType dtype, std::int64_t count, std::uint64_t seed) const;
  void forget_nans(Bytes& bytes, std::int64_t offset, DType dtype, std::int64_t count) const;
  void forget_nans_of_rows(int rank, Bytes& rows) const;

  CombineShape shape_;
  int max_blocks_;
  int max_targets_;
  int max_pairs_;
  std::int64_t rows_per_token_;
  std::int64_t row_bytes_;
  std::int64_t flags_bytes_;
  std::int64_t region_bytes_;
  std::int64_t y_rows_;
  std::int64_t out_stride_;
  std::vector<int> active_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

/// Nothing was reported.
inline void expect_no_reports(const std::string& what) {
  for (const cudasim::Report& report : cudasim::reports()) {
    ADD_FAILURE() << report.kind << ": " << report.text << " (" << what << ")";
  }
  cudasim::clear_reports();
}

}  // namespace fanfold::testing
