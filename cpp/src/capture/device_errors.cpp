// SPDX-License-Identifier: Apache-2.0
#include "capture/device_errors.h"

#include <cstddef>
#include <utility>

#include "capture/record_errors.h"

namespace fanfold::capture {

DeviceErrors::DeviceErrors(exec::PinnedMemory report, std::vector<int> layers, int top_k)
    : report_(std::move(report)), layers_(std::move(layers)), top_k_(top_k) {}

exec::CaptureReport& DeviceErrors::report() const noexcept {
  return *reinterpret_cast<exec::CaptureReport*>(report_.host.get());
}

exec::CaptureReport* DeviceErrors::on_device() const noexcept {
  return reinterpret_cast<exec::CaptureReport*>(report_.device);
}

void DeviceErrors::throw_new() {
  exec::CaptureReport& report = this->report();
  const std::uint64_t known = __atomic_load_n(&report.acknowledged, __ATOMIC_ACQUIRE);
  // Acquire: pairs with st_release_sys in gpu/kernels/record_ids.cu, carries `error`.
  if (__atomic_load_n(&report.number, __ATOMIC_ACQUIRE) == known) return;
  raise(report.error);
}

void DeviceErrors::raise(const exec::CaptureError& error) {
  const exec::CaptureError copy = error;
  exec::CaptureReport& report = this->report();
  std::uint64_t known = __atomic_load_n(&report.acknowledged, __ATOMIC_ACQUIRE);
  if (known != copy.number && __atomic_load_n(&report.number, __ATOMIC_ACQUIRE) == copy.number) {
    // Release: kernels may write the next one once they see this. Fails where another thread has
    // told of it, and perhaps of later ones.
    __atomic_compare_exchange_n(&report.acknowledged, &known, copy.number, false, __ATOMIC_RELEASE,
                                __ATOMIC_RELAXED);
  }
  const int layer = layers_[static_cast<std::size_t>(copy.slot)];
  switch (copy.fault) {
    case exec::CaptureFault::kPartlyWritten:
      refuse_partly_written(top_k_, copy.row, copy.column);
    case exec::CaptureFault::kOtherIds:
      refuse_other_ids(layer, copy.token, copy.row, copy.step_id);
    case exec::CaptureFault::kWrongId:
      break;
  }
  refuse_id(layer, {copy.row, copy.column, copy.id}, copy.num_ids, copy.is_physical != 0);
}

}  // namespace fanfold::capture
