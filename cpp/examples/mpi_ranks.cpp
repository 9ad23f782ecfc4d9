// SPDX-License-Identifier: Apache-2.0
// The processes of an MPI job exchange tokens once: each token goes to its expert, the expert
// scales it, and the result comes home. Run it under mpirun, with any number of ranks:
//
//   find_package(fanfold CONFIG REQUIRED COMPONENTS mpi)
//   target_link_libraries(mpi_ranks PRIVATE fanfold::mpi)

#include <mpi.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "fanfold/all_to_all.h"
#include "fanfold/mpi.h"

namespace {

constexpr int kNumTokens = 6;
constexpr int kHidden = 16;

// Returns whether this rank's tokens came home right.
bool run_rank(fanfold::Communicator& communicator) {
  fanfold::AllToAllConfig config;  // equal on all ranks
  config.num_experts = communicator.num_ranks();
  config.top_k = 1;
  config.max_tokens_per_rank = kNumTokens;
  config.hidden = kHidden;
  config.dtype = fanfold::DType::kFloat32;
  config.layout = fanfold::Layout::kExpertMajor;  // one group of rows per expert of this rank
  config.weighting = fanfold::Weighting::kApplied;
  fanfold::AllToAll all_to_all(communicator, config);  // collective

  std::vector<float> tokens(kNumTokens * kHidden);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<float>(i % 7) - 3;
  std::vector<std::int32_t> ids;  // the expert of each token
  for (int token = 0; token < kNumTokens; ++token) {
    ids.push_back((token + communicator.rank()) % config.num_experts);
  }
  fanfold::DispatchInputs inputs;
  inputs.topk_ids = fanfold::TensorView(ids.data(), fanfold::DType::kInt32, {kNumTokens, 1});
  inputs.payloads = {
      fanfold::TensorView(tokens.data(), fanfold::DType::kFloat32, {kNumTokens, kHidden})};
  const fanfold::Received received = all_to_all.dispatch(inputs);

  // The "model": expert e multiplies by e + 1. Here each rank has one expert, its rank.
  const auto* rows = static_cast<const float*>(received.payloads().front().data);
  const auto num_rows = static_cast<const std::int32_t*>(received.expert_counts().data)[0];
  fanfold::CombineInputs results;
  results.y = all_to_all.combine_buffer(received.handle());
  auto* scaled = static_cast<float*>(results.y.data);
  const auto scale = static_cast<float>(communicator.rank() + 1);
  for (std::int64_t i = 0; i < std::int64_t{num_rows} * kHidden; ++i) scaled[i] = scale * rows[i];

  std::vector<float> out(tokens.size());
  results.out = fanfold::TensorView(out.data(), fanfold::DType::kFloat32, {kNumTokens, kHidden});
  all_to_all.combine(results, received.handle());
  bool is_right = true;
  for (std::size_t i = 0; i < out.size(); ++i) {
    is_right = is_right && out[i] == static_cast<float>(ids[i / kHidden] + 1) * tokens[i];
  }
  all_to_all.close();  // collective
  std::printf("rank %d of %d, data through %s, exchange by %s: %s\n", communicator.rank(),
              communicator.num_ranks(), communicator.kind().c_str(),
              fanfold::name_of(all_to_all.config().strategy), is_right ? "right" : "WRONG");
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  bool is_right = true;
  try {
    // Shared memory if all ranks are on this machine, else MPI; then MPI all the same.
    for (const auto use : {fanfold::TransportUse::kAuto, fanfold::TransportUse::kAlways}) {
      fanfold::Communicator communicator = fanfold::from_mpi(MPI_COMM_WORLD, use);
      is_right = run_rank(communicator) && is_right;
      communicator.close();  // collective; before MPI_Finalize
    }
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return is_right ? 0 : 1;
}
