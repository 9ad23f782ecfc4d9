// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank of a case: its inputs, on the host and on its device.

#include <cstdint>
#include <vector>

#include "device_check/commands.h"
#include "device_check/device.h"
#include "fanfold/all_to_all.h"

namespace fanfold::device_check {

/// The configuration of a case on `device`; layouts per expert carry the weights.
AllToAllConfig config_of(const Options& options, DeviceType device, int device_index);
/// The device of a rank: all there are, in turn. Makes it current on this thread.
int take_device(int rank);

/// Inputs of one rank and round: distinct experts for each token, numbers whose products with
/// powers of two are exact.
struct HostInputs {
  std::vector<std::int32_t> ids;  // [T, K]
  std::vector<std::uint16_t> x;   // [T, H] bfloat16
  std::vector<float> weights;     // [T, K]
  std::int32_t num_tokens = 0;    // of T
};
HostInputs draw(const Options& options, int rank, std::uint64_t round);

/// The same in device memory, with room for the results.
class DeviceInputs {
 public:
  explicit DeviceInputs(const Options& options);
  /// Waits; nothing that reads them may run.
  void write(const HostInputs& inputs);
  /// Tensors for a dispatch on `stream`; with_count: T is read on the device.
  DispatchInputs dispatch(const Stream& stream, bool with_count) const;
  TensorView out() const;
  std::vector<std::uint16_t> read_out() const;

 private:
  TensorView on_device(void* data, DType dtype, std::int64_t rows, std::int64_t columns) const;

  Options options_;
  int device_;
  Buffer ids_;
  Buffer x_;
  Buffer weights_;
  Buffer num_tokens_;
  Buffer out_;
};

/// Enqueues the expert of this rank on what was received; returns its results, which lie in the
/// combine buffer.
TensorView enqueue_expert(AllToAll& all_to_all, const Received& received, const Stream& stream);

}  // namespace fanfold::device_check
