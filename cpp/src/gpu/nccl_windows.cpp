// SPDX-License-Identifier: Apache-2.0
#include "gpu/nccl_windows.h"

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "base/byte_math.h"
#include "base/format.h"
#include "base/keep_forever.h"
#include "fanfold/error.h"

namespace fanfold::gpu {

NcclWindows::NcclWindows(std::shared_ptr<NcclCollectives> collectives, std::int64_t bytes)
    : collectives_(std::move(collectives)),
      bytes_(base::align_up(bytes, std::int64_t{nccl::kWindowAlignment})),
      generation_(collectives_->generation()) {}

NcclWindows::~NcclWindows() {
  if (memory_ == nullptr) return;
  const DeviceContext& context = *collectives_->setup().context;
  if (context.driver().is_forked_child() || is_unsettled_) return;
  try {
    context.wait_idle([] {});
    collectives_->release_window(window_, generation_);
    const DeviceContext::Current current(context);
    (void)collectives_->setup().library->functions().ncclMemFree(memory_);
  } catch (...) {
    // Work may go on that uses it; memory that is not given back harms nobody.
    base::keep_forever(collectives_);
  }
}

void NcclWindows::allocate() {
  const NcclCollectives::Setup& setup = collectives_->setup();
  setup.library->require(NcclFeature::kPeerPointers);
  const DeviceContext::Current current(*setup.context);
  const nccl::Result result =
      setup.library->functions().ncclMemAlloc(&memory_, static_cast<std::size_t>(bytes_));
  if (result == nccl::kSuccess) return;
  memory_ = nullptr;
  // NCCL does not tell a device that is full from one that has failed.
  throw OutOfMemory(base::str("GPU memory of ", bytes_,
                              " bytes, ncclMemAlloc: ", setup.library->describe(result, nullptr)));
}

void NcclWindows::register_memory(base::Deadline deadline) {
  // A thread of NCCL's may write to it when the call here has been given up.
  const auto window = std::make_shared<nccl::Window>(nullptr);
  try {
    collectives_->run(
        "ncclCommWindowRegister",
        [this, window](const nccl::Functions& call, nccl::Comm comm) {
          is_unsettled_ = true;
          return call.ncclCommWindowRegister(comm, memory_, static_cast<std::size_t>(bytes_),
                                             window.get(), nccl::kWindowSymmetric);
        },
        deadline);
  } catch (...) {
    if (is_unsettled_) base::keep_forever(window);
    throw;
  }
  is_unsettled_ = false;
  window_ = __atomic_load_n(window.get(), __ATOMIC_ACQUIRE);
  if (window_ != nullptr) collectives_->add_window(window_, generation_);
  if (window_ == nullptr) {
    throw Unsupported(
        "GPU memory by nccl: expected a communicator with symmetric memory, got one that has none "
        "(devices without peer access, or NCCL_CUMEM_ENABLE=0 or NCCL_WIN_ENABLE=0)");
  }
}

void NcclWindows::find_peers() {
  const NcclLibrary& library = *collectives_->setup().library;
  for (int rank = 0; rank < collectives_->num_ranks(); ++rank) {
    void* address = rank == collectives_->rank() ? memory_ : nullptr;
    nccl::Result result = nccl::kSuccess;
    if (address == nullptr) {
      const DeviceContext::Current current(*collectives_->setup().context);
      result = library.functions().ncclGetPeerDevicePointer(window_, 0, rank, &address);
    }
    if (result != nccl::kSuccess || address == nullptr) {
      throw Unsupported(base::str(
          "GPU memory by nccl: expected the memory of rank ", rank, " within reach of device ",
          collectives_->device(), ", got ",
          result == nccl::kSuccess ? "no address of it" : library.describe(result, nullptr)));
    }
    data_.push_back(static_cast<std::byte*>(address));
  }
}

std::shared_ptr<NcclWindows> NcclWindows::make(comm::Group& group,
                                               std::shared_ptr<NcclCollectives> collectives,
                                               std::int64_t bytes, base::Deadline deadline) {
  auto windows = std::make_shared<NcclWindows>(std::move(collectives), bytes);
  const std::string step = base::str("GPU memory of ", bytes, " bytes per rank, by nccl: ");
  const auto together = [&](const char* part, const std::function<void()>& work) {
    std::optional<comm::Failure> failure;
    try {
      work();
    } catch (...) {
      failure = comm::Failure::current(group.rank());
    }
    (void)group.exchange(step + part, {}, failure, deadline);
  };
  together("allocation", [&] { windows->allocate(); });
  together("registration", [&] {
    // Leaves the others time to hear of a failure.
    const std::chrono::nanoseconds most(deadline.remaining_ns() / 4 * 3);
    windows->register_memory(base::Deadline(most));
  });
  together("addresses", [&] { windows->find_peers(); });
  together("zeroing", [&] { windows->zero(); });
  return windows;
}

void NcclWindows::zero() {
  collectives_->setup().context->zero(static_cast<std::byte*>(memory_), bytes_);
}

}  // namespace fanfold::gpu
