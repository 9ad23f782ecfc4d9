// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/allocator.h"

namespace fanfold::python {

/// A device as Python names it ("cpu", "cuda", "cuda:1", a torch.device) with the kinds of handles;
/// nothing for the host's memory.
/// @throws InvalidArgument  another device or kind, or kinds for host memory.
std::optional<GpuMemoryConfig> to_gpu_memory(nanobind::handle device,
                                             const std::vector<std::string>& kinds);

/// SymmetricMemory.tensor.
nanobind::object tensor_of(const SymmetricMemory& memory, int rank, nanobind::handle dtype,
                           const std::vector<std::int64_t>& shape, std::int64_t offset_bytes);

}  // namespace fanfold::python
