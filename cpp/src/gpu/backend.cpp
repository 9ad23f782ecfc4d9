// SPDX-License-Identifier: Apache-2.0
#include "gpu/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

#include "base/format.h"
#include "fanfold/error.h"
#include "gpu/address.h"
#include "gpu/device_context.h"
#include "gpu/kernels/kernels.h"

namespace fanfold::gpu {

namespace {

const KernelEntry* listed_last = nullptr;  // before anything is listed

}  // namespace

KernelEntry::KernelEntry(const void* function_) noexcept
    : function(function_), next(std::exchange(listed_last, this)) {}

const KernelEntry* first_kernel() noexcept { return listed_last; }

namespace {

// Every rank's process or thread may have a device of its own that reaches the memory.
constexpr unsigned kHostAllocFlags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
constexpr unsigned kHostRegisterFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;

constexpr int kBlocksPerMultiprocessor = 2;

/// A context and what it was asked to give back, which may outlive the backend.
using SharedContext = std::shared_ptr<const DeviceContext>;

template <class Free>
void give_back(const DeviceContext& context, Free&& free) noexcept {
  // A forked child has no driver.
  if (context.driver().is_forked_child()) return;
  try {
    const DeviceContext::Current current(context);
    (void)free(context.driver());
  } catch (...) {  // NOLINT(bugprone-empty-catch): without the context its memory is gone as well
  }
}

/// While it lives, calls of this thread are none that a capture of another thread's forbids: right
/// for events that are never captured.
class BesideCaptures {
 public:
  BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ =
      cudaStreamCaptureModeRelaxed;  // to use next: this, then what it was
};

class Backend final : public exec::DeviceBackend {
 public:
  explicit Backend(int device)
      : context_(std::make_shared<const DeviceContext>(device)),
        limits_{kBlocksPerMultiprocessor *
                    context_->attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                early_start(context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                            load_kernels(), driver_version())} {}

  int device() const noexcept override { return context_->device(); }

  std::shared_ptr<std::byte> allocate(std::int64_t bytes) override {
    const std::int64_t size = std::max<std::int64_t>(bytes, 1);
    std::shared_ptr<std::byte> memory(
        context_->allocate(size), [context = context_](std::byte* data) { context->free(data); });
    context_->zero(memory.get(), size);
    return memory;
  }

  exec::PinnedMemory allocate_pinned(std::int64_t bytes) override {
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
    const DeviceContext::Current current(*context_);
    void* host = nullptr;
    driver().check(driver().cuMemHostAlloc(&host, size, kHostAllocFlags),
                   base::str("cuMemHostAlloc of ", bytes, " bytes"));
    std::shared_ptr<std::byte> memory(
        static_cast<std::byte*>(host), [context = context_](std::byte* data) {
          give_back(*context, [&](const Driver& driver) { return driver.cuMemFreeHost(data); });
        });
    std::memset(host, 0, size);
    return reached(std::move(memory));
  }

  exec::PinnedMemory pin(std::byte* host, std::int64_t bytes) override {
    const DeviceContext::Current current(*context_);
    driver().check(
        driver().cuMemHostRegister(host, static_cast<std::size_t>(bytes), kHostRegisterFlags),
        base::str("cuMemHostRegister of ", bytes, " bytes"));
    return reached({host, [context = context_](std::byte* data) {
                      give_back(*context, [&](const Driver& driver) {
                        return driver.cuMemHostUnregister(data);
                      });
                    }});
  }

  void upload(std::byte* device, const void* host, std::int64_t bytes) override {
    if (bytes > 0) context_->upload(device, host, bytes);
  }

  void download(void* host, const std::byte* device, std::int64_t bytes) override {
    if (bytes > 0) context_->download(host, device, bytes);
  }

  std::uint64_t capture_of(exec::Stream stream) const override {
    if (!context_->owns(handle_of(stream))) {
      throw InvalidArgument(
          base::str("stream: expected a CUDA stream of device ", device(), ", got another's"));
    }
    const DeviceContext::Current current(*context_);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t id = 0;
    driver().check(
        driver().cuStreamGetCaptureInfo(handle_of(stream), &status, &id, nullptr, nullptr, nullptr),
        "cuStreamGetCaptureInfo");
    if (status == CU_STREAM_CAPTURE_STATUS_INVALIDATED) {
      throw InvalidState("stream: its graph capture is invalid; end it, and capture anew");
    }
    return status == CU_STREAM_CAPTURE_STATUS_NONE ? 0 : id + 1;
  }

  void check_no_capture() override { context_->check_no_capture(); }

  void order(exec::Stream before, exec::Stream after) override {
    if (before == after) return;
    const DeviceContext::Current current(*context_);
    CUevent event = nullptr;
    driver().check(driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    CUresult result = driver().cuEventRecord(event, handle_of(before));
    if (result == CUDA_SUCCESS) {
      result = driver().cuStreamWaitEvent(handle_of(after), event, CU_EVENT_WAIT_DEFAULT);
    }
    (void)driver().cuEventDestroy(event);  // the streams keep what they need of it
    driver().check(result, "cuStreamWaitEvent");
  }

  void wait(exec::Stream stream, base::FunctionRef<void()> look) override {
    context_->wait(handle_of(stream), look);
  }

  void wait_idle(base::FunctionRef<void()> look) override { context_->wait_idle(look); }

  void copy(std::byte* to, const std::byte* from, std::int64_t bytes,
            exec::Stream stream) override {
    if (bytes <= 0) return;
    const DeviceContext::Current current(*context_);
    driver().check(driver().cuMemcpyDtoDAsync(address_of(to), address_of(from),
                                              static_cast<std::size_t>(bytes), handle_of(stream)),
                   base::str("cuMemcpyDtoDAsync of ", bytes, " bytes"));
  }

  void fill(std::byte* to, int byte, std::int64_t bytes, exec::Stream stream) override {
    if (bytes <= 0) return;
    const DeviceContext::Current current(*context_);
    driver().check(driver().cuMemsetD8Async(address_of(to), static_cast<unsigned char>(byte),
                                            static_cast<std::size_t>(bytes), handle_of(stream)),
                   base::str("cuMemsetD8Async of ", bytes, " bytes"));
  }

  std::shared_ptr<void> make_event() override {
    const DeviceContext::Current current(*context_);
    cudaEvent_t event = nullptr;
    check_call(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return {event, [context = context_](void* made) {
              give_back(*context, [&](const Driver&) { return cudaEventDestroy(event_of(made)); });
            }};
  }
  void record_event(void* event, exec::Stream stream) override {
    const DeviceContext::Current current(*context_);
    check_call(cudaEventRecord(event_of(event), handle_of(stream)), "cudaEventRecord");
  }
  void wait_event(void* event) override {
    const DeviceContext::Current current(*context_);
    const BesideCaptures beside;
    check_call(cudaEventSynchronize(event_of(event)), "cudaEventSynchronize");
  }
  bool has_passed(void* event) override {
    const DeviceContext::Current current(*context_);
    const BesideCaptures beside;
    const cudaError_t state = cudaEventQuery(event_of(event));
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();  // the caller's next look finds none of ours
      return false;
    }
    check_call(state, "cudaEventQuery");
    return true;
  }

  void signal(const exec::DeviceSignalParams& params, exec::Stream stream) override {
    launch(gpu::signal, params, stream, "launch of signal");
  }
  void dispatch_send(const exec::DeviceDispatchSendParams& params, exec::Stream stream) override {
    launch(gpu::dispatch_send, params, stream, "launch of dispatch_send");
  }
  void compact_rows(const exec::DeviceCompactParams& params, exec::Stream stream) override {
    launch(gpu::compact_rows, params, stream, "launch of compact_rows");
  }
  void arrange(const exec::DeviceArrangeParams& params, exec::Stream stream) override {
    launch(gpu::arrange, params, stream, "launch of arrange");
  }
  void describe_rows(const exec::DeviceDescribeParams& params, exec::Stream stream) override {
    launch(gpu::describe_rows, params, stream, "launch of describe_rows");
  }
  void combine_send(const exec::DeviceCombineSendParams& params, exec::Stream stream) override {
    launch(gpu::combine_send, params, stream, "launch of combine_send");
  }
  void sum_rows(const exec::DeviceSumParams& params, exec::Stream stream) override {
    launch(gpu::sum_rows, params, stream, "launch of sum_rows");
  }
  void pack_rows(const exec::DevicePackParams& params, exec::Stream stream) override {
    launch(gpu::pack_rows, params, stream, "launch of pack_rows");
  }
  void sanitize(const exec::DeviceSanitizeParams& params, exec::Stream stream) override {
    launch(gpu::sanitize, params, stream, "launch of sanitize");
  }

  void begin_step(const exec::DeviceBeginStepParams& params, exec::Stream stream) override {
    launch(gpu::begin_step, params, stream, "launch of begin_step");
  }
  void record_ids(const exec::DeviceRecordParams& params, exec::Stream stream) override {
    launch(gpu::record_ids, params, stream, "launch of record_ids");
  }
  void copy_snapshot(const exec::DeviceSnapshotParams& params, exec::Stream stream) override {
    launch(gpu::copy_snapshot, params, stream, "launch of copy_snapshot");
  }

  std::int64_t max_tiles(std::int64_t num_rows) const noexcept override {
    const std::int64_t full = (num_rows + exec::kTileRows - 1) / exec::kTileRows;
    return limits_.max_blocks + full;
  }

 private:
  const Driver& driver() const noexcept { return context_->driver(); }

  /// Loads all kernels and returns the oldest version of PTX that one was compiled for. To load one
  /// at its first launch may have to wait for kernels that wait for just that launch.
  int load_kernels() const {
    const DeviceContext::Current current(*context_);
    int oldest = INT_MAX;
    for (const KernelEntry* each = first_kernel(); each != nullptr; each = each->next) {
      cudaFuncAttributes attributes{};
      check_call(cudaFuncGetAttributes(&attributes, each->function), "cudaFuncGetAttributes");
      oldest = std::min(oldest, attributes.ptxVersion);
    }
    return oldest;
  }

  static int driver_version() noexcept {
    int version = 0;  // where it cannot be told, an old one
    (void)cudaDriverGetVersion(&version);
    return version;
  }

  // The runtime's stream and the driver's are one type.
  static CUstream handle_of(exec::Stream stream) noexcept { return static_cast<CUstream>(stream); }
  static cudaEvent_t event_of(void* event) noexcept { return static_cast<cudaEvent_t>(event); }

  /// Page-locked memory with the device's address of it.
  exec::PinnedMemory reached(std::shared_ptr<std::byte> host) const {
    CUdeviceptr address = 0;
    driver().check(driver().cuMemHostGetDevicePointer(&address, host.get(), 0),
                   "cuMemHostGetDevicePointer");
    return {std::move(host), data_at(address)};
  }

  template <class Params>
  void launch(cudaError_t (*kernel)(const Params&, LaunchLimits, cudaStream_t),
              const Params& params, exec::Stream stream, const char* name) {
    const DeviceContext::Current current(*context_);
    check_call(kernel(params, limits_, handle_of(stream)), name);
  }

  /// As Driver::check: the runtime numbers its errors as the driver does.
  static void check_call(cudaError_t error, const char* call) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();  // the caller's next look finds none of ours
    const std::string message =
        base::str(call, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
    if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message);
    if (error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread) {
      throw InvalidState(message + "; expected no stream capture under way");
    }
    throw CudaFailure(message, static_cast<int>(error));
  }

  SharedContext context_;
  LaunchLimits limits_;
};

}  // namespace

std::unique_ptr<exec::DeviceBackend> make_backend(int device) {
  return std::make_unique<Backend>(device);
}

}  // namespace fanfold::gpu
