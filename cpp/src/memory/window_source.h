// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where symmetric memory comes from: the host's, or a GPU's.

#include <cstdint>
#include <functional>
#include <memory>

#include "base/clock.h"
#include "comm/group.h"
#include "fanfold/allocator.h"

namespace fanfold::memory {

/// One kind of memory. The bytes of GPU memory are out of the host's reach but for what is here.
/// Threads: one at a time, except `allocate_private`'s result, which any thread may let go of.
class WindowSource {
 public:
  WindowSource() = default;
  virtual ~WindowSource() = default;
  WindowSource(const WindowSource&) = delete;
  WindowSource& operator=(const WindowSource&) = delete;

  /// A zeroed window of at least `bytes` on each rank. Collective, as Group::share_windows.
  virtual comm::Windows make_windows(std::int64_t bytes, base::Deadline deadline) = 0;
  /// Tells, on any thread, whether windows of `make_windows` may still be used; empty: always.
  virtual std::function<bool()> usability(const comm::Windows& /*windows*/) const { return {}; }
  /// Private memory of this rank that begins on 128 bytes.
  virtual std::shared_ptr<std::byte> allocate_private(std::int64_t bytes) = 0;
  virtual AllocatorMemory memory() const = 0;

  // These wait until it is done.
  virtual void zero(std::byte* data, std::int64_t bytes) = 0;
  virtual std::uint64_t read_word(const std::byte* data) = 0;
  virtual void write_word(std::byte* data, std::uint64_t word) = 0;
  /// @throws InvalidArgument  `buffer`, number `rank` of the caller's, is not of this kind.
  virtual void check_buffer(const OwnBuffer& buffer, std::size_t rank) const = 0;
};

/// Anonymous shared memory of the group.
class HostSource final : public WindowSource {
 public:
  explicit HostSource(comm::Group& group) : group_(group) {}

  comm::Windows make_windows(std::int64_t bytes, base::Deadline deadline) override;
  std::shared_ptr<std::byte> allocate_private(std::int64_t bytes) override;
  AllocatorMemory memory() const override;
  void zero(std::byte* data, std::int64_t bytes) override;
  std::uint64_t read_word(const std::byte* data) override;
  void write_word(std::byte* data, std::uint64_t word) override;
  void check_buffer(const OwnBuffer&, std::size_t) const override {}

 private:
  comm::Group& group_;
};

}  // namespace fanfold::memory
