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

/// A shared mapping, aligned to 2 MiB, not inherited by forked children, all its pages touched.
class Mapping {
 public:
  /// Maps `bytes` of `fd`, touches every page without changing it and asks for huge pages.
  /// @throws SystemFailure, std::bad_alloc
  Mapping(const FileDescriptor& fd, std::int64_t bytes);
  /// Does nothing in a forked child, where other memory may lie at this address by now.
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::byte* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  std::int64_t owner_pid_ = 0;
};

/// `bytes` rounded up to whole pages, at least one.
/// @throws std::bad_alloc  no machine has that many.
std::int64_t round_to_pages(std::int64_t bytes);

/// Private memory that costs nothing until it is written: zero, 2 MiB aligned, huge pages where the
/// kernel gives them, not inherited by forked children.
std::shared_ptr<std::byte> map_private(std::int64_t bytes);

}  // namespace fanfold::base
