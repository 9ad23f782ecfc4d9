// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <optional>
#include <vector>

#include "base/float_convert.h"
#include "device_check/commands.h"
#include "device_check/device.h"
#include "device_check/rank_case.h"
#include "support/spawn_ranks.h"

namespace fanfold::device_check {
namespace {

/// As scale_rows, on the host.
void scale_on_host(const TensorView& x, const TensorView& y, const TensorView& counts) {
  const auto* from = static_cast<const std::uint16_t*>(x.data);
  auto* to = static_cast<std::uint16_t*>(y.data);
  const auto* rows = static_cast<const std::int32_t*>(counts.data);
  for (std::int64_t group = 0; group < x.shape[0]; ++group) {
    const auto factor = static_cast<float>(1 << (group % 4));
    for (std::int64_t i = 0; i < rows[group] * x.shape[2]; ++i) {
      const std::int64_t at = group * x.shape[1] * x.shape[2] + i;
      to[at] = base::bfloat16_from_float(base::float_from_bfloat16(from[at]) * factor);
    }
  }
}

/// The results that the CPU gives, [T, H] with zeros from the number of tokens on.
std::vector<std::uint16_t> run_on_host(AllToAll& all_to_all, const Options& options,
                                       const HostInputs& inputs) {
  const std::int64_t num_tokens = inputs.num_tokens;
  DispatchInputs dispatch;
  dispatch.topk_ids = TensorView(inputs.ids.data(), DType::kInt32, {num_tokens, options.top_k});
  dispatch.topk_weights =
      TensorView(inputs.weights.data(), DType::kFloat32, {num_tokens, options.top_k});
  dispatch.payloads = {TensorView(inputs.x.data(), DType::kBFloat16, {num_tokens, options.hidden})};
  const Received received = all_to_all.dispatch(dispatch);
  CombineInputs combine;
  combine.y = all_to_all.combine_buffer(received.handle());
  scale_on_host(received.payloads()[0], combine.y,
                is_per_expert(options.layout) ? received.expert_counts() : received.rank_counts());
  std::vector<std::uint16_t> out(inputs.x.size(), 0);
  combine.out = TensorView(out.data(), DType::kBFloat16, {num_tokens, options.hidden});
  all_to_all.combine(combine, received.handle());
  return out;
}

/// One rank's rounds; returns how many results differ.
std::int64_t run_rank(Communicator& communicator, const Options& options) {
  const int rank = communicator.rank();
  const int device = take_device(rank);
  AllToAll on_host(communicator, config_of(options, DeviceType::kCpu, 0));
  AllToAll on_device(communicator, config_of(options, DeviceType::kGpu, device));
  const Stream stream;
  DeviceInputs inputs(options);
  const TensorView out = inputs.out();
  // Making memory waits for the device, where a peer's kernel may wait for this rank.
  communicator.barrier();
  const auto enqueue = [&] {
    const Received received = on_device.dispatch(inputs.dispatch(stream, /*with_count=*/true));
    CombineInputs combine;
    combine.y = enqueue_expert(on_device, received, stream);
    combine.out = out;
    on_device.combine(combine, received.handle());
  };
  std::optional<Graph> graph;
  if (options.graph) graph.emplace(stream, enqueue);
  std::int64_t num_wrong = 0;
  for (int round = 0; round < options.rounds; ++round) {
    const HostInputs drawn = draw(options, rank, static_cast<std::uint64_t>(round));
    inputs.write(drawn);
    if (graph) {
      graph->launch(stream);
    } else {
      enqueue();
    }
    stream.wait();
    on_device.check();
    const std::vector<std::uint16_t> got = inputs.read_out();
    const std::vector<std::uint16_t> wanted = run_on_host(on_host, options, drawn);
    for (std::size_t i = 0; i < wanted.size(); ++i) num_wrong += got[i] == wanted[i] ? 0 : 1;
  }
  on_device.close();
  on_host.close();
  return num_wrong;
}

}  // namespace

bool rounds(const Options& options) {
  std::atomic<std::int64_t> num_wrong{0};
  testing::spawn_ranks(options.ranks, [&](Communicator& communicator) {
    num_wrong += run_rank(communicator, options);
  });
  const double rows = static_cast<double>(options.rounds) * options.ranks * options.tokens;
  std::printf("rounds: ranks=%d tokens=%d hidden=%d top_k=%d experts=%d %s %s: %d rounds, ",
              options.ranks, options.tokens, options.hidden, options.top_k, options.experts,
              name_of(options.layout), options.graph ? "graph" : "eager", options.rounds);
  if (num_wrong == 0) {
    std::printf("%.0f numbers equal the CPU's\n", rows * options.hidden);
  } else {
    std::printf("%lld of %.0f numbers DIFFER from the CPU's\n",
                static_cast<long long>(num_wrong.load()), rows * options.hidden);
  }
  return num_wrong == 0;
}

}  // namespace fanfold::device_check
