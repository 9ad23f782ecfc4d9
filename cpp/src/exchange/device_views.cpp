// SPDX-License-Identifier: Apache-2.0

// Views of a received round on a GPU, its routing, and sanitize.

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/byte_math.h"
#include "base/format.h"
#include "exchange/device_exchange.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

using base::str;

/// "round 3 of AllToAll 'moe'"
std::string name_of_round(const Slot& slot, const std::string& what) {
  return str("round ", slot.round, " of ", what);
}

}  // namespace

void DeviceExchange::use_stream(Slot& slot, const std::optional<void*>& stream, const char* call) {
  const exec::Stream used = stream.value_or(slot.stream);
  const std::uint64_t capture = device_->capture_of(used);
  if (capture != slot.capture) {
    const char* const got = capture == 0         ? "got a stream that is not capturing"
                            : slot.is_captured() ? "got a stream of another capture"
                                                 : "got a stream that is capturing";
    throw InvalidState(str(call, ": ", name_of_round(slot, what()),
                           slot.is_captured()
                               ? " was dispatched in a graph capture and must end in it, "
                               : " was dispatched outside of a graph capture and cannot go on in "
                                 "one, ",
                           got));
  }
  // The caller has ordered the streams behind calls, not behind what was asked for since.
  if (slot.has_late_work && used != slot.call_stream) {
    device_->order(slot.call_stream, used);
    slot.has_late_work = false;
  }
  slot.call_stream = used;
}

bool DeviceExchange::has_lost_capture(const Slot& slot) const {
  if (!slot.is_captured()) return false;
  try {
    return device_->capture_of(slot.stream) != slot.capture;
  } catch (const InvalidArgument&) {
    return true;  // nor is the stream there any more
  } catch (const InvalidState&) {
    return true;  // an invalid one can only be ended
  }
}

void DeviceExchange::forget_routing(Slot& slot) {
  if (slot.routing == nullptr) return;
  if (std::find(retired_.begin(), retired_.end(), slot.routing) == retired_.end()) {
    retired_.push_back(slot.routing);
  }
  slot.routing.reset();
}

void DeviceExchange::count_experts(Slot& slot) {
  if (slot.has_expert_counts) return;
  use_stream(slot, slot.call_stream, "expert_counts");
  count_experts_on(slot, slot.call_stream);
}

void DeviceExchange::count_experts_on(Slot& slot, exec::Stream stream) {
  exec::DeviceArrangeParams params = arrange_params(slot);
  add_counts(slot, params);
  device_->arrange(params, stream);
  slot.has_expert_counts = true;
  slot.has_late_work = true;
}

void DeviceExchange::fill_source_rows(Slot& slot) {
  if (slot.has_source_rows) return;
  use_stream(slot, slot.call_stream, "source_rank or source_token");
  exec::DeviceDescribeParams params{};
  params.round = round_of(slot, exec::DevicePhase::kDispatch);
  params.rank_counts = counts(slot);
  params.source_tokens = received_tokens(slot);
  if (is_per_expert(setup_.config.layout)) {
    params.pairs = local_at<plan::ExpertRow>(slot, workspace_.device.pairs_offset);
    params.max_pairs = plan::max_pairs(workspace_.top_k, workspace_.max_local_experts);
  }
  params.source_rank = local_at<std::int32_t>(slot, workspace_.local_source_rank_offset);
  params.source_token = local_at<std::int32_t>(slot, workspace_.local_source_token_offset);
  // The kernel writes rows with a token only.
  const Extents extents = leading(slot);
  const std::int64_t bytes = extents.shape[0] * extents.shape[1] * 4;
  device_->fill(reinterpret_cast<std::byte*>(params.source_rank), 0xFF, bytes, slot.call_stream);
  device_->fill(reinterpret_cast<std::byte*>(params.source_token), 0xFF, bytes, slot.call_stream);
  device_->describe_rows(params, slot.call_stream);
  slot.has_source_rows = true;
  slot.has_late_work = true;
}

HostCounts DeviceExchange::host_counts(Slot& slot) {
  if (slot.is_captured()) {
    throw InvalidState(str("host_counts: ", name_of_round(slot, what()),
                           " belongs to a graph, whose counts are known when it runs"));
  }
  count_experts(slot);
  use_stream(slot, slot.call_stream, "host_counts");
  await_carried();
  device_->wait(slot.call_stream, loss_watch());
  throw_if_kernels_failed();
  const auto ranks = static_cast<std::size_t>(num_ranks());
  const auto experts = static_cast<std::size_t>(num_local_experts());
  std::vector<std::int32_t> words(
      static_cast<std::size_t>(plan::num_counts(num_ranks(), workspace_.max_local_experts)));
  device_->download(words.data(), reinterpret_cast<const std::byte*>(counts(slot)),
                    static_cast<std::int64_t>(words.size() * sizeof words[0]));
  throw_if_kernels_gave_up();
  const std::int32_t* const at = words.data();
  const std::int32_t* const tokens = at + (token_counts(slot) - counts(slot));
  slot.token_counts.assign(tokens, tokens + ranks);
  check_token_counts(slot);
  HostCounts host;
  host.rank_counts.assign(at, at + ranks);
  host.expert_counts.assign(at + ranks, at + ranks + experts);
  host.num_rows = at[total_rows(slot) - counts(slot)];
  return host;
}

std::shared_ptr<const Routing::Data> DeviceExchange::copy_routing(Slot& slot) {
  if (slot.routing) return slot.routing;
  if (slot.ids_changed) {
    throw InvalidState(str("routing: the received ids of ", name_of_round(slot, what()),
                           " were overwritten by sanitize; take the routing before"));
  }
  if (slot.is_captured()) {
    throw InvalidState(str("routing: ", name_of_round(slot, what()),
                           " belongs to a graph; memory cannot be allocated in a capture"));
  }
  use_stream(slot, slot.call_stream, "routing");
  const plan::DeviceRegions& d = workspace_.device;
  const std::int64_t tokens = slot.plan().num_tokens;
  const std::int64_t rows = num_ranks() * slot.round_max_tokens;
  const std::int64_t row_bytes = std::int64_t{workspace_.top_k} * 4;
  const std::int64_t targets = plan::max_targets(workspace_.top_k, num_ranks());
  const bool keeps_weights = slot.has_weights && setup_.config.weighting == Weighting::kOrigin;

  auto kept = std::make_shared<DeviceRouting>();
  struct Part {
    std::byte** to;
    const void* from;
    std::int64_t bytes;
  };
  const auto part = [](auto*& to, const void* from, std::int64_t bytes) {
    return Part{reinterpret_cast<std::byte**>(&to), from, bytes};
  };
  const exec::DeviceSlot* const words = shared_at<exec::DeviceSlot>(d.slots_offset) + slot.index;
  const Part parts[] = {
      part(kept->num_tokens, &words->num_tokens, 4),
      part(kept->rank_counts, counts(slot), std::int64_t{num_ranks()} * 4),
      part(kept->rows_per_rank, rows_per_rank(slot), std::int64_t{num_ranks()} * 4),
      part(kept->sent_ids, local_at<std::byte>(slot, d.sent_ids_offset), tokens * row_bytes),
      part(kept->sent_weights, local_at<std::byte>(slot, d.sent_weights_offset),
           keeps_weights ? tokens * row_bytes : 0),
      part(kept->targets, local_at<std::byte>(slot, d.targets_offset),
           tokens * targets * static_cast<std::int64_t>(sizeof(plan::Target))),
      part(kept->topk_ids, received_ids(slot), rows * row_bytes),
      part(kept->topk_weights, received_weights(slot), slot.has_weights ? rows * row_bytes : 0),
      part(kept->source_tokens, received_tokens(slot), rows * 4),
  };
  std::int64_t bytes = 0;
  for (const Part& each : parts) bytes += base::align_up(each.bytes, 128);
  kept->backend = device_;
  kept->exchange = std::static_pointer_cast<DeviceExchange>(shared_from_this());
  kept->num_ranks = num_ranks();
  kept->stream = slot.call_stream;
  kept->memory = device_->allocate(bytes);
  // Here, where a call may wait; seldom, since a rank on the same GPU may wait for this one.
  constexpr std::size_t kMaxRetired = 16;
  if (retired_.size() > kMaxRetired) retired_.clear();
  std::byte* at = kept->memory.get();
  for (const Part& each : parts) {
    if (each.bytes == 0) continue;
    *each.to = at;
    device_->copy(at, static_cast<const std::byte*>(each.from), each.bytes, slot.call_stream);
    at += base::align_up(each.bytes, 128);
  }
  slot.has_late_work = true;
  std::shared_ptr<Routing::Data> data = start_routing(slot);
  data->plan.num_tokens = tokens;
  data->device = std::move(kept);
  return data;
}

const std::vector<std::int32_t>& DeviceRouting::host_rank_counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (host_rank_counts_.empty()) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(num_ranks));
    if (const std::shared_ptr<DeviceExchange> owner = exchange.lock()) {
      owner->await_carried();
      backend->wait(stream, owner->loss_watch());
      owner->throw_if_kernels_failed();
    } else {
      backend->wait(stream, [] {});
    }
    backend->download(values.data(), reinterpret_cast<const std::byte*>(rank_counts),
                      std::int64_t{num_ranks} * 4);
    host_rank_counts_ = std::move(values);
  }
  return host_rank_counts_;
}

void DeviceExchange::sanitize(const SanitizeCall& call) {
  if (Slot* const slot = slot_of_ids(call.out)) {
    // What comes later counts what this overwrites.
    use_stream(*slot, call.stream, "sanitize");
    if (!slot->has_expert_counts) count_experts_on(*slot, call.stream);
    slot->ids_changed = true;
  }
  const TensorView& ids = call.ids;
  const TensorView& out = call.out;
  const bool has_sources = ids.ndim == 3;
  const std::size_t row = has_sources ? 1 : 0;
  exec::DeviceSanitizeParams params{};
  params.ids = ids.data;
  params.out = out.data;
  params.dtype = ids.dtype;
  params.source_stride = has_sources ? ids.strides[0] : 0;
  params.row_stride = ids.strides[row];
  params.out_source_stride = has_sources ? out.strides[0] : 0;
  params.out_row_stride = out.strides[row];
  params.num_sources = has_sources ? ids.shape[0] : 1;
  params.num_rows = ids.shape[row];
  params.top_k = static_cast<std::int32_t>(ids.shape[row + 1]);
  params.counts = static_cast<const std::int32_t*>(call.counts.data);
  params.invalid_expert_id = call.invalid_expert_id;
  params.policy = call.policy;
  params.rank_of = shared_at<std::int32_t>(workspace_.device.rank_of_offset);
  params.local_of = shared_at<std::int32_t>(workspace_.device.local_of_offset);
  params.num_experts = setup_.map.num_experts;
  params.rank = rank_;
  device_->sanitize(params, call.stream);
}

}  // namespace fanfold::exchange
