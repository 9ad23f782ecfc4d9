// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <nanobind/stl/string.h>

#include <charconv>
#include <cstdint>
#include <system_error>

#include "fanfold/error.h"

namespace fanfold::python {

namespace nb = nanobind;

namespace {

/// torch's current device, where torch is loaded and has one.
int current_device() {
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains("torch")) return 0;
  const nb::object cuda = nb::object(modules["torch"]).attr("cuda");
  if (!nb::cast<bool>(cuda.attr("is_available")())) return 0;
  return nb::cast<int>(cuda.attr("current_device")());
}

[[noreturn]] void refuse_stream(nb::handle stream) {
  throw InvalidArgument(
      "stream: expected the address of a cudaStream_t, or an object with cuda_stream or "
      "__cuda_stream__, got " +
      nb::cast<std::string>(nb::repr(stream)));
}

}  // namespace

std::optional<int> to_gpu(nb::handle device) {
  const std::string name = nb::cast<std::string>(nb::str(device));
  if (name == "cpu") return std::nullopt;
  const std::string prefix = "cuda";
  if (name == prefix) return current_device();
  int index = 0;
  bool is_good = name.rfind(prefix + ":", 0) == 0;
  if (is_good) {
    const char* const end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + prefix.size() + 1, end, index);
    is_good = parsed.ec == std::errc() && parsed.ptr == end && index >= 0;
  }
  if (!is_good) throw InvalidArgument("device: expected cpu, cuda or cuda:N, got '" + name + "'");
  return index;
}

std::string name_of_device(DeviceType device, int device_index) {
  if (device == DeviceType::kCpu) return "cpu";
  return "cuda:" + std::to_string(device_index);
}

void* to_stream(nb::handle stream) {
  nb::object address = nb::borrow(stream);
  if (nb::hasattr(stream, "cuda_stream")) {
    address = stream.attr("cuda_stream");
  } else if (nb::hasattr(stream, "__cuda_stream__")) {
    const nb::object pair = stream.attr("__cuda_stream__")();  // (version, address)
    if (!nb::isinstance<nb::tuple>(pair) || nb::len(pair) != 2) refuse_stream(stream);
    address = pair[1];
  }
  std::uintptr_t value = 0;
  const bool is_number = nb::isinstance<nb::int_>(address) && !nb::isinstance<nb::bool_>(address);
  if (!is_number || !nb::try_cast(address, value)) refuse_stream(stream);
  return reinterpret_cast<void*>(value);
}

std::optional<void*> resolve_stream(nb::handle stream, std::optional<int> gpu,
                                    const TensorType& type) {
  if (!gpu) {
    if (stream.is_none()) return std::nullopt;
    throw InvalidArgument("stream: expected None for CPU tensors, got a stream");
  }
  if (!stream.is_none()) return to_stream(stream);
  return type.api == nullptr ? std::nullopt : current_stream(*type.api, *gpu);
}

}  // namespace fanfold::python
