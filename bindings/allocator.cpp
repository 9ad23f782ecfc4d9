// SPDX-License-Identifier: Apache-2.0
#include "fanfold/allocator.h"

#include <nanobind/stl/optional.h>

#include "bind.h"
#include "convert.h"

namespace fanfold::python {

void bind_allocator(nb::module_& m) {
  using namespace nanobind::literals;
  nb::class_<AllocatorStats>(m, "AllocatorStats",
                             "What an allocator holds, in bytes of this rank's own windows.")
      .def_ro("reserved", &AllocatorStats::reserved, "Held from the system: in use and cached.")
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
            const TensorView view(static_cast<void*>(self.data(rank)), DType::kUInt8,
                                  {self.bytes()});
            return make_tensor(view, Framework::kNumpy, self.block());
          },
          "rank"_a, nb::sig("def view(self, rank: int) -> typing.Any"),
          "The window of `rank` as a NumPy uint8 array; keeps the memory mapped.");

  nb::class_<Allocator>(m, "Allocator",
                        "Allocates, caches and reuses symmetric memory of one group. Calls marked\n"
                        "collective are made by all ranks in the same order.")
      .def(nb::init<Communicator&>(), "communicator"_a)
      .def(
          "allocate",
          [](Allocator& self, std::int64_t num_bytes, std::optional<double> timeout_s) {
            const nb::gil_scoped_release released;
            return self.allocate(num_bytes, 0, to_timeout(timeout_s));
          },
          "num_bytes"_a, nb::kw_only(), "timeout_s"_a = nb::none(),
          "A block of at least num_bytes per rank; collective.")
      .def("free", &Allocator::free, "memory"_a,
           "Returns a block to the cache; every rank frees the same blocks in the same order.")
      .def("trim", &Allocator::trim, "Gives all cached blocks back to the system; every rank.")
      .def_prop_ro("stats", &Allocator::stats);
}

}  // namespace fanfold::python
