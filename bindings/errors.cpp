// SPDX-License-Identifier: Apache-2.0
#include "fanfold/error.h"

#include "bind.h"

namespace fanfold::python {
namespace {

namespace nb = nanobind;

/// Makes `name` with the given bases and registers a translator that sets its attributes.
nb::object make_class(nb::module_& m, const char* name, nb::handle bases, const char* doc) {
  nb::dict body;
  body["__module__"] = "fanfold";
  body["__doc__"] = doc;
  nb::object type = nb::module_::import_("builtins").attr("type")(name, bases, body);
  m.attr(name) = type;
  return type;
}

nb::tuple bases(nb::handle first) { return nb::make_tuple(first); }
nb::tuple bases(nb::handle first, const char* builtin) {
  return nb::make_tuple(first, nb::module_::import_("builtins").attr(builtin));
}

/// Sets the Python error `type` with the message and attributes of the exception.
template <class Exception, class SetAttributes>
void raise(nb::handle type, const Exception& error, SetAttributes&& set_attributes) {
  nb::object instance = type(error.what());
  set_attributes(instance);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

/// Registers translation of C++ `Exception` to Python `type`. The type is owned by the module,
/// which outlives every translation.
template <class Exception>
void translate(nb::handle type) {
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
          });
        }
      },
      type.ptr());
}

}  // namespace

void bind_errors(nb::module_& m) {
  const nb::object base =
      make_class(m, "Error", bases(nb::module_::import_("builtins").attr("Exception")),
                 "Base of every error of this library.");
  translate<Error>(base);
  translate<InvalidArgument>(make_class(
      m, "InvalidArgument", bases(base, "ValueError"),
      "A value, shape, dtype or device does not fit. State: unchanged; nothing was sent."));
  translate<InvalidState>(make_class(m, "InvalidState", bases(base),
                                     "Wrong order of calls, or use after close, reset or fork."));
  translate<Unsupported>(make_class(m, "Unsupported", bases(base),
                                    "Built without it, or the strategy or machine lacks it."));
  translate<SystemFailure>(make_class(
      m, "SystemFailure", bases(base, "OSError"),
      "A call of the operating system failed; `errno` says why. State: object unusable."));
  translate<CapacityExceeded>(
      make_class(m, "CapacityExceeded", bases(base),
                 "More rows than the caller gave room for. State: unchanged, on every rank."));
  translate<PeerTimeout>(
      make_class(m, "PeerTimeout", bases(base, "TimeoutError"),
                 "Rank `rank` is late. State: failed until `reset()` on every rank."));
  translate<PeerAborted>(make_class(
      m, "PeerAborted", bases(base),
      "Rank `rank` called abort or reset and gave `reason`. State: failed until `reset()`."));
  translate<PeerLost>(
      make_class(m, "PeerLost", bases(base, "ConnectionError"),
                 "Rank `rank` is gone. State: the communicator is broken; close it."));
}

}  // namespace fanfold::python
