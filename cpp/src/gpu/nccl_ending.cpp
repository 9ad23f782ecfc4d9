// SPDX-License-Identifier: Apache-2.0
#include "gpu/nccl_ending.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "base/keep_forever.h"

namespace fanfold::gpu {
namespace {

void abort_all(const NcclLibrary& library, const DeviceContext& context, nccl::Comm comm,
               const std::vector<std::shared_ptr<NcclMaking>>& late) {
  try {
    const DeviceContext::Current current(context);
    if (comm != nullptr) (void)library.functions().ncclCommAbort(comm);
    for (const std::shared_ptr<NcclMaking>& making : late) {
      const nccl::Comm made = making->made();
      if (made != nullptr) {
        (void)library.functions().ncclCommAbort(made);
      } else {
        base::keep_forever(making);  // NCCL may write to it still
      }
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // The device has failed for good: there is nothing left to give back.
  }
}

}  // namespace

std::shared_ptr<NcclEnding> NcclEnding::begin(std::shared_ptr<const NcclLibrary> library,
                                              std::shared_ptr<const DeviceContext> context,
                                              nccl::Comm comm,
                                              std::vector<std::shared_ptr<NcclMaking>> late) {
  auto ending = std::make_shared<NcclEnding>();
  auto work = [ending, library = std::move(library), context = std::move(context), comm,
               late = std::move(late)]() mutable {
    abort_all(*library, *context, comm, late);
    late.clear();
    context.reset();  // whoever waited for the end may be the last to need the device
    library.reset();
    const std::lock_guard<std::mutex> lock(ending->mutex_);
    ending->is_over_ = true;
    ending->changed_.notify_all();
  };
  try {
    std::thread(work).detach();
  } catch (const std::system_error&) {
    work();  // no thread is to be had
  }
  return ending;
}

bool NcclEnding::wait(base::Deadline deadline) {
  // A wait for longer than the clock can tell would end at once.
  constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(24);
  const std::chrono::nanoseconds left(deadline.remaining_ns());
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::min(left, kLongest), [this] { return is_over_; });
}

}  // namespace fanfold::gpu
