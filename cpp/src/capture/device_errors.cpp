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
  const std::uint64_t number = __atomic_load_n(&report.number, __ATOMIC_ACQUIRE);
  if (number == known) return;
  const exec::CaptureError error = report.error;
  // Where another thread has told of it, kernels may have written the next one meanwhile.
  if (acknowledge(known, number)) refuse(error);
}

void DeviceErrors::raise(const exec::CaptureError& error) {
  exec::CaptureReport& report = this->report();
  const std::uint64_t known = __atomic_load_n(&report.acknowledged, __ATOMIC_ACQUIRE);
  const std::uint64_t number = __atomic_load_n(&report.number, __ATOMIC_ACQUIRE);
  if (number == error.number && number != known) acknowledge(known, number);
  refuse(error);
}

bool DeviceErrors::acknowledge(std::uint64_t known, std::uint64_t number) noexcept {
  // Release: kernels write the next error only once they have acquired this.
  return __atomic_compare_exchange_n(&report().acknowledged, &known, number, false,
                                     __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

void DeviceErrors::refuse(const exec::CaptureError& error) const {
  const int layer = layers_[static_cast<std::size_t>(error.slot)];
  switch (error.fault) {
    case exec::CaptureFault::kOtherCount:
      refuse_count(layer, error.row, error.num_ids, error.id);
    case exec::CaptureFault::kPartlyWritten:
      refuse_partly_written(top_k_, error.row, error.column);
    case exec::CaptureFault::kOtherIds:
      refuse_other_ids(layer, error.token, error.row, error.step_id);
    case exec::CaptureFault::kWrongId:
      break;
  }
  refuse_id(layer, {error.row, error.column, error.id}, error.num_ids, error.is_physical != 0);
}

}  // namespace fanfold::capture
