// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a Communicator has for GPU tensors.

#include <nanobind/nanobind.h>

#include <optional>

#include "convert.h"
#include "fanfold/communicator.h"

namespace fanfold::python {

/// The tensors of a collective, and its stream where they lie on a GPU.
class CollectiveArguments {
 public:
  explicit CollectiveArguments(const Communicator& communicator)
      : args_(types_, communicator.device_index()) {}

  TensorView view(nb::handle value, const char* name) { return seen(args_.view(value, name)); }
  TensorView output(nb::handle value, const char* name) { return seen(args_.output(value, name)); }
  /// What `stream` stands for; None is the current stream of the framework of `last`, the tensor
  /// that was viewed last.
  /// @throws InvalidArgument  a stream is given for CPU tensors.
  std::optional<void*> stream(nb::handle stream, nb::handle last);

 private:
  TensorView seen(const TensorView& view) {
    if (view.device == DeviceType::kGpu) gpu_ = view.device_index;
    return view;
  }

  TensorTypeCache types_;
  Arguments args_;
  std::optional<int> gpu_;
};

void bind_nccl(nb::class_<Communicator>& c);

}  // namespace fanfold::python
