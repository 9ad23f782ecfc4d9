// SPDX-License-Identifier: Apache-2.0
#include "fanfold/allocator.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "fanfold/error.h"
#include "gpu_memory.h"
#include "simulator.h"

namespace fanfold::python {
namespace {

const char* name_of_device(DeviceType device) { return device == DeviceType::kCpu ? "CPU" : "GPU"; }

/// The device that tensors over the memory say they are on.
DeviceType device_of_tensors(const AllocatorMemory& memory) {
  return memory.is_host_accessible ? DeviceType::kCpu : memory.device;
}

std::vector<OwnBuffer> to_buffers(Arguments& args, nb::handle values, DeviceType device) {
  TensorType type;
  std::vector<OwnBuffer> buffers;
  for (const TensorView& view : args.views(values, "buffers", type)) {
    if (view.device != device || !view.is_contiguous()) {
      throw InvalidArgument(std::string("buffers: expected contiguous ") + name_of_device(device) +
                            " tensors, got " + view.describe());
    }
    buffers.push_back(
        {static_cast<std::byte*>(view.data), view.num_elements() * size_of(view.dtype)});
  }
  // Only now: views() takes read-only tensors, too.
  for (nb::handle value : values) args.output(value, "buffers");
  return buffers;
}

void make_allocator(Allocator* self, Communicator& communicator, nb::handle buffers,
                    nb::handle device, const std::vector<std::string>& kinds,
                    std::optional<double> timeout_s) {
  const std::optional<GpuMemoryConfig> gpu = to_gpu_memory(device, kinds);
  const auto timeout = to_timeout(timeout_s);
  std::optional<std::vector<OwnBuffer>> own;
  Arguments args;
  if (!buffers.is_none()) {
    // The simulated device's tensors are the host's to everybody else.
    const bool on_host = !gpu || is_simulated();
    own = to_buffers(args, buffers, on_host ? DeviceType::kCpu : DeviceType::kGpu);
  }
  const nb::gil_scoped_release released;
  if (gpu && own) {
    new (self) Allocator(communicator, *gpu, *own, timeout);
  } else if (gpu) {
    new (self) Allocator(communicator, *gpu, timeout);
  } else if (own) {
    new (self) Allocator(communicator, *own, timeout);
  } else {
    new (self) Allocator(communicator);
  }
}

/// A Python object that any thread may let go of.
std::shared_ptr<nb::object> keep(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* kept) {
            if (!Py_IsInitialized()) return;  // a leak, but the process ends
            const nb::gil_scoped_acquire gil;
            delete kept;
          }};
}

std::shared_ptr<std::byte> call_source(const nb::object& source, std::int64_t num_bytes,
                                       DeviceType device) {
  const nb::gil_scoped_acquire gil;
  nb::object tensor;
  try {
    tensor = source(num_bytes);
  } catch (const nb::python_error& error) {
    if (error.matches(PyExc_MemoryError)) throw std::bad_alloc();
    throw;
  }
  Arguments args;
  const TensorView view = args.output(tensor, "private memory");
  const std::int64_t given = view.num_elements() * size_of(view.dtype);
  if (view.device != device || !view.is_contiguous() || given < num_bytes) {
    throw InvalidArgument(std::string("private memory: expected a contiguous ") +
                          name_of_device(device) + " tensor of " + std::to_string(num_bytes) +
                          " bytes or more, got " + view.describe());
  }
  return {keep(std::move(tensor)), static_cast<std::byte*>(view.data)};
}

void set_private_memory(Allocator& self, nb::object source) {
  if (source.is_none()) {
    self.set_private_memory({});
    return;
  }
  const DeviceType device = device_of_tensors(self.memory());
  self.set_private_memory([kept = keep(std::move(source)), device](std::int64_t num_bytes) {
    return call_source(*kept, num_bytes, device);
  });
}

}  // namespace

void bind_allocator(nb::module_& m) {
  using namespace nanobind::literals;
  nb::class_<AllocatorStats>(m, "AllocatorStats",
                             "What an allocator holds, in bytes of this rank's own windows.")
      .def_ro("reserved", &AllocatorStats::reserved,
              "Held from the system or the caller: in use and cached.")
      .def_ro("in_use", &AllocatorStats::in_use)
      .def_ro("peak_in_use", &AllocatorStats::peak_in_use)
      .def_ro("num_blocks", &AllocatorStats::num_blocks)
      .def_ro("num_reused", &AllocatorStats::num_reused, "Allocations served from the cache.");

  nb::class_<SymmetricMemory>(m, "SymmetricMemory",
                              "A block of symmetric memory: one window per rank, all mapped here.")
      .def_prop_ro("num_bytes", &SymmetricMemory::bytes, "Usable bytes per rank.")
      .def_prop_ro("num_ranks", &SymmetricMemory::num_ranks)
      .def(
          "view",
          [](const SymmetricMemory& self, int rank) {
            if (rank < 0 || rank >= self.num_ranks()) throw nb::index_error("rank out of range");
            if (!self.memory().is_host_accessible) {
              throw InvalidArgument("view: expected host memory, got a GPU's; use tensor()");
            }
            const TensorView view(static_cast<void*>(self.data(rank)), DType::kUInt8,
                                  {self.bytes()});
            return make_tensor(view, Framework::kNumpy, self.block());
          },
          "rank"_a, nb::sig("def view(self, rank: int) -> typing.Any"),
          "The window of `rank`, in host memory, as a NumPy uint8 array; keeps the memory mapped.")
      .def("tensor", &tensor_of, "rank"_a, "dtype"_a, "shape"_a, nb::kw_only(),
           "offset_bytes"_a = 0,
           nb::sig("def tensor(self, rank: int, dtype: typing.Any, shape: typing.Sequence[int], *, "
                   "offset_bytes: int = 0) -> typing.Any"),
           R"doc(A contiguous tensor over the window of `rank`, without a copy.

Keeps the memory mapped while it lives; GPU memory is unmapped once the device is idle. Work that
was enqueued on it must have ended before the block is freed.

Args:
    rank: whose window.
    dtype: decides what comes back: a torch dtype a torch tensor, a NumPy dtype an array (host
        memory only), a name such as "bfloat16" or "float8_e4m3fn" an object with ``__dlpack__``.
    shape: of the tensor.
    offset_bytes: where it begins in the window; a multiple of the element's size.

Raises:
    InvalidArgument: it does not fit into the window, or NumPy and GPU memory.)doc")
      .def_prop_ro("memory", &SymmetricMemory::memory, "Where it lies.");

  nb::class_<Allocator>(m, "Allocator",
                        "Allocates, caches and reuses symmetric memory of one group. Calls marked\n"
                        "collective are made by all ranks in the same order.")
      .def("__init__", &make_allocator, "communicator"_a, "buffers"_a = nb::none(), nb::kw_only(),
           "device"_a = "cpu", "kinds"_a = std::vector<std::string>(), "timeout_s"_a = nb::none(),
           nb::keep_alive<1, 3>(),
           nb::sig("def __init__(self, communicator: Communicator, buffers: "
                   "typing.Sequence[typing.Any] | None = None, *, device: typing.Any = 'cpu', "
                   "kinds: typing.Sequence[str] = (), timeout_s: float | None = None) -> None"),
           R"doc(Memory of the system, of a GPU, or of the caller.

Args:
    communicator: the group; its state is shared, it need not be kept.
    buffers: None, or one writable tensor per rank on the kind of device asked for, each equal in
        size: all symmetric memory comes out of these. Tensor r becomes the windows of rank r; every
        rank gives all of them as it sees them: threads the same tensors, processes the same shared
        memory as mapped there. Keep them until all that was made with the allocator is closed on
        every rank and no tensor over it is held. Then creation is collective.
    device: "cpu" for host memory; "cuda:1", a torch.device, or "cuda" (torch's current device, else
        0) for memory of this rank's GPU, which makes creation collective.
    kinds: how ranks may come to each other's GPU memory, in the order in which to try: "fabric"
        (an NVLink domain), "file_descriptor" (one machine), "same_process" (threads). Empty: all of
        these. Or alone "nccl": memory of NCCL 2.29 or later, on a communicator of from_nccl.
    timeout_s: deadline of a collective creation in seconds.

Raises:
    InvalidArgument: not one buffer per rank, too small, or (on every rank) a rank gives other sizes
        or kinds or does not see another's memory.
    Unsupported: no CUDA driver, no such device, or built without the GPU backend (on every
        rank).)doc")
      .def(
          "allocate",
          [](Allocator& self, std::int64_t num_bytes, std::optional<double> timeout_s) {
            const nb::gil_scoped_release released;
            return self.allocate(num_bytes, 0, to_timeout(timeout_s));
          },
          "num_bytes"_a, nb::kw_only(), "timeout_s"_a = nb::none(),
          "A block of at least num_bytes per rank; collective.\n\n"
          "Raises:\n    CapacityExceeded: the caller's buffers have no such room (on every rank).\n"
          "    Unsupported: GPU memory, and no kind of handle works; says why for each.\n"
          "    CudaFailure: the CUDA driver failed.\n    MemoryError: no memory (on every rank).")
      .def("free", &Allocator::free, "memory"_a,
           "Returns a block to the cache; every rank frees the same blocks in the same order.")
      .def("trim", &Allocator::trim, "Gives all cached blocks back to the system; every rank.")
      .def_prop_ro("stats", &Allocator::stats)
      .def_prop_ro("memory", &Allocator::memory, "What memory it gives.")
      .def("set_private_memory", &set_private_memory, "source"_a.none(),
           nb::sig("def set_private_memory(self, source: "
                   "typing.Callable[[int], typing.Any] | None) -> None"),
           R"doc(Where the private memory of what is made with this allocator comes from.

Args:
    source: called with a number of bytes when an AllToAll is made, on its thread; returns a
        writable contiguous tensor, on the memory's kind of device, of as many bytes or more, which begins on a multiple of 128
        bytes and is kept until the memory is given back. None: the system.

Raises, from the AllToAll and on every rank:
    MemoryError: `source` raised one.
    InvalidArgument: what `source` returned does not fit.)doc");
}

}  // namespace fanfold::python
