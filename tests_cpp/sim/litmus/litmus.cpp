// SPDX-License-Identifier: Apache-2.0

#include "litmus.h"

#include <cstdlib>
#include <fstream>
#include <set>

namespace fanfold::gpu::litmus {

std::string kinds() {
  std::set<std::string> found;
  for (const cudasim::Report& report : cudasim::reports()) {
    found.insert(report.kind);
  }
  std::string text;
  for (const std::string& kind : found) {
    text += (text.empty() ? "" : " ") + kind;
  }
  return text;
}

std::string all_texts() {
  std::string text;
  for (const cudasim::Report& report : cudasim::reports()) {
    text += "[" + report.kind + "] " + report.text + "\n";
  }
  return text;
}

std::string text_of(const std::string& kind) {
  for (const cudasim::Report& report : cudasim::reports()) {
    if (report.kind == kind) {
      return report.text;
    }
  }
  return "";
}

namespace {

std::string source_line(const std::string& file_name, int number) {
  std::ifstream file(std::string(LITMUS_SOURCE_DIR) + "/" + file_name);
  std::string line;
  for (int i = 0; i < number; ++i) {
    std::getline(file, line);
  }
  const std::size_t begin = line.find_first_not_of(' ');
  return begin == std::string::npos ? "" : line.substr(begin);
}

}  // namespace

std::vector<std::string> named_lines(const std::string& text) {
  const std::string suffix = ".cu:";
  std::vector<std::string> lines;
  std::size_t at = text.find(suffix);
  while (at != std::string::npos) {
    const std::size_t begin = text.find_last_of(" \n/", at) + 1;
    const std::size_t number = at + suffix.size();
    lines.push_back(source_line(text.substr(begin, number - 1 - begin),
                                static_cast<int>(std::strtol(&text[number], nullptr, 10))));
    at = text.find(suffix, number);
  }
  return lines;
}

void LitmusTest::SetUp() {
  config_.devices = kNumDevices;
  start(config_);
  for (int i = 0; i <= kNumDevices; ++i) {
    ASSERT_EQ(cudaSetDevice(i % kNumDevices), cudaSuccess);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    streams_.push_back(stream);
  }
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

void LitmusTest::TearDown() {
  start(config_);  // whatever went wrong is no longer held against the clean-up
  for (const cudaStream_t stream : streams_) {
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  for (void* const memory : memory_) {
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
  }
  cudaGetLastError();
}

void LitmusTest::start(const cudasim::Config& config) {
  cudasim::configure(config);
  cudasim::clear_reports();
  cudasim::clear_faults();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

cudaStream_t LitmusTest::stream(int device) const {
  EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
  return streams_[static_cast<std::size_t>(device)];
}

cudaStream_t LitmusTest::other_stream() const {
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  return streams_[kNumDevices];
}

Words LitmusTest::words(int mode) {
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  std::vector<void*> parts(3);
  for (void*& part : parts) {
    EXPECT_EQ(cudaMalloc(&part, kPartBytes), cudaSuccess);
    memory_.push_back(part);
  }
  clear(parts[1]);
  clear(parts[2]);
  return {static_cast<int*>(parts[0]), static_cast<std::uint32_t*>(parts[1]),
          static_cast<int*>(parts[2]), mode};
}

void LitmusTest::clear(void* memory) {
  EXPECT_EQ(cudaMemset(memory, 0, kPartBytes), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
}

cudaError_t LitmusTest::sync() {
  cudaError_t first = cudaSuccess;
  for (const cudaStream_t stream : streams_) {
    const cudaError_t error = cudaStreamSynchronize(stream);
    first = first == cudaSuccess ? error : first;
  }
  return first;
}

int LitmusTest::result(const Words& words, std::size_t index) {
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  int value = -1;
  EXPECT_EQ(cudaMemcpy(&value, words.out + index, sizeof(value), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return value;
}

std::string LitmusTest::pair(cudaError_t (*launch)(const Words&, int, cudaStream_t), int mode) {
  const Words parts = words(mode);
  EXPECT_EQ(launch(parts, 0, stream(0)), cudaSuccess);
  EXPECT_EQ(launch(parts, 1, stream(1)), cudaSuccess);
  sync();
  return kinds();
}

std::string LitmusTest::single(cudaError_t (*launch)(const Words&, cudaStream_t), int mode) {
  const Words parts = words(mode);
  EXPECT_EQ(launch(parts, stream(0)), cudaSuccess);
  sync();
  return kinds();
}

}  // namespace fanfold::gpu::litmus
