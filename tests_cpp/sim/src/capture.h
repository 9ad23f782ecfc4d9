// SPDX-License-Identifier: Apache-2.0
#pragma once

// Capture of work into graphs, and what is not allowed while it goes on.

#include "task.h"

namespace cudasim {

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode);
/// Ends the capture that began in the stream; `graph` stays null unless it succeeds.
cudaError_t end_capture(Stream& stream, std::unique_ptr<Graph>& graph);

/// Adds a node; the stream captures.
cudaError_t capture_operation(Stream& stream, Operation operation);
/// The stream waits for an event; one of the two belongs to a capture.
cudaError_t capture_wait(Stream& stream, const Event& event);
void capture_record(Stream& stream, Event& event);

/// An error, after invalidating its capture, if the stream captures: it cannot be waited for.
cudaError_t refuse_if_capturing(Stream& stream);
/// An error, after invalidating, if the use of the legacy stream would order captured work.
cudaError_t refuse_legacy_use(const Stream& stream);
/// An error, after invalidating its capture, if the event was last recorded in one.
cudaError_t refuse_if_captured(const Event& event);

/// The calling thread's mode; returns the one before.
cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode);

}  // namespace cudasim
