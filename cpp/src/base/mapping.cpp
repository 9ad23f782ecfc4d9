// SPDX-License-Identifier: Apache-2.0
#include "base/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/byte_math.h"
#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::base {
namespace {

// Newer than the C library's headers that we still build with; values of the kernel's user ABI.
constexpr unsigned kMfdNoexecSeal = 0x0008U;  // linux/memfd.h, kernel 6.3
constexpr int kMadvPopulateWrite = 23;        // asm-generic/mman-common.h, kernel 5.14
constexpr int kMadvCollapse = 25;             // asm-generic/mman-common.h, kernel 6.1

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
// A processor's TLB covers less (1536 to 2048 small pages), and making one huge page takes half a
// millisecond, as the kernel moves the data and waits for every core.
constexpr std::int64_t kMinHugeBytes = 2 * kHugePage;

[[noreturn]] void throw_system_failure(const char* call, std::int64_t bytes, int code) {
  if (code == ENOMEM || code == ENOSPC || code == EFBIG) throw std::bad_alloc();
  throw SystemFailure(str("shared memory of ", bytes, " bytes: ", call, ": ", std::strerror(code)),
                      code);
}

std::size_t to_size(std::int64_t bytes) noexcept { return static_cast<std::size_t>(bytes); }

/// Reserves address space and returns its first 2 MiB boundary; the rest is given back.
std::byte* reserve_aligned(std::int64_t bytes) {
  const std::int64_t total = bytes + kHugePage;
  void* const raw = ::mmap(nullptr, to_size(total), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw_system_failure("mmap", bytes, errno);
  auto* const start = static_cast<std::byte*>(raw);
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(raw));
  const std::int64_t head = align_up(address, kHugePage) - address;
  if (head > 0) ::munmap(start, to_size(head));
  const std::int64_t tail = total - head - bytes;
  if (tail > 0) ::munmap(start + head + bytes, to_size(tail));
  return start + head;
}

/// Writes to each page without changing it; peers may be writing at the same time.
void touch_pages(std::byte* data, std::int64_t bytes) noexcept {
  const std::int64_t page = ::sysconf(_SC_PAGESIZE);
  for (std::int64_t offset = 0; offset < bytes; offset += page) {
    reinterpret_cast<std::atomic<std::uint32_t>*>(data + offset)
        ->fetch_or(0, std::memory_order_relaxed);
  }
}

/// `data` begins a page.
void populate(std::byte* data, std::int64_t bytes) {
  while (::madvise(data, to_size(bytes), kMadvPopulateWrite) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) throw_system_failure("madvise(MADV_POPULATE_WRITE)", bytes, errno);
    touch_pages(data, bytes);  // a kernel before 5.14
    break;
  }
  // Best effort: a kernel without it, or memory without free huge pages, leaves small pages.
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data));
  const std::int64_t head = align_up(address, kHugePage) - address;
  const std::int64_t huge_bytes = (bytes - head) / kHugePage * kHugePage;
  if (huge_bytes >= kMinHugeBytes) {
    (void)::madvise(data + head, to_size(huge_bytes), kMadvCollapse);
  }
}

}  // namespace

void FileDescriptor::reset() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::int64_t round_to_pages(std::int64_t bytes) {
  constexpr std::int64_t kMaxBytes = std::int64_t{1} << 56;  // what five-level page tables reach
  if (bytes > kMaxBytes) throw std::bad_alloc();
  return align_up(bytes > 0 ? bytes : 1, ::sysconf(_SC_PAGESIZE));
}

FileDescriptor create_shared_memory(std::int64_t bytes) {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  FileDescriptor fd(::memfd_create("fanfold", flags | kMfdNoexecSeal));
  if (!fd.is_open() && errno == EINVAL) fd = FileDescriptor(::memfd_create("fanfold", flags));
  if (!fd.is_open()) throw_system_failure("memfd_create", bytes, errno);
  (void)::fchmod(fd.get(), S_IRUSR | S_IWUSR);  // for /proc/<pid>/fd; the memory has no name
  if (::ftruncate(fd.get(), bytes) != 0) throw_system_failure("ftruncate", bytes, errno);
  // A peer that shrank it would make our loads fault.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_system_failure("fcntl(F_ADD_SEALS)", bytes, errno);
  }
  return fd;
}

Mapping::Mapping(const FileDescriptor& fd, std::int64_t bytes, Pages pages)
    : bytes_(bytes), owner_pid_(::getpid()) {
  std::byte* const place = reserve_aligned(bytes);
  const auto give_up = [&](const char* call, int code) {
    ::munmap(place, to_size(bytes));
    throw_system_failure(call, bytes, code);
  };
  if (::mmap(place, to_size(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd.get(), 0) ==
      MAP_FAILED) {
    give_up("mmap", errno);
  }
  if (::madvise(place, to_size(bytes), MADV_DONTFORK) != 0) {
    give_up("madvise(MADV_DONTFORK)", errno);
  }
  try {
    if (pages == Pages::kTouched) populate(place, bytes);
  } catch (...) {
    ::munmap(place, to_size(bytes));
    throw;
  }
  data_ = place;
}

void Mapping::touch(std::int64_t offset, std::int64_t bytes) const {
  if (bytes <= 0) return;
  const std::int64_t page = ::sysconf(_SC_PAGESIZE);
  const std::int64_t first = offset / page * page;
  populate(data_ + first, align_up(offset + bytes, page) - first);
}

Mapping::~Mapping() {
  if (::getpid() == owner_pid_) ::munmap(data_, to_size(bytes_));
}

std::shared_ptr<std::byte> map_private(std::int64_t bytes) {
  const std::int64_t size = round_to_pages(bytes);
  std::byte* const data = reserve_aligned(size);
  if (::mprotect(data, to_size(size), PROT_READ | PROT_WRITE) != 0) {
    const int code = errno;
    ::munmap(data, to_size(size));
    throw_system_failure("mprotect", size, code);
  }
  (void)::madvise(data, to_size(size), MADV_HUGEPAGE);  // best effort
  (void)::madvise(data, to_size(size), MADV_DONTFORK);  // only saves copies: the memory is private
  const auto release = [size, pid = ::getpid()](std::byte* memory) noexcept {
    if (::getpid() == pid) ::munmap(memory, to_size(size));
  };
  return std::shared_ptr<std::byte>(data, release);
}

}  // namespace fanfold::base
