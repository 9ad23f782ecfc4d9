// SPDX-License-Identifier: Apache-2.0
#pragma once

// One symmetric allocation on the GPUs of a group.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/group.h"
#include "fanfold/allocator.h"
#include "gpu/address.h"
#include "gpu/device_context.h"
#include "gpu/handles.h"

namespace fanfold::gpu {

/// A window per rank, equal in size, one after the other in one range of addresses: the same
/// offsets on every rank. Rank r's lies on its own device; all are mapped for this rank's device.
/// The memory of a window lives until the last rank that maps it lets go of it.
class FabricWindows {
 public:
  FabricWindows(std::shared_ptr<const DeviceContext> context, AddressRange range,
                std::size_t stride)
      : context_(std::move(context)), range_(std::move(range)), stride_(stride) {}
  /// Waits for the device, as cudaFree does: work on the windows may be under way. Where that
  /// fails, as in a graph capture, they stay mapped.
  ~FabricWindows();
  FabricWindows(const FabricWindows&) = delete;
  FabricWindows& operator=(const FabricWindows&) = delete;

  /// Maps the window of the next rank and lets this rank's device use it.
  void map_next(CUmemGenericAllocationHandle handle);
  /// From now on there may be work on them.
  void hand_out() noexcept { is_handed_out_ = true; }

  std::byte* data(int rank) const noexcept {
    return data_at(range_.begin() + static_cast<std::size_t>(rank) * stride_);
  }
  std::int64_t bytes() const noexcept { return static_cast<std::int64_t>(stride_); }

 private:
  std::shared_ptr<const DeviceContext> context_;
  AddressRange range_;  // outlives what is mapped in it
  std::vector<MappedMemory> mapped_;
  std::size_t stride_;
  bool is_handed_out_ = false;
};

/// Windows, and how the ranks came to share them.
struct SharedWindows {
  std::shared_ptr<FabricWindows> windows;
  HandleKind kind;
  std::vector<std::string> passed_over;
};

/// Makes zeroed windows of at least `bytes`. Not for kNccl. The first of `kinds` is taken whose
/// every step works on all ranks: make the memory, export, import, map, give rights, write and
/// read. Collective; a failure on one rank leaves nothing on any.
/// @throws Unsupported      no kind works; the text says why for each. With one kind: CudaFailure,
///         where the driver failed.
/// @throws OutOfMemory      a rank's device has no room, or no machine has.
/// @throws InvalidArgument  the ranks ask for different things, or a handle is not of this group.
/// @throws PeerTimeout, PeerLost, PeerAborted, SystemFailure
SharedWindows share_windows(comm::Group& group, const std::shared_ptr<const DeviceContext>& context,
                            std::int64_t bytes, const std::vector<HandleKind>& kinds,
                            base::Deadline deadline);

/// "fabric", "file_descriptor", "same_process", "nccl".
const char* name_of(HandleKind kind);

}  // namespace fanfold::gpu
