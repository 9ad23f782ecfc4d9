// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory and streams of GPUs through the CUDA runtime, for tests of rounds.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/test_device.h"

namespace fanfold::testing {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

/// While it lives, the program's TestDevice.
class TestGpu final : public TestDevice {
 public:
  TestGpu() { test_device() = this; }
  /// All memory must be let go of.
  ~TestGpu() override {
    test_device() = nullptr;
    for (const auto& [key, blocks] : free_) {
      (void)cudaSetDevice(key.first);
      for (void* block : blocks) (void)cudaFree(block);
    }
    for (const auto& [index, streams] : streams_) {
      (void)cudaSetDevice(index);
      for (cudaStream_t stream : streams) (void)cudaStreamDestroy(stream);
    }
  }
  TestGpu(const TestGpu&) = delete;
  TestGpu& operator=(const TestGpu&) = delete;

  std::shared_ptr<std::byte> allocate(int index, std::int64_t bytes) override {
    const std::pair<int, std::int64_t> key(index, bytes < 256 ? 256 : bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<void*>& blocks = free_[key];
    void* block = nullptr;
    if (blocks.empty()) {
      check_cuda(cudaSetDevice(index), "cudaSetDevice");
      check_cuda(cudaMalloc(&block, static_cast<std::size_t>(key.second)), "cudaMalloc");
    } else {
      block = blocks.back();
      blocks.pop_back();
    }
    return {static_cast<std::byte*>(block), [this, key](std::byte* data) {
              const std::lock_guard<std::mutex> again(mutex_);
              free_[key].push_back(data);
            }};
  }

  std::shared_ptr<void> make_stream(int index) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<cudaStream_t>& streams = streams_[index];
    cudaStream_t stream = nullptr;
    if (streams.empty()) {
      check_cuda(cudaSetDevice(index), "cudaSetDevice");
      check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    } else {
      stream = streams.back();
      streams.pop_back();
    }
    return {stream, [this, index](void* used) {
              const std::lock_guard<std::mutex> again(mutex_);
              streams_[index].push_back(static_cast<cudaStream_t>(used));
            }};
  }

  void synchronize(int index, void* stream) override {
    check_cuda(cudaSetDevice(index), "cudaSetDevice");
    check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
  }

  void upload(int index, void* to, const void* from, std::int64_t bytes, void* stream) override {
    copy(index, to, from, bytes, cudaMemcpyHostToDevice, stream);
  }
  void download(int index, void* to, const void* from, std::int64_t bytes, void* stream) override {
    copy(index, to, from, bytes, cudaMemcpyDeviceToHost, stream);
  }

 private:
  void copy(int index, void* to, const void* from, std::int64_t bytes, cudaMemcpyKind kind,
            void* stream) {
    if (bytes == 0) return;
    check_cuda(cudaSetDevice(index), "cudaSetDevice");
    check_cuda(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind,
                               static_cast<cudaStream_t>(stream)),
               "cudaMemcpyAsync");
    synchronize(index, stream);
  }

  std::mutex mutex_;  // guards both
  std::map<std::pair<int, std::int64_t>, std::vector<void*>> free_;
  std::map<int, std::vector<cudaStream_t>> streams_;
};

}  // namespace fanfold::testing
