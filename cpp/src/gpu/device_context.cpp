// SPDX-License-Identifier: Apache-2.0
#include "gpu/device_context.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/format.h"
#include "fanfold/error.h"
#include "gpu/address.h"

namespace fanfold::gpu {
namespace {

constexpr std::chrono::milliseconds kLookPause(5);

}  // namespace

DeviceContext::Current::Current(const DeviceContext& context) : driver_(context.driver_) {
  driver_.check(driver_.cuCtxPushCurrent(context.context_), "cuCtxPushCurrent");
}

DeviceContext::Current::~Current() {
  CUcontext popped = nullptr;
  (void)driver_.cuCtxPopCurrent(&popped);
}

/// A stream that waits for no other, not even for the legacy one. What was enqueued has ended when
/// it ends, even if waiting failed once: the memory may be unmapped next.
class DeviceContext::OwnStream {
 public:
  explicit OwnStream(const Driver& driver) : driver_(driver) {
    driver_.check(driver_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~OwnStream() {
    if (!is_idle_) (void)driver_.cuStreamSynchronize(stream_);
    (void)driver_.cuStreamDestroy(stream_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  CUstream get() const noexcept { return stream_; }
  void wait() {
    driver_.check(driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize");
    is_idle_ = true;
  }

 private:
  const Driver& driver_;
  CUstream stream_ = nullptr;
  bool is_idle_ = false;
};

DeviceContext::DeviceContext(int device) : driver_(Driver::get()), device_(device) {
  int num_devices = 0;
  driver_.check(driver_.cuDeviceGetCount(&num_devices), "cuDeviceGetCount");
  if (device < 0 || device >= num_devices) {
    throw Unsupported(base::str("device: expected 0 to ", num_devices - 1, ", got ", device));
  }
  driver_.check(driver_.cuDeviceGet(&handle_, device), "cuDeviceGet");
  if (!has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    throw Unsupported(
        base::str("device ", device, ": expected one with virtual memory management"));
  }
  std::array<char, 32> bus_id{};
  driver_.check(driver_.cuDeviceGetPCIBusId(bus_id.data(), bus_id.size(), handle_),
                "cuDeviceGetPCIBusId");
  pci_bus_id_ = bus_id.data();
  driver_.check(driver_.cuDevicePrimaryCtxRetain(&context_, handle_), "cuDevicePrimaryCtxRetain");
}

DeviceContext::~DeviceContext() {
  if (!driver_.is_forked_child()) (void)driver_.cuDevicePrimaryCtxRelease(handle_);
}

int DeviceContext::attribute(CUdevice_attribute attribute) const {
  int value = 0;
  driver_.check(driver_.cuDeviceGetAttribute(&value, attribute, handle_), "cuDeviceGetAttribute");
  return value;
}

void DeviceContext::zero(std::byte* data, std::int64_t bytes) const {
  const Current current(*this);
  OwnStream stream(driver_);
  driver_.check(
      driver_.cuMemsetD8Async(address_of(data), 0, static_cast<std::size_t>(bytes), stream.get()),
      base::str("cuMemsetD8Async of ", bytes, " bytes"));
  stream.wait();
}

void DeviceContext::upload(std::byte* data, const void* host, std::int64_t bytes) const {
  const Current current(*this);
  OwnStream stream(driver_);
  driver_.check(driver_.cuMemcpyHtoDAsync(address_of(data), host, static_cast<std::size_t>(bytes),
                                          stream.get()),
                "cuMemcpyHtoDAsync");
  stream.wait();
}

void DeviceContext::download(void* host, const std::byte* data, std::int64_t bytes) const {
  const Current current(*this);
  OwnStream stream(driver_);
  driver_.check(driver_.cuMemcpyDtoHAsync(host, address_of(data), static_cast<std::size_t>(bytes),
                                          stream.get()),
                "cuMemcpyDtoHAsync");
  stream.wait();
}

std::uint64_t DeviceContext::read_word(const std::byte* data) const {
  std::uint64_t word = 0;
  download(&word, data, sizeof word);
  return word;
}

void DeviceContext::write_word(std::byte* data, std::uint64_t word) const {
  upload(data, &word, sizeof word);
}

std::byte* DeviceContext::allocate(std::int64_t bytes) const {
  const Current current(*this);
  CUdeviceptr address = 0;
  driver_.check(driver_.cuMemAlloc(&address, static_cast<std::size_t>(bytes)),
                base::str("cuMemAlloc of ", bytes, " bytes on device ", device_));
  return data_at(address);
}

void DeviceContext::wait_idle(base::FunctionRef<void()> look) const {
  if (driver_.is_forked_child()) return;
  check_no_capture();
  // The driver's call cannot be given up, and this thread has to look around meanwhile.
  std::mutex mutex;
  std::condition_variable ended;
  bool has_ended = false;
  CUresult result = CUDA_SUCCESS;
  std::thread waiter([&] {
    result = driver_.cuCtxPushCurrent(context_);
    if (result == CUDA_SUCCESS) {
      result = driver_.cuCtxSynchronize();
      CUcontext popped = nullptr;
      (void)driver_.cuCtxPopCurrent(&popped);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    has_ended = true;
    ended.notify_one();
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    while (!ended.wait_for(lock, kLookPause, [&] { return has_ended; })) look();
  }
  waiter.join();
  driver_.check(result, "cuCtxSynchronize");
}

void DeviceContext::wait(CUstream stream, base::FunctionRef<void()> look) const {
  constexpr std::int64_t kEagerNs = 200'000;  // as long as most waits
  const Current current(*this);
  const std::int64_t start = base::now_ns();
  std::int64_t next_look = start + std::chrono::nanoseconds(kLookPause).count();
  for (;;) {
    const CUresult result = driver_.cuStreamQuery(stream);
    if (result != CUDA_ERROR_NOT_READY) {
      driver_.check(result, "cuStreamQuery");
      return;
    }
    const std::int64_t now = base::now_ns();
    if (now >= next_look) {
      look();
      next_look = now + std::chrono::nanoseconds(kLookPause).count();
    }
    if (now - start < kEagerNs) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

void DeviceContext::check_no_capture() const {
  // A call that a capture forbids, as it does waiting, and that does not wait.
  const Current current(*this);
  CUevent event = nullptr;
  driver_.check(driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  const CUresult result = driver_.cuEventQuery(event);
  (void)driver_.cuEventDestroy(event);
  driver_.check(result, "cuEventQuery");
}

void DeviceContext::free(std::byte* data) const noexcept {
  // Without the context its memory is gone as well.
  if (driver_.is_forked_child() || driver_.cuCtxPushCurrent(context_) != CUDA_SUCCESS) return;
  (void)driver_.cuMemFree(address_of(data));
  CUcontext popped = nullptr;
  (void)driver_.cuCtxPopCurrent(&popped);
}

bool DeviceContext::is_device_memory(const std::byte* data) const {
  const Current current(*this);
  unsigned int type = 0;
  const CUresult result =
      driver_.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(data));
  if (result == CUDA_ERROR_INVALID_VALUE) return false;  // memory that CUDA does not know
  driver_.check(result, "cuPointerGetAttribute");
  return type == CU_MEMORYTYPE_DEVICE;
}

bool DeviceContext::owns(CUstream stream) const {
  const Current current(*this);  // the default streams are the current context's
  CUcontext context = nullptr;
  const CUresult result = driver_.cuStreamGetCtx(stream, &context);
  if (result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_CONTEXT) return false;
  driver_.check(result, "cuStreamGetCtx");
  return context == context_;
}

}  // namespace fanfold::gpu
