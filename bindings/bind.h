// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts of the extension module, one per public header.

#include <nanobind/nanobind.h>

namespace fanfold::python {

/// The result of `call`, made without the GIL: what takes a lock, or may wait for a thread that
/// wants the GIL.
template <class Call>
decltype(auto) without_gil(Call&& call) {
  const nanobind::gil_scoped_release released;
  return call();
}

/// What a member function of a Bound's core gives.
template <class Bound, class Member>
auto get(Member member) {
  return [member](const Bound& self) { return without_gil([&] { return (self.core.*member)(); }); };
}

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
