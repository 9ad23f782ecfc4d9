// SPDX-License-Identifier: Apache-2.0

// A capture in a GPU's memory: every call enqueues kernels and waits for nothing. What they find
// wrong makes the step worthless; whoever looks next is told.

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>

#include "base/format.h"
#include "base/keep_forever.h"
#include "capture/check.h"
#include "capture/device_errors.h"
#include "capture/routing_capture_impl.h"
#include "fanfold/error.h"

namespace fanfold::capture {
namespace {

using base::str;

constexpr std::int64_t kWideIds = 8;        // that kernels take at a time
constexpr std::int64_t kAlignment = 128;    // of the parts of a place
constexpr std::int64_t kSinkMultiple = 16;  // of its bytes

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Where the parts of a snapshot lie in its place, and how many bytes that takes.
struct PlaceLayout {
  PlaceLayout(std::int64_t max_tokens, std::int64_t num_layers, std::int64_t row_bytes)
      : ids(round_up(sizeof(exec::CaptureSnapshotHead), kAlignment)),
        recorded(round_up(ids + max_tokens * row_bytes, kAlignment)),
        bytes(recorded + (max_tokens * num_layers + 31) / 32 * 4) {}
  std::int64_t ids;
  std::int64_t recorded;
  std::int64_t bytes;
};

/// What is shared by a capture and its snapshots.
struct Device {
  std::shared_ptr<exec::DeviceBackend> backend;
  std::shared_ptr<DeviceErrors> errors;
};

/// The contents of a snapshot that the device copies.
class DeviceContents final : public LateContents {
 public:
  DeviceContents(Device device, std::shared_ptr<void> event, const std::byte* place,
                 const PlaceLayout& layout, const RoutingSnapshot::State& state)
      : device_(std::move(device)),
        event_(std::move(event)),
        place_(place),
        layout_(layout),
        state_(state) {}

  const SnapshotContents& wait() override {
    std::call_once(once_, [this] {
      device_.backend->wait_event(event_.get());
      read();
    });
    if (error_.number != 0) device_.errors->raise(error_);
    return contents_;
  }

  bool is_ready() override { return device_.backend->has_passed(event_.get()); }

 private:
  void read();

  Device device_;
  std::shared_ptr<void> event_;
  const std::byte* place_;
  PlaceLayout layout_;
  const RoutingSnapshot::State& state_;  // which holds this
  std::once_flag once_;                  // guards the rest
  SnapshotContents contents_;
  exec::CaptureError error_{};
};

void DeviceContents::read() {
  const auto& head = *reinterpret_cast<const exec::CaptureSnapshotHead*>(place_);
  const auto* words = reinterpret_cast<const std::uint32_t*>(place_ + layout_.recorded);
  const std::int64_t num_layers = state_.spec.num_layers;
  const std::int64_t num_cells = state_.num_tokens * num_layers;
  SnapshotContents found;
  found.step_id = head.step_id;
  found.missing_rows.resize(static_cast<std::size_t>(num_layers));
  for (std::int64_t first = 0; first < num_cells; first += 32) {
    const std::int64_t here = std::min<std::int64_t>(32, num_cells - first);
    const std::uint32_t all = UINT32_MAX >> (32 - here);
    std::uint32_t missing = all & ~words[first / 32];
    for (; missing != 0; missing &= missing - 1) {
      const std::int64_t cell = first + __builtin_ctz(missing);
      ++found.missing_rows[static_cast<std::size_t>(cell % num_layers)];
    }
  }
  for (std::size_t slot = 0; slot < found.missing_rows.size(); ++slot) {
    if (found.missing_rows[slot] > 0) found.missing_layers.push_back(state_.layers[slot]);
  }
  if (!found.missing_layers.empty()) {
    found.recorded.assign(static_cast<std::size_t>(num_layers), RowSet(state_.num_tokens));
    for (std::int64_t cell = 0; cell < num_cells; ++cell) {
      if ((words[cell / 32] >> (cell % 32) & 1U) == 0) continue;
      found.recorded[static_cast<std::size_t>(cell % num_layers)].add(cell / num_layers, 1);
    }
  }
  contents_ = std::move(found);
  error_ = head.error;
}

class DeviceCapture final : public RoutingCapture::Impl {
 public:
  DeviceCapture(const RoutingCaptureConfig& given, const OpenDevice& open);
  /// Kernels that are under way use this memory: it stays where they could not be waited for.
  ~DeviceCapture() override;

  void check() override { device_.errors->throw_new(); }

 private:
  void check_place(const char* name, const TensorView& view) const override;
  exec::Stream to_stream(const std::optional<void*>& stream) const override;
  void start_step(exec::Stream stream) override;
  void write(const Record& record) override;
  Joined join(const TensorView& topk_ids, const CaptureLayout& layout,
              exec::Stream stream) override;
  void make_sink(std::size_t slot, Sink& sink, DType dtype, std::int64_t rows,
                 std::int64_t width) override;
  void clear_sink(std::size_t slot, exec::Stream stream) override;
  void copy(RoutingSnapshot::State& state, exec::Stream stream) override;
  void use_map(const std::vector<std::int32_t>& logical_of_expert) override;
  void check_snapshot(exec::Stream stream) override;

  /// Tells kernels of it. The device is idle.
  void upload_rule(const std::vector<std::int32_t>& logical_of_expert);
  bool is_wide(const TensorView& ids) const noexcept;
  /// No peer is part of this: there is nobody to look for.
  void wait_idle() {
    device_.backend->wait_idle([] {});
  }
  template <class T>
  static T* at(const std::shared_ptr<std::byte>& memory) noexcept {
    return reinterpret_cast<T*>(memory.get());
  }

  Device device_;
  PlaceLayout place_;
  std::shared_ptr<std::byte> state_;    // a CaptureState
  std::shared_ptr<std::byte> logical_;  // in [ids] int32; may be longer than the map in use
  std::int64_t max_logical_ = 0;
  std::shared_ptr<std::byte> cells_;   // [num_layers, max_tokens, top_k]
  std::shared_ptr<std::byte> stamps_;  // [num_layers, max_tokens] uint64
  std::shared_ptr<std::byte> sinks_;   // [num_layers] CaptureSink
  std::int64_t sink_bytes_ = 0;        // of all
  // Ids of all shards; what is not the last is that of graphs.
  std::vector<std::shared_ptr<std::byte>> joined_;
  std::int64_t joined_bytes_ = 0;  // of the last
  std::vector<exec::PinnedMemory> places_;
  std::vector<std::shared_ptr<void>> events_;  // by place
};

DeviceCapture::~DeviceCapture() {
  try {
    wait_idle();
  } catch (...) {
    for (const auto* memory : {&state_, &logical_, &cells_, &stamps_, &sinks_}) {
      base::keep_forever(*memory);
    }
    for (const auto& memory : joined_) base::keep_forever(memory);
    for (const auto& sink : Impl::sinks()) {
      if (sink != nullptr) base::keep_forever(sink->memory);
    }
    for (const exec::PinnedMemory& place : places_) base::keep_forever(place.host);
    base::keep_forever(device_.errors);
  }
}

DeviceCapture::DeviceCapture(const RoutingCaptureConfig& given, const OpenDevice& open)
    : Impl(given), place_(config().max_tokens, config().num_layers, spec().row_bytes()) {
  device_.backend = open(config().device_index);
  exec::DeviceBackend& backend = *device_.backend;
  const std::int64_t num_rows = config().num_layers * config().max_tokens;
  device_.errors = std::make_shared<DeviceErrors>(
      backend.allocate_pinned(sizeof(exec::CaptureReport)), config().layers, config().top_k);
  state_ = backend.allocate(sizeof(exec::CaptureState));
  cells_ = backend.allocate(num_rows * cell_bytes());
  stamps_ = backend.allocate(num_rows * static_cast<std::int64_t>(sizeof(std::uint64_t)));
  sinks_ =
      backend.allocate(config().num_layers * static_cast<std::int64_t>(sizeof(exec::CaptureSink)));
  exec::CaptureState state{};
  state.first_error = exec::kNoCaptureError;
  state.step = 1;  // of no row: their stamps are 0
  backend.upload(state_.get(), &state, sizeof state);
  upload_rule(config().logical_of_expert);
  std::vector<std::shared_ptr<std::byte>> hosts;
  for (int i = 0; i < config().max_in_flight; ++i) {
    places_.push_back(backend.allocate_pinned(place_.bytes));
    hosts.push_back(places_.back().host);
    events_.push_back(backend.make_event());
  }
  ring_ = std::make_shared<SnapshotRing>(std::move(hosts));
}

void DeviceCapture::check_place(const char* name, const TensorView& view) const {
  if (view.device != DeviceType::kGpu || view.device_index != config().device_index) {
    refuse(name, str("a tensor on cuda:", config().device_index), view.describe());
  }
  if (view.num_elements() > 0 && view.data == nullptr) {
    refuse(name, "data", "a null pointer for " + view.describe());
  }
}

exec::Stream DeviceCapture::to_stream(const std::optional<void*>& stream) const {
  if (!stream) refuse("stream", "a CUDA stream for device 'cuda'", "none");
  return *stream;
}

void DeviceCapture::check_snapshot(exec::Stream stream) {
  if (device_.backend->capture_of(stream) != 0) {
    throw InvalidState("snapshot: expected a stream outside of a graph capture, got one in it");
  }
  device_.errors->throw_new();
}

void DeviceCapture::start_step(exec::Stream stream) {
  (void)device_.backend->capture_of(stream);  // refuses a stream of another device
  exec::DeviceBeginStepParams params{};
  params.state = at<exec::CaptureState>(state_);
  params.step_id = step_id();
  params.sinks = at<exec::CaptureSink>(sinks_);
  params.num_sinks = config().num_layers;
  params.num_bytes = sink_bytes_;
  device_.backend->begin_step(params, stream);
}

bool DeviceCapture::is_wide(const TensorView& ids) const noexcept {
  const std::int64_t unit = std::min<std::int64_t>(16, kWideIds * size_of(ids.dtype));
  const auto address = reinterpret_cast<std::uintptr_t>(ids.data);
  return config().top_k % kWideIds == 0 && address % static_cast<std::uintptr_t>(unit) == 0 &&
         ids.row_stride_bytes() % unit == 0;
}

void DeviceCapture::write(const Record& record) {
  (void)device_.backend->capture_of(record.stream);  // as above
  const auto slot = static_cast<std::int64_t>(record.slot);
  exec::DeviceRecordParams params{};
  params.state = at<exec::CaptureState>(state_);
  params.report = device_.errors->on_device();
  params.ids = record.ids.data;
  params.ids_stride = record.ids.strides[0];
  params.dtype = record.ids.dtype;
  params.top_k = config().top_k;
  params.id_bytes = static_cast<std::int32_t>(size_of(spec().dtype));
  params.is_sink = record.is_sink;
  params.overwrite = record.overwrite;
  params.is_wide = is_wide(record.ids);
  params.cells = cells_.get() + slot * layer_bytes();
  params.stamps = at<std::uint64_t>(stamps_) + slot * config().max_tokens;
  params.slot = slot;
  if (record.received_counts != nullptr) {
    params.received_counts = record.received_counts;
    params.num_shards = static_cast<std::int32_t>(record.counts.size());
    std::transform(record.counts.begin(), record.counts.end(), params.counts,
                   [](std::int64_t count) { return static_cast<std::int32_t>(count); });
  }
  std::size_t next = 0;
  while (next < record.spans.size()) {
    params.num_spans = 0;
    params.num_rows = 0;
    for (; next < record.spans.size() && params.num_spans < exec::kMaxCaptureSpans; ++next) {
      const RowSpan& span = record.spans[next];
      if (span.num_rows == 0) continue;
      params.spans[params.num_spans++] = {span.source, span.token, params.num_rows};
      params.num_rows += span.num_rows;
    }
    if (params.num_rows > 0) device_.backend->record_ids(params, record.stream);
  }
}

RoutingCapture::Impl::Joined DeviceCapture::join(const TensorView& topk_ids,
                                                 const CaptureLayout& layout, exec::Stream stream) {
  const std::int64_t sum = check_counts(layout);
  if (joined_.empty() || sum * topk_ids.row_bytes() > joined_bytes_) {
    if (device_.backend->capture_of(stream) != 0) refuse_first_shards_in_graph();
    // At once for all that may come: fewer rows of padding than shards, ids of 8 bytes.
    const auto num_shards = static_cast<std::int64_t>(layout.counts.size());
    const std::int64_t width = std::int64_t{config().top_k} + config().num_shared_experts;
    const std::int64_t bytes = (config().max_tokens + num_shards) * width * 8;
    joined_.push_back(device_.backend->allocate(bytes));
    joined_bytes_ = bytes;
  }
  TensorView all(static_cast<void*>(joined_.back().get()), topk_ids.dtype,
                 {sum, topk_ids.shape[1]});
  all.device = DeviceType::kGpu;
  all.device_index = config().device_index;
  return {all, config().gather(topk_ids, all, layout, stream)};
}

void DeviceCapture::make_sink(std::size_t slot, Sink& sink, DType dtype, std::int64_t rows,
                              std::int64_t width) {
  exec::DeviceBackend& backend = *device_.backend;
  sink.bytes = rows * width * size_of(dtype);
  const std::int64_t bytes = round_up(sink.bytes, kSinkMultiple);
  sink.memory = backend.allocate(bytes);
  sink.view = TensorView(static_cast<void*>(sink.memory.get()), dtype, {rows, width});
  sink.view.device = DeviceType::kGpu;
  sink.view.device_index = config().device_index;
  exec::CaptureSink entry{};
  entry.data = sink.memory.get();
  entry.bytes = bytes;
  entry.empty = dtype == DType::kInt16 ? 0x8000800080008000U : 0x8000000080000000U;
  const std::vector<std::uint64_t> empty(static_cast<std::size_t>(bytes) / sizeof entry.empty,
                                         entry.empty);
  backend.upload(sink.memory.get(), empty.data(), bytes);
  wait_idle();  // a kernel may be reading the entries
  backend.upload(reinterpret_cast<std::byte*>(at<exec::CaptureSink>(sinks_) + slot), &entry,
                 sizeof entry);
  sink_bytes_ += bytes;
}

void DeviceCapture::clear_sink(std::size_t slot, exec::Stream stream) {
  exec::DeviceBeginStepParams params{};
  params.sinks = at<exec::CaptureSink>(sinks_) + slot;
  params.num_sinks = 1;
  params.num_bytes = sinks()[slot]->bytes;
  device_.backend->begin_step(params, stream);
}

void DeviceCapture::copy(RoutingSnapshot::State& state, exec::Stream stream) {
  const auto index = static_cast<std::size_t>(state.place);
  const exec::PinnedMemory& place = places_[index];
  exec::DeviceSnapshotParams params{};
  params.state = at<exec::CaptureState>(state_);
  params.cells = cells_.get();
  params.stamps = at<std::uint64_t>(stamps_);
  params.max_tokens = config().max_tokens;
  params.num_tokens = state.num_tokens;
  params.num_layers = config().num_layers;
  params.cell_bytes = cell_bytes();
  params.unit = 16;
  while (cell_bytes() % params.unit != 0) params.unit /= 2;
  params.head = reinterpret_cast<exec::CaptureSnapshotHead*>(place.device);
  params.ids = place.device + place_.ids;
  params.recorded = reinterpret_cast<std::uint32_t*>(place.device + place_.recorded);
  device_.backend->copy_snapshot(params, stream);
  device_.backend->record_event(events_[index].get(), stream);
  state.ids = place.host.get() + place_.ids;
  state.late =
      std::make_unique<DeviceContents>(device_, events_[index], place.host.get(), place_, state);
}

void DeviceCapture::use_map(const std::vector<std::int32_t>& logical_of_expert) {
  wait_idle();
  upload_rule(logical_of_expert);
}

void DeviceCapture::upload_rule(const std::vector<std::int32_t>& logical_of_expert) {
  const auto num_ids = static_cast<std::int64_t>(logical_of_expert.size());
  const auto bytes = num_ids * static_cast<std::int64_t>(sizeof(std::int32_t));
  exec::CaptureRule rule{nullptr, spec().num_experts};
  std::shared_ptr<std::byte> table = logical_;
  if (num_ids > 0) {
    if (num_ids > max_logical_) table = device_.backend->allocate(bytes);
    device_.backend->upload(table.get(), logical_of_expert.data(), bytes);
    rule = {at<const std::int32_t>(table), num_ids};
  }
  device_.backend->upload(state_.get() + offsetof(exec::CaptureState, rule), &rule, sizeof rule);
  logical_ = std::move(table);
  max_logical_ = std::max(max_logical_, num_ids);
}

}  // namespace

std::unique_ptr<RoutingCapture::Impl> make_device_capture(const RoutingCaptureConfig& config,
                                                          const OpenDevice& open) {
  return std::make_unique<DeviceCapture>(config, open);
}

}  // namespace fanfold::capture
