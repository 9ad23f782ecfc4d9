// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "device_check/commands.h"
#include "device_check/device.h"
#include "device_check/rank_case.h"
#include "support/spawn_ranks.h"

namespace fanfold::device_check {
namespace {

constexpr int kWarmUps = 3;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Times of one rank, in microseconds.
struct RankTimes {
  std::vector<double> dispatch;  // by round
  std::vector<double> combine;
  double graph_round = 0;      // mean of a replayed round
  std::int64_t rows_sent = 0;  // to all ranks, this one included
};

/// The phases of rounds that follow each other, by events between them; then whole rounds as a
/// graph. The experts do nothing: their results are what the combine buffer holds.
RankTimes run_rank(Communicator& communicator, const Options& options) {
  const int device = take_device(communicator.rank());
  AllToAll all_to_all(communicator, config_of(options, DeviceType::kGpu, device));
  const Stream stream;
  DeviceInputs inputs(options);
  inputs.write(draw(options, communicator.rank(), 0));
  const DispatchInputs dispatch = inputs.dispatch(stream, /*with_count=*/false);
  CombineInputs combine;
  combine.out = inputs.out();

  RankTimes times;
  const int num_rounds = kWarmUps + options.rounds;
  std::vector<Event> events(3 * static_cast<std::size_t>(num_rounds));
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  communicator.barrier();
  for (int round = 0; round < num_rounds; ++round) {
    Event* const at = &events[3 * static_cast<std::size_t>(round)];
    at[0].record(stream);
    const Received received = all_to_all.dispatch(dispatch);
    at[1].record(stream);
    combine.y = all_to_all.combine_buffer(received.handle());
    all_to_all.combine(combine, received.handle());
    at[2].record(stream);
  }
  stream.wait();
  all_to_all.check();
  for (int round = kWarmUps; round < num_rounds; ++round) {
    const Event* const at = &events[3 * static_cast<std::size_t>(round)];
    times.dispatch.push_back(at[1].since(at[0]));
    times.combine.push_back(at[2].since(at[1]));
  }

  Graph graph(stream, [&] {
    const Received received = all_to_all.dispatch(dispatch);
    combine.y = all_to_all.combine_buffer(received.handle());
    all_to_all.combine(combine, received.handle());
  });
  for (int round = 0; round < kWarmUps; ++round) graph.launch(stream);
  stream.wait();
  communicator.barrier();
  events[0].record(stream);
  for (int round = 0; round < options.rounds; ++round) graph.launch(stream);
  events[1].record(stream);
  stream.wait();
  all_to_all.check();
  times.graph_round = events[1].since(events[0]) / options.rounds;

  const Received received = all_to_all.dispatch(dispatch);
  for (const std::int32_t rows : received.host_counts().rank_counts) times.rows_sent += rows;
  all_to_all.release(received.handle());
  stream.wait();
  all_to_all.close();
  return times;
}

/// Of a copy on one device that reads and writes `bytes` bytes in all.
double copy_us(std::int64_t bytes) {
  take_device(0);
  const Buffer from(bytes / 2);
  const Buffer to(bytes / 2);
  const Stream stream;
  std::vector<double> times;
  for (int i = 0; i < 10; ++i) {
    Event begin;
    Event end;
    begin.record(stream);
    require(cudaMemcpyAsync(to.get(), from.get(), static_cast<std::size_t>(bytes / 2),
                            cudaMemcpyDeviceToDevice, stream.get()),
            "cudaMemcpyAsync");
    end.record(stream);
    stream.wait();
    times.push_back(end.since(begin));
  }
  return median(times);
}

/// Per round the slowest rank's; then the median.
double phase_us(const std::vector<RankTimes>& ranks, std::vector<double> RankTimes::* phase) {
  std::vector<double> slowest = ranks[0].*phase;
  for (const RankTimes& rank : ranks) {
    for (std::size_t i = 0; i < slowest.size(); ++i) {
      slowest[i] = std::max(slowest[i], (rank.*phase)[i]);
    }
  }
  return median(slowest);
}

}  // namespace

bool bench(const Options& options) {
  std::vector<RankTimes> ranks(static_cast<std::size_t>(options.ranks));
  testing::spawn_ranks(options.ranks, [&](Communicator& communicator) {
    ranks[static_cast<std::size_t>(communicator.rank())] = run_rank(communicator, options);
  });
  std::int64_t rows = std::int64_t{options.ranks} * options.tokens;  // read by a dispatch
  double graph_round = 0;
  for (const RankTimes& rank : ranks) {
    rows += rank.rows_sent;
    graph_round = std::max(graph_round, rank.graph_round);
  }
  const std::int64_t bytes = rows * options.hidden * 2;
  const double copy = copy_us(bytes);
  const double dispatch = phase_us(ranks, &RankTimes::dispatch);
  const double combine = phase_us(ranks, &RankTimes::combine);
  std::printf(
      "bench: ranks=%d tokens=%d hidden=%d top_k=%d experts=%d %s: dispatch %.1f us, combine %.1f "
      "us, "
      "graph round %.1f us; %.1f MB a phase, a copy of them %.1f us: dispatch at %.0f %%, combine "
      "at "
      "%.0f %% of it\n",
      options.ranks, options.tokens, options.hidden, options.top_k, options.experts,
      name_of(options.layout), dispatch, combine, graph_round, static_cast<double>(bytes) / 1e6,
      copy, 100 * copy / dispatch, 100 * copy / combine);
  return true;
}

}  // namespace fanfold::device_check
