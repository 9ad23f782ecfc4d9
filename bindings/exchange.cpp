// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <nanobind/stl/string.h>

#include <string>

#include "device.h"
#include "fanfold/error.h"

namespace fanfold::python {

using namespace nanobind::literals;

std::optional<void*> BoundAllToAll::stream_of(nb::handle stream) const {
  return resolve_stream(stream, gpu, source);
}

std::optional<void*> BoundAllToAll::first_stream_of(nb::handle stream,
                                                    const TensorType& type) const {
  const std::optional<void*> first = resolve_stream(stream, gpu, type);
  if (gpu && !first) {
    throw InvalidArgument(
        "stream: expected one, since rows move on a GPU and these tensors do not tell the current "
        "one as those of torch do, got None");
  }
  return first;
}

nb::object BoundAllToAll::new_tensor(DType dtype, const std::vector<std::int64_t>& shape,
                                     Framework like, Arguments& args, TensorView& view) const {
  if (!gpu) return new_host_tensor(dtype, shape, like, view);
  if (like != Framework::kTorch) {
    throw InvalidArgument(
        "out: expected a tensor on the GPU, got None, which makes one for tensors of torch only");
  }
  const nb::module_ torch = nb::module_::import_("torch");
  nb::list sizes;
  for (const std::int64_t size : shape) sizes.append(size);
  nb::object made = torch.attr("empty")(sizes, "dtype"_a = torch.attr(name_of(dtype)),
                                        "device"_a = name_of_device(DeviceType::kGpu, *gpu));
  view = args.output(made, "out");
  return made;
}

}  // namespace fanfold::python
