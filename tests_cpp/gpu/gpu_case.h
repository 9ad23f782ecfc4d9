// SPDX-License-Identifier: Apache-2.0
#pragma once

// What tests of single calls on GPUs share.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gpu/gpu_ranks.h"
#include "support/round_run.h"
#include "support/test_device.h"

namespace fanfold::testing {

inline AllToAllConfig gpu_config(Layout layout = Layout::kRankMajor) {
  AllToAllConfig config;
  config.num_experts = 5;
  config.top_k = 2;
  config.max_tokens_per_rank = 4;
  config.hidden = 12;
  config.dtype = DType::kFloat32;
  config.layout = layout;
  config.strategy = Strategy::kOneSided;
  config.device = DeviceType::kGpu;
  return config;
}

inline AllToAllConfig of_rank(AllToAllConfig config, const Communicator& communicator) {
  config.device_index = communicator.rank();
  return config;
}

inline RoundPlan plan_of(const AllToAllConfig& config, int num_ranks, std::uint64_t seed = 1) {
  return make_round(config, num_ranks, RoutingKind::kUniform, config.max_tokens_per_rank, seed);
}

inline void run_round(AllToAll& all_to_all, std::uint64_t seed) {
  RoundRun round(all_to_all, plan_of(all_to_all.config(), all_to_all.num_ranks(), seed));
  round.dispatch();
  round.combine();
}

/// A stream of `index` in a capture from `begin` to `end`, and the graph it makes.
class Capture {
 public:
  Capture(int index, void* stream) : index_(index), stream_(static_cast<cudaStream_t>(stream)) {}
  ~Capture() {
    if (executable_ != nullptr) (void)cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  void begin() {
    check_cuda(cudaSetDevice(index_), "cudaSetDevice");
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
  }
  void end() {
    check_cuda(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  void replay() { check_cuda(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch"); }

 private:
  int index_;
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace fanfold::testing
