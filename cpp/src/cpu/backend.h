// SPDX-License-Identifier: Apache-2.0
#pragma once

// The backend for this machine's processor.

#include <memory>

#include "exec/backend.h"

namespace fanfold::cpu {

std::unique_ptr<exec::Backend> make_backend(const exec::Context& context);

// One phase per file, as in `gpu`. `Context` carries the kernels, the control area and the hook.
void dispatch_send(const exec::Context& context, const exec::DispatchSendParams& params);
void dispatch_recv(const exec::Context& context, const exec::DispatchRecvParams& params);
void expand_rows(const exec::Context& context, const exec::ExpandRowsParams& params);
void move_rows(const exec::Context& context, const exec::MoveRowsParams& params);
void pack_rows(const exec::Context& context, const exec::PackRowsParams& params);
void gather_rows(const exec::Context& context, const exec::GatherRowsParams& params);
void combine_send(const exec::Context& context, const exec::CombineSendParams& params);
void wait_flags(const exec::Context& context, const exec::WaitFlagsParams& params);
void sum_rows(const exec::Context& context, const exec::SumRowsParams& params);
void sanitize(const exec::SanitizeParams& params);

}  // namespace fanfold::cpu
