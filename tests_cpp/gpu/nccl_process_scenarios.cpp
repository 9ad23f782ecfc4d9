// SPDX-License-Identifier: Apache-2.0

// What the processes do that nccl_processes_test.cpp starts.

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "fanfold/allocator.h"
#include "fanfold/error.h"
#include "gpu/nccl_ranks.h"
#include "gpu/process_rank.h"
#include "support/spawn_processes.h"

namespace fanfold {
namespace {

using testing::expect;
using testing::on_gpu;
using testing::RankArguments;
using testing::say;
using testing::test_device;

/// Numbers on the process's only device.
class Numbers {
 public:
  explicit Numbers(std::vector<std::int32_t> values)
      : stream_(test_device()->make_stream(0)),
        size_(static_cast<std::int64_t>(values.size())),
        data_(test_device()->allocate(0, 4 * size_)) {
    test_device()->upload(0, data_.get(), values.data(), 4 * size_, stream_.get());
  }
  TensorView view() const {
    TensorView view(data_.get(), DType::kInt32, {size_});
    view.device = DeviceType::kGpu;
    return view;
  }
  void* stream() const { return stream_.get(); }
  std::int32_t last() const {
    std::int32_t value = 0;
    test_device()->download(0, &value, data_.get() + 4 * (size_ - 1), 4, stream_.get());
    return value;
  }

 private:
  std::shared_ptr<void> stream_;
  std::int64_t size_;
  std::shared_ptr<std::byte> data_;
};

/// The sum of each rank's number, plus one: 1 + 2 + ...
void check_sum(Communicator& communicator) {
  const Numbers numbers(std::vector<std::int32_t>(3000, communicator.rank() + 1));
  communicator.all_reduce(numbers.view(), numbers.view(), {}, numbers.stream());
  const int n = communicator.num_ranks();
  expect(numbers.last() == n * (n + 1) / 2, "a wrong sum");
}

void sum_and_share(const RankArguments& arguments) {
  on_gpu(arguments, [](Communicator& bootstrap) {
    Communicator communicator = Communicator::from_nccl(bootstrap, testing::nccl_options(0));
    for (int round = 0; round < 5; ++round) check_sum(communicator);
    {
      GpuMemoryConfig memory;
      memory.kinds = {HandleKind::kNccl};
      Allocator allocator(communicator, memory);
      const SymmetricMemory block = allocator.allocate(4096);
      for (int peer = 0; peer < communicator.num_ranks(); ++peer) {
        reinterpret_cast<std::int32_t*>(block.data(peer))[communicator.rank()] = peer + 1;
      }
      communicator.barrier();
      for (int peer = 0; peer < communicator.num_ranks(); ++peer) {
        const auto* const words =
            reinterpret_cast<const std::int32_t*>(block.data(communicator.rank()));
        expect(words[peer] == communicator.rank() + 1, "a peer's word is not there");
      }
      communicator.barrier();
    }
    communicator.close();
    bootstrap.close();
  });
}

/// Rank 1 waits to be killed, while rank 0's stream waits for it.
void lose_rank_one(const RankArguments& arguments) {
  if (arguments.rank == 1) {
    on_gpu(arguments, [](Communicator& bootstrap) {
      const Communicator communicator =
          Communicator::from_nccl(bootstrap, testing::nccl_options(0));
      say("ready");
      (void)testing::listen();
    });
    return;
  }
  on_gpu(arguments, [](Communicator& bootstrap) {
    Communicator communicator = Communicator::from_nccl(bootstrap, testing::nccl_options(0));
    const Numbers numbers({1, 2, 3});
    communicator.all_reduce(numbers.view(), numbers.view(), {}, numbers.stream());
    say("ready");
    for (;;) {
      try {
        communicator.check_device();
      } catch (const PeerLost& error) {
        say("lost " + std::to_string(error.rank()));
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    communicator.abort("rank 1 is lost");
    test_device()->synchronize(0, numbers.stream());
  });
}

}  // namespace

namespace testing {

std::vector<Scenario> scenarios() {
  return {{"sum_and_share", &sum_and_share}, {"lose_rank_one", &lose_rank_one}};
}

}  // namespace testing
}  // namespace fanfold
