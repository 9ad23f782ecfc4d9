// SPDX-License-Identifier: Apache-2.0
#include "base/fork_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>

namespace fanfold::base {

ForkGuard::ForkGuard() : page_bytes_(::sysconf(_SC_PAGESIZE)), pid_(::getpid()) {
  const auto size = static_cast<std::size_t>(page_bytes_);
  void* const page =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw std::bad_alloc();
  if (::madvise(page, size, MADV_WIPEONFORK) != 0) {
    ::munmap(page, size);
    return;  // the process id will do
  }
  word_ = new (page) std::atomic<std::uint32_t>(1);
}

ForkGuard::~ForkGuard() {
  if (word_ != nullptr) ::munmap(word_, static_cast<std::size_t>(page_bytes_));
}

bool ForkGuard::pid_differs() const noexcept { return ::getpid() != pid_; }

}  // namespace fanfold::base
