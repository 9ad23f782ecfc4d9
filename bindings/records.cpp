// SPDX-License-Identifier: Apache-2.0

// Plain records that an AllToAll answers with.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind.h"
#include "fanfold/all_to_all.h"

namespace fanfold::python {
namespace {

namespace nb = nanobind;

template <class Value>
std::vector<std::string> names_of(const std::vector<Value>& values) {
  std::vector<std::string> names;
  for (const Value value : values) names.emplace_back(name_of(value));
  return names;
}

void bind_metainfo(nb::module_& m) {
  nb::class_<Metainfo>(m, "Metainfo", "Names and values of an AllToAll's offset table.")
      .def("__getitem__",
           [](const Metainfo& self, const std::string& name) { return self.at(name); })
      .def("__len__", [](const Metainfo& self) { return self.entries().size(); })
      .def("__contains__",
           [](const Metainfo& self, const std::string& name) {
             for (const Metainfo::Entry& entry : self.entries()) {
               if (entry.first == name) return true;
             }
             return false;
           })
      .def("items", [](const Metainfo& self) { return self.entries(); })
      .def("keys", [](const Metainfo& self) {
        std::vector<std::string> names;
        for (const Metainfo::Entry& entry : self.entries()) names.push_back(entry.first);
        return names;
      });
}

void bind_capabilities(nb::module_& m) {
  nb::class_<Capabilities>(m, "Capabilities", "What a strategy can do.")
      .def_prop_ro("strategy", [](const Capabilities& self) { return name_of(self.strategy); })
      .def_prop_ro(
          "layouts", [](const Capabilities& self) { return names_of(self.layouts); },
          "All that it gives.")
      .def_prop_ro(
          "native_layouts", [](const Capabilities& self) { return names_of(self.native_layouts); },
          "Those that need no local copy after the rows arrived (flat_by_expert: without "
          "max_recv_rows).")
      .def_prop_ro("id_dtypes", [](const Capabilities& self) { return names_of(self.id_dtypes); })
      .def_ro("two_phase", &Capabilities::two_phase,
              "Whether dispatch and combine can be split into send and recv.")
      .def_ro("graph_safe", &Capabilities::graph_safe)
      .def_ro("needs_uniform_tokens", &Capabilities::needs_uniform_tokens)
      .def_ro("deterministic", &Capabilities::deterministic,
              "Whether sums are always in the stated order; False: deterministic=False changes it.")
      .def_ro("error_bound", &Capabilities::error_bound,
              "What deterministic=False promises; empty where it changes nothing.")
      .def_ro("rank_mask", &Capabilities::rank_mask, "Whether set_active_mask works.")
      .def_ro("wires", &Capabilities::wires, "Whether dispatch_wire and combine_wire work.")
      .def_ro("workers", &Capabilities::workers, "Whether set_num_workers has an effect.")
      .def_ro("max_payloads", &Capabilities::max_payloads)
      .def_ro("max_top_k", &Capabilities::max_top_k)
      .def_ro("max_ranks", &Capabilities::max_ranks);
}

void bind_capacities(nb::module_& m) {
  nb::class_<Capacities>(m, "Capacities", "What one round can hold on this rank.")
      .def_ro("tokens_per_rank", &Capacities::tokens_per_rank,
              "M: tokens that one rank may send to another.")
      .def_ro("experts_per_token", &Capacities::experts_per_token,
              "min(top_k, L): rows that one token can have per rank.")
      .def_ro("rows_per_expert", &Capacities::rows_per_expert, "R * M.")
      .def_ro("rows", &Capacities::rows, "Rows of the layout; 0: as a round brings them.");
}

}  // namespace

void bind_records(nb::module_& m) {
  bind_metainfo(m);
  bind_capabilities(m);
  bind_capacities(m);
}

}  // namespace fanfold::python
