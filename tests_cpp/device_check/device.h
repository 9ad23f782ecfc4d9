// SPDX-License-Identifier: Apache-2.0
#pragma once

// Owners of what device_check makes with the CUDA runtime.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace fanfold::device_check {

inline void require(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

/// Device memory.
class Buffer {
 public:
  explicit Buffer(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    require(cudaMalloc(&data_, bytes_ > 0 ? bytes_ : 1), "cudaMalloc");
    require(cudaMemset(data_, 0, bytes_ > 0 ? bytes_ : 1), "cudaMemset");
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // non-blocking streams do not wait
  }
  ~Buffer() { (void)cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* get() const noexcept { return data_; }
  std::byte* bytes() const noexcept { return static_cast<std::byte*>(data_); }
  /// Waits.
  template <class T>
  void write(const std::vector<T>& values) {
    require(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
            "cudaMemcpy");
  }
  template <class T>
  std::vector<T> read(std::size_t count) const {
    std::vector<T> values(count);
    require(cudaMemcpy(values.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    return values;
  }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

class Stream {
 public:
  Stream() {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const noexcept { return stream_; }
  void wait() const { require(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { require(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const Stream& stream) {
    require(cudaEventRecord(event_, stream.get()), "cudaEventRecord");
  }
  /// Microseconds from `earlier`; both have passed.
  double since(const Event& earlier) const {
    float ms = 0;
    require(cudaEventElapsedTime(&ms, earlier.event_, event_), "cudaEventElapsedTime");
    return static_cast<double>(ms) * 1000;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// What `record` enqueues on a stream, as a graph to be replayed.
class Graph {
 public:
  template <class Record>
  Graph(const Stream& stream, Record&& record) {
    require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
            "cudaStreamBeginCapture");
    record();
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
    const cudaError_t result = cudaGraphInstantiate(&graph_, graph, 0);
    (void)cudaGraphDestroy(graph);
    require(result, "cudaGraphInstantiate");
  }
  ~Graph() { (void)cudaGraphExecDestroy(graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Stream& stream) {
    require(cudaGraphLaunch(graph_, stream.get()), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace fanfold::device_check
