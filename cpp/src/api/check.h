// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of what callers pass. Each throws InvalidArgument with name, expected and got.

#include <cstdint>
#include <optional>
#include <string>

#include "exchange/exchange.h"
#include "fanfold/all_to_all.h"

namespace fanfold::api {

/// A dispatch whose arguments hold; the caller's inputs must outlive it.
exchange::DispatchCall check_dispatch(const exchange::Exchange& exchange,
                                      const DispatchInputs& inputs);

/// y of a combine in `slot`.
void check_results(exchange::Exchange& exchange, const exchange::Slot& slot,
                   const CombineInputs& inputs);

/// out and topk_weights of a combine in `slot` with rows of `hidden` elements.
void check_combine_out(const exchange::Exchange& exchange, const exchange::Slot& slot,
                       const CombineInputs& inputs, std::int64_t hidden);

/// hidden and dtype of a combine buffer.
void check_combine_row(const exchange::Exchange& exchange, std::int64_t hidden, DType dtype);

/// On a GPU a call has a stream.
void check_stream(const AllToAllConfig& config, const std::optional<void*>& stream);

void check_sanitize(const exchange::Exchange& exchange, const TensorView& ids,
                    const TensorView& counts, std::int64_t invalid_expert_id,
                    const TensorView& out);

}  // namespace fanfold::api
