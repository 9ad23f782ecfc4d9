// SPDX-License-Identifier: Apache-2.0
#include "simple.h"

#include "cudasim/device.h"

namespace cudasim {
namespace {

__global__ void put_kernel(int* data, int value) { data[threadIdx.x] = value; }
__global__ void get_kernel(int* out, const int* in) { out[threadIdx.x] = in[threadIdx.x]; }
__global__ void increment_kernel(int* data) { data[threadIdx.x] += 1; }
__global__ void count_kernel(int* counter) { atomicAdd(counter, 1); }

__global__ void wait_kernel(const unsigned* word, unsigned value, int* out, const int* data) {
  while (op_load(word, 4, Order::kAcquire, Scope::kSys, CUDASIM_HERE) != value) {
  }
  if (out != nullptr) *out = *data;
}

__global__ void signal_kernel(unsigned* word, unsigned word_value, int* data, int value) {
  if (data != nullptr) *data = value;
  op_store(word, word_value, 4, Order::kRelease, Scope::kSys, CUDASIM_HERE);
}

__global__ void fail_kernel() { __trap(); }

__global__ void shared_kernel(int bytes) {
  auto* const memory = static_cast<char*>(op_dynamic_shared());
  memory[bytes - 1] = 1;
}

KernelLaunch threads(const char* name, cudaStream_t stream, int count, int blocks = 1) {
  KernelLaunch launch;
  launch.name = name;
  launch.stream = stream;
  launch.grid = dim3(static_cast<unsigned>(blocks));
  launch.block = dim3(static_cast<unsigned>(count));
  return launch;
}

}  // namespace

cudaError_t put(cudaStream_t stream, int* data, int count, int value) {
  return launch_kernel(threads("put", stream, count), put_kernel, data, value);
}

cudaError_t get(cudaStream_t stream, int* out, const int* in, int count) {
  return launch_kernel(threads("get", stream, count), get_kernel, out, in);
}

cudaError_t increment(cudaStream_t stream, int* data, int count) {
  return launch_kernel(threads("increment", stream, count), increment_kernel, data);
}

cudaError_t count_threads(cudaStream_t stream, int* counter, int blocks, int num_threads) {
  return launch_kernel(threads("count", stream, num_threads, blocks), count_kernel, counter);
}

cudaError_t wait_for_word(cudaStream_t stream, const unsigned* word, unsigned value, int* out,
                          const int* data) {
  return launch_kernel(threads("wait", stream, 1), wait_kernel, word, value, out, data);
}

cudaError_t signal_word(cudaStream_t stream, unsigned* word, unsigned word_value, int* data,
                        int value) {
  return launch_kernel(threads("signal", stream, 1), signal_kernel, word, word_value, data, value);
}

cudaError_t fail(cudaStream_t stream) {
  return launch_kernel(threads("fail", stream, 1), fail_kernel);
}

cudaError_t use_shared(cudaStream_t stream, std::size_t bytes) {
  KernelLaunch launch = threads("use_shared", stream, 1);
  launch.dynamic_shared_bytes = bytes;
  return launch_kernel(launch, shared_kernel, static_cast<int>(bytes));
}

const void* use_shared_function() { return reinterpret_cast<const void*>(shared_kernel); }

}  // namespace cudasim
