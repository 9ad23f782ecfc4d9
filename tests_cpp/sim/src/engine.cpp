// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include "state.h"

namespace cudasim {
namespace {

thread_local int this_threads_device = 0;

/// Different texts of one kind, so that a broken loop does not fill the memory.
constexpr std::size_t kMaxReports = 200;

void create_devices(Engine& state) {
  for (int id = static_cast<int>(state.devices.size()); id < state.config.devices; ++id) {
    auto device = std::make_unique<Device>();
    device->id = id;
    device->legacy.device = device.get();
    device->legacy.is_legacy = true;
    state.devices.push_back(std::move(device));
  }
}

}  // namespace

// Outlives static destructors of tests.
Engine& engine = *new Engine;  // NOLINT(bugprone-throwing-static-initialization)

// The random numbers start again with the configuration's seed at configure().
// NOLINTNEXTLINE(bugprone-random-generator-seed)
Engine::Engine() {
  create_devices(*this);
  config.race &= sees_accesses();
  config.init &= sees_accesses();
}

Lock::Lock() {
  ++engine.num_waiting_for_lock;
  engine.mutex.lock();
  --engine.num_waiting_for_lock;
}

Lock::~Lock() { engine.mutex.unlock(); }

const Config& config() { return engine.config; }
Stats& counters() { return engine.stats; }
int num_devices() { return engine.config.devices; }
int current_device() { return this_threads_device; }
void set_current_device(int device) { this_threads_device = device; }
cudaError_t sticky_error(int device) {
  return engine.devices.at(static_cast<std::size_t>(device))->sticky;
}

void fail_device(Device& device, cudaError_t error) {
  if (device.sticky == cudaSuccess) device.sticky = error;
  device.has_failed = true;
  engine.any_device_failed = true;
}

double random_fraction() { return static_cast<double>(engine.random() >> 11) * 0x1p-53; }

void report(const std::string& kind, const std::string& text) {
  for (Report& old : engine.reports) {
    if (old.kind == kind && old.text == text) {
      ++old.count;
      return;
    }
  }
  if (engine.reports.size() < kMaxReports) engine.reports.push_back({kind, text, 1});
}

void report_once(const char* kind, std::uint64_t key, const std::function<std::string()>& text) {
  const auto [it, is_new] = engine.report_index.try_emplace({kind, key}, engine.reports.size());
  if (!is_new) {
    if (it->second < engine.reports.size()) ++engine.reports[it->second].count;
    return;
  }
  if (engine.reports.size() < kMaxReports) engine.reports.push_back({kind, text(), 1});
}

// --- Controls -------------------------------------------------------------------------------

void configure(const Config& config) {
  const Lock lock;
  engine.config = config;
  engine.config.race &= sees_accesses();
  engine.config.init &= sees_accesses();
  // Which older value a load may return follows from what is known of accesses.
  if (!sees_accesses()) engine.config.stale = 0;
  engine.random.seed(config.seed);
  create_devices(engine);
  for (const auto& device : engine.devices) {
    drop_blocks(*device);
    drop_tasks(*device);
    host_joins(*device);
    device->sticky = cudaSuccess;
    device->has_failed = false;
  }
  // Nobody could give these back while a device had failed.
  if (engine.any_device_failed) engine.registered.clear();
  engine.any_device_failed = false;
}

bool sees_accesses() {
#if defined(CUDASIM_REAL_ADDRESS_SANITIZER) || defined(CUDASIM_REAL_THREAD_SANITIZER)
  return false;
#else
  return true;
#endif
}

std::vector<Report> reports() {
  const Lock lock;
  return engine.reports;
}

void clear_reports() {
  const Lock lock;
  engine.reports.clear();
  engine.report_index.clear();
}

Stats stats() {
  const Lock lock;
  return engine.stats;
}

std::uint64_t now_ns() {
  const Lock lock;
  return engine.now_ns;
}

void annotate(const void* address, std::size_t bytes, const char* name, std::uint64_t writers,
              std::uint64_t readers) {
  const Lock lock;
  const Mapping* const mapping = find_mapping(address);
  if (mapping == nullptr) {
    report("oob", std::string("annotate: no device memory behind ") + name);
    return;
  }
  const std::size_t offset = mapping->offset_of(reinterpret_cast<std::uintptr_t>(address));
  mapping->physical->add_region({offset, bytes, name, writers, readers});
}

void fail_call(const char* call, int error, int nth) {
  const Lock lock;
  engine.faults[call] = {error, nth, false};
}

void fail_every(const char* call, int error) {
  const Lock lock;
  engine.faults[call] = {error, 1, true};
}

void die_at_call(int nth) {
  const Lock lock;
  engine.calls_to_live = nth;
}

void clear_faults() {
  const Lock lock;
  engine.faults.clear();
  engine.calls_to_live = 0;
}

std::map<std::string, int> calls() {
  const Lock lock;
  return engine.calls;
}

void clear_calls() {
  const Lock lock;
  engine.calls.clear();
}

}  // namespace cudasim
