// SPDX-License-Identifier: Apache-2.0
#include "simulator.h"

#include <cuda_runtime_api.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cudasim/control.h"
#include "fanfold/error.h"

namespace fanfold::python {
namespace {

namespace nb = nanobind;
using namespace nanobind::literals;
using nogil = nb::gil_scoped_release;

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // it must not show in a later call
  throw CudaFailure(std::string(what) + ": " + cudaGetErrorString(error), static_cast<int>(error));
}

/// Makes a device the current one of this thread while it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    require(cudaGetDevice(&before_), "cudaGetDevice");
    require(cudaSetDevice(device), "cudaSetDevice");
  }
  ~CurrentDevice() { static_cast<void>(cudaSetDevice(before_)); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

class Stream {
 public:
  explicit Stream(int device) : device_(device) {
    const CurrentDevice current(device);
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const noexcept { return stream_; }
  std::uintptr_t address() const noexcept { return reinterpret_cast<std::uintptr_t>(stream_); }
  int device() const noexcept { return device_; }
  void synchronize() const { require(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  bool is_capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    require(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  /// `function` runs in stream order on whichever thread waits. It is borrowed.
  void call(nb::handle function) const {
    const auto run = [](void* borrowed) {
      const nb::gil_scoped_acquire held;
      try {
        nb::handle(static_cast<PyObject*>(borrowed))();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a function that a stream called");
      }
    };
    require(cudaLaunchHostFunc(stream_, run, function.ptr()), "cudaLaunchHostFunc");
  }
  void touch(const nb::ndarray<>& array) const {
    void* const memory = array.data();
    require(cudaMemcpyAsync(memory, memory, array.nbytes(), cudaMemcpyDeviceToDevice, stream_),
            "cudaMemcpyAsync");
  }

 private:
  cudaStream_t stream_ = nullptr;
  int device_;
};

/// Work that was captured.
class Graph {
 public:
  explicit Graph(cudaGraph_t graph) : graph_(graph) {
    const cudaError_t error = cudaGraphInstantiate(&instance_, graph_, 0);
    if (error != cudaSuccess) static_cast<void>(cudaGraphDestroy(graph_));
    require(error, "cudaGraphInstantiate");
  }
  ~Graph() {
    static_cast<void>(cudaGraphExecDestroy(instance_));
    static_cast<void>(cudaGraphDestroy(graph_));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Stream& stream) const {
    require(cudaGraphLaunch(instance_, stream.get()), "cudaGraphLaunch");
  }
  std::size_t num_nodes() const {
    std::size_t count = 0;
    require(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    return count;
  }

 private:
  cudaGraph_t graph_;
  cudaGraphExec_t instance_ = nullptr;
};

/// Device memory for arrays. Given back blocks wait here for the next array of their size, since
/// cudaFree waits for the device, on which a peer's kernel may wait for this thread.
class Pool {
 public:
  void* take(int device, std::size_t bytes) {
    void* address = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<void*>& known = free_[{device, bytes}];
      if (!known.empty()) {
        address = known.back();
        known.pop_back();
      }
    }
    const CurrentDevice current(device);
    if (address == nullptr) require(cudaMalloc(&address, bytes), "cudaMalloc");
    return address;
  }

  void give_back(int device, std::size_t bytes, void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[{device, bytes}].push_back(address);
  }

 private:
  std::mutex mutex_;  // guards free_
  std::map<std::pair<int, std::size_t>, std::vector<void*>> free_;
};

nb::object empty(const std::shared_ptr<Pool>& pool, std::int64_t num_bytes, int device) {
  if (num_bytes < 0) throw InvalidArgument("num_bytes: expected 0 or more");
  struct Block {
    std::shared_ptr<Pool> pool;
    int device;
    std::size_t bytes;
    void* address;
  };
  const auto bytes = static_cast<std::size_t>(num_bytes > 0 ? num_bytes : 1);
  auto block = std::make_unique<Block>(Block{pool, device, bytes, nullptr});
  {
    const nogil released;
    block->address = pool->take(device, bytes);
  }
  std::byte* const address = static_cast<std::byte*>(block->address);
  const nb::capsule owner(block.release(), [](void* kept) noexcept {
    auto* const mine = static_cast<Block*>(kept);
    mine->pool->give_back(mine->device, mine->bytes, mine->address);
    delete mine;
  });
  return nb::cast(
      nb::ndarray<nb::numpy, std::uint8_t>(address, {static_cast<std::size_t>(num_bytes)}, owner));
}

void write(const nb::ndarray<>& array, const nb::ndarray<nb::ro>& values) {
  const std::optional<int> device = simulated_device_of(array.data());
  if (!device || array.nbytes() != values.nbytes()) {
    throw InvalidArgument("write: expected device memory, and as many bytes of values");
  }
  const nogil released;
  const Stream stream(*device);  // the legacy one might wait for kernels
  require(cudaMemcpyAsync(array.data(), values.data(), values.nbytes(), cudaMemcpyHostToDevice,
                          stream.get()),
          "cudaMemcpyAsync");
  stream.synchronize();
}

void configure(int devices, std::uint64_t seed, int resident_blocks, bool shuffle_blocks,
               double preempt, double stale, int host_threads) {
  cudasim::Config config;
  config.devices = devices;
  config.seed = seed;
  config.resident_blocks = resident_blocks;
  config.shuffle_blocks = shuffle_blocks;
  config.preempt = preempt;
  config.stale = stale;
  config.host_threads = host_threads;
  // The library's own deadlines end waits before the simulator does.
  config.deadlock_ns = 600'000'000'000;
  config.wall_limit_s = 60;
  const nogil released;
  cudasim::configure(config);
}

std::vector<std::pair<std::string, std::string>> reports() {
  std::vector<std::pair<std::string, std::string>> all;
  for (const cudasim::Report& report : cudasim::reports()) {
    all.emplace_back(report.kind, report.text);
  }
  return all;
}

std::unique_ptr<Graph> end_capture(const Stream& stream) {
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
  return std::make_unique<Graph>(graph);
}

void bind_objects(nb::module_& m) {
  nb::class_<Stream>(m, "Stream",
                     "A non-blocking stream. Must outlive the rounds that were enqueued on it.")
      .def_prop_ro("cuda_stream", &Stream::address, "Address of the cudaStream_t.")
      .def_prop_ro("device", &Stream::device)
      .def_prop_ro("is_capturing", &Stream::is_capturing)
      .def("synchronize", &Stream::synchronize, nb::call_guard<nogil>(),
           "Waits for what is enqueued; runs it.")
      .def(
          "call", &Stream::call, "function"_a,
          "Enqueues a function without arguments, which may be captured. Keep it until it has run\n"
          "for the last time; let it not raise.")
      .def("touch", &Stream::touch, "array"_a,
           "Enqueues what the checks take for a copy to a contiguous array of device memory,\n"
           "which a called function has written.");
  nb::class_<Graph>(m, "Graph", "Work that was captured.")
      .def("launch", &Graph::launch, "stream"_a, nb::call_guard<nogil>())
      .def_prop_ro("num_nodes", &Graph::num_nodes);
}

}  // namespace

bool is_simulated() noexcept { return true; }

std::optional<int> simulated_device_of(const void* address) noexcept {
  cudaPointerAttributes attributes;
  const bool is_known = cudaPointerGetAttributes(&attributes, address) == cudaSuccess;
  if (!is_known || attributes.type != cudaMemoryTypeDevice) return std::nullopt;
  return attributes.device;
}

void bind_simulator(nb::module_& parent) {
  nb::module_ m = parent.def_submodule(
      "simulator", "Steers the simulated device and says what its checks found. For tests.");
  bind_objects(m);
  m.def("configure", &configure, nb::kw_only(), "devices"_a = 1, "seed"_a = 1,
        "resident_blocks"_a = 16, "shuffle_blocks"_a = false, "preempt"_a = 0.0, "stale"_a = 0.0,
        "host_threads"_a = 1,
        "Starts a run; errors and pending work are forgotten, memory and streams stay. See\n"
        "cudasim::Config. host_threads: threads that enqueue work, as ranks do.");
  m.def(
      "empty",
      [pool = std::make_shared<Pool>()](std::int64_t num_bytes, int device) {
        return empty(pool, num_bytes, device);
      },
      "num_bytes"_a, "device"_a = 0,
      nb::sig("def empty(num_bytes: int, device: int = 0) -> typing.Any"),
      "A uint8 NumPy array over device memory that nobody has written, as far as the checks know:\n"
      "they do not see what the host does to it, but for `write`. Its memory is used again when "
      "it\n"
      "is gone: drop it only when the work on it has ended.");
  m.def("write", &write, "array"_a, "values"_a,
        nb::sig("def write(array: typing.Any, values: typing.Any) -> None"),
        "Copies values into an array of device memory, both contiguous, by a copy that the checks\n"
        "see, and waits for it.");
  m.def(
      "device_of", [](const nb::ndarray<>& array) { return simulated_device_of(array.data()); },
      "array"_a, "The device in whose memory an array begins; None: no device's.");
  m.def(
      "stream", [](int device) { return std::make_unique<Stream>(device); }, "device"_a = 0,
      "A new stream.");
  m.def(
      "synchronize",
      [](int device) {
        const CurrentDevice current(device);
        require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      },
      "device"_a = 0, nb::call_guard<nogil>(), "Waits for all work of a device.");
  m.def("reports", &reports, "What was found since the last clear_reports: (kind, text) each.");
  m.def("clear_reports", &cudasim::clear_reports);
  m.def(
      "begin_capture",
      [](const Stream& stream) {
        require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                "cudaStreamBeginCapture");
      },
      "stream"_a, "What this thread enqueues on the stream is captured from here on.");
  m.def("end_capture", &end_capture, "stream"_a, "Ends the capture; a Graph.");
}

}  // namespace fanfold::python
