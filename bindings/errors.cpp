// SPDX-License-Identifier: Apache-2.0
#include "fanfold/error.h"

#include <string>

#include "bind.h"

namespace fanfold::python {
namespace {

namespace nb = nanobind;

/// Sets the Python error `type` with the message and attributes of the exception.
template <class Exception, class SetAttributes>
void raise(nb::handle type, const Exception& error, SetAttributes&& set_attributes) {
  nb::object instance = type(error.what());
  set_attributes(instance);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

/// Registers translation of C++ `Exception` to the class `name` of fanfold.errors. The module keeps
/// the class, and outlives every translation.
template <class Exception>
void translate(nb::module_& m, const char* name) {
  const nb::object type = nb::module_::import_("fanfold.errors").attr(name);
  m.attr((std::string("_") + name).c_str()) = type;
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void* payload) {
        try {
          std::rethrow_exception(pointer);
        } catch (const Exception& error) {
          raise(nb::handle(static_cast<PyObject*>(payload)), error, [&](nb::object& instance) {
            if constexpr (std::is_base_of_v<PeerError, Exception>) {
              instance.attr("rank") = error.rank();
            }
            if constexpr (std::is_same_v<PeerAborted, Exception>) {
              instance.attr("reason") = nb::str(error.reason().c_str(), error.reason().size());
            }
            if constexpr (std::is_same_v<SystemFailure, Exception>) {
              instance.attr("errno") = error.code();
            }
            if constexpr (std::is_same_v<CudaFailure, Exception>) {
              instance.attr("code") = error.code();
            }
          });
        }
      },
      type.ptr());
}

}  // namespace

// The last that is registered is tried first: the base goes first.
void bind_errors(nb::module_& m) {
  translate<Error>(m, "Error");
  translate<InvalidArgument>(m, "InvalidArgument");
  translate<InvalidState>(m, "InvalidState");
  translate<Unsupported>(m, "Unsupported");
  translate<SystemFailure>(m, "SystemFailure");
  translate<CudaFailure>(m, "CudaFailure");
  translate<CapacityExceeded>(m, "CapacityExceeded");
  translate<PeerTimeout>(m, "PeerTimeout");
  translate<PeerAborted>(m, "PeerAborted");
  translate<PeerLost>(m, "PeerLost");
}

}  // namespace fanfold::python
