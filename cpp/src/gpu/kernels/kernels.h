// SPDX-License-Identifier: Apache-2.0
#pragma once

// One function per kernel, in the file of the same name. Each enqueues one launch, handles zero
// rows, allocates nothing and reads nothing back. Graph capture: allowed.

#include <cuda_runtime_api.h>

#include "exec/capture_params.h"
#include "exec/device_params.h"

namespace fanfold::gpu {

/// How many blocks a grid may have where more would only wait: two for each multiprocessor.
struct GridLimit {
  int max_blocks;
};

cudaError_t signal(const exec::DeviceSignalParams& params, cudaStream_t stream);
cudaError_t dispatch_send(const exec::DeviceDispatchSendParams& params, GridLimit limit,
                          cudaStream_t stream);
cudaError_t arrange(const exec::DeviceArrangeParams& params, GridLimit limit, cudaStream_t stream);
cudaError_t describe_rows(const exec::DeviceDescribeParams& params, GridLimit limit,
                          cudaStream_t stream);
cudaError_t combine_send(const exec::DeviceCombineSendParams& params, GridLimit limit,
                         cudaStream_t stream);
cudaError_t sum_rows(const exec::DeviceSumParams& params, GridLimit limit, cudaStream_t stream);
cudaError_t pack_rows(const exec::DevicePackParams& params, GridLimit limit, cudaStream_t stream);
cudaError_t sanitize(const exec::DeviceSanitizeParams& params, GridLimit limit,
                     cudaStream_t stream);
cudaError_t begin_step(const exec::DeviceBeginStepParams& params, GridLimit limit,
                       cudaStream_t stream);
cudaError_t record_ids(const exec::DeviceRecordParams& params, GridLimit limit,
                       cudaStream_t stream);
cudaError_t copy_snapshot(const exec::DeviceSnapshotParams& params, GridLimit limit,
                          cudaStream_t stream);

}  // namespace fanfold::gpu
