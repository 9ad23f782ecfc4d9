#pragma once
#include <cuda_runtime_api.h>
#include <cstdint>
#include <cstddef>
namespace fanfold::testing {
constexpr std::int64_t kBoxBytes = 1 << 20;
constexpr int kMaxOps = 160;

struct Boxes {
  int num_ranks;
  std::byte* memory = nullptr;  // pinned: [R, R] boxes, then [R, R] sent, [R, R] taken, [R] stop
  std::byte* box(int from, int to) const { return memory + (from * num_ranks + to) * kBoxBytes; }
  std::uint64_t* words() const {
    return reinterpret_cast<std::uint64_t*>(memory + kBoxBytes * num_ranks * num_ranks);
  }
  std::uint64_t* sent(int from, int to) const { return words() + from * num_ranks + to; }
  std::uint64_t* taken(int from, int to) const {
    return words() + (num_ranks + from) * num_ranks + to;
  }
  std::uint64_t* stop(int rank) const { return words() + 2 * num_ranks * num_ranks + rank; }
};
struct Mailboxes : Boxes {
  ~Mailboxes() { (void)cudaFreeHost(memory); }
};


struct Op {
  std::byte* data;
  std::int64_t bytes;
  int peer;
  bool is_send;
};
struct Ops {
  Op ops[kMaxOps];
  int num_ops;
  int rank;
  int num_ranks;
  std::uint64_t* count;  // launches of this rank, on its device
  std::byte* boxes;
};


cudaError_t launch_exchange(const Ops& ops, cudaStream_t stream);
}
