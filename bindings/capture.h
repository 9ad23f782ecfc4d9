// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the bindings of recorded routing share.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fanfold/routing_rows.h"

namespace fanfold::python {

/// A dtype, or none for "auto".
std::optional<DType> to_stored_dtype(nanobind::handle dtype);

/// "logical" or "physical".
IdSpace to_id_space(const char* name);

/// A NumPy array that may be read only; `owner` keeps its memory.
nanobind::object read_only_array(const TensorView& view, std::shared_ptr<const void> owner);

/// [num_layers, num_experts] int64, a NumPy array.
nanobind::object to_histogram(const std::vector<std::int64_t>& counts, const RoutingSpec& spec);

/// Properties that say how ids are stored, of a class whose `spec_of` gives a RoutingSpec.
template <class Class, class SpecOf>
void bind_spec(Class& c, SpecOf spec_of) {
  using Self = typename Class::Type;
  c.def_prop_ro("num_layers", [spec_of](const Self& self) { return spec_of(self).num_layers; })
      .def_prop_ro("num_experts", [spec_of](const Self& self) { return spec_of(self).num_experts; })
      .def_prop_ro("top_k", [spec_of](const Self& self) { return spec_of(self).top_k; })
      .def_prop_ro(
          "dtype", [spec_of](const Self& self) { return name_of(spec_of(self).dtype); },
          "Name of the type of a stored id.")
      .def_prop_ro(
          "sentinel", [spec_of](const Self& self) { return spec_of(self).sentinel(); },
          "Says \"no expert\" or \"not recorded\": -1, or the maximum of an unsigned type.")
      .def_prop_ro(
          "id_space", [spec_of](const Self& self) { return name_of(spec_of(self).id_space); },
          "\"logical\" or \"physical\".");
}

void bind_routing_rows(nanobind::module_& m);
void bind_routing_store(nanobind::module_& m);

}  // namespace fanfold::python
