// SPDX-License-Identifier: Apache-2.0
#include "gpu/test_collectives.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "fanfold/error.h"
#include "gpu/test_mailboxes.h"

namespace fanfold::testing {

namespace {

class TestCollectives final : public comm::DeviceCollectives {
 public:
  TestCollectives(std::shared_ptr<Mailboxes> boxes, int rank, int device)
      : boxes_(std::move(boxes)), rank_(rank), device_(device) {
    (void)cudaSetDevice(device);
    void* memory = nullptr;
    if (cudaMalloc(&memory, 128) != cudaSuccess) throw std::runtime_error("cudaMalloc");
    (void)cudaMemset(memory, 0, 128);
    (void)cudaDeviceSynchronize();
    count_ = static_cast<std::uint64_t*>(memory);
  }
  ~TestCollectives() override {
    (void)cudaSetDevice(device_);
    (void)cudaFree(count_);
  }
  int rank() const noexcept override { return rank_; }
  int num_ranks() const noexcept override { return boxes_->num_ranks; }
  int device() const noexcept override { return device_; }

  void begin_group() override { ++depth_; }
  void end_group() override {
    if (--depth_ == 0) launch();
  }
  void all_gather(const void* send, void* recv, std::int64_t bytes, void* stream) override {
    auto* const to = static_cast<std::byte*>(recv);
    for (int peer = 0; peer < num_ranks(); ++peer) {
      if (peer == rank_) continue;
      add(const_cast<void*>(send), bytes, peer, true, stream);
      add(to + peer * bytes, bytes, peer, false, stream);
    }
    flush();
  }
  void all_to_all(const void*, void*, std::int64_t, void*) override {
    throw std::logic_error("all_to_all");
  }
  void all_to_all_v(const void* send, const std::vector<Span>& to, void* recv,
                    const std::vector<Span>& from, void* stream) override {
    for (int peer = 0; peer < num_ranks(); ++peer) {
      const auto i = static_cast<std::size_t>(peer);
      if (peer == rank_) continue;
      add(static_cast<std::byte*>(const_cast<void*>(send)) + to[i].offset, to[i].bytes, peer, true,
          stream);
      add(static_cast<std::byte*>(recv) + from[i].offset, from[i].bytes, peer, false, stream);
    }
    flush();
  }
  void broadcast(void* data, std::int64_t bytes, int root, void* stream) override {
    for (int peer = 0; peer < num_ranks(); ++peer) {
      if (peer == rank_) continue;
      if (root == rank_) add(data, bytes, peer, true, stream);
      if (root == peer) add(data, bytes, peer, false, stream);
    }
    flush();
  }
  void all_reduce(const void*, void*, DType, std::int64_t, void*) override {
    throw std::logic_error("all_reduce");
  }
  void reduce_scatter(const void*, void*, DType, std::int64_t, void*) override {
    throw std::logic_error("reduce_scatter");
  }
  void check() override {
    if (is_aborted_) throw InvalidState("collectives: were aborted");
  }
  void abort() noexcept override {
    is_aborted_ = true;
    *const_cast<volatile std::uint64_t*>(boxes_->stop(rank_)) = 1;
  }
  void reset(base::Deadline) override {
    // Every rank is idle.
    const int ranks = num_ranks();
    for (int peer = 0; peer < ranks; ++peer) {
      *const_cast<volatile std::uint64_t*>(boxes_->sent(rank_, peer)) = 0;
      *const_cast<volatile std::uint64_t*>(boxes_->taken(peer, rank_)) = 0;
    }
    (void)cudaSetDevice(device_);
    (void)cudaMemset(count_, 0, 8);
    (void)cudaDeviceSynchronize();
    *const_cast<volatile std::uint64_t*>(boxes_->stop(rank_)) = 0;
    is_aborted_ = false;
  }
  void close(base::Deadline) override {}

 private:
  void add(void* data, std::int64_t bytes, int peer, bool is_send, void* stream) {
    check();
    if (ops_.num_ops == kMaxOps) throw std::logic_error("too many calls in a group");
    ops_.ops[ops_.num_ops++] = {static_cast<std::byte*>(data), bytes, peer, is_send};
    stream_ = stream;
  }
  void flush() {
    if (depth_ == 0) launch();
  }
  void launch() {
    if (ops_.num_ops == 0) return;
    ops_.rank = rank_;
    ops_.num_ranks = num_ranks();
    ops_.count = count_;
    ops_.boxes = boxes_->memory;
    (void)cudaSetDevice(device_);
    const cudaError_t error = launch_exchange(ops_, static_cast<cudaStream_t>(stream_));
    ops_.num_ops = 0;
    if (error != cudaSuccess) throw CudaFailure("launch of exchange", error);
  }

  std::shared_ptr<Mailboxes> boxes_;
  int rank_;
  int device_;
  std::uint64_t* count_;
  int depth_ = 0;
  Ops ops_{};
  void* stream_ = nullptr;
  volatile bool is_aborted_ = false;
};

}  // namespace

std::shared_ptr<Mailboxes> make_mailboxes(int num_ranks) {
  auto boxes = std::make_shared<Mailboxes>();
  boxes->num_ranks = num_ranks;
  const std::size_t bytes = static_cast<std::size_t>(kBoxBytes * num_ranks * num_ranks +
                                                     8 * (2 * num_ranks + 1) * num_ranks);
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
    throw std::runtime_error("cudaHostAlloc");
  }
  std::memset(memory, 0, bytes);
  boxes->memory = static_cast<std::byte*>(memory);
  return boxes;
}

std::unique_ptr<comm::DeviceCollectives> make_test_collectives(std::shared_ptr<Mailboxes> mailboxes,
                                                               int rank, int device) {
  return std::make_unique<TestCollectives>(std::move(mailboxes), rank, device);
}

}  // namespace fanfold::testing
