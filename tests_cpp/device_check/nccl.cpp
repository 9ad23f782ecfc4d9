// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "device_check/commands.h"
#include "device_check/device.h"
#include "device_check/rank_case.h"
#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "fanfold/nccl.h"
#include "support/spawn_ranks.h"

namespace fanfold::device_check {
namespace {

using Numbers = std::vector<std::int32_t>;

/// What one rank calls, and what it must get.
class Calls {
 public:
  Calls(Communicator& communicator, std::int64_t count)
      : communicator_(communicator),
        rank_(communicator.rank()),
        num_ranks_(communicator.num_ranks()),
        count_(count),
        blocks_(4 * count * num_ranks_),
        recv_(4 * count * num_ranks_) {}

  bool all() {
    bool is_well = true;
    is_well &= check("all_gather_v", &Calls::gather, &Calls::gathered);
    is_well &= check("all_to_all", &Calls::exchange, &Calls::exchanged);
    is_well &= check("all_reduce", &Calls::reduce, &Calls::reduced);
    is_well &= check("reduce_scatter_v", &Calls::scatter, &Calls::scattered);
    is_well &= check("broadcast", &Calls::tell, &Calls::told);
    return is_well && replays();
  }

 private:
  /// Of rank r at place i before each call.
  std::int32_t sent(int rank, std::int64_t i) const {
    return static_cast<std::int32_t>(1000000 * rank + i);
  }
  std::int64_t total() const { return count_ * num_ranks_; }
  TensorView view(const Buffer& buffer, std::int64_t count) const {
    TensorView view(buffer.get(), DType::kInt32, {count});
    view.device = DeviceType::kGpu;
    view.device_index = communicator_.device_index().value_or(-1);
    return view;
  }
  std::vector<std::int64_t> counts() const {
    return std::vector<std::int64_t>(static_cast<std::size_t>(num_ranks_), count_);
  }
  std::int32_t sum_at(std::int64_t i) const {
    std::int32_t sum = 0;
    for (int peer = 0; peer < num_ranks_; ++peer) sum += sent(peer, i);
    return sum;
  }

  void gather() {
    communicator_.all_gather_v(view(blocks_, count_), view(recv_, total()), counts(), {},
                               stream_.get());
  }
  std::int32_t gathered(std::int64_t i) const {
    return sent(static_cast<int>(i / count_), i % count_);
  }
  void exchange() {
    communicator_.all_to_all(view(blocks_, total()), view(recv_, total()), {}, stream_.get());
  }
  std::int32_t exchanged(std::int64_t i) const {
    return sent(static_cast<int>(i / count_), rank_ * count_ + i % count_);
  }
  void reduce() {
    communicator_.all_reduce(view(blocks_, total()), view(recv_, total()), {}, stream_.get());
  }
  std::int32_t reduced(std::int64_t i) const { return sum_at(i); }
  void scatter() {
    communicator_.reduce_scatter_v(view(blocks_, total()), view(recv_, count_), counts(), {},
                                   stream_.get());
  }
  std::int32_t scattered(std::int64_t i) const {
    return i < count_ ? sum_at(rank_ * count_ + i) : -1;
  }
  void tell() { communicator_.broadcast(view(recv_, total()), num_ranks_ - 1, {}, stream_.get()); }
  std::int32_t told(std::int64_t i) const { return sent(num_ranks_ - 1, i); }

  void prepare(bool recv_is_sent) {
    Numbers numbers(static_cast<std::size_t>(total()));
    for (std::int64_t i = 0; i < total(); ++i) {
      numbers[static_cast<std::size_t>(i)] = sent(rank_, i);
    }
    blocks_.write(numbers);
    if (!recv_is_sent) std::fill(numbers.begin(), numbers.end(), -1);
    recv_.write(numbers);
  }

  bool got(const char* name, std::int32_t (Calls::*expected)(std::int64_t) const) const {
    stream_.wait();
    const Numbers numbers = recv_.read<std::int32_t>(static_cast<std::size_t>(total()));
    for (std::int64_t i = 0; i < total(); ++i) {
      const std::int32_t value = numbers[static_cast<std::size_t>(i)];
      if (value == (this->*expected)(i)) continue;
      std::printf("nccl: rank %d: %s: place %lld: expected %d, got %d\n", rank_, name,
                  static_cast<long long>(i), (this->*expected)(i), value);
      return false;
    }
    return true;
  }

  bool check(const char* name, void (Calls::*call)(),
             std::int32_t (Calls::*expected)(std::int64_t) const) {
    prepare(call == &Calls::tell);
    (this->*call)();
    return got(name, expected);
  }

  bool replays() {
    prepare(false);
    Graph graph(stream_, [&] {
      exchange();
      gather();
    });
    for (int replay = 0; replay < 3; ++replay) {
      prepare(false);
      graph.launch(stream_);
      if (!got("graph of all_to_all and all_gather_v", &Calls::gathered)) return false;
    }
    return true;
  }

  Communicator& communicator_;
  int rank_;
  int num_ranks_;
  std::int64_t count_;
  Buffer blocks_;
  Buffer recv_;
  Stream stream_;
};

/// Words in a block of NCCL's memory: what this rank writes into each peer's window arrives. Empty:
/// well, or NCCL has no such memory here.
std::string check_memory(Communicator& communicator) {
  GpuMemoryConfig config;
  config.device = communicator.device_index().value_or(-1);
  config.kinds = {HandleKind::kNccl};
  Allocator allocator(communicator, config);
  SymmetricMemory memory;
  try {
    memory = allocator.allocate(4096);
  } catch (const Unsupported& error) {
    if (communicator.rank() == 0) std::printf("nccl: no memory of NCCL: %s\n", error.what());
    return {};
  }
  const int num_ranks = communicator.num_ranks();
  for (int peer = 0; peer < num_ranks; ++peer) {
    const std::int32_t word = 100 * communicator.rank() + peer;
    require(cudaMemcpy(memory.data(peer) + 4 * static_cast<std::size_t>(communicator.rank()), &word,
                       sizeof word, cudaMemcpyDefault),
            "cudaMemcpy");
  }
  communicator.barrier();
  Numbers words(static_cast<std::size_t>(num_ranks));
  require(cudaMemcpy(words.data(), memory.data(communicator.rank()), words.size() * 4,
                     cudaMemcpyDefault),
          "cudaMemcpy");
  communicator.barrier();
  for (int peer = 0; peer < num_ranks; ++peer) {
    const std::int32_t word = words[static_cast<std::size_t>(peer)];
    if (word == 100 * peer + communicator.rank()) continue;
    return "memory of NCCL: rank " + std::to_string(communicator.rank()) + " got " +
           std::to_string(word) + " from rank " + std::to_string(peer);
  }
  return {};
}

/// Why the ranks could not be connected or did not work; empty: all was well.
std::string run_ranks(const Options& options) {
  std::mutex mutex;  // guards the text
  std::string text;
  const auto complain = [&](const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (text.empty()) text = what;
  };
  testing::spawn_ranks(options.ranks, [&](Communicator& bootstrap) {
    NcclOptions nccl;
    nccl.device_index = take_device(bootstrap.rank());
    nccl.library = options.library;
    nccl.timeout = std::chrono::seconds(20);
    try {
      Communicator communicator = Communicator::from_nccl(bootstrap, nccl);
      {
        Calls calls(communicator, std::int64_t{options.tokens} * options.hidden);
        // Memory is made and freed while no peer's kernel waits on the same device.
        communicator.barrier();
        if (!calls.all()) complain("a result was wrong");
        communicator.barrier();
      }
      const std::string wrong = check_memory(communicator);
      if (!wrong.empty()) complain(wrong);
      communicator.close();
    } catch (const std::exception& error) {
      complain(error.what());
    }
  });
  return text;
}

}  // namespace

bool nccl(const Options& options) {
  const std::string text = run_ranks(options);
  std::printf(
      "nccl: %d ranks: %s\n", options.ranks,
      text.empty() ? "every collective, a graph of two and its memory are right" : text.c_str());
  return text.empty();
}

}  // namespace fanfold::device_check
