// SPDX-License-Identifier: Apache-2.0
#pragma once

// Devices and streams as Python names them.

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "convert.h"
#include "fanfold/tensor_view.h"

namespace fanfold::python {

/// The CUDA device of "cuda:1" or of a torch.device; "cuda" is torch's current one, else 0. Nothing
/// for "cpu".
/// @throws InvalidArgument  another name.
std::optional<int> to_gpu(nanobind::handle device);

/// "cpu" or "cuda:N".
std::string name_of_device(DeviceType device, int device_index);

/// The cudaStream_t that `stream` stands for: an int, or an object with `cuda_stream` (PyTorch) or
/// `__cuda_stream__`.
/// @throws InvalidArgument  anything else.
void* to_stream(nanobind::handle stream);

/// The same for an object on a CUDA device; None is the current stream of the framework of `type`,
/// where it tells, else nothing. On the CPU (`gpu` nothing) there is none.
std::optional<void*> resolve_stream(nanobind::handle stream, std::optional<int> gpu,
                                    const TensorType& type);

}  // namespace fanfold::python
