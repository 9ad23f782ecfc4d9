// SPDX-License-Identifier: Apache-2.0
// Rounds in CUDA graphs: captured once, replayed with other tokens.

#include <cstring>
#include <memory>
#include <vector>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_case.h"
#include "support/expect_error.h"
#include "support/oracle.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::gpu_config;
using testing::of_rank;
using testing::RoundPlan;
using testing::RoundRun;
using testing::RoutingKind;
using testing::TensorBuffer;

/// One captured round whose expert hands its rows back: x [T, H] float32 comes home once for each
/// rank (rank_major) or expert (expert_major) that it went to.
class GraphedRound {
 public:
  GraphedRound(AllToAll& all_to_all, std::int64_t rows, std::int64_t m)
      : all_to_all_(all_to_all),
        index_(all_to_all.config().device_index),
        stream_(testing::test_device()->make_stream(index_)),
        capture_(index_, stream_.get()),
        ids_(DType::kInt64, rows, {all_to_all.config().top_k}),
        rows_(DType::kFloat32, rows, {all_to_all.config().hidden}),
        num_tokens_(DType::kInt32, 1, {}),
        out_(DType::kFloat32, rows, {all_to_all.config().hidden}) {
    for (TensorBuffer* each : {&ids_, &rows_, &num_tokens_, &out_}) {
      each->move_to(index_, stream_.get());
    }
    inputs_.topk_ids = ids_.view();
    inputs_.payloads = {rows_.view()};
    inputs_.num_tokens = num_tokens_.view();
    inputs_.round_max_tokens = m;
    inputs_.stream = stream_.get();
  }

  void capture() {
    capture_.begin();
    const Received received = all_to_all_.dispatch(inputs_);
    const TensorView x = received.payloads().front();
    CombineInputs combine;
    combine.y = all_to_all_.combine_buffer(received.handle());
    combine.out = out_.view();
    // The expert.
    testing::check_cuda(
        cudaMemcpyAsync(combine.y.data, x.data,
                        static_cast<std::size_t>(x.num_elements() * size_of(x.dtype)),
                        cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream_.get())),
        "cudaMemcpyAsync");
    all_to_all_.combine(combine, received.handle());
    capture_.end();
  }

  /// Tokens of this replay, the same on every rank but for the values.
  void fill(std::int64_t num_tokens, std::uint64_t seed) {
    const AllToAllConfig& config = all_to_all_.config();
    expected_.assign(static_cast<std::size_t>(rows_.view().shape[0] * config.hidden), 0.0F);
    for (std::int64_t token = 0; token < rows_.view().shape[0]; ++token) {
      const auto first = static_cast<std::int64_t>(
          (seed * 7 + static_cast<std::uint64_t>(token * 3 + all_to_all_.rank())) %
          static_cast<std::uint64_t>(config.num_experts));
      // Two experts, or one and none.
      const std::int64_t ids[2] = {first, token % 3 == 2 ? -1 : (first + 2) % config.num_experts};
      std::memcpy(ids_.row(token), ids, sizeof ids);
      const int copies = num_copies(ids[0], ids[1]);
      for (std::int64_t column = 0; column < config.hidden; ++column) {
        const auto value = static_cast<float>(100 * all_to_all_.rank() + 10 * token + column) +
                           static_cast<float>(seed) * 1000.0F;
        std::memcpy(rows_.row(token) + 4 * column, &value, sizeof value);
        if (token >= num_tokens) continue;
        expected_[static_cast<std::size_t>(token * config.hidden + column)] =
            value * static_cast<float>(copies);
      }
    }
    const auto count = static_cast<std::int32_t>(num_tokens);
    std::memcpy(num_tokens_.row(0), &count, sizeof count);
    upload(ids_);
    upload(rows_);
    upload(num_tokens_);
  }

  void replay() { capture_.replay(); }

  void check_out(const std::string& where) {
    out_.fetch(stream_.get());
    const auto* got = reinterpret_cast<const float*>(out_.row(0));
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      ASSERT_EQ(got[i], expected_[i])
          << where << ", rank " << all_to_all_.rank() << ", element " << i;
    }
  }

 private:
  void upload(TensorBuffer& buffer) {
    testing::test_device()->upload(index_, buffer.view().data, buffer.row(0),
                                   buffer.view().shape[0] * buffer.view().row_stride_bytes(),
                                   stream_.get());
  }
  /// Linear placement: the ranks or experts that a token goes to.
  int num_copies(std::int64_t a, std::int64_t b) const {
    if (b < 0) return 1;
    if (all_to_all_.config().layout == Layout::kExpertMajor) return 2;
    const auto ranks =
        testing::linear_placement(all_to_all_.config().num_experts, all_to_all_.num_ranks());
    return ranks[static_cast<std::size_t>(a)] == ranks[static_cast<std::size_t>(b)] ? 1 : 2;
  }

  AllToAll& all_to_all_;
  int index_;
  std::shared_ptr<void> stream_;
  testing::Capture capture_;
  TensorBuffer ids_;
  TensorBuffer rows_;
  TensorBuffer num_tokens_;
  TensorBuffer out_;
  DispatchInputs inputs_;
  std::vector<float> expected_;
};

class GpuGraphTest : public ::testing::TestWithParam<Layout> {};

TEST_P(GpuGraphTest, ACapturedRoundReplaysWithOtherTokensAndTokenCounts) {
  const testing::GpuRanks gpus(3, 3);
  testing::spawn_ranks(3, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(gpu_config(GetParam()), communicator));
    EXPECT_TRUE(all_to_all.capabilities().graph_safe);
    GraphedRound round(all_to_all, 4, 4);
    round.capture();
    for (int i = 0; i < 6; ++i) {
      round.fill((i * 3 + communicator.rank()) % 5, static_cast<std::uint64_t>(i));
      round.replay();
      round.check_out("replay " + std::to_string(i));
    }
    communicator.barrier();  // `check` below tells of peers that have left
    all_to_all.check();
    communicator.barrier();
    all_to_all.close();
  });
}

TEST_P(GpuGraphTest, GraphsOfTwoSizesAndOrdinaryRoundsTakeTurns) {
  const testing::GpuRanks gpus(2, 2);
  AllToAllConfig config = gpu_config(GetParam());
  config.test_knobs.first_epoch = (std::uint64_t{1} << 40) - 3;
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(config, communicator));
    GraphedRound small(all_to_all, 1, 1);
    GraphedRound large(all_to_all, 4, 4);
    small.capture();
    large.capture();
    for (int i = 0; i < 5; ++i) {
      const auto seed = static_cast<std::uint64_t>(i);
      GraphedRound& next = i % 2 == 0 ? small : large;
      next.fill(i % 2 == 0 ? 1 : 1 + i % 3, seed);
      next.replay();
      next.check_out("replay " + std::to_string(i));
      if (i % 2 == 0) continue;
      RoundRun between(all_to_all,
                       testing::make_round(config, 2, RoutingKind::kUneven, 4, 70 + seed));
      between.dispatch();
      between.combine();
    }
    all_to_all.close();
  });
}

TEST_P(GpuGraphTest, NumTokensOfTheDeviceCountsWithoutAGraph) {
  const testing::GpuRanks gpus(2, 2);
  const AllToAllConfig config = gpu_config(GetParam());
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(config, communicator));
    const int index = communicator.rank();
    const auto plan = testing::make_round(config, 2, RoutingKind::kUniform, 4, 3);
    RoundRun round(all_to_all, plan);
    TensorBuffer word(DType::kInt32, 1, {});
    const std::int32_t count = 1;
    std::memcpy(word.row(0), &count, sizeof count);
    word.move_to(index, round.stream());
    DispatchInputs inputs = round.inputs;
    inputs.num_tokens = word.view();
    const Received received = all_to_all.dispatch(inputs);
    const HostCounts counts = received.host_counts();
    for (const std::int32_t rows : counts.rank_counts) EXPECT_LE(rows, 1);
    EXPECT_EQ(received.num_tokens(), 4);
    EXPECT_EQ(all_to_all.out_shape(received.handle()).first, 4);
    all_to_all.release(received.handle());
    round.synchronize();
    communicator.barrier();
    all_to_all.close();
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, GpuGraphTest,
                         ::testing::Values(Layout::kRankMajor, Layout::kExpertMajor),
                         [](const auto& each) { return std::string(name_of(each.param)); });

TEST(GpuCaptureTest, ARoundEndsWhereItBegan) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    const AllToAllConfig config = gpu_config();
    AllToAll all_to_all(communicator, config);
    const auto plan = testing::make_round(config, 1, RoutingKind::kUniform, 4, 5);
    RoundRun run(all_to_all, plan);
    testing::Capture capture(0, run.stream());
    // Outside, then inside.
    run.dispatch_send();
    capture.begin();
    expect_error<InvalidState>(
        {"dispatch_recv: round 0 of AllToAll was dispatched outside of a graph capture and cannot "
         "go on in one"},
        [&] { (void)all_to_all.dispatch_recv(run.handle()); });
    capture.end();
    run.dispatch_recv();
    run.combine();
    // Inside, then outside.
    const auto stream = testing::test_device()->make_stream(0);
    testing::Capture other(0, stream.get());
    DispatchInputs inputs = run.inputs;
    inputs.stream = stream.get();
    other.begin();
    const Received received = all_to_all.dispatch(inputs);
    EXPECT_EQ(received.payloads().front().device, DeviceType::kGpu);
    expect_error<InvalidState>({"host_counts: round 1 of AllToAll belongs to a graph"},
                               [&] { (void)received.host_counts(); });
    expect_error<InvalidState>({"routing: round 1 of AllToAll belongs to a graph"},
                               [&] { (void)received.routing(); });
    const auto outside = testing::test_device()->make_stream(0);
    expect_error<InvalidState>(
        {"release: round 1 of AllToAll was dispatched in a graph capture and must end in it"},
        [&] { all_to_all.release(received.handle(), outside.get()); });
    all_to_all.release(received.handle());
    other.end();
    EXPECT_FALSE(all_to_all.is_failed());
    RoundRun after(all_to_all, plan);
    after.dispatch();
    after.combine();
    all_to_all.close();
  });
}

}  // namespace
}  // namespace fanfold
