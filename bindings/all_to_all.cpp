// SPDX-License-Identifier: Apache-2.0
#include "fanfold/all_to_all.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "config.h"
#include "exchange.h"
#include "fanfold/error.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;
using Seconds = std::optional<double>;
using nogil = nb::gil_scoped_release;
using Class = nb::class_<BoundAllToAll>;

void bind_state(Class& c) {
  c.def(
       "set_active_mask",
       [](BoundAllToAll& self, const std::vector<bool>& mask) {
         const nogil released;
         self.core.set_active_mask(mask);
       },
       "mask"_a,
       "Leaves ranks out from the next dispatch on: one bool per rank, equal on all active ranks.\n"
       "On a GPU it waits for all work of the device; not in a graph capture, and graphs captured\n"
       "before take the new mask, too.")
      .def(
          "set_placement",
          [](BoundAllToAll& self, nb::handle placement, Seconds timeout_s) {
            const Placement made = to_placement(placement);
            const nogil released;
            self.core.set_placement(made, to_timeout(timeout_s));
          },
          "placement"_a.none(), "timeout_s"_a = nb::none(),
          nb::sig("def set_placement(self, placement: str | typing.Sequence[int] | "
                  "fanfold.placement.Placement, timeout_s: float | None = None) -> None"),
          R"doc(Move experts: as many (physical) experts, placed anew.

Collective; waits for every active rank. Routings made before are refused afterwards. On a GPU it
first waits for all work of the device; not in a graph capture, and graphs captured before, but for
rounds along a routing, take the new placement, too.

Args:
    placement: "linear", "round_robin", a table with the rank of each expert, or a Placement.
    timeout_s: deadline of this call in seconds.

Raises:
    InvalidArgument: the ranks' placements differ, or the workspace has no room for a rank's experts
        (see max_local_experts); nothing has changed.
    InvalidState: a round is open.)doc")
      .def(
          "set_num_workers",
          [](BoundAllToAll& self, int num_workers) {
            const nogil released;
            self.core.set_num_workers(num_workers);
          },
          "num_workers"_a,
          "Threads that move rows in large rounds, the caller's included; 1 to 256, at first 1.\n"
          "Results stay the same, bit for bit. Local; between calls. No effect on a GPU.")
      .def(
          "abort",
          [](BoundAllToAll& self, const std::string& reason) {
            const nogil released;
            self.core.abort(reason);
          },
          "reason"_a,
          "Makes the waits of all ranks raise PeerAborted(rank, reason); any thread. On a GPU the\n"
          "kernels of all ranks stop waiting, and their next calls raise it.")
      .def(
          "reset",
          [](BoundAllToAll& self, Seconds timeout_s) {
            const nogil released;
            self.core.reset(to_timeout(timeout_s));
          },
          nb::kw_only(), "timeout_s"_a = nb::none(),
          "Brings a failed AllToAll back and ends its open rounds; collective, waits, on a GPU\n"
          "first for all work of the device. Not in a graph capture.")
      .def(
          "close",
          [](BoundAllToAll& self, Seconds timeout_s) {
            self.cache.clear();
            self.memory.reset();
            const nogil released;
            self.core.close(to_timeout(timeout_s));
          },
          nb::kw_only(), "timeout_s"_a = nb::none(),
          "Waits until every rank has closed or left, then gives the workspace back. Idempotent.\n"
          "On a GPU it first waits for all work of the device. Not in a graph capture.")
      .def(
          "check",
          [](const BoundAllToAll& self) {
            const nogil released;
            self.core.check();
          },
          "Raises what the last failed call raised, or that a peer aborted or left; on a GPU also\n"
          "what kernels have reported so far. Never waits.")
      .def(
          "feasible",
          [](const BoundAllToAll& self, std::int64_t round_max_tokens, std::int64_t row_bytes,
             const std::string& layout) {
            const Layout asked = layout_from_name(layout);
            const Feasibility answer =
                without_gil([&] { return self.core.feasible(round_max_tokens, row_bytes, asked); });
            return std::make_pair(answer.feasible, answer.reason);
          },
          "round_max_tokens"_a, "row_bytes"_a, "layout"_a,
          "(True, reason) or (False, reason): whether a dispatch would fit.")
      .def(
          "choice", [](const BoundAllToAll& self) { return self.core.choice(); },
          "Which strategy serves, and why.");
}

void bind_attributes(Class& c) {
  c.def_prop_ro(
       "config", [](const BoundAllToAll& self) { return to_dict(self.core.config()); },
       nb::sig("def config(self) -> fanfold.config.AllToAllConfig"),
       "The arguments that this object was created from, those that were left out decided; dtypes\n"
       "are names, test knobs are missing.")
      .def_prop_ro("rank", get<BoundAllToAll>(&AllToAll::rank))
      .def_prop_ro("num_ranks", get<BoundAllToAll>(&AllToAll::num_ranks))
      .def_prop_ro("local_experts", get<BoundAllToAll>(&AllToAll::local_experts),
                   "Global ids of this rank's experts; position = local id.")
      .def_prop_ro("active_mask", get<BoundAllToAll>(&AllToAll::active_mask))
      .def_prop_ro("is_closed", get<BoundAllToAll>(&AllToAll::is_closed))
      .def_prop_ro("is_failed", get<BoundAllToAll>(&AllToAll::is_failed))
      .def_prop_ro("num_workers", get<BoundAllToAll>(&AllToAll::num_workers),
                   "See set_num_workers.")
      .def_prop_ro("num_dropped_ids", get<BoundAllToAll>(&AllToAll::num_dropped_ids),
                   "Ids >= num_experts that were dropped since creation.")
      .def_prop_ro("num_dropped_rows", get<BoundAllToAll>(&AllToAll::num_dropped_rows),
                   "Rows beyond max_recv_rows that were dropped on this rank since creation.")
      .def_prop_ro("workspace_bytes", get<BoundAllToAll>(&AllToAll::workspace_bytes),
                   "Bytes held by this rank now: symmetric and private. high_throughput without\n"
                   "max_recv_rows holds more as rounds bring more rows.")
      .def_prop_ro("metainfo", get<BoundAllToAll>(&AllToAll::metainfo),
                   "The table of byte offsets into the workspace.")
      .def_prop_ro("capabilities", get<BoundAllToAll>(&AllToAll::capabilities),
                   "What the strategy can do.")
      .def_prop_ro("capacities", get<BoundAllToAll>(&AllToAll::capacities),
                   "What one round can hold on this rank.");
}

}  // namespace

void bind_all_to_all(nb::module_& m) {
  Class c(m, "AllToAll", nb::is_weak_referenceable());
  c.def(
      "__init__",
      [](BoundAllToAll* self, Communicator& communicator, const nb::dict& config,
         Allocator* allocator, const BoundAllToAll* workspace_of) {
        const AllToAllConfig made = to_config(config);
        const AllToAll* shared = workspace_of == nullptr ? nullptr : &workspace_of->core;
        const nogil released;
        new (self) BoundAllToAll(communicator, made, allocator, shared);
      },
      "communicator"_a, "config"_a, "allocator"_a = nb::none(), "workspace_of"_a = nb::none(),
      nb::keep_alive<1, 4>(),  // which keeps buffers of the caller's
      nb::sig("def __init__(self, communicator: Communicator, config: dict[str, typing.Any], "
              "allocator: Allocator | None = None, workspace_of: AllToAll | None = None) -> "
              "None"));
  c.def_static(
      "required_bytes_of",
      [](int num_ranks, const nb::dict& config) {
        return AllToAll::required_bytes(num_ranks, to_config(config));
      },
      "num_ranks"_a, "config"_a,
      nb::sig("def required_bytes_of(num_ranks: int, config: dict[str, typing.Any]) -> int"));
  bind_dispatch(c);
  bind_combine(c);
  bind_state(c);
  bind_attributes(c);
}

}  // namespace fanfold::python
