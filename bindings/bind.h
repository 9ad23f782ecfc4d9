// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts of the extension module, one per public header.

#include <nanobind/nanobind.h>

namespace fanfold::python {

void bind_errors(nanobind::module_& m);
void bind_communicator(nanobind::module_& m);
void bind_allocator(nanobind::module_& m);
void bind_gpu_memory(nanobind::module_& m);
void bind_memory_pool(nanobind::module_& m);
void bind_received(nanobind::module_& m);
void bind_records(nanobind::module_& m);
void bind_all_to_all(nanobind::module_& m);
void bind_capture(nanobind::module_& m);

}  // namespace fanfold::python
