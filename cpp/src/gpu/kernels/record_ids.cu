// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"

namespace fanfold::gpu {
namespace {

using Params = exec::DeviceRecordParams;
using exec::CaptureFault;

constexpr int kChunk = 8;  // ids of a row that a thread has at a time

// --- Ids as routers give them -----------------------------------------------------------------

/// One id as a number; negative for "no expert", which the maximum of an unsigned type says where
/// no expert has that id.
template <typename Id>
__device__ inline std::int64_t number_of(Id id, std::int64_t num_ids) {
  constexpr Id kAllBits = static_cast<Id>(-1);
  if constexpr (kAllBits > Id{0}) {
    if (id == kAllBits && static_cast<std::int64_t>(kAllBits) >= num_ids) return -1;
  }
  return static_cast<std::int64_t>(id);
}

/// What a signed type says for "not written".
__device__ inline std::int64_t not_written(DType dtype) {
  return dtype == DType::kInt16 ? -32768 : -std::int64_t{2147483648};
}

/// Eight ids that begin on 16 bytes (of one byte: on 8).
template <typename Id>
__device__ inline void load_wide(const Id* from, std::int64_t num_ids, std::int64_t* numbers) {
  constexpr int kIdBytes = sizeof(Id);
  constexpr std::size_t kWords = kChunk * kIdBytes / 4;
  std::uint32_t words[kWords];
  if constexpr (kWords == 2) {
    const std::uint64_t both = *reinterpret_cast<const std::uint64_t*>(from);
    words[0] = static_cast<std::uint32_t>(both);
    words[1] = static_cast<std::uint32_t>(both >> 32);
  } else {
    FANFOLD_UNROLL
    for (std::size_t i = 0; i < kWords; i += 4) {
      const uint4 unit = ld16(reinterpret_cast<const std::byte*>(from) + i * 4);
      words[i] = unit.x;
      words[i + 1] = unit.y;
      words[i + 2] = unit.z;
      words[i + 3] = unit.w;
    }
  }
  FANFOLD_UNROLL
  for (int i = 0; i < kChunk; ++i) {
    if constexpr (kIdBytes == 8) {
      const std::uint64_t id = words[2 * i] | std::uint64_t{words[2 * i + 1]} << 32;
      numbers[i] = number_of(static_cast<Id>(id), num_ids);
    } else {
      const std::uint32_t word = words[i * kIdBytes / 4];
      numbers[i] = number_of(static_cast<Id>(word >> (8 * (i * kIdBytes % 4))), num_ids);
    }
  }
}

template <typename Id>
__device__ inline void load_as(const Params& p, std::int64_t at, int count, std::int64_t num_ids,
                               std::int64_t* numbers) {
  const auto* const from = static_cast<const Id*>(p.ids) + at;
  if (p.is_wide) return load_wide(from, num_ids, numbers);
  Id ids[kChunk] = {};
  FANFOLD_UNROLL
  for (int i = 0; i < kChunk; ++i) {
    if (i < count) ids[i] = from[i];
  }
  FANFOLD_UNROLL
  for (int i = 0; i < kChunk; ++i) numbers[i] = number_of(ids[i], num_ids);
}

/// Up to eight ids of a row from element `at` on.
__device__ inline void load_ids(const Params& p, std::int64_t at, int count, std::int64_t num_ids,
                                std::int64_t* numbers) {
  switch (p.dtype) {
    case DType::kInt8:
      return load_as<std::int8_t>(p, at, count, num_ids, numbers);
    case DType::kUInt8:
      return load_as<std::uint8_t>(p, at, count, num_ids, numbers);
    case DType::kInt16:
      return load_as<std::int16_t>(p, at, count, num_ids, numbers);
    case DType::kUInt16:
      return load_as<std::uint16_t>(p, at, count, num_ids, numbers);
    case DType::kUInt32:
      return load_as<std::uint32_t>(p, at, count, num_ids, numbers);
    case DType::kInt64:
      return load_as<std::int64_t>(p, at, count, num_ids, numbers);
    default:  // the caller has checked: int32
      return load_as<std::int32_t>(p, at, count, num_ids, numbers);
  }
}

// --- Cells ------------------------------------------------------------------------------------

/// Writes `count` ids to a cell, or (`compares`) leaves it as it is; whether it held other ones.
template <typename Out>
__device__ inline bool put_as(const Params& p, std::byte* to, int count,
                              const std::int64_t* numbers, bool compares) {
  constexpr int kOutBytes = sizeof(Out);
  constexpr std::size_t kWords = kChunk * kOutBytes / 4;
  bool differs = false;
  if (!p.is_wide) {
    auto* const out = reinterpret_cast<Out*>(to);
    FANFOLD_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      if (i >= count) continue;
      const auto id = static_cast<Out>(numbers[i]);
      if (!compares) {
        out[i] = id;
      } else if (out[i] != id) {
        differs = true;
      }
    }
    return differs;
  }
  std::uint32_t words[kWords] = {};
  FANFOLD_UNROLL
  for (int i = 0; i < kChunk; ++i) {
    const auto id = static_cast<std::uint32_t>(static_cast<Out>(numbers[i]));
    words[i * kOutBytes / 4] |= id << (8 * (i * kOutBytes % 4));
  }
  if constexpr (kWords == 2) {
    auto* const out = reinterpret_cast<std::uint64_t*>(to);
    const std::uint64_t both = words[0] | std::uint64_t{words[1]} << 32;
    if (compares) return *out != both;
    *out = both;
  } else {
    FANFOLD_UNROLL
    for (std::size_t i = 0; i < kWords; i += 4) {
      const uint4 unit = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      if (!compares) {
        st16(to + i * 4, unit);
        continue;
      }
      const uint4 seen = ld16(to + i * 4);
      differs |= seen.x != unit.x || seen.y != unit.y || seen.z != unit.z || seen.w != unit.w;
    }
  }
  return differs;
}

__device__ inline bool put_ids(const Params& p, std::byte* to, int count,
                               const std::int64_t* numbers, bool compares) {
  switch (p.id_bytes) {
    case 1:
      return put_as<std::uint8_t>(p, to, count, numbers, compares);
    case 2:
      return put_as<std::uint16_t>(p, to, count, numbers, compares);
    default:
      return put_as<std::uint32_t>(p, to, count, numbers, compares);
  }
}

// --- Errors -----------------------------------------------------------------------------------

/// Remembers an error of this kernel, unless there is an earlier one.
__device__ inline void remember(const Params& p, CaptureFault fault, std::int64_t row, int column) {
  std::uint64_t* const first = &p.state->first_error;
  const std::uint64_t key = static_cast<std::uint64_t>(fault) << exec::kCaptureFaultShift |
                            static_cast<std::uint64_t>(row * p.top_k + column);
  std::uint64_t seen = ld_relaxed_gpu(first);
  while (key < seen || (has(Fault::kAnyErrorOfKernel) && key > seen)) {
    const std::uint64_t before = atom_cas_acq_rel_gpu(first, seen, key);
    if (before == seen) return;
    seen = before;
  }
}

__device__ inline std::int64_t token_of(const Params& p, std::int64_t row) {
  for (int i = 0; i < p.num_spans; ++i) {
    const std::int64_t end = i + 1 < p.num_spans ? p.spans[i + 1].first : p.num_rows;
    const std::int64_t within = row - p.spans[i].source;
    if (within >= 0 && within < end - p.spans[i].first) return p.spans[i].token + within;
  }
  return -1;
}

/// The id that an error is about. Of a chunk at a time: rows may be such that only chunks can be
/// loaded.
__device__ inline std::int64_t id_of(const Params& p, const exec::CaptureError& error) {
  std::int64_t numbers[kChunk];
  const auto within = static_cast<int>(error.column % kChunk);
  load_ids(p, error.row * p.ids_stride + error.column - within, within + 1, error.num_ids, numbers);
  std::int64_t id = 0;
  FANFOLD_UNROLL
  for (int i = 0; i < kChunk; ++i) {
    if (i == within) id = numbers[i];
  }
  return id;
}

/// Makes `key` the error of the step, if it is the first, and tells the host, if that has seen what
/// it was told before. One thread.
__device__ inline void report(const Params& p, std::uint64_t key) {
  exec::CaptureState* const state = p.state;
  if (state->error.number != 0) return;
  const std::uint64_t at = key & ((std::uint64_t{1} << exec::kCaptureFaultShift) - 1);
  exec::CaptureError error;
  error.number = ++state->num_errors;
  error.fault = static_cast<CaptureFault>(key >> exec::kCaptureFaultShift);
  error.slot = p.slot;
  error.row = static_cast<std::int64_t>(at) / p.top_k;
  error.column = static_cast<std::int64_t>(at) % p.top_k;
  error.token = token_of(p, error.row);
  error.step_id = state->step_id;
  error.num_ids = state->rule.num_ids;
  error.is_physical = state->rule.logical_of_expert != nullptr ? 1 : 0;
  if (error.fault == CaptureFault::kOtherCount) {
    error.id = p.received_counts[error.row];
    error.num_ids = p.counts[error.row];
    error.token = -1;
  } else {
    error.id = id_of(p, error);
  }
  state->error = error;
  // Pairs with the host's release in DeviceErrors: it has read what is overwritten here.
  if (ld_acquire_sys(&p.report->acknowledged) != state->num_reported) return;
  state->num_reported = error.number;
  const auto* const from = reinterpret_cast<const std::uint64_t*>(&state->error);
  auto* const to = reinterpret_cast<std::uint64_t*>(&p.report->error);
  for (int i = 0; i < exec::kCaptureErrorWords; ++i) st_relaxed_sys(to + i, from[i]);
  st_release_sys(&p.report->number, error.number);  // <- DeviceErrors::throw_new
}

// --- Rows -------------------------------------------------------------------------------------

/// The source row and the token of the `at`th row of all spans.
__device__ inline void find_row(const Params& p, std::int64_t at, std::int64_t* row,
                                std::int64_t* token) {
  int low = 0;
  int high = p.num_spans;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.spans[middle].first <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  *row = p.spans[low].source + at - p.spans[low].first;
  *token = p.spans[low].token + at - p.spans[low].first;
}

/// Whether a row of a sink is to be recorded: all of its ids were written.
__device__ inline bool was_written(const Params& p, std::int64_t row) {
  const std::int64_t empty = not_written(p.dtype);
  int num_missing = 0;
  int first_missing = -1;
  for (int column = 0; column < p.top_k; column += kChunk) {
    const int count = min(kChunk, p.top_k - column);
    std::int64_t numbers[kChunk];
    load_ids(p, row * p.ids_stride + column, count, 0, numbers);
    FANFOLD_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      if (i >= count || numbers[i] != empty) continue;
      if (first_missing < 0) first_missing = column + i;
      ++num_missing;
    }
  }
  if (num_missing > 0 && num_missing < p.top_k) {
    if (has(Fault::kPartlyWrittenIsWritten)) return true;
    remember(p, CaptureFault::kPartlyWritten, row, first_missing);
  }
  return num_missing == 0;
}

/// Of a row that is wrong nothing is said to be recorded; the step's error tells.
__device__ inline void record_row(const Params& p, const exec::CaptureRule& rule,
                                  std::uint64_t step, std::int64_t row, std::int64_t token) {
  if (p.is_sink && !was_written(p, row)) return;
  std::byte* const cell = p.cells + token * p.top_k * p.id_bytes;
  const bool is_recorded = p.stamps[token] == step;
  const bool compares = is_recorded && !p.overwrite && !has(Fault::kRecordsOverOtherRows);
  const std::int64_t num_right = has(Fault::kLastExpertIsWrong) ? rule.num_ids - 1 : rule.num_ids;
  int wrong_column = -1;
  bool differs = false;
  for (int column = 0; column < p.top_k; column += kChunk) {
    const int count = min(kChunk, p.top_k - column);
    std::int64_t numbers[kChunk];
    load_ids(p, row * p.ids_stride + column, count, rule.num_ids, numbers);
    FANFOLD_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      if (i >= count) continue;
      std::int64_t id = numbers[i];
      if (id >= num_right) {
        if (wrong_column < 0) wrong_column = column + i;
        id = -1;
      }
      if (id >= 0 && rule.logical_of_expert != nullptr && !has(Fault::kKeepsPhysical)) {
        id = rule.logical_of_expert[id];
      }
      numbers[i] = id < 0 ? -1 : id;  // the sentinel has all bits set
    }
    differs |= put_ids(p, cell + std::int64_t{column} * p.id_bytes, count, numbers, compares);
  }
  if (wrong_column >= 0) {
    remember(p, CaptureFault::kWrongId, row, wrong_column);
  } else if (differs) {
    remember(p, CaptureFault::kOtherIds, row, 0);
  } else if (!is_recorded) {
    p.stamps[token] = step;
  }
}

/// Any grid: a thread for each row, so that a row's stamp is read and written by one. The last
/// block waits for nobody; it turns the first error into the step's, tells the host, and resets
/// first_error and num_done. The stamps are read by later kernels of the capture.
__global__ void __launch_bounds__(kThreads, 2) record_ids_kernel(const __grid_constant__ Params p) {
  grid_dependency_wait();
  const exec::CaptureRule rule = p.state->rule;
  const std::uint64_t step = p.state->step;
  const std::int64_t num_threads = std::int64_t{gridDim.x} * kThreads;
  if (p.received_counts != nullptr && blockIdx.x == 0) {
    for (int shard = static_cast<int>(threadIdx.x); shard < p.num_shards; shard += kThreads) {
      if (p.received_counts[shard] == p.counts[shard]) continue;
      remember(p, CaptureFault::kOtherCount, shard, 0);
    }
  }
  for (std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; at < p.num_rows;
       at += num_threads) {
    std::int64_t row = 0;
    std::int64_t token = 0;
    find_row(p, at, &row, &token);
    record_row(p, rule, step, row, token);
  }
  // remember -> this counter or barrier -> the look at first_error
  if (gridDim.x == 1) {
    if (!has(Fault::kNoBarrierBeforeLook)) __syncthreads();
  } else if (!is_last_block(&p.state->num_done)) {
    return;
  }
  if (threadIdx.x != 0) return;
  if (!has(Fault::kRecordCountersStay)) p.state->num_done = 0;
  const std::uint64_t key = ld_relaxed_gpu(&p.state->first_error);
  if (key == exec::kNoCaptureError) return;
  report(p, key);
  p.state->first_error = exec::kNoCaptureError;
}

}  // namespace

cudaError_t record_ids(const exec::DeviceRecordParams& params, LaunchLimits limits,
                       cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const std::int64_t wanted = (params.num_rows + kThreads - 1) / kThreads;
  const std::int64_t most = limits.max_blocks;
  return launch_blocks<record_ids_kernel>("record_ids", wanted < most ? wanted : most, 0, limits,
                                          stream, params);
}

}  // namespace fanfold::gpu
