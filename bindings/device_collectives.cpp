// SPDX-License-Identifier: Apache-2.0
#include "fanfold/nccl.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device.h"
#include "device_collectives.h"
#include "fanfold/error.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;
using Seconds = std::optional<double>;
using nogil = nb::gil_scoped_release;

Communicator from_nccl(Communicator& bootstrap, nb::object device,
                       std::optional<std::uintptr_t> handle, std::optional<std::string> library,
                       Seconds timeout_s) {
  NcclOptions options;
  const std::optional<int> gpu = to_gpu(device);
  if (!gpu) throw InvalidArgument("device: expected cuda or cuda:N, got 'cpu'");
  options.device_index = *gpu;
  // A handle is an address.  NOLINTNEXTLINE(performance-no-int-to-ptr)
  if (handle) options.handle = reinterpret_cast<void*>(*handle);
  if (library) options.library = *library;
  options.default_library =
      nb::cast<std::string>(nb::module_::import_("fanfold._nccl").attr("wheel_library")());
  options.timeout = to_timeout(timeout_s);
  const nogil released;
  return Communicator::from_nccl(bootstrap, options);
}

}  // namespace

std::optional<void*> CollectiveArguments::stream(nb::handle stream, nb::handle last) {
  if (!gpu_) return resolve_stream(stream, std::nullopt, {});
  return resolve_stream(stream, gpu_, args_.source_of(last));
}

void bind_nccl(nb::class_<Communicator>& c) {
  c.def_static("from_nccl", &from_nccl, "bootstrap"_a, nb::kw_only(), "device"_a = "cuda",
               "handle"_a = nb::none(), "library"_a = nb::none(), "timeout_s"_a = nb::none(),
               nb::sig("def from_nccl(bootstrap: Communicator, *, device: typing.Any = 'cuda', "
                       "handle: int | None = None, library: str | None = None, timeout_s: float | "
                       "None = None) -> Communicator"),
               R"doc(The ranks of bootstrap, with collectives on GPU tensors over NCCL; collective.

CPU tensors go the way of bootstrap, of which this is a split. A collective on GPU tensors enqueues on
its stream, returns at once and may be captured into a graph; nothing is compared between the ranks.
Sums are NCCL's: in its order and precision, which may differ between versions and runs.

Args:
    bootstrap: any communicator of the ranks.
    device: this rank's GPU: "cuda:1", a torch.device, or "cuda": torch's current one, else 0.
    handle: address of an ncclComm_t of the caller with the same ranks, order and device, as
        fanfold.interop_torch.nccl_handle gives it. It stays the caller's: it must outlive the
        communicator, which never aborts or destroys it. None: a new one is made.
    library: NCCL's file. None: environment variable FANFOLD_NCCL_LIBRARY, else what this process has
        loaded, else the wheel of this environment, else the system's.
    timeout_s: deadline of this and default of later calls; None: that of bootstrap.

Raises:
    Unsupported: no NCCL of version 2.19 or later, other versions on other ranks, no such device, or
        a build without the GPU backend.
    InvalidArgument: the handle does not fit.
    CudaFailure, SystemFailure, PeerTimeout, PeerLost: it could not be made; on all ranks.)doc")
      .def_prop_ro(
          "device_index", [](const Communicator& self) { return self.device_index(); },
          "The CUDA device of a communicator of from_nccl, else None.")
      .def(
          "check_device",
          [](Communicator& self) {
            const nogil released;
            self.check_device();
          },
          "Raises what has failed of collectives on GPU tensors; never waits.")
      .def(
          "shrink",
          [](Communicator& self, const std::vector<int>& lost, Communicator& survivors,
             Seconds timeout_s) {
            const nogil released;
            return self.shrink(lost, survivors, to_timeout(timeout_s));
          },
          "lost"_a, "survivors"_a, nb::kw_only(), "timeout_s"_a = nb::none(),
          "Of a communicator of from_nccl without the ranks that are lost, on the host "
          "communicator\n"
          "of the others, in the same order; collective over survivors. This one can only be "
          "closed\n"
          "then.");
}

}  // namespace fanfold::python
