// SPDX-License-Identifier: Apache-2.0
#pragma once

// What Python holds: an AllToAll or a Received with the tensors that were made over its memory.

#include <memory>
#include <utility>

#include "convert.h"
#include "fanfold/all_to_all.h"

namespace fanfold::python {

/// An AllToAll and its tensor objects.
struct BoundAllToAll {
  BoundAllToAll(Communicator& communicator, const AllToAllConfig& config, Allocator* allocator,
                const AllToAll* workspace_of)
      : core(communicator, config, allocator, workspace_of) {}

  nb::object tensor(const TensorView& view, Framework kind) {
    if (!view.has_value()) return nb::none();
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
  std::shared_ptr<const void> memory;  // of the tensors in the cache
  TensorCache cache;
  TensorTypeCache types;
  Framework framework = Framework::kDlpack;  // of the last dispatch's payloads
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
                   nb::handle topk_weights, bool release, std::optional<double> timeout_s);

/// A call on CPU tensors needs no stream.
void check_stream(nb::handle stream);

void bind_dispatch(nb::class_<BoundAllToAll>& c);
void bind_combine(nb::class_<BoundAllToAll>& c);

}  // namespace fanfold::python
