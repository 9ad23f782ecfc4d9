// SPDX-License-Identifier: Apache-2.0
#pragma once

// A Communicator's collectives on GPU tensors: checks, and the way to DeviceCollectives.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <vector>

#include "comm/communicator_impl.h"
#include "fanfold/tensor_view.h"

namespace fanfold::comm {

/// Whether a call with these tensors concerns a GPU: one of them is there.
bool is_on_gpu(std::initializer_list<std::reference_wrapper<const TensorView>> tensors);

// As the functions of Communicator. They only enqueue; `deadline` bounds what that waits for.
/// @throws InvalidArgument  also: the communicator has no collectives on GPU memory, `stream` is
/// not
///         given, or a tensor is on another device.
void all_gather_v(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                  const std::vector<std::int64_t>& counts, std::optional<void*> stream,
                  base::Deadline deadline);
/// @throws Unsupported  the counts are not equal.
void reduce_scatter_v(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                      const std::vector<std::int64_t>& counts, std::optional<void*> stream,
                      base::Deadline deadline);
void all_to_all(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                std::optional<void*> stream, base::Deadline deadline);
void all_to_all_v(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                  const std::vector<std::int64_t>& send_counts,
                  const std::vector<std::int64_t>& recv_counts, std::optional<void*> stream,
                  base::Deadline deadline);
void broadcast(Communicator::Impl& impl, const TensorView& tensor, int root,
               std::optional<void*> stream, base::Deadline deadline);
void all_reduce(Communicator::Impl& impl, const TensorView& send, const TensorView& recv,
                std::optional<void*> stream, base::Deadline deadline);

}  // namespace fanfold::comm
