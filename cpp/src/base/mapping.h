// SPDX-License-Identifier: Apache-2.0
#pragma once

// Owning wrappers of file descriptors and shared memory.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace fanfold::base {

/// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
  ~FileDescriptor() { reset(); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const noexcept { return fd_; }
  bool is_open() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

/// Creates anonymous shared memory of exactly `bytes` (a multiple of the page): close-on-exec,
/// not executable, sealed against shrinking, growing and further seals.
/// @throws SystemFailure, std::bad_alloc
FileDescriptor create_shared_memory(std::int64_t bytes);

/// Whether shared memory takes up memory from the start, or only where it has been touched.
enum class Pages : std::uint8_t { kTouched, kReserved };

/// A shared mapping, aligned to 2 MiB, not inherited by forked children.
class Mapping {
 public:
  /// Maps `bytes` of `fd`; kTouched: and touches all of it.
  /// @throws SystemFailure, std::bad_alloc
  Mapping(const FileDescriptor& fd, std::int64_t bytes, Pages pages = Pages::kTouched);
  /// Borrows memory that outlives it.
  Mapping(std::byte* data, std::int64_t bytes) noexcept : data_(data), bytes_(bytes) {}
  /// Unmaps what is not borrowed. Not in a forked child, where other memory may lie at this address
  /// by now.
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  /// Takes memory for every page of the range that has none, without changing a byte, and asks for
  /// huge pages. Peers may use the memory at the same time.
  /// @throws SystemFailure, std::bad_alloc
  void touch(std::int64_t offset, std::int64_t bytes) const;
  std::byte* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  std::int64_t owner_pid_ = 0;  // 0: borrowed
};

/// `bytes` rounded up to whole pages, at least one.
/// @throws std::bad_alloc  no machine has that many.
std::int64_t round_to_pages(std::int64_t bytes);

/// Private memory that costs nothing until it is written: zero, 2 MiB aligned, huge pages where the
/// kernel gives them, not inherited by forked children.
std::shared_ptr<std::byte> map_private(std::int64_t bytes);

}  // namespace fanfold::base
