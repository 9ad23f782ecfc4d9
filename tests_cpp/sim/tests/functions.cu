// SPDX-License-Identifier: Apache-2.0
#include "functions.h"

#include "cudasim/device.h"

namespace cudasim {
namespace {

constexpr unsigned kAll = 0xffffffffu;

__global__ void warp_kernel(int* results) {
  const int lane = static_cast<int>(threadIdx.x);
  int next = 0;
  const auto put = [&](unsigned value) { results[next++ * 32 + lane] = static_cast<int>(value); };
  const auto put_int = [&](int value) { put(static_cast<unsigned>(value)); };
  put_int(__shfl_sync(kAll, lane, 5));
  put_int(__shfl_sync(kAll, lane, 1, 8));
  put_int(__shfl_xor_sync(kAll, lane, 3));
  put_int(__shfl_up_sync(kAll, lane, 2));
  put_int(__shfl_down_sync(kAll, lane, 2));
  put(__ballot_sync(kAll, lane < 4));
  put_int(__any_sync(kAll, lane == 31));
  put_int(__all_sync(kAll, lane < 31));
  put(__match_any_sync(kAll, lane / 16));
  int all_equal = -1;
  put(__match_all_sync(kAll, 7, &all_equal) + static_cast<unsigned>(all_equal));
  put(__reduce_add_sync(kAll, static_cast<unsigned>(lane)));
  put_int(__reduce_min_sync(kAll, lane - 16));
  put_int(__reduce_max_sync(kAll, -1 - lane));
  put(__reduce_or_sync(kAll, 1u << lane));
  put(__reduce_xor_sync(kAll, static_cast<unsigned>(lane)));
  const unsigned active = __activemask();
  __syncwarp();  // nobody has left before all have looked
  put(active);
}

__global__ void atomic_kernel(long long* results) {
  static const char kKey = 0;
  auto* const word = static_cast<unsigned*>(op_static_shared(&kKey, 32, 8));
  auto* const number = reinterpret_cast<int*>(word + 1);
  auto* const real = reinterpret_cast<float*>(word + 2);
  auto* const wide = reinterpret_cast<unsigned long long*>(word + 4);
  *word = 10;
  *number = -3;
  *real = 1.5f;
  *wide = 1ull << 40;
  int next = 0;
  const auto put = [&](long long value) { results[next++] = value; };
  put(atomicAdd(word, 5u));
  put(atomicSub(word, 1u));
  put(atomicExch(word, 3u));
  put(atomicMax(word, 9u));
  put(atomicMin(word, 4u));
  put(atomicOr(word, 3u));
  put(atomicAnd(word, 5u));
  put(atomicXor(word, 1u));
  put(atomicInc(word, 4u));  // wraps to 0
  put(atomicInc(word, 4u));
  put(atomicDec(word, 7u));
  put(atomicDec(word, 7u));  // wraps to 7
  put(atomicCAS(word, 7u, 20u));
  put(*word);
  atomicMax(number, -1);
  put(*number);
  atomicMin_system(number, -8);
  put(*number);
  atomicAdd(real, 2.25f);
  put(static_cast<long long>(*real * 100));
  put(static_cast<long long>(atomicAdd(wide, 1ull << 33) >> 33));
  put(static_cast<long long>(atomicCAS_block(wide, 0ull, 5ull) >> 33));
  put(static_cast<long long>(*wide >> 33));
}

__global__ void math_kernel(long long* results) {
  int next = 0;
  const auto put = [&](long long value) { results[next++] = value; };
  put(__ffs(8));
  put(__ffs(0));
  put(__ffsll(1ll << 40));
  put(__popc(0xff0fu));
  put(__popcll(~0ull));
  put(__clz(1));
  put(__clz(0));
  put(__clzll(1ll << 40));
  put(__brev(1u));
  put(__float_as_uint(1.0f));
  put(static_cast<long long>(__uint_as_float(0x40000000u)));
  put(__float_as_int(-0.0f));
  put(static_cast<long long>(__int_as_float(0x40400000)));
  put(__double_as_longlong(1.0));
  // The product is 1 + 2^-11 + 2^-24, which no float holds: rounded once, the last term survives.
  const float a = 1.0f + 0x1p-12f;
  put(static_cast<long long>(__fmaf_rn(a, a, -1.0f) * 0x1p24f));
  put(static_cast<long long>(__fadd_rn(__fmul_rn(a, a), -1.0f) * 0x1p24f));
  put(min(3, 4u));
  put(max(-3, -4));
  put(__float2int_rn(2.5f));
  put(warpSize);
}

}  // namespace

cudaError_t warp_functions(cudaStream_t stream, int* results) {
  return launch_kernel({"warp", 1, 32, 0, stream, false, nullptr}, warp_kernel, results);
}

cudaError_t atomic_functions(cudaStream_t stream, long long* results) {
  return launch_kernel({"atomic", 1, 1, 0, stream, false, nullptr}, atomic_kernel, results);
}

cudaError_t math_functions(cudaStream_t stream, long long* results) {
  return launch_kernel({"math", 1, 1, 0, stream, false, nullptr}, math_kernel, results);
}

}  // namespace cudasim
