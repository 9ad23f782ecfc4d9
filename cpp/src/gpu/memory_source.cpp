// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory_source.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "comm/failure.h"
#include "fanfold/error.h"
#include "gpu/device_context.h"
#include "gpu/fabric_windows.h"
#include "gpu/nccl_windows.h"
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

/// The carrier of kNccl; null for other kinds.
std::shared_ptr<NcclCollectives> nccl_for(
    const std::vector<HandleKind>& kinds, int device,
    const std::shared_ptr<comm::DeviceCollectives>& collectives) {
  if (std::find(kinds.begin(), kinds.end(), HandleKind::kNccl) == kinds.end()) return nullptr;
  if (kinds.size() > 1) {
    throw InvalidArgument(base::str("kinds: expected nccl alone, got ", list_of(kinds)));
  }
  if (collectives == nullptr) {
    throw InvalidArgument(
        "kinds: expected a communicator made by from_nccl for nccl, got one without NCCL");
  }
  if (collectives->device() != device) {
    throw InvalidArgument(base::str("device: expected ", collectives->device(),
                                    ", the communicator's, for kind nccl, got ", device));
  }
  // The only implementation that the library makes.
  return std::static_pointer_cast<NcclCollectives>(collectives);
}

class GpuSource final : public memory::WindowSource {
 public:
  GpuSource(comm::Group& group, std::shared_ptr<const DeviceContext> context,
            std::shared_ptr<NcclCollectives> nccl, std::vector<HandleKind> kinds)
      : group_(group),
        context_(std::move(context)),
        nccl_(std::move(nccl)),
        kinds_(std::move(kinds)) {
    memory_.device = DeviceType::kGpu;
    memory_.device_index = context_->device();
    memory_.is_host_accessible = kHostReachesDeviceMemory;
  }

  comm::Windows make_windows(std::int64_t bytes, base::Deadline deadline) override {
    if (nccl_ != nullptr) {
      memory_.kind = HandleKind::kNccl;
      const auto made = NcclWindows::make(group_, nccl_, bytes, deadline);
      comm::Windows windows = as_windows(made);
      for (auto it = made_.begin(); it != made_.end();) {
        it = it->second.expired() ? made_.erase(it) : std::next(it);
      }
      made_[windows.front().get()] = made;
      return windows;
    }
    SharedWindows shared = share_windows(group_, context_, bytes, kinds_, deadline);
    if (!memory_.kind) {
      memory_.kind = shared.kind;
      memory_.passed_over = std::move(shared.passed_over);
      kinds_ = {shared.kind};
    }
    return as_windows(shared.windows);
  }

  std::function<bool()> usability(const comm::Windows& windows) const override {
    const auto made = made_.find(windows.front().get());
    if (made == made_.end()) return {};
    return [of_nccl = made->second.lock()] { return of_nccl != nullptr && of_nccl->are_usable(); };
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
  template <class AllWindows>
  struct Window {
    Window(std::shared_ptr<AllWindows> windows, int rank)
        : all(std::move(windows)), mapping(all->data(rank), all->bytes()) {}
    std::shared_ptr<AllWindows> all;
    base::Mapping mapping;
  };

  template <class AllWindows>
  comm::Windows as_windows(const std::shared_ptr<AllWindows>& all) const {
    comm::Windows windows;
    for (int rank = 0; rank < group_.num_ranks(); ++rank) {
      const auto window = std::make_shared<Window<AllWindows>>(all, rank);
      windows.emplace_back(window, &window->mapping);
    }
    return windows;
  }

  comm::Group& group_;
  std::shared_ptr<const DeviceContext> context_;
  std::shared_ptr<NcclCollectives> nccl_;  // only for kNccl
  std::vector<HandleKind> kinds_;
  AllocatorMemory memory_;
  std::map<const base::Mapping*, std::weak_ptr<NcclWindows>> made_;  // only for kNccl, by rank 0's
};

}  // namespace

std::unique_ptr<memory::WindowSource> make_memory_source(
    comm::Group& group, const std::shared_ptr<comm::DeviceCollectives>& device,
    const GpuMemoryConfig& config, base::Deadline deadline) {
  std::optional<comm::Failure> failure;
  std::vector<HandleKind> kinds;
  std::shared_ptr<const DeviceContext> context;
  std::shared_ptr<NcclCollectives> nccl;
  comm::Parcel own;
  try {
    kinds = kinds_of(config);
    own.bytes = list_of(kinds);
    nccl = nccl_for(kinds, config.device, device);
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
  return std::make_unique<GpuSource>(group, std::move(context), std::move(nccl), std::move(kinds));
}

}  // namespace fanfold::gpu
