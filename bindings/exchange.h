// SPDX-License-Identifier: Apache-2.0
#pragma once

// What Python holds: an AllToAll or a Received with the tensors that were made over its memory.

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "convert.h"
#include "fanfold/all_to_all.h"
#include "simulator.h"

namespace fanfold::python {

/// An AllToAll and its tensor objects.
struct BoundAllToAll {
  BoundAllToAll(Communicator& communicator, const AllToAllConfig& config, Allocator* allocator,
                const AllToAll* workspace_of)
      : core(communicator, config, allocator, workspace_of) {
    if (config.device == DeviceType::kGpu) gpu = config.device_index;
  }
  /// With the GIL, as all that Python drops: what ends may have to wait.
  ~BoundAllToAll() {
    const nb::gil_scoped_release released;
    const AllToAll end = std::move(core);
  }
  BoundAllToAll(const BoundAllToAll&) = delete;
  BoundAllToAll& operator=(const BoundAllToAll&) = delete;

  /// The stream of a call. None: the one on which the framework of the last dispatch's payloads
  /// works now, where it tells; else nothing, which means that of the round's dispatch.
  /// @throws InvalidArgument  not a stream, or a stream and no GPU.
  std::optional<void*> stream_of(nb::handle stream) const;
  /// The same for a call that begins a round, or of none, on tensors of `type`.
  /// @throws InvalidArgument  also: nothing tells the stream of a GPU.
  std::optional<void*> first_stream_of(nb::handle stream, const TensorType& type) const;

  /// A new contiguous tensor of the framework `like` on this object's device; `view` becomes its
  /// view.
  nb::object new_tensor(DType dtype, const std::vector<std::int64_t>& shape, Framework like,
                        Arguments& args, TensorView& view) const;

  Arguments arguments() { return {types, gpu}; }

  nb::object tensor(TensorView view, Framework kind) {
    if (!view.has_value()) return nb::none();
    if (is_simulated()) view.device = DeviceType::kCpu;
    // While a tensor of the cache lives, no other memory can have its address.
    nb::object known = cache.find(view, kind);
    return known.is_valid() ? known : make(view, kind);
  }

  /// Rounds of more rows may have replaced the memory: tensors over the old one keep it for as long
  /// as their user does, the cache must not.
  nb::object make(const TensorView& view, Framework kind) {
    std::shared_ptr<const void> now = core.memory();
    if (now != memory) {
      cache.clear();
      memory = std::move(now);
    }
    return cache.make(view, kind, memory);
  }

  AllToAll core;
  std::optional<int> gpu;              // its CUDA device
  std::shared_ptr<const void> memory;  // of the tensors in the cache
  TensorCache cache;
  TensorTypeCache types;
  TensorType source;  // of the last dispatch's payloads; as Arguments::views gives it
};

/// A Received, the AllToAll it came from, and whose tensors its payloads were.
struct BoundReceived {
  Received core;
  nb::object all_to_all;  // a BoundAllToAll
  Framework framework;
  nb::object payloads;  // list, made on first use

  BoundAllToAll& owner() const { return *nb::inst_ptr<BoundAllToAll>(all_to_all); }
  nb::object tensor(const TensorView& view) const { return owner().tensor(view, framework); }
};

/// Combine as both AllToAll and Received offer it; returns `out`.
nb::object combine(BoundAllToAll& self, const Round& round, nb::handle y, nb::handle out,
                   nb::handle topk_weights, bool release, std::optional<double> timeout_s,
                   nb::handle stream);

void bind_dispatch(nb::class_<BoundAllToAll>& c);
void bind_combine(nb::class_<BoundAllToAll>& c);

}  // namespace fanfold::python
