// SPDX-License-Identifier: Apache-2.0
#pragma once

// The memory of one rank of HandMadeRanks, for its own files.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "gpu/hand_made_ranks.h"
#include "support/random_bits.h"

namespace fanfold::testing {

inline constexpr std::int64_t kGap = 256;  // red zone between parts
inline constexpr std::int32_t kInvalid = -7;

inline void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

/// What a payload's row of a token holds.
inline std::byte payload_byte(int rank, std::int64_t token, std::size_t payload, std::int64_t at) {
  return static_cast<std::byte>(mix(static_cast<std::uint64_t>(rank),
                                    static_cast<std::uint64_t>(token), payload,
                                    static_cast<std::uint64_t>(at)));
}

/// Device memory as the host sees it.
template <typename T>
std::vector<T> read(const T* memory, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  check(cudaMemcpy(values.data(), memory, values.size() * sizeof(T), cudaMemcpyDefault));
  return values;
}

/// One rank's memory, on its device.
struct HandMadeRanks::Rank {
  explicit Rank(int ordinal) : device(ordinal) { check(cudaSetDevice(device)); }
  ~Rank() {
    cudaSetDevice(device);
    for (void* const memory : owned) EXPECT_EQ(cudaFree(memory), cudaSuccess);
    for (void* const memory : pinned) EXPECT_EQ(cudaFreeHost(memory), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  /// Memory that nobody has written.
  template <typename T>
  T* take(std::int64_t count, const char* name) {
    void* memory = nullptr;
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T);
    check(cudaMalloc(&memory, bytes + kGap));
    owned.push_back(memory);
    cudasim::annotate(memory, bytes, name);
    return static_cast<T*>(memory);
  }
  template <typename T>
  T* zeros(std::int64_t count, const char* name) {
    T* const memory = take<T>(count, name);
    check(cudaMemset(memory, 0, static_cast<std::size_t>(count) * sizeof(T)));
    return memory;
  }
  template <typename T>
  T* put(const std::vector<T>& values, const char* name) {
    T* const memory = take<T>(static_cast<std::int64_t>(values.size()), name);
    check(cudaMemcpy(static_cast<void*>(memory), static_cast<const void*>(values.data()),
                     values.size() * sizeof(T), cudaMemcpyDefault));
    return memory;
  }
  template <typename T>
  T* pin() {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(T), cudaHostAllocDefault));
    pinned.push_back(memory);
    return new (memory) T{};
  }

  int device;
  cudaStream_t stream = nullptr;
  std::vector<void*> owned;
  std::vector<void*> pinned;

  std::byte* window = nullptr;
  std::byte** windows = nullptr;  // [R]
  std::int32_t* rank_of = nullptr;
  std::int32_t* local_of = nullptr;
  std::int32_t* copy_begin = nullptr;
  std::int32_t* copies = nullptr;
  std::int32_t* is_active = nullptr;
  exec::DeviceControl* control = nullptr;
  exec::DeviceSlot* slot = nullptr;
  exec::DeviceReport* report = nullptr;
  std::uint32_t* abort_word = nullptr;
  exec::TileWords tiles = {};
  // Kept for the combine, and for rounds along this routing.
  std::int32_t* sent_ids = nullptr;
  float* sent_weights = nullptr;
  plan::Target* targets = nullptr;
  std::int32_t* rows_per_rank = nullptr;
  std::int32_t* routed_ids = nullptr;
  float* routed_weights = nullptr;
  std::int32_t* routed_tokens = nullptr;
  // Counts.
  std::int32_t* rank_counts = nullptr;
  std::int32_t* token_counts = nullptr;
  std::int32_t* num_rows = nullptr;
  // Layout per expert.
  std::int32_t* expert_counts = nullptr;
  std::int32_t* offsets = nullptr;
  plan::ExpertRow* pairs = nullptr;
  float* expert_weights = nullptr;
  std::vector<std::byte*> expanded;
  std::int32_t* source_rank = nullptr;
  std::int32_t* source_token = nullptr;
  // This round's inputs.
  std::byte* topk_ids = nullptr;
  std::int64_t ids_stride = 0;
  float* topk_weights = nullptr;
  std::int64_t weights_stride = 0;
  std::vector<std::byte*> payloads;
  std::int32_t* word = nullptr;
  std::int64_t num_given = 0;
  std::uint64_t num_dropped = 0;  // since creation
};

}  // namespace fanfold::testing
