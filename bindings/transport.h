// SPDX-License-Identifier: Apache-2.0
#pragma once

// Transports that are written in Python.

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "fanfold/transport.h"

namespace fanfold::python {

/// A transport whose calls go to a fanfold.Transport. What its methods raise passes through the
/// library as nanobind::python_error.
/// @throws InvalidArgument  an attribute is of another type.
std::shared_ptr<Transport> to_transport(nanobind::object object);

/// "auto", "shared_memory" or "always". @throws InvalidArgument  another name.
TransportUse to_transport_use(const std::string& name);

}  // namespace fanfold::python
