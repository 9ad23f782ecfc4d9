// SPDX-License-Identifier: Apache-2.0
#include "capture.h"

#include <algorithm>

#include "state.h"

namespace cudasim {
namespace {

thread_local cudaStreamCaptureMode this_threads_mode = cudaStreamCaptureModeGlobal;

void unite(std::vector<int>& nodes, const std::vector<int>& others) {
  for (const int node : others) {
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
  }
}

/// By node: is it, or does it come before, one of `ends`?
std::vector<bool> reached_from(const Capture& capture, const std::vector<int>& ends) {
  std::vector<bool> is_reached(capture.nodes.size(), false);
  for (const int node : ends) is_reached[static_cast<std::size_t>(node)] = true;
  for (std::size_t i = capture.nodes.size(); i-- > 0;) {  // dependencies have smaller indices
    if (!is_reached[i]) continue;
    for (const int node : capture.nodes[i].dependencies) {
      is_reached[static_cast<std::size_t>(node)] = true;
    }
  }
  return is_reached;
}

/// Has every stream that the capture has spread to been joined to its origin?
bool is_joined(const Capture& capture) {
  const std::vector<bool> is_reached = reached_from(capture, capture.origin->capture_tail);
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const Stream* stream) {
    const auto& tail = stream->capture_tail;
    return std::all_of(tail.begin(), tail.end(),
                       [&](int node) { return is_reached[static_cast<std::size_t>(node)]; });
  });
}

void release_streams(Capture& capture) {
  capture.has_ended = true;
  for (Stream* const stream : capture.streams) {
    stream->capture.reset();
    stream->capture_tail.clear();
  }
}

}  // namespace

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode) {
  if (stream.is_legacy) return cudaErrorStreamCaptureUnsupported;
  if (stream.capture != nullptr) return cudaErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->origin = &stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->id = ++engine.num_captures;
  capture->streams = {&stream};
  stream.capture = capture;
  stream.capture_tail.clear();
  engine.captures.push_back(std::move(capture));
  return cudaSuccess;
}

cudaError_t end_capture(Stream& stream, std::unique_ptr<Graph>& graph) {
  const std::shared_ptr<Capture> capture = stream.capture;
  if (capture == nullptr) return cudaErrorIllegalState;
  if (capture->origin != &stream) return cudaErrorStreamCaptureUnmatched;
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return cudaErrorStreamCaptureWrongThread;
  }
  const bool was_joined = is_joined(*capture);
  release_streams(*capture);
  auto& all = engine.captures;
  all.erase(std::find(all.begin(), all.end(), capture));
  if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (!was_joined) return cudaErrorStreamCaptureUnjoined;
  graph = std::make_unique<Graph>();
  graph->nodes = std::move(capture->nodes);
  return cudaSuccess;
}

cudaError_t capture_operation(Stream& stream, Operation operation) {
  Capture& capture = *stream.capture;
  if (capture.is_invalid) return cudaErrorStreamCaptureInvalidated;
  const auto index = static_cast<int>(capture.nodes.size());
  capture.nodes.push_back({std::move(operation), stream.device, stream.capture_tail});
  stream.capture_tail = {index};
  return cudaSuccess;
}

cudaError_t capture_wait(Stream& stream, const Event& event) {
  const std::shared_ptr<Capture>& theirs = event.capture;
  if (theirs != nullptr && theirs->has_ended) return cudaErrorCapturedEvent;
  if (theirs != nullptr && theirs->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (theirs != nullptr && stream.is_legacy) {
    theirs->is_invalid = true;
    return cudaErrorStreamCaptureImplicit;
  }
  if (stream.capture == nullptr) {  // the capture spreads to this stream
    stream.capture = theirs;
    stream.capture_tail = event.capture_tail;
    theirs->streams.insert(&stream);
    return cudaSuccess;
  }
  if (stream.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (stream.capture != theirs) {  // work outside the capture, or in another one
    stream.capture->is_invalid = true;
    if (theirs != nullptr) theirs->is_invalid = true;
    return cudaErrorStreamCaptureIsolation;
  }
  unite(stream.capture_tail, event.capture_tail);
  return cudaSuccess;
}

void capture_record(Stream& stream, Event& event) {
  event.task.reset();
  event.capture = stream.capture;
  event.capture_tail = stream.capture_tail;
}

cudaError_t refuse_if_capturing(Stream& stream) {
  if (stream.capture == nullptr) return refuse_legacy_use(stream);
  stream.capture->is_invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_legacy_use(const Stream& stream) {
  if (!stream.is_legacy) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (const auto& capture : engine.captures) {
    const bool concerns =
        std::any_of(capture->streams.begin(), capture->streams.end(), [&](const Stream* captured) {
          return captured->is_blocking && captured->device == stream.device;
        });
    if (!concerns) continue;
    capture->is_invalid = true;
    error = cudaErrorStreamCaptureImplicit;
  }
  return error;
}

cudaError_t refuse_if_captured(const Event& event) {
  if (event.capture == nullptr) return cudaSuccess;
  event.capture->is_invalid = true;
  return cudaErrorCapturedEvent;
}

cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode) {
  return std::exchange(this_threads_mode, mode);
}

int unsafe_during_capture() {
  if (this_threads_mode == cudaStreamCaptureModeRelaxed) return 0;
  int error = 0;
  for (const auto& capture : engine.captures) {
    const bool is_mine = capture->thread == std::this_thread::get_id();
    const bool concerns_me = is_mine ? capture->mode != cudaStreamCaptureModeRelaxed
                                     : this_threads_mode == cudaStreamCaptureModeGlobal &&
                                           capture->mode == cudaStreamCaptureModeGlobal;
    if (!concerns_me) continue;
    capture->is_invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

}  // namespace cudasim
