// SPDX-License-Identifier: Apache-2.0
// Runtime API: capture and graphs.

#include "capture.h"
#include "runtime.h"

using namespace cudasim;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  CUDASIM_DEVICE_API("cudaStreamBeginCapture")
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return with_last_error(cudaErrorInvalidResourceHandle);
  return with_last_error(begin_capture(*stream, mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  CUDASIM_API("cudaStreamEndCapture")
  *graph = nullptr;
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return with_last_error(cudaErrorInvalidResourceHandle);
  std::unique_ptr<Graph> captured;
  const cudaError_t error = end_capture(*stream, captured);
  if (error != cudaSuccess) return with_last_error(error);
  *graph = reinterpret_cast<cudaGraph_t>(captured.get());
  engine.graphs[*graph] = std::move(captured);
  ++engine.stats.graphs;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  CUDASIM_API("cudaStreamIsCapturing")
  const Stream* const stream = find_stream(handle);
  if (stream == nullptr) return with_last_error(cudaErrorInvalidResourceHandle);
  if (const cudaError_t e = refuse_legacy_use(*stream)) return with_last_error(e);
  if (stream->capture == nullptr) {
    *status = cudaStreamCaptureStatusNone;
  } else {
    *status = stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
  }
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  CUDASIM_API("cudaThreadExchangeStreamCaptureMode")
  *mode = exchange_capture_mode(*mode);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* num_nodes) {
  CUDASIM_API("cudaGraphGetNodes")
  const auto found = engine.graphs.find(graph);
  if (found == engine.graphs.end() || nodes != nullptr) {  // nodes have no handles here
    return with_last_error(cudaErrorInvalidValue);
  }
  *num_nodes = found->second->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  CUDASIM_DEVICE_API("cudaGraphInstantiate")
  const auto found = engine.graphs.find(graph);
  if (found == engine.graphs.end()) return with_last_error(cudaErrorInvalidValue);
  auto copy = std::make_unique<Graph>();
  copy->nodes = found->second->nodes;
  *instance = reinterpret_cast<cudaGraphExec_t>(copy.get());
  engine.graph_instances[*instance] = std::move(copy);
  ++engine.stats.graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t handle) {
  CUDASIM_API("cudaGraphLaunch")
  const auto found = engine.graph_instances.find(instance);
  Stream* const stream = find_stream(handle);
  if (found == engine.graph_instances.end() || stream == nullptr) {
    return with_last_error(cudaErrorInvalidResourceHandle);
  }
  if (const cudaError_t e = refuse_if_capturing(*stream)) return with_last_error(e);
  if (stream->device->sticky != cudaSuccess) return with_last_error(stream->device->sticky);
  append_graph(*stream, *found->second);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  CUDASIM_API("cudaGraphDestroy")
  if (engine.graphs.erase(graph) == 0) return with_last_error(cudaErrorInvalidValue);
  --engine.stats.graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  CUDASIM_API("cudaGraphExecDestroy")
  if (engine.graph_instances.erase(instance) == 0) return with_last_error(cudaErrorInvalidValue);
  --engine.stats.graphs;
  return cudaSuccess;
}

}  // extern "C"
