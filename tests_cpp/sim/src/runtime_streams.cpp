// SPDX-License-Identifier: Apache-2.0
// Runtime API: streams, events, host functions and launches.

#include <algorithm>

#include "capture.h"
#include "cudasim/operations.h"
#include "runtime.h"

namespace cudasim {
namespace {

/// Steps that a query lets the devices make.
constexpr int kStepsPerQuery = 64;

Stream* per_thread_stream(Device& device) {
  auto& stream = device.per_thread[std::this_thread::get_id()];
  if (stream == nullptr) {
    stream = std::make_unique<Stream>();
    stream->device = &device;
  }
  return stream.get();
}

Event* find_event(cudaEvent_t handle) {
  const auto found = engine.events.find(handle);
  return found == engine.events.end() ? nullptr : found->second.get();
}

cudaError_t create_stream(cudaStream_t* handle, unsigned flags, int priority) {
  if ((flags & ~unsigned{cudaStreamNonBlocking}) != 0) return cudaErrorInvalidValue;
  auto stream = std::make_unique<Stream>();
  stream->device = &this_device();
  stream->flags = flags;
  stream->is_blocking = (flags & cudaStreamNonBlocking) == 0;
  stream->priority = priority;
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  this_device().streams.push_back(std::move(stream));
  ++engine.stats.streams;
  return cudaSuccess;
}

cudaError_t create_event(cudaEvent_t* handle, unsigned flags) {
  auto event = std::make_shared<Event>();
  event->device = &this_device();
  event->has_timing = (flags & cudaEventDisableTiming) == 0;
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  engine.events[*handle] = std::move(event);
  ++engine.stats.events;
  return cudaSuccess;
}

cudaError_t record(Event& event, Stream& stream) {
  if (event.device != stream.device) return cudaErrorInvalidResourceHandle;
  if (stream.capture != nullptr) {
    if (stream.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
    capture_record(stream, event);
    return cudaSuccess;
  }
  if (const cudaError_t e = refuse_legacy_use(stream)) return e;
  if (stream.device->sticky != cudaSuccess) return stream.device->sticky;
  event.capture.reset();
  event.task = append(stream, {});
  return cudaSuccess;
}

cudaError_t wait_for(Stream& stream, const Event& event) {
  if (stream.capture != nullptr || event.capture != nullptr) return capture_wait(stream, event);
  if (const cudaError_t e = refuse_legacy_use(stream)) return e;
  if (stream.device->sticky != cudaSuccess) return stream.device->sticky;
  if (event.task != nullptr) append(stream, {}, {event.task});
  return cudaSuccess;
}

cudaError_t check_launch(const KernelLaunch& launch) {
  const dim3 grid = launch.grid;
  const dim3 block = launch.block;
  const std::size_t num_threads = std::size_t{block.x} * block.y * block.z;
  if (num_threads == 0 || num_threads > kMaxBlockThreads || block.z > 64) {
    return cudaErrorInvalidConfiguration;
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) {
    return cudaErrorInvalidConfiguration;
  }
  std::size_t limit = kMaxSharedBytes;
  if (launch.function != nullptr) {
    const auto set = engine.shared_limits.find(launch.function);
    limit = std::max(kDefaultSharedBytes,
                     set == engine.shared_limits.end() ? std::size_t{0} : set->second);
  }
  return launch.dynamic_shared_bytes > limit ? cudaErrorInvalidValue : cudaSuccess;
}

template <class F>
cudaError_t query(const Device& device, F&& is_done) {
  for (int i = 0; i < kStepsPerQuery && !is_done(); ++i) step();
  if (device.sticky != cudaSuccess) return device.sticky;
  return is_done() ? cudaSuccess : cudaErrorNotReady;
}

}  // namespace

Stream* find_stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return &this_device().legacy;
  if (handle == cudaStreamPerThread) return per_thread_stream(this_device());
  for (const auto& device : engine.devices) {
    for (const auto& stream : device->streams) {
      if (reinterpret_cast<cudaStream_t>(stream.get()) == handle) return stream.get();
    }
  }
  return nullptr;
}

cudaError_t submit(cudaStream_t handle, Operation operation) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t e = refuse_legacy_use(*stream)) return e;
  if (stream->device->sticky != cudaSuccess) return stream->device->sticky;
  if (stream->capture != nullptr) return capture_operation(*stream, std::move(operation));
  append(*stream, std::move(operation));
  return cudaSuccess;
}

cudaError_t synchronize(Stream& stream) {
  const TaskPointer tail = stream.tail;
  if (tail == nullptr) return stream.device->sticky;
  run_until([&] { return tail->is_done(); });
  host_joins(tail);
  return stream.device->sticky;
}

cudaError_t synchronize_device(int index) {
  Device& device = *engine.devices.at(static_cast<std::size_t>(index));
  run_until([&] { return device.num_unfinished == 0; });
  host_joins(device);
  return device.sticky;
}

cudaError_t enqueue_kernel(const KernelLaunch& launch, std::function<void()> body) {
  CUDASIM_API("launch")
  if (const cudaError_t e = check_launch(launch)) return with_last_error(e);
  const Stream* const stream = find_stream(launch.stream);
  if (stream != nullptr && stream->device != &this_device()) {
    report("launch", std::string("kernel ") + launch.name + " goes to a stream of device " +
                         std::to_string(stream->device->id) + ", but device " +
                         std::to_string(current_device()) + " is current");
    return with_last_error(cudaErrorInvalidResourceHandle);
  }
  Operation operation;
  operation.kind = Operation::Kind::kKernel;
  operation.name = launch.name;
  operation.grid = launch.grid;
  operation.block = launch.block;
  operation.dynamic_shared_bytes = launch.dynamic_shared_bytes;
  operation.programmatic_dependent = launch.programmatic_dependent;
  operation.body = std::move(body);
  return with_last_error(submit(launch.stream, std::move(operation)));
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  CUDASIM_DEVICE_API("cudaStreamCreateWithPriority")
  return with_last_error(create_stream(stream, flags, priority));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  CUDASIM_DEVICE_API("cudaStreamCreateWithFlags")
  return with_last_error(create_stream(stream, flags, 0));
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  CUDASIM_DEVICE_API("cudaStreamCreate")
  return with_last_error(create_stream(stream, cudaStreamDefault, 0));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  CUDASIM_API("cudaDeviceGetStreamPriorityRange")
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// Does not wait: what is enqueued goes on.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  CUDASIM_API("cudaStreamDestroy")
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || stream->is_legacy) {
    return with_last_error(cudaErrorInvalidResourceHandle);
  }
  auto& streams = stream->device->streams;
  const auto it = std::find_if(streams.begin(), streams.end(),
                               [&](const auto& other) { return other.get() == stream; });
  if (it == streams.end()) return with_last_error(cudaErrorInvalidResourceHandle);
  if (stream->tail != nullptr) stream->device->orphans.push_back(stream->tail);
  if (stream->capture != nullptr) {
    stream->capture->is_invalid = true;
    stream->capture->streams.erase(stream);
  }
  streams.erase(it);
  --engine.stats.streams;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CUDASIM_API("cudaStreamSynchronize")
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return with_last_error(cudaErrorInvalidResourceHandle);
  if (const cudaError_t e = refuse_if_capturing(*stream)) return with_last_error(e);
  return with_last_error(synchronize(*stream));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CUDASIM_API("cudaStreamQuery")
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return with_last_error(cudaErrorInvalidResourceHandle);
  if (const cudaError_t e = refuse_if_capturing(*stream)) return with_last_error(e);
  const TaskPointer tail = stream->tail;
  const cudaError_t error =
      query(*stream->device, [&] { return tail == nullptr || tail->is_done(); });
  if (error == cudaSuccess) host_joins(tail);
  return with_last_error(error);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  CUDASIM_API("cudaStreamWaitEvent")
  Stream* const stream = find_stream(handle);
  const Event* const event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) {
    return with_last_error(cudaErrorInvalidResourceHandle);
  }
  return with_last_error(wait_for(*stream, *event));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  CUDASIM_API("cudaLaunchHostFunc")
  if (function == nullptr) return with_last_error(cudaErrorInvalidValue);
  Operation operation;
  operation.kind = Operation::Kind::kHost;
  operation.body = [function, argument] { function(argument); };
  return with_last_error(submit(stream, std::move(operation)));
}

// --- Events ---------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  CUDASIM_DEVICE_API("cudaEventCreateWithFlags")
  return with_last_error(create_event(event, flags));
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  CUDASIM_DEVICE_API("cudaEventCreate")
  return with_last_error(create_event(event, cudaEventDefault));
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  CUDASIM_API("cudaEventDestroy")
  if (engine.events.erase(handle) == 0) return with_last_error(cudaErrorInvalidResourceHandle);
  --engine.stats.events;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t handle) {
  CUDASIM_API("cudaEventRecord")
  Stream* const stream = find_stream(handle);
  Event* const event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) {
    return with_last_error(cudaErrorInvalidResourceHandle);
  }
  return with_last_error(record(*event, *stream));
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  CUDASIM_API("cudaEventQuery")
  const Event* const event = find_event(handle);
  if (event == nullptr) return with_last_error(cudaErrorInvalidResourceHandle);
  if (const cudaError_t e = refuse_if_captured(*event)) return with_last_error(e);
  if (const int e = unsafe_during_capture()) return with_last_error(static_cast<cudaError_t>(e));
  const TaskPointer task = event->task;
  const cudaError_t error =
      query(*event->device, [&] { return task == nullptr || task->is_done(); });
  if (error == cudaSuccess) host_joins(task);
  return with_last_error(error);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  CUDASIM_API("cudaEventSynchronize")
  const Event* const event = find_event(handle);
  if (event == nullptr) return with_last_error(cudaErrorInvalidResourceHandle);
  if (const cudaError_t e = refuse_if_captured(*event)) return with_last_error(e);
  if (const int e = unsafe_during_capture()) return with_last_error(static_cast<cudaError_t>(e));
  const TaskPointer task = event->task;
  if (task == nullptr) return cudaSuccess;
  Device& device = *event->device;
  run_until([&] { return task->is_done(); });
  host_joins(task);
  return with_last_error(device.sticky);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  CUDASIM_API("cudaEventElapsedTime")
  const Event* const first = find_event(begin);
  const Event* const last = find_event(end);
  if (first == nullptr || last == nullptr || first->task == nullptr || last->task == nullptr ||
      !first->has_timing || !last->has_timing || first->device != last->device) {
    return with_last_error(cudaErrorInvalidResourceHandle);
  }
  if (!first->is_done() || !last->is_done()) return cudaErrorNotReady;
  const auto difference = static_cast<std::int64_t>(last->task->end_ns - first->task->end_ns);
  *milliseconds = static_cast<float>(static_cast<double>(difference) * 1e-6);
  return cudaSuccess;
}

}  // extern "C"
