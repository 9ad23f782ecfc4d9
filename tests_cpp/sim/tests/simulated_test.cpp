// SPDX-License-Identifier: Apache-2.0
#include "simulated_test.h"

#include <set>

namespace cudasim {

void SimulatedTest::SetUp() {
  clear_reports();
  clear_faults();
  restart();
  for (int device = 0; device < kNumDevices; ++device) {
    cudaSetDevice(device);
    cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking);
  }
  cudaSetDevice(0);
  cudaGetLastError();
}

void SimulatedTest::TearDown() {
  restart();
  for (const auto* list : {&streams_, &more_streams_}) {
    for (cudaStream_t stream : *list) cudaStreamDestroy(stream);
  }
  for (void* address : allocations_) cudaFree(address);
}

void SimulatedTest::restart(Config config) {
  config.devices = kNumDevices;
  configure(config);
}

void SimulatedTest::restart_with_seed(std::uint64_t seed) {
  Config config;
  config.seed = seed;
  restart(config);
}

void* SimulatedTest::memory(std::size_t bytes, bool is_zeroed) {
  cudaSetDevice(0);
  void* address = nullptr;
  cudaMalloc(&address, bytes);
  allocations_.push_back(address);
  if (is_zeroed) {
    cudaMemset(address, 0, bytes);
    cudaDeviceSynchronize();
  }
  return address;
}

cudaStream_t SimulatedTest::stream_on(int device) {
  cudaSetDevice(device);
  return streams_.at(static_cast<std::size_t>(device));
}

cudaStream_t SimulatedTest::other_stream() {
  cudaSetDevice(0);
  cudaStreamCreateWithFlags(&more_streams_.emplace_back(), cudaStreamNonBlocking);
  return more_streams_.back();
}

void SimulatedTest::synchronize_all() {
  for (int device = 0; device < kNumDevices; ++device) {
    cudaSetDevice(device);
    cudaDeviceSynchronize();
  }
  cudaSetDevice(0);
}

std::vector<Report> SimulatedTest::finish_with_reports() {
  synchronize_all();
  std::vector<Report> found = reports();
  clear_reports();
  return found;
}

std::string SimulatedTest::finish() {
  std::set<std::string> kinds;
  for (const Report& report : finish_with_reports()) kinds.insert(report.kind);
  std::string text;
  for (const std::string& kind : kinds) text += (text.empty() ? "" : "+") + kind;
  return text.empty() ? "clean" : text;
}

}  // namespace cudasim
