// SPDX-License-Identifier: Apache-2.0
// Four ranks, each a thread, exchange tokens once: every token travels to the ranks that host its
// experts, the experts scale it, and the results come home and are added up.
//
//   find_package(fanfold CONFIG REQUIRED)
//   target_link_libraries(four_ranks PRIVATE fanfold::fanfold)

#include <cstdint>
#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

#include "fanfold/all_to_all.h"

namespace {

constexpr int kNumRanks = 4;
constexpr int kNumExperts = 8;  // two on each rank: 0 and 1 on rank 0, and so on
constexpr int kTopK = 2;        // experts per token
constexpr int kMaxTokens = 16;  // capacity of each rank
constexpr int kHidden = 32;     // elements of a token

// Equal on all ranks; creating the AllToAll verifies that.
fanfold::AllToAllConfig make_config() {
  fanfold::AllToAllConfig config;
  config.num_experts = kNumExperts;
  config.top_k = kTopK;
  config.max_tokens_per_rank = kMaxTokens;
  config.hidden = kHidden;
  config.dtype = fanfold::DType::kFloat32;
  // One row per (token, local expert), grouped by expert: what a grouped matrix product wants.
  config.layout = fanfold::Layout::kExpertMajor;
  // The experts return plain results; the library multiplies by the router's weights and adds.
  config.weighting = fanfold::Weighting::kCarried;
  config.name = "example";
  return config;
}

// The "model": expert e multiplies by e + 1. Rows lie as [local experts, rows per expert, kHidden];
// only the first expert_counts[l] rows of [l] carry a token.
void run_experts(const fanfold::AllToAll& all_to_all, const fanfold::Received& received,
                 const fanfold::TensorView& results) {
  const fanfold::TensorView& rows = received.payloads().front();
  const auto* counts = static_cast<const std::int32_t*>(received.expert_counts().data);
  const std::vector<std::int32_t>& experts = all_to_all.local_experts();
  for (std::size_t local = 0; local < experts.size(); ++local) {
    const std::int64_t first = static_cast<std::int64_t>(local) * rows.shape[1] * kHidden;
    const float* in = static_cast<const float*>(rows.data) + first;
    float* out = static_cast<float*>(results.data) + first;
    const auto scale = static_cast<float>(experts[local] + 1);
    for (std::int64_t i = 0; i < std::int64_t{counts[local]} * kHidden; ++i) out[i] = scale * in[i];
  }
}

// What one rank does. Returns whether its tokens came home right.
bool run_rank(fanfold::Communicator& communicator) {
  fanfold::AllToAll all_to_all(communicator, make_config());  // collective: every rank makes one
  const int rank = all_to_all.rank();

  // This rank's tokens and where its router sends them. Ranks may have different numbers of tokens.
  const int num_tokens = kMaxTokens - 4 * rank;
  std::vector<float> tokens(static_cast<std::size_t>(num_tokens) * kHidden);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<float>(i % 7) - 3;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  for (int token = 0; token < num_tokens; ++token) {
    ids.push_back((token + rank) % kNumExperts);
    ids.push_back((token + rank + 3) % kNumExperts);
    weights.push_back(0.75F);
    weights.push_back(0.25F);
  }

  // Out: each token goes once to each rank that hosts one of its experts.
  fanfold::DispatchInputs inputs;
  inputs.topk_ids = fanfold::TensorView(ids.data(), fanfold::DType::kInt32, {num_tokens, kTopK});
  inputs.topk_weights =
      fanfold::TensorView(weights.data(), fanfold::DType::kFloat32, {num_tokens, kTopK});
  inputs.payloads = {
      fanfold::TensorView(tokens.data(), fanfold::DType::kFloat32, {num_tokens, kHidden})};
  const fanfold::Received received = all_to_all.dispatch(inputs);

  // The experts write where combine reads: nothing is copied.
  run_experts(all_to_all, received, all_to_all.combine_buffer(received.handle()));

  // Home: the results of a token's experts are weighted and added. This ends the round; `received`
  // must not be read any more.
  std::vector<float> out(tokens.size());
  fanfold::CombineInputs results;
  results.y = all_to_all.combine_buffer(received.handle());
  results.out = fanfold::TensorView(out.data(), fanfold::DType::kFloat32, {num_tokens, kHidden});
  all_to_all.combine(results, received.handle());

  // Small integers and quarters are exact in float32, so the check may be, too.
  bool is_right = true;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::size_t token = i / kHidden;
    const float scale = 0.75F * static_cast<float>(ids[token * kTopK] + 1) +
                        0.25F * static_cast<float>(ids[token * kTopK + 1] + 1);
    is_right = is_right && out[i] == scale * tokens[i];
  }
  all_to_all.close();  // collective
  std::printf("rank %d: %d tokens went out and came home %s\n", rank, num_tokens,
              is_right ? "right" : "WRONG");
  return is_right;
}

}  // namespace

int main() {
  // Ranks of one process. Communicator::processes makes the same group out of processes.
  std::vector<fanfold::Communicator> communicators = fanfold::Communicator::threads(kNumRanks);
  std::vector<int> is_right(kNumRanks, 0);
  std::vector<std::thread> threads;
  threads.reserve(kNumRanks);
  for (std::size_t r = 0; r < kNumRanks; ++r) {
    threads.emplace_back([&, r] {
      try {
        is_right[r] = run_rank(communicators[r]) ? 1 : 0;
        communicators[r].close();
      } catch (const std::exception& error) {
        std::printf("rank %zu: %s\n", r, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int right : is_right) {
    if (right == 0) return 1;
  }
  std::printf("all ranks agree\n");
  return 0;
}
