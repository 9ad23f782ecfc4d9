// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <utility>

#include "comm/communicator_impl.h"
#include "fanfold/error.h"
#include "fanfold/fabric_memory.h"
#include "gpu/memory_source.h"
#include "memory/allocator_impl.h"

namespace fanfold {
namespace {

std::unique_ptr<memory::WindowSource> gpu_source(const Communicator& communicator,
                                                 const GpuMemoryConfig& gpu,
                                                 std::optional<std::chrono::nanoseconds> timeout) {
  const auto& impl = communicator.impl();
  if (impl == nullptr) throw InvalidState("allocator: the communicator was moved from");
  const Communicator::Impl::Call call(*impl, "Allocator");
  return gpu::make_memory_source(impl->group(), impl->shared_device_collectives(), gpu,
                                 impl->deadline(timeout));
}

}  // namespace

Allocator::Allocator(Communicator& communicator, const GpuMemoryConfig& gpu,
                     std::optional<std::chrono::nanoseconds> timeout)
    : impl_(std::make_shared<Impl>(communicator, gpu_source(communicator, gpu, timeout))) {}

Allocator::Allocator(Communicator& communicator, const GpuMemoryConfig& gpu,
                     const std::vector<OwnBuffer>& buffers,
                     std::optional<std::chrono::nanoseconds> timeout)
    : Allocator(communicator, gpu, timeout) {
  impl_->use_own_buffers(buffers, communicator.impl()->deadline(timeout));
}

FabricMemory::FabricMemory(Communicator& communicator, std::int64_t bytes,
                           const GpuMemoryConfig& gpu,
                           std::optional<std::chrono::nanoseconds> timeout)
    : allocator_(communicator, gpu, timeout),
      memory_(allocator_.allocate(bytes, 0, timeout)),
      communicator_(communicator.impl()) {}
FabricMemory::~FabricMemory() = default;
FabricMemory::FabricMemory(FabricMemory&&) noexcept = default;
FabricMemory& FabricMemory::operator=(FabricMemory&&) noexcept = default;

std::int64_t FabricMemory::bytes() const { return memory_.bytes(); }
int FabricMemory::num_ranks() const { return memory_.num_ranks(); }
std::byte* FabricMemory::data(int rank) const { return memory_.data(rank); }
TensorView FabricMemory::tensor(int rank, DType dtype, const std::vector<std::int64_t>& shape,
                                std::int64_t offset_bytes) const {
  return memory_.tensor(rank, dtype, shape, offset_bytes);
}
AllocatorMemory FabricMemory::memory() const { return allocator_.memory(); }

void FabricMemory::close(std::optional<std::chrono::nanoseconds> timeout) {
  if (!memory_.has_value()) return;
  const SymmetricMemory memory = std::move(memory_);
  memory_ = {};
  const Communicator::Impl::Call call(*communicator_, "close of GPU memory");
  try {
    communicator_->channel().barrier(communicator_->deadline(timeout));
  } catch (const PeerLost&) {
    return;  // who is gone uses the windows no more
  }
}

}  // namespace fanfold
