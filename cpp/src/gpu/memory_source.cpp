// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory_source.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "comm/failure.h"
#include "fanfold/error.h"
#include "gpu/device_context.h"
#include "gpu/fabric_windows.h"
#include "gpu/platform.h"

namespace fanfold::gpu {
namespace {

std::vector<HandleKind> kinds_of(const GpuMemoryConfig& config) {
  if (config.kinds.empty()) {
    return {HandleKind::kFabric, HandleKind::kFileDescriptor, HandleKind::kSameProcess};
  }
  for (std::size_t i = 0; i < config.kinds.size(); ++i) {
    const auto end = config.kinds.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find(config.kinds.begin(), end, config.kinds[i]) == end) continue;
    throw InvalidArgument(
        base::str("kinds: expected each once, got ", name_of(config.kinds[i]), " twice"));
  }
  return config.kinds;
}

std::string list_of(const std::vector<HandleKind>& kinds) {
  std::string text;
  for (const HandleKind kind : kinds)
    text += (text.empty() ? "" : ", ") + std::string(name_of(kind));
  return text;
}

class GpuSource final : public memory::WindowSource {
 public:
  GpuSource(comm::Group& group, std::shared_ptr<const DeviceContext> context,
            std::vector<HandleKind> kinds)
      : group_(group), context_(std::move(context)), kinds_(std::move(kinds)) {
    memory_.device = DeviceType::kGpu;
    memory_.device_index = context_->device();
    memory_.is_host_accessible = kHostReachesDeviceMemory;
  }

  comm::Windows make_windows(std::int64_t bytes, base::Deadline deadline) override {
    SharedWindows shared = share_windows(group_, context_, bytes, kinds_, deadline);
    if (!memory_.kind) {
      memory_.kind = shared.kind;
      memory_.passed_over = std::move(shared.passed_over);
      kinds_ = {shared.kind};
    }
    comm::Windows windows;
    for (int rank = 0; rank < group_.num_ranks(); ++rank) {
      const auto window = std::make_shared<Window>(shared.windows, rank);
      windows.emplace_back(window, &window->mapping);
    }
    return windows;
  }

  std::shared_ptr<std::byte> allocate_private(std::int64_t bytes) override {
    std::byte* const data = context_->allocate(bytes);
    return {data, [context = context_](std::byte* memory) { context->free(memory); }};
  }

  AllocatorMemory memory() const override { return memory_; }
  void zero(std::byte* data, std::int64_t bytes) override { context_->zero(data, bytes); }
  std::uint64_t read_word(const std::byte* data) override { return context_->read_word(data); }
  void write_word(std::byte* data, std::uint64_t word) override {
    context_->write_word(data, word);
  }
  void check_buffer(const OwnBuffer& buffer, std::size_t rank) const override {
    if (context_->is_device_memory(buffer.data)) return;
    throw InvalidArgument(
        base::str("buffers[", rank, "]: expected memory of a GPU, got another's"));
  }

 private:
  /// One window, which keeps all of them mapped.
  struct Window {
    Window(std::shared_ptr<FabricWindows> windows, int rank)
        : all(std::move(windows)), mapping(all->data(rank), all->bytes()) {}
    std::shared_ptr<FabricWindows> all;
    base::Mapping mapping;
  };

  comm::Group& group_;
  std::shared_ptr<const DeviceContext> context_;
  std::vector<HandleKind> kinds_;
  AllocatorMemory memory_;
};

}  // namespace

std::unique_ptr<memory::WindowSource> make_memory_source(comm::Group& group,
                                                         const GpuMemoryConfig& config,
                                                         base::Deadline deadline) {
  std::optional<comm::Failure> failure;
  std::vector<HandleKind> kinds;
  std::shared_ptr<const DeviceContext> context;
  comm::Parcel own;
  try {
    kinds = kinds_of(config);
    own.bytes = list_of(kinds);
    context = std::make_shared<const DeviceContext>(config.device);
  } catch (...) {
    failure = comm::Failure::current(group.rank());
    if (failure->kind == comm::Failure::Kind::kUnsupported) {
      failure->message = base::str("rank ", group.rank(), ": ", failure->message);
    }
  }
  const auto all = group.exchange("Allocator of GPU memory", std::move(own), failure, deadline);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].bytes == all[0].bytes) continue;
    throw InvalidArgument(base::str("kinds: expected the same on every rank, got ", all[0].bytes,
                                    " on rank 0 and ", all[rank].bytes, " on rank ", rank));
  }
  return std::make_unique<GpuSource>(group, std::move(context), std::move(kinds));
}

}  // namespace fanfold::gpu
