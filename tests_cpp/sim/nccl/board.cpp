// SPDX-License-Identifier: Apache-2.0
#include "board.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <vector>

namespace cudasim::nccl {
namespace {

std::size_t cards_bytes(int num_ranks) {
  constexpr std::size_t kPage = 4096;
  const std::size_t bytes = static_cast<std::size_t>(num_ranks) * sizeof(Card);
  return (bytes + kPage - 1) / kPage * kPage;
}

/// Page-locked memory of past communicators of this process, by size: it is used again, never
/// freed.
struct Boards {
  std::mutex mutex;  // guards both
  std::map<std::size_t, std::vector<std::byte*>> free;
  std::map<std::string, std::weak_ptr<const Board>> open;
};

Boards& boards() {
  static Boards& all = *new Boards;  // kernels may outlive static destructors
  return all;
}

std::shared_ptr<const Board> page_locked_board(const std::string& name, int num_ranks) {
  Boards& all = boards();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (auto old = all.open[name].lock()) return old;
  const std::size_t bytes = Board::bytes(num_ranks);
  std::vector<std::byte*>& free = all.free[bytes];
  void* data = nullptr;
  if (free.empty()) {
    if (cudaHostAlloc(&data, bytes, cudaHostAllocPortable) != cudaSuccess) return nullptr;
  } else {
    data = free.back();
    free.pop_back();
  }
  std::memset(data, 0, bytes);
  const auto give_back = [bytes](const Board* board) {
    Boards& again = boards();
    const std::lock_guard<std::mutex> relock(again.mutex);
    again.free[bytes].push_back(board->data);
    delete board;
  };
  std::shared_ptr<const Board> board(new Board{static_cast<std::byte*>(data), num_ranks},
                                     give_back);
  all.open[name] = board;
  return board;
}

}  // namespace

std::string Meeting::new_name() {
  static std::atomic<int> count{0};
  return "/cudasim-nccl-" + std::to_string(::getpid()) + "-" + std::to_string(++count) + "-" +
         std::to_string(std::random_device()());
}

std::shared_ptr<Meeting> Meeting::open(const std::string& name, int num_ranks) {
  const std::size_t bytes = cards_bytes(num_ranks) + Board::bytes(num_ranks);
  const int fd = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  void* data = MAP_FAILED;
  if (::ftruncate(fd, static_cast<off_t>(bytes)) == 0) {
    data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  ::close(fd);
  if (data == MAP_FAILED) return nullptr;
  return std::shared_ptr<Meeting>(
      new Meeting(name, num_ranks, static_cast<std::byte*>(data), bytes));
}

Meeting::~Meeting() {
  ::shm_unlink(name_.c_str());  // who has it open keeps it
  ::munmap(data_, bytes_);
}

bool Meeting::is_complete() const {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (__atomic_load_n(&card(rank).has_joined, __ATOMIC_ACQUIRE) == 0) return false;
  }
  return true;
}

std::shared_ptr<const Board> Meeting::board() {
  bool is_one_process = true;
  for (int rank = 0; rank < num_ranks_; ++rank) is_one_process &= card(rank).pid == ::getpid();
  if (is_one_process) return page_locked_board(name_, num_ranks_);
  struct Shared {
    std::shared_ptr<Meeting> meeting;
    Board board;
  };
  const auto shared = std::make_shared<Shared>(
      Shared{shared_from_this(), {data_ + cards_bytes(num_ranks_), num_ranks_}});
  return {shared, &shared->board};
}

}  // namespace cudasim::nccl
