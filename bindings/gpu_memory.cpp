// SPDX-License-Identifier: Apache-2.0
#include "gpu_memory.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <utility>

#include "bind.h"
#include "convert.h"
#include "device.h"
#include "fanfold/error.h"
#include "fanfold/fabric_memory.h"

namespace fanfold::python {
namespace {

struct NamedKind {
  const char* name;
  HandleKind kind;
};
constexpr NamedKind kKinds[] = {{"fabric", HandleKind::kFabric},
                                {"file_descriptor", HandleKind::kFileDescriptor},
                                {"same_process", HandleKind::kSameProcess},
                                {"nccl", HandleKind::kNccl}};

HandleKind to_kind(const std::string& name) {
  for (const NamedKind& named : kKinds) {
    if (name == named.name) return named.kind;
  }
  throw InvalidArgument("kinds: expected fabric, file_descriptor, same_process or nccl, got '" +
                        name + "'");
}

std::optional<std::string> name_of_kind(const AllocatorMemory& memory) {
  for (const NamedKind& named : kKinds) {
    if (memory.kind == named.kind) return named.name;
  }
  return std::nullopt;
}

std::string device_of(const AllocatorMemory& memory) {
  return name_of_device(memory.device, memory.device_index);
}

}  // namespace

std::optional<GpuMemoryConfig> to_gpu_memory(nb::handle device,
                                             const std::vector<std::string>& kinds) {
  const std::optional<int> gpu = to_gpu(device);
  if (!gpu) {
    if (kinds.empty()) return std::nullopt;
    throw InvalidArgument("kinds: expected none for device 'cpu', got " +
                          std::to_string(kinds.size()));
  }
  GpuMemoryConfig config;
  config.device = *gpu;
  for (const std::string& kind : kinds) config.kinds.push_back(to_kind(kind));
  return config;
}

nb::object tensor_of(const SymmetricMemory& memory, int rank, nb::handle dtype,
                     const std::vector<std::int64_t>& shape, std::int64_t offset_bytes) {
  TensorView view = memory.tensor(rank, to_dtype(dtype), shape, offset_bytes);
  if (memory.memory().is_host_accessible) view.device = DeviceType::kCpu;
  const Framework framework = framework_of_dtype(dtype);
  if (framework == Framework::kNumpy && view.device != DeviceType::kCpu) {
    throw InvalidArgument(
        "dtype: expected a name or one of torch for GPU memory, got one of NumPy");
  }
  return make_tensor(view, framework, memory.block());
}

namespace {

void bind_fabric_memory(nb::module_& m) {
  using namespace nanobind::literals;
  nb::class_<FabricMemory>(m, "FabricMemory",
                           "A window of GPU memory per rank, all of them mapped for this rank's\n"
                           "device. For one allocation; an Allocator makes many and reuses them.")
      .def(
          "__init__",
          [](FabricMemory* self, Communicator& communicator, std::int64_t num_bytes,
             nb::handle device, const std::vector<std::string>& kinds,
             std::optional<double> timeout_s) {
            const std::optional<GpuMemoryConfig> gpu = to_gpu_memory(device, kinds);
            if (!gpu) throw InvalidArgument("device: expected cuda or cuda:N, got 'cpu'");
            const nb::gil_scoped_release released;
            new (self) FabricMemory(communicator, num_bytes, *gpu, to_timeout(timeout_s));
          },
          "communicator"_a, "num_bytes"_a, nb::kw_only(), "device"_a = "cuda",
          "kinds"_a = std::vector<std::string>(), "timeout_s"_a = nb::none(),
          nb::sig("def __init__(self, communicator: Communicator, num_bytes: int, *, "
                  "device: typing.Any = 'cuda', kinds: typing.Sequence[str] = (), "
                  "timeout_s: float | None = None) -> None"),
          R"doc(Zeroed windows of at least num_bytes; collective.

Args:
    communicator: the group; its state is shared, it need not be kept.
    num_bytes: per rank; rounded up to what the driver divides memory into.
    device: this rank's GPU: "cuda:1", a torch.device, or "cuda": torch's current one, else 0.
    kinds: as Allocator's.
    timeout_s: deadline in seconds.

Raises:
    Unsupported: no driver, no such device, built without the GPU backend, or no kind of handle
        works; says for each which step failed on which rank.
    CudaFailure: one kind was asked for, and the driver failed.
    InvalidArgument: num_bytes < 1, or the ranks differ.
    MemoryError: a device has no room. Whatever fails on one rank fails on all.)doc")
      .def_prop_ro("num_bytes", &FabricMemory::bytes, "Usable bytes per rank.")
      .def_prop_ro("num_ranks", &FabricMemory::num_ranks)
      .def_prop_ro("memory", &FabricMemory::memory, "The device and how the ranks share it.")
      .def(
          "tensor",
          [](const FabricMemory& self, int rank, nb::handle dtype,
             const std::vector<std::int64_t>& shape, std::int64_t offset_bytes) {
            return tensor_of(self.windows(), rank, dtype, shape, offset_bytes);
          },
          "rank"_a, "dtype"_a, "shape"_a, nb::kw_only(), "offset_bytes"_a = 0,
          nb::sig("def tensor(self, rank: int, dtype: typing.Any, shape: typing.Sequence[int], *, "
                  "offset_bytes: int = 0) -> typing.Any"),
          "As SymmetricMemory.tensor.")
      .def(
          "close",
          [](FabricMemory& self, std::optional<double> timeout_s) {
            const nb::gil_scoped_release released;
            self.close(to_timeout(timeout_s));
          },
          nb::kw_only(), "timeout_s"_a = nb::none(),
          "Waits until every rank has called it (not when one is gone), then lets go of the "
          "memory,\n"
          "which a tensor over it still keeps mapped here. Unmapping waits for the device.");
}

}  // namespace

void bind_gpu_memory(nb::module_& m) {
  using namespace nanobind::literals;
  nb::class_<AllocatorMemory>(m, "AllocatorMemory", "What memory an allocator gives.")
      .def_prop_ro("device", &device_of, "\"cpu\" or \"cuda:N\".")
      .def_ro("is_host_accessible", &AllocatorMemory::is_host_accessible,
              "Whether the host may read and write it.")
      .def_prop_ro("kind", &name_of_kind,
                   "How the ranks share GPU memory, once a block was made: \"fabric\",\n"
                   "\"file_descriptor\", \"same_process\" or \"nccl\".")
      .def_ro("passed_over", &AllocatorMemory::passed_over,
              "Why the kinds before it did not work: a sentence each, with rank and step.");
  bind_fabric_memory(m);
}

}  // namespace fanfold::python
