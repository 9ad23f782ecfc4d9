// SPDX-License-Identifier: Apache-2.0

// Collectives on GPU tensors over NCCL, here over its double on the simulated device.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator_impl.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_ranks.h"
#include "gpu/nccl_ranks.h"
#include "gpu/test_gpu.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using testing::GpuRanks;
using testing::spawn_nccl_ranks;
using testing::test_device;

/// Numbers on one device, with a stream.
class Numbers {
 public:
  Numbers(int device, std::shared_ptr<void> stream, std::vector<std::int32_t> values)
      : device_(device),
        stream_(std::move(stream)),
        size_(static_cast<std::int64_t>(values.size())),
        data_(test_device()->allocate(device, 4 * size_)) {
    set(values);
  }

  TensorView view() const { return part(0, size_); }
  TensorView part(std::int64_t begin, std::int64_t count) const {
    TensorView view(data_.get() + 4 * begin, DType::kInt32, {count});
    view.device = DeviceType::kGpu;
    view.device_index = device_;
    return view;
  }
  void set(const std::vector<std::int32_t>& values) {
    test_device()->upload(device_, data_.get(), values.data(), 4 * size_, stream_.get());
  }
  std::vector<std::int32_t> get() const {
    std::vector<std::int32_t> values(static_cast<std::size_t>(size_));
    test_device()->download(device_, values.data(), data_.get(), 4 * size_, stream_.get());
    return values;
  }

 private:
  int device_;
  std::shared_ptr<void> stream_;
  std::int64_t size_;
  std::shared_ptr<std::byte> data_;
};

struct Rank {
  explicit Rank(Communicator& communicator, int num_devices)
      : comm(communicator),
        rank(communicator.rank()),
        num_ranks(communicator.num_ranks()),
        device(rank % num_devices),
        stream(test_device()->make_stream(device)) {}

  Numbers numbers(std::vector<std::int32_t> values) const {
    return {device, stream, std::move(values)};
  }
  Numbers filled(std::int64_t count, std::int32_t value) const {
    return numbers(std::vector<std::int32_t>(static_cast<std::size_t>(count), value));
  }
  Numbers counted(std::int64_t count, std::int32_t first) const {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    std::iota(values.begin(), values.end(), first);
    return numbers(std::move(values));
  }
  void synchronize() const { test_device()->synchronize(device, stream.get()); }

  Communicator& comm;
  int rank;
  int num_ranks;
  int device;
  std::shared_ptr<void> stream;
};

class NcclCollectivesTest : public ::testing::TestWithParam<int> {};

TEST_P(NcclCollectivesTest, EveryCollectiveBringsWhatItSays) {
  const int n = GetParam();
  const GpuRanks gpus(n, n);
  spawn_nccl_ranks(n, n, [&](Communicator& communicator) {
    const Rank self(communicator, n);
    EXPECT_EQ(communicator.kind(), "nccl");
    // More than a slot of the double, and no multiple of it.
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{3000}}) {
      const auto base = static_cast<std::int32_t>(1000000 * self.rank);
      const Numbers send = self.counted(count, base);
      const Numbers all = self.filled(count * n, -1);
      communicator.all_gather_v(send.view(), all.view(),
                                std::vector<std::int64_t>(static_cast<std::size_t>(n), count), {},
                                self.stream.get());
      const std::vector<std::int32_t> gathered = all.get();
      for (int peer = 0; peer < n; ++peer) {
        EXPECT_EQ(gathered[static_cast<std::size_t>(peer * count)], 1000000 * peer);
        EXPECT_EQ(gathered[static_cast<std::size_t>((peer + 1) * count - 1)],
                  1000000 * peer + count - 1);
      }

      const Numbers sum = self.filled(count, -1);
      communicator.all_reduce(send.view(), sum.view(), {}, self.stream.get());
      const std::vector<std::int32_t> sums = sum.get();
      for (std::int64_t i = 0; i < count; i += 511) {
        EXPECT_EQ(sums[static_cast<std::size_t>(i)], 1000000 * (n * (n - 1) / 2) + n * i);
      }

      const Numbers blocks = self.counted(count * n, base);
      const Numbers own = self.filled(count, -1);
      communicator.reduce_scatter_v(blocks.view(), own.view(),
                                    std::vector<std::int64_t>(static_cast<std::size_t>(n), count),
                                    {}, self.stream.get());
      EXPECT_EQ(own.get().back(), 1000000 * (n * (n - 1) / 2) + n * ((self.rank + 1) * count - 1));

      const Numbers recv = self.filled(count * n, -1);
      communicator.all_to_all(blocks.view(), recv.view(), {}, self.stream.get());
      const std::vector<std::int32_t> received = recv.get();
      for (int peer = 0; peer < n; ++peer) {
        EXPECT_EQ(received[static_cast<std::size_t>(peer * count)],
                  1000000 * peer + self.rank * count);
      }

      const int root = n - 1;
      const Numbers told = self.counted(count, base);
      communicator.broadcast(told.view(), root, {}, self.stream.get());
      EXPECT_EQ(told.get().back(), 1000000 * root + count - 1);
    }
    communicator.close();
  });
  EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleNumComms)(), 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclCollectivesTest, ::testing::Values(1, 2, 4));

TEST(NcclCommunicatorTest, CountsMayDifferAndBeZero) {
  constexpr int kRanks = 3;
  const GpuRanks gpus(kRanks, kRanks);
  spawn_nccl_ranks(kRanks, kRanks, [&](Communicator& communicator) {
    const Rank self(communicator, kRanks);
    const std::vector<std::int64_t> counts = {2, 0, 5};
    const std::int64_t own = counts[static_cast<std::size_t>(self.rank)];
    const Numbers send = self.counted(own, 100 * self.rank);
    const Numbers all = self.filled(7, -1);
    communicator.all_gather_v(send.view(), all.view(), counts, {}, self.stream.get());
    EXPECT_THAT(all.get(), ::testing::ElementsAre(0, 1, 200, 201, 202, 203, 204));

    // Rank r sends r rows to everyone; nothing from rank 0.
    const std::vector<std::int64_t> to(kRanks, self.rank);
    const std::vector<std::int64_t> from = {0, 1, 2};
    const Numbers out = self.counted(std::int64_t{kRanks} * self.rank, 10 * self.rank);
    const Numbers in = self.filled(3, -1);
    communicator.all_to_all_v(out.view(), in.view(), to, from, {}, self.stream.get());
    EXPECT_THAT(in.get(),
                ::testing::ElementsAre(10 + self.rank, 20 + 2 * self.rank, 21 + 2 * self.rank));
    communicator.close();
  });
}

TEST(NcclCommunicatorTest, RoundsOfVariedCallsAgree) {
  constexpr int kRanks = 4;
  const GpuRanks gpus(kRanks, 2);  // two ranks share a device
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLaunchLooks)(3);
  spawn_nccl_ranks(kRanks, 2, [&](Communicator& communicator) {
    const Rank self(communicator, 2);
    std::mt19937 calls(7);  // the same on all ranks
    std::mt19937 delays(static_cast<unsigned>(self.rank));
    for (int round = 0; round < 30; ++round) {
      const auto count = static_cast<std::int64_t>(calls() % 1500);
      const auto kind = calls() % 3;
      std::this_thread::sleep_for(std::chrono::microseconds(delays() % 300));
      const Numbers send = self.filled(count * kRanks, round + self.rank);
      const Numbers recv = self.filled(count * kRanks, -1);
      if (kind == 0) {
        communicator.all_to_all(send.view(), recv.view(), {}, self.stream.get());
      } else if (kind == 1) {
        communicator.all_reduce(send.view(), recv.view(), {}, self.stream.get());
      } else {
        communicator.all_gather_v(send.part(0, count), recv.view(),
                                  std::vector<std::int64_t>(kRanks, count), {}, self.stream.get());
      }
      const std::vector<std::int32_t> got = recv.get();
      for (std::size_t i = 0; i < got.size(); ++i) {
        const auto peer = static_cast<std::int32_t>(i / static_cast<std::size_t>(count));
        ASSERT_EQ(got[i], kind == 1 ? kRanks * round + 6 : round + peer) << "round " << round;
      }
    }
    communicator.close();
  });
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLaunchLooks)(0);
}

TEST(NcclCommunicatorTest, AGraphReplaysItsCollectives) {
  constexpr int kRanks = 2;
  const GpuRanks gpus(kRanks, kRanks);
  spawn_nccl_ranks(kRanks, kRanks, [&](Communicator& communicator) {
    const Rank self(communicator, kRanks);
    Numbers send = self.counted(5, 0);
    const Numbers all = self.filled(10, -1);
    auto* const stream = static_cast<cudaStream_t>(self.stream.get());
    testing::check_cuda(cudaSetDevice(self.device), "cudaSetDevice");
    testing::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin");
    communicator.all_gather_v(send.view(), all.view(), {5, 5}, {}, stream);
    communicator.all_reduce(all.view(), all.view(), {}, stream);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replayed = nullptr;
    testing::check_cuda(cudaStreamEndCapture(stream, &graph), "end");
    testing::check_cuda(cudaGraphInstantiate(&replayed, graph, 0), "instantiate");
    for (int replay = 0; replay < 4; ++replay) {
      send.set({replay, replay, replay, replay, 10 * self.rank + replay});
      testing::check_cuda(cudaGraphLaunch(replayed, stream), "launch");
      const std::vector<std::int32_t> got = all.get();
      EXPECT_EQ(got[0], 2 * replay);
      EXPECT_EQ(got[4], 2 * replay);
      EXPECT_EQ(got[9], 2 * (10 + replay));
    }
    testing::check_cuda(cudaGraphExecDestroy(replayed), "destroy");
    testing::check_cuda(cudaGraphDestroy(graph), "destroy");
    communicator.close();
  });
}

TEST(NcclCommunicatorTest, CallsOfAGroupAreOneLaunch) {
  constexpr int kRanks = 2;
  const GpuRanks gpus(kRanks, kRanks);
  spawn_nccl_ranks(kRanks, kRanks, [&](Communicator& communicator) {
    const Rank self(communicator, kRanks);
    comm::DeviceCollectives& device = *communicator.impl()->device_collectives();
    const Numbers send = self.counted(4, 10 * self.rank);
    const Numbers first = self.filled(8, -1);
    const Numbers second = self.filled(4, -1);
    device.begin_group();
    device.all_gather(send.view().data, first.view().data, 16, self.stream.get());
    device.all_to_all(send.view().data, second.view().data, 8, self.stream.get());
    device.end_group();
    EXPECT_EQ(first.get()[7], 13);
    EXPECT_THAT(second.get(), ::testing::ElementsAre(2 * self.rank, 2 * self.rank + 1,
                                                     10 + 2 * self.rank, 11 + 2 * self.rank));
    communicator.close();
  });
}

TEST(NcclCommunicatorTest, FloatsAreSummed) {
  constexpr int kRanks = 2;
  const GpuRanks gpus(kRanks, kRanks);
  spawn_nccl_ranks(kRanks, kRanks, [&](Communicator& communicator) {
    const Rank self(communicator, kRanks);
    struct Case {
      DType dtype;
      std::uint32_t one;
      std::uint32_t two;
    };
    for (const Case& one : {Case{DType::kFloat32, 0x3f800000, 0x40000000},
                            Case{DType::kFloat16, 0x3c003c00, 0x40004000},
                            Case{DType::kBFloat16, 0x3f803f80, 0x40004000}}) {
      const auto bits = static_cast<std::int32_t>(one.one);
      const Numbers send = self.filled(6, bits);
      TensorView view = send.view();
      view.dtype = one.dtype;
      view.shape[0] = 24 / size_of(one.dtype);
      communicator.all_reduce(view, view, {}, self.stream.get());
      EXPECT_EQ(static_cast<std::uint32_t>(send.get()[5]), one.two) << name_of(one.dtype);
    }
    communicator.close();
  });
}

TEST(NcclCommunicatorTest, CpuTensorsGoTheHostsWay) {
  const GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [](Communicator& communicator) {
    std::vector<std::int32_t> values(3, communicator.rank() + 1);
    const TensorView view(values.data(), DType::kInt32, {3});
    communicator.all_reduce(view, view);
    EXPECT_EQ(values[2], 3);
    communicator.close();
  });
}

TEST(NcclCommunicatorTest, WrongArgumentsAreRefused) {
  const GpuRanks gpus(1, 2);
  spawn_nccl_ranks(1, 1, [](Communicator& communicator) {
    const Rank self(communicator, 1);
    const Numbers numbers = self.filled(4, 1);
    testing::expect_error<InvalidArgument>({"stream: expected a CUDA stream for int32 [4]"}, [&] {
      communicator.all_reduce(numbers.view(), numbers.view());
    });
    TensorView elsewhere = numbers.view();
    elsewhere.device_index = 1;
    testing::expect_error<InvalidArgument>(
        {"send: expected a tensor on GPU 0, the communicator's"},
        [&] { communicator.all_reduce(elsewhere, elsewhere, {}, self.stream.get()); });
    std::int32_t value = 0;
    const TensorView on_cpu(&value, DType::kInt32, {1});
    testing::expect_error<InvalidArgument>({"send: expected a tensor on GPU 0"}, [&] {
      communicator.all_reduce(on_cpu, numbers.part(0, 1), {}, self.stream.get());
    });
    TensorView bytes = numbers.view();
    bytes.dtype = DType::kUInt8;
    testing::expect_error<InvalidArgument>(
        {"expected float32, float16, bfloat16, int32 or int64"},
        [&] { communicator.all_reduce(bytes, bytes, {}, self.stream.get()); });
    EXPECT_EQ(numbers.get()[0], 1);
    communicator.close();
  });
}

TEST(NcclCommunicatorTest, OtherCommunicatorsSayWhoTakesGpuTensors) {
  const GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [](Communicator& communicator) {
    const Rank self(communicator, 1);
    const Numbers numbers = self.filled(4, 1);
    testing::expect_error<InvalidArgument>({"from_nccl takes GPU tensors"}, [&] {
      communicator.all_reduce(numbers.view(), numbers.view(), {}, self.stream.get());
    });
  });
}

}  // namespace
}  // namespace fanfold
