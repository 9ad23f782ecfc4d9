// SPDX-License-Identifier: Apache-2.0
#include "gpu/fault_scenario.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "cudasim/control.h"
#include "fanfold/error.h"
#include "gpu/nccl_ranks.h"
#include "gpu/test_gpu.h"
#include "support/random_bits.h"

namespace fanfold::testing {
namespace {

using Bytes = std::vector<std::byte>;

AllToAllConfig config_of(const FaultScenario& s, int rank) {
  AllToAllConfig config;
  config.num_experts = s.num_experts;
  config.top_k = s.top_k;
  config.max_tokens_per_rank = s.tokens;
  config.hidden = s.hidden;
  config.dtype = DType::kBFloat16;
  config.extra_bytes_per_token = 3;
  config.strategy = s.strategy;
  config.layout = s.layout;
  config.weighting = s.weighting;
  config.combine_wire = s.combine_wire;
  config.max_in_flight = s.max_in_flight;
  config.device = DeviceType::kGpu;
  config.device_index = rank % s.num_devices;
  config.timeout = std::chrono::seconds(15);
  if (s.has_replicas) {
    std::vector<std::int32_t> ranks;
    std::vector<std::int32_t> logical;
    for (int expert = 0; expert < s.num_experts; ++expert) {
      ranks.push_back(expert % s.num_ranks);
      logical.push_back(expert / 2);
    }
    config.placement = Placement::from_replicas(ranks, logical);
  }
  return config;
}

/// A tensor of the device whose bytes the host has written.
class Tensor {
 public:
  Tensor(int device, DType dtype, std::initializer_list<std::int64_t> shape, Bytes bytes,
         void* stream)
      : view_(static_cast<void*>(nullptr), dtype, shape) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    memory_ = test_device()->allocate(device, size);
    test_device()->upload(device, memory_.get(), bytes.data(), size, stream);
    view_.data = memory_.get();
    view_.device = DeviceType::kGpu;
    view_.device_index = device;
  }
  const TensorView& view() const { return view_; }

 private:
  std::shared_ptr<std::byte> memory_;
  TensorView view_;
};

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// What one rank gives in one round.
struct Inputs {
  Inputs(const FaultScenario& s, int rank, int round, void* stream) {
    RandomBits random(mix(static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(round)));
    const std::int64_t rows = rank == 1 ? s.tokens - 1 : s.tokens;
    const int num_logical = s.has_replicas ? (s.num_experts + 1) / 2 : s.num_experts;
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    for (std::int64_t i = 0; i < rows * s.top_k; ++i) {
      // With repeats, ids of no expert, and ids past all of them.
      ids.push_back(static_cast<std::int32_t>(random.below(num_logical + 2)) - 1);
      weights.push_back(random.unit());
    }
    std::vector<std::uint16_t> numbers;
    for (std::int64_t i = 0; i < rows * s.hidden; ++i) {
      numbers.push_back(static_cast<std::uint16_t>(0x3f80 + random.below(0x100)));
    }
    Bytes tail(static_cast<std::size_t>(rows) * 3);
    for (std::byte& byte : tail) byte = static_cast<std::byte>(random.below(256));
    tensors.reserve(5);
    const auto add = [&](DType dtype, std::initializer_list<std::int64_t> shape, Bytes bytes) {
      tensors.emplace_back(rank % s.num_devices, dtype, shape, std::move(bytes), stream);
      return tensors.back().view();
    };
    dispatch.topk_ids = add(DType::kInt32, {rows, s.top_k}, bytes_of(ids));
    dispatch.topk_weights = add(DType::kFloat32, {rows, s.top_k}, bytes_of(weights));
    dispatch.payloads = {add(DType::kBFloat16, {rows, s.hidden}, bytes_of(numbers)),
                         add(DType::kUInt8, {rows, 3}, std::move(tail))};
    if (s.counts_on_device) {
      const auto count = static_cast<std::int32_t>(rank == 0 ? rows + 2 : rows - 1);
      dispatch.num_tokens = add(DType::kInt32, {1}, bytes_of(std::vector<std::int32_t>{count}));
    }
    dispatch.round_max_tokens = s.tokens;
    dispatch.stream = stream;
  }

  std::vector<Tensor> tensors;
  DispatchInputs dispatch;
};

/// Bytes from the first element to behind the last.
std::int64_t span_of(const TensorView& view) {
  if (view.num_elements() == 0) return 0;
  std::int64_t last = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.ndim); ++i) {
    last += (view.shape[i] - 1) * view.strides[i];
  }
  return (last + 1) * size_of(view.dtype);
}

/// All ranks of a scenario.
class Ranks {
 public:
  Ranks(const FaultScenario& scenario, FaultOutcome& outcome)
      : s_(scenario),
        outcome_(outcome),
        communicators_(Communicator::threads(scenario.num_ranks)),
        over_nccl_(communicators_.size()),
        ranks_(static_cast<std::size_t>(scenario.num_ranks)) {
    each_on_a_thread([&](std::size_t r) {
      if (s_.strategy == Strategy::kBatched || s_.strategy == Strategy::kGatherScatter) {
        over_nccl_[r] = Communicator::from_nccl(communicators_[r], nccl_options(device(r)));
      }
      ranks_[r] = std::make_unique<AllToAll>(over_nccl_[r] ? *over_nccl_[r] : communicators_[r],
                                             config_of(s_, static_cast<int>(r)));
    });
    for (int rank = 0; rank < s_.num_ranks; ++rank) {
      streams_.push_back(test_device()->make_stream(rank % s_.num_devices));
    }
    active_.assign(ranks_.size(), true);
  }

  ~Ranks() {
    each_on_a_thread([&](std::size_t r) { ranks_[r].reset(); });
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// Everything is enqueued before anything is waited for, round by round.
  void run() {
    for (int round = 0; round < s_.num_rounds; ++round) {
      if (s_.masks_last && round == 1) {
        active_.back() = false;
        each_active([&](std::size_t r) { ranks_[r]->set_active_mask(active_); });
      }
      std::vector<std::unique_ptr<Inputs>> inputs;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        inputs.push_back(std::make_unique<Inputs>(s_, static_cast<int>(r), round, stream(r)));
      }
      dispatch(inputs);
      for (int i = 0; i < s_.num_combines; ++i) {
        const bool ends = i + 1 == s_.num_combines;
        combine(inputs, round * s_.num_combines + i, ends);
        if (ends || s_.waits_between_combines) keep_results();
      }
    }
  }

 private:
  template <class Body>
  void each_on_a_thread(Body&& body) {
    std::vector<std::thread> threads;
    std::vector<std::exception_ptr> errors(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          body(r);
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
      if (error != nullptr) std::rethrow_exception(error);
    }
  }
  template <class Body>
  void each_active(Body&& body) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (active_[r]) body(r);
    }
  }
  void* stream(std::size_t r) const { return streams_[r].get(); }
  int device(std::size_t r) const { return static_cast<int>(r) % s_.num_devices; }

  void wait_all() {
    each_active([&](std::size_t r) {
      test_device()->synchronize(device(r), stream(r));
      ranks_[r]->check();
    });
  }

  void keep(std::size_t r, const TensorView& view) {
    Bytes bytes(static_cast<std::size_t>(span_of(view)));
    test_device()->download(device(r), bytes.data(), view.data,
                            static_cast<std::int64_t>(bytes.size()), stream(r));
    outcome_.results.push_back(std::move(bytes));
  }

  void dispatch(const std::vector<std::unique_ptr<Inputs>>& inputs) {
    received_.assign(ranks_.size(), Received());
    std::vector<Round> rounds(ranks_.size());
    each_active([&](std::size_t r) {
      if (s_.whole_calls) {
        received_[r] = ranks_[r]->dispatch(inputs[r]->dispatch);
      } else {
        rounds[r] = ranks_[r]->dispatch_send(inputs[r]->dispatch);
      }
    });
    each_active([&](std::size_t r) {
      if (!s_.whole_calls) received_[r] = ranks_[r]->dispatch_recv(rounds[r]);
      received_[r].expert_counts();  // enqueues what is made on first use
      received_[r].source_token();
    });
    wait_all();
    each_active([&](std::size_t r) { keep_received(r); });
  }

  /// Counts and indices, and the rows of payloads that have a token.
  void keep_received(std::size_t r) {
    const Received& received = received_[r];
    for (const TensorView* view :
         {&received.rank_counts(), &received.expert_counts(), &received.offsets(),
          &received.num_rows(), &received.source_rank(), &received.source_token()}) {
      keep(r, *view);
    }
    const TensorView& ids = received.topk_ids();
    if (ids.has_value()) {
      keep(r, ids);
      ranks_[r]->sanitize(ids, received.rank_counts(), -7, SanitizePolicy::kPaddingAndNonLocal, ids,
                          stream(r));
      test_device()->synchronize(device(r), stream(r));
      keep(r, ids);
    }
    const HostCounts counts = received.host_counts();
    const std::vector<std::int32_t>& rows =
        is_per_expert(s_.layout) ? counts.expert_counts : counts.rank_counts;
    std::vector<TensorView> views = received.payloads();
    if (is_per_expert(s_.layout)) views.push_back(received.topk_weights());
    for (TensorView view : views) {
      auto* const data = static_cast<std::byte*>(view.data);
      const std::int64_t stride = view.strides[0] * size_of(view.dtype);
      for (std::size_t group = 0; group < rows.size(); ++group) {
        if (rows[group] <= 0) continue;
        TensorView part = view;
        part.data = data + static_cast<std::int64_t>(group) * stride;
        part.shape[0] = 1;
        part.shape[1] = std::min<std::int64_t>(rows[group], view.shape[1]);
        keep(r, part);
      }
    }
  }

  void combine(const std::vector<std::unique_ptr<Inputs>>& inputs, int number, bool ends) {
    std::vector<CombineInputs> calls(ranks_.size());
    each_active([&](std::size_t r) {
      const Round round = received_[r].handle();
      CombineInputs& call = calls[r];
      const TensorView buffer = ranks_[r]->combine_buffer(round);
      call.y = buffer;
      RandomBits random(mix(77, static_cast<std::uint64_t>(number), r));
      Bytes y(static_cast<std::size_t>(span_of(buffer)));
      for (std::size_t i = 1; i < y.size(); i += 2) {  // numbers of a few binades
        y[i - 1] = static_cast<std::byte>(random.below(256));
        y[i] = static_cast<std::byte>(0x3f + random.below(4));
      }
      if (s_.in_place) {
        test_device()->upload(device(r), buffer.data, y.data(), static_cast<std::int64_t>(y.size()),
                              stream(r));
      } else {
        tensors_.emplace_back(
            device(r), DType::kBFloat16,
            std::initializer_list<std::int64_t>{buffer.shape[0], buffer.shape[1], buffer.shape[2]},
            std::move(y), stream(r));
        call.y = tensors_.back().view();
      }
      const std::int64_t rows = inputs[r]->dispatch.payloads[0].shape[0];
      tensors_.emplace_back(
          device(r), DType::kFloat32, std::initializer_list<std::int64_t>{rows, s_.hidden},
          Bytes(static_cast<std::size_t>(rows * s_.hidden * 4), std::byte{0xab}), stream(r));
      call.out = tensors_.back().view();
      outs_.emplace_back(r, call.out);
      call.release = ends;
      call.stream = stream(r);
    });
    each_active([&](std::size_t r) {
      if (s_.whole_calls) {
        ranks_[r]->combine(calls[r], received_[r].handle());
        for (int i = 0; s_.runs_between_ranks && i < 100; ++i) {
          (void)cudaStreamQuery(static_cast<cudaStream_t>(stream(r)));
        }
      } else {
        ranks_[r]->combine_send(calls[r], received_[r].handle());
      }
    });
    if (!s_.whole_calls) {
      each_active([&](std::size_t r) { ranks_[r]->combine_recv(calls[r], received_[r].handle()); });
    }
  }

  /// Of the combines since the last time.
  void keep_results() {
    wait_all();
    for (const auto& [r, out] : outs_) keep(r, out);
    outs_.clear();
    tensors_.clear();
  }

  const FaultScenario& s_;
  FaultOutcome& outcome_;
  std::vector<Communicator> communicators_;
  std::vector<std::optional<Communicator>> over_nccl_;
  std::vector<std::unique_ptr<AllToAll>> ranks_;
  std::vector<std::shared_ptr<void>> streams_;
  std::vector<bool> active_;
  std::vector<Received> received_;
  std::deque<Tensor> tensors_;  // of combines
  std::vector<std::pair<std::size_t, TensorView>> outs_;
};

}  // namespace

FaultOutcome run(const FaultScenario& scenario, std::uint64_t seed) {
  FaultOutcome outcome;
  cudasim::Config config;
  config.seed = seed;
  config.devices = scenario.num_devices;
  config.host_threads = 1;
  config.resident_blocks = scenario.resident_blocks;
  config.shuffle_blocks = seed % 2 == 0;
  config.stale = seed % 3 == 0 ? 0.2 : 0;
  config.preempt = seed % 3 == 1 ? 0.05 : 0;
  cudasim::clear_reports();
  cudasim::configure(config);
  const TestGpu gpu;
  try {
    Ranks(scenario, outcome).run();
  } catch (const std::exception& error) {
    outcome.has_failed = true;
    outcome.text = error.what();
  }
  for (const cudasim::Report& report : cudasim::reports()) {
    if (outcome.kinds.empty()) outcome.text = report.kind + ": " + report.text;
    if (std::find(outcome.kinds.begin(), outcome.kinds.end(), report.kind) == outcome.kinds.end()) {
      outcome.kinds.push_back(report.kind);
    }
  }
  cudasim::clear_reports();
  return outcome;
}

}  // namespace fanfold::testing
