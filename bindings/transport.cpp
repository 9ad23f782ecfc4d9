// SPDX-License-Identifier: Apache-2.0
#include "transport.h"

#include <nanobind/stl/string.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "fanfold/error.h"

namespace fanfold::python {
namespace {

namespace nb = nanobind;
using Nanoseconds = std::chrono::nanoseconds;

double to_seconds(Nanoseconds time) { return std::chrono::duration<double>(time).count(); }

[[noreturn]] void refuse(const char* what, const char* expected, nb::handle got) {
  throw InvalidArgument(std::string("transport.") + what + ": expected " + expected + ", got " +
                        nb::cast<std::string>(nb::repr(got)));
}

template <class Value>
Value attribute(nb::handle object, const char* name, const char* expected) {
  const nb::object found = object.attr(name);
  Value value{};
  if (!nb::try_cast<Value>(found, value, false)) refuse(name, expected, found);
  return value;
}

/// A new bytearray of the parts in a row.
nb::object joined(const std::vector<Transport::Part>& parts) {
  std::int64_t size = 0;
  for (const Transport::Part& part : parts) size += part.bytes;
  const nb::object made = nb::steal(PyByteArray_FromStringAndSize(nullptr, size));
  if (!made.is_valid()) throw nb::python_error();
  char* to = PyByteArray_AsString(made.ptr());
  for (const Transport::Part& part : parts) {
    if (part.bytes == 0) continue;
    std::memcpy(to, part.data, static_cast<std::size_t>(part.bytes));
    to += part.bytes;
  }
  return made;
}

std::vector<std::byte> bytes_of(nb::handle buffer) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto* begin = static_cast<const std::byte*>(view.buf);
  std::vector<std::byte> bytes(begin, begin + view.len);
  PyBuffer_Release(&view);
  return bytes;
}

/// Throws the error again with its traceback as a note. The library keeps errors of `send` for a
/// later call, and a traceback would keep the callers' variables, the communicator among them.
[[noreturn]] void rethrow_without_frames(nb::python_error& error) {
  error.restore();
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* frames = nullptr;
  PyErr_Fetch(&type, &value, &frames);
  PyErr_NormalizeException(&type, &value, &frames);
  const nb::object traceback = nb::steal(frames);
  if (traceback.is_valid() && nb::hasattr(value, "add_note")) {  // Python 3.11
    const nb::object lines = nb::module_::import_("traceback").attr("format_tb")(traceback);
    nb::handle(value).attr("add_note")(nb::str("").attr("join")(lines));
  }
  PyException_SetTraceback(value, Py_None);
  PyErr_Restore(type, value, nullptr);
  throw nb::python_error();
}

/// The Python object, seen as a Transport. Its calls come without the GIL.
class PythonTransport final : public Transport {
 public:
  explicit PythonTransport(nb::object object)
      : object_(std::move(object)),
        rank_(attribute<int>(object_, "rank", "an int")),
        num_ranks_(attribute<int>(object_, "num_ranks", "an int")),
        kind_(attribute<std::string>(object_, "kind", "a str")),
        is_thread_bound_(attribute<bool>(object_, "is_thread_bound", "a bool")),
        tells_unsent_(nb::hasattr(object_, "has_unsent")) {}
  ~PythonTransport() override {
    if (!nb::is_alive()) {
      (void)object_.release();  // the interpreter has ended, and what it held with it
      return;
    }
    const nb::gil_scoped_acquire gil;
    object_.reset();
  }
  PythonTransport(const PythonTransport&) = delete;
  PythonTransport& operator=(const PythonTransport&) = delete;

  int rank() const noexcept override { return rank_; }
  int num_ranks() const noexcept override { return num_ranks_; }
  std::string kind() const override { return kind_; }
  bool is_thread_bound() const noexcept override { return is_thread_bound_; }

  void start(std::int64_t max_message_bytes) override {
    const nb::gil_scoped_acquire gil;
    object_.attr("start")(max_message_bytes);
  }

  void send(int peer, const std::vector<Part>& parts) override {
    const nb::gil_scoped_acquire gil;
    try {
      object_.attr("send")(peer, joined(parts));
    } catch (nb::python_error& error) {
      rethrow_without_frames(error);
    }
  }

  std::optional<Message> receive(Nanoseconds max_wait) override {
    const nb::gil_scoped_acquire gil;
    const nb::object received = object_.attr("receive")(to_seconds(max_wait));
    if (received.is_none()) return std::nullopt;
    int source = -1;
    if (!nb::isinstance<nb::tuple>(received) || nb::len(received) != 2 ||
        !nb::try_cast<int>(received[0], source, false) || source < 0 || source >= num_ranks_ ||
        PyObject_CheckBuffer(nb::object(received[1]).ptr()) == 0) {
      refuse("receive", "None or a tuple of a rank of another and a buffer", received);
    }
    return Message{source, bytes_of(nb::object(received[1]))};
  }

  bool has_unsent(int peer) const override {
    if (!tells_unsent_) return false;
    const nb::gil_scoped_acquire gil;
    const nb::object told = object_.attr("has_unsent")(peer);
    bool has_some = false;
    if (!nb::try_cast<bool>(told, has_some, false)) refuse("has_unsent", "a bool", told);
    return has_some;
  }

  std::string lost_reason(int peer) const override {
    const nb::gil_scoped_acquire gil;
    const nb::object reason = object_.attr("lost_reason")(peer);
    std::string text;
    if (!nb::try_cast<std::string>(reason, text, false)) refuse("lost_reason", "a str", reason);
    return text;
  }

  std::shared_ptr<void> before_wait() const override {
    if (!nb::is_alive() || PyGILState_Check() == 0) return nullptr;
    return std::make_shared<nb::gil_scoped_release>();
  }

  void close(Nanoseconds timeout) noexcept override {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire gil;
    try {
      object_.attr("close")(to_seconds(timeout));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("closing a fanfold.Transport");
    }
  }

 private:
  nb::object object_;
  int rank_;
  int num_ranks_;
  std::string kind_;
  bool is_thread_bound_;
  bool tells_unsent_;
};

}  // namespace

std::shared_ptr<Transport> to_transport(nb::object object) {
  return std::make_shared<PythonTransport>(std::move(object));
}

TransportUse to_transport_use(const std::string& name) {
  if (name == "auto") return TransportUse::kAuto;
  if (name == "shared_memory") return TransportUse::kSharedMemory;
  if (name == "always") return TransportUse::kAlways;
  throw InvalidArgument("use: expected 'auto', 'shared_memory' or 'always', got '" + name + "'");
}

}  // namespace fanfold::python
