// SPDX-License-Identifier: Apache-2.0
#include "device_check/rank_case.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "device_check/device_kernels.h"
#include "support/random_bits.h"

namespace fanfold::device_check {

AllToAllConfig config_of(const Options& options, DeviceType device, int device_index) {
  AllToAllConfig config;
  config.num_experts = options.experts;
  config.top_k = options.top_k;
  config.max_tokens_per_rank = options.tokens;
  config.hidden = options.hidden;
  config.dtype = DType::kBFloat16;
  config.strategy = Strategy::kOneSided;
  config.layout = options.layout;
  config.weighting = is_per_expert(options.layout) ? Weighting::kCarried : Weighting::kApplied;
  config.device = device;
  config.device_index = device_index;
  config.timeout = std::chrono::milliseconds(options.timeout_ms);
  return config;
}

int take_device(int rank) {
  int num_devices = 0;
  require(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  const int device = rank % num_devices;
  require(cudaSetDevice(device), "cudaSetDevice");
  return device;
}

HostInputs draw(const Options& options, int rank, std::uint64_t round) {
  testing::RandomBits random(testing::mix(options.seed, round, static_cast<std::uint64_t>(rank)));
  HostInputs inputs;
  std::vector<std::int32_t> experts(static_cast<std::size_t>(options.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (int token = 0; token < options.tokens; ++token) {
    for (int k = 0; k < options.top_k; ++k) {
      const auto at = static_cast<std::size_t>(k);
      std::swap(experts[at], experts[at + random.next() % (experts.size() - at)]);
      inputs.ids.push_back(experts[at]);
      inputs.weights.push_back(static_cast<float>(random.next() % 1024) / 1024.0F);
    }
    for (int i = 0; i < options.hidden; ++i) {
      const std::uint64_t bits = random.next();  // sixteen binades around 1
      inputs.x.push_back(
          static_cast<std::uint16_t>((bits & 0x807fU) | ((119 + ((bits >> 16) & 15U)) << 7)));
    }
  }
  inputs.num_tokens =
      static_cast<std::int32_t>(random.next() % (static_cast<std::uint64_t>(options.tokens) + 1));
  return inputs;
}

DeviceInputs::DeviceInputs(const Options& options)
    : options_(options),
      device_(0),
      ids_(std::int64_t{4} * options.tokens * options.top_k),
      x_(std::int64_t{2} * options.tokens * options.hidden),
      weights_(std::int64_t{4} * options.tokens * options.top_k),
      num_tokens_(4),
      out_(std::int64_t{2} * options.tokens * options.hidden) {
  require(cudaGetDevice(&device_), "cudaGetDevice");
}

void DeviceInputs::write(const HostInputs& inputs) {
  ids_.write(inputs.ids);
  x_.write(inputs.x);
  weights_.write(inputs.weights);
  num_tokens_.write(std::vector<std::int32_t>{inputs.num_tokens});
}

TensorView DeviceInputs::on_device(void* data, DType dtype, std::int64_t rows,
                                   std::int64_t columns) const {
  TensorView view(data, dtype, {rows, columns});
  view.device = DeviceType::kGpu;
  view.device_index = device_;
  return view;
}

DispatchInputs DeviceInputs::dispatch(const Stream& stream, bool with_count) const {
  DispatchInputs inputs;
  inputs.topk_ids = on_device(ids_.get(), DType::kInt32, options_.tokens, options_.top_k);
  inputs.topk_weights = on_device(weights_.get(), DType::kFloat32, options_.tokens, options_.top_k);
  inputs.payloads = {on_device(x_.get(), DType::kBFloat16, options_.tokens, options_.hidden)};
  if (with_count) {
    inputs.num_tokens = on_device(num_tokens_.get(), DType::kInt32, 1, 1);
    inputs.num_tokens.ndim = 1;
  }
  inputs.stream = stream.get();
  return inputs;
}

TensorView DeviceInputs::out() const {
  return on_device(out_.get(), DType::kBFloat16, options_.tokens, options_.hidden);
}

std::vector<std::uint16_t> DeviceInputs::read_out() const {
  return out_.read<std::uint16_t>(static_cast<std::size_t>(options_.tokens) *
                                  static_cast<std::size_t>(options_.hidden));
}

TensorView enqueue_expert(AllToAll& all_to_all, const Received& received, const Stream& stream) {
  const TensorView& x = received.payloads()[0];
  const TensorView y = all_to_all.combine_buffer(received.handle());
  const bool by_expert = is_per_expert(all_to_all.config().layout);
  const TensorView& counts = by_expert ? received.expert_counts() : received.rank_counts();
  ScaleRowsParams params{};
  params.x = static_cast<const std::byte*>(x.data);
  params.y = static_cast<std::byte*>(y.data);
  params.counts = static_cast<const std::int32_t*>(counts.data);
  params.num_groups = static_cast<std::int32_t>(x.shape[0]);
  params.rows_per_group = x.shape[1];
  params.hidden = x.shape[2];
  const auto num_blocks =
      static_cast<int>(std::clamp<std::int64_t>(x.shape[0] * x.shape[1], 1, 64));
  require(scale_rows(params, num_blocks, stream.get()), "scale_rows");
  return y;
}

}  // namespace fanfold::device_check
