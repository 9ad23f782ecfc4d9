// SPDX-License-Identifier: Apache-2.0
#pragma once

// Strategies one_sided and low_latency where rows lie on GPUs: kernels push rows, raise and await
// flags, and pull results. The calls of a round only enqueue. device_collective.h has those where
// collectives carry what kernels push and pull.
//
// Two things differ from the CPU. Epochs count the rounds of one slot and live on the device, where
// kernels advance them, so that a graph replays. And a released round is settled by its own call,
// on the stream, so that no later one needs to.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "exchange/device_routing.h"
#include "exchange/exchange.h"
#include "exchange/shared_window.h"

namespace fanfold::exchange {

class DeviceExchange : public Exchange {
 public:
  DeviceExchange(Setup setup, base::Deadline deadline);
  ~DeviceExchange() override;

  Capabilities capabilities() const override {
    return capabilities_of(config().strategy, DeviceType::kGpu);
  }
  std::uint32_t generation() const noexcept override { return control().generation(); }
  std::int64_t num_ids_dropped_by_kernels() const noexcept override;

  bool kernels_have_failed() const noexcept override;
  void throw_if_kernels_failed() override;
  /// The same where kernels have left a round before there is a report. Of an idle stream.
  void throw_if_kernels_gave_up();
  void use_stream(Slot& slot, const std::optional<void*>& stream, const char* call) override;
  bool has_lost_capture(const Slot& slot) const override;
  void forget_routing(Slot& slot) override;
  void settle(Slot& /*slot*/, base::Deadline /*deadline*/) override {}
  void dispatch_send(Slot& slot, const DispatchCall& call) override;
  void dispatch_recv(Slot& slot, base::Deadline deadline) override;
  void combine_send(Slot& slot, const CombineCall& call) override;
  void combine_recv(Slot& slot, const CombineCall& call) override;
  void release(Slot& slot) override;

  void require_memory() const override;
  void check_no_capture(const char* call) const override;
  void finish_work(const std::vector<bool>* next_active) override;
  void set_active(const std::vector<bool>& active) override;
  void set_num_workers(int /*num_workers*/) override {}
  void set_placement(const Placement& placement, plan::ExpertMap map, std::uint64_t config_digest,
                     std::uint32_t version) override;
  void abort(const std::string& reason) noexcept override { control().abort(reason); }
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) override;
  void check() const override;
  void give_up_open_rounds() noexcept override;
  void leave() noexcept override;
  void close(base::Deadline deadline) override;
  /// For who waits for the work of a stream; any thread. While the result is called now and then,
  /// the work does not go on waiting for peers that are gone.
  virtual std::function<void()> loss_watch() const;
  /// Before a wait for a stream or the device: what may never end is waited for here.
  /// @throws  why it does not, and cannot be ended either.
  virtual void await_carried() const {}
  bool is_forked_child() const noexcept override;
  void use_name() override { control().set_what(what()); }
  std::byte* slot_base(const Slot& slot) const noexcept override;
  bool owns(const void* data) const noexcept override;
  std::shared_ptr<const void> memory() const override { return kept_; }

  std::shared_ptr<const Routing::Data> copy_routing(Slot& slot) override;
  void sanitize(const SanitizeCall& call) override;
  HostCounts host_counts(Slot& slot) override;

 protected:
  /// Whether collectives carry rows and flags.
  bool is_staged() const noexcept { return route_ != exec::DeviceRoute::kWindows; }
  void plan_tokens(Slot& slot, const DispatchCall& call) override;
  /// Enqueues the kernel that sends rows; `waits`: it also waits for the peers' flags.
  void send_rows(Slot& slot, const DispatchCall& call, bool waits);
  /// Likewise for results, if only a flag where they lie in place.
  void send_results(Slot& slot, const CombineCall& call, bool waits);

 private:
  struct Kept {  // what views need
    SymmetricMemory window;
    std::shared_ptr<std::byte> local;
  };
  struct Memory;  // all that kernels reach
  static constexpr std::size_t kNumPhases = 4;

  void pack_rows(const Slot& slot, const DispatchInputs& in,
                 const exec::PackRowsParams& params) override;
  void fill_source_rows(Slot& slot) override;
  void count_experts(Slot& slot) override;
  void fill_offsets(const Slot&) const override {}
  void fill_num_rows(const Slot&) const override {}

  // What kernels read between rounds; these wait.
  void upload_words();
  /// Forgets what blocks have told each other. The device is idle.
  void clear_tiles();
  void upload_host_words();
  void upload_mask();
  void upload_placement();
  void start_generation(std::uint64_t first_epoch, std::int64_t first_round);
  bool has_peer_died() const noexcept;
  template <class T>
  void upload(std::int64_t offset, const std::vector<T>& values) {
    device_->upload(shared_at<std::byte>(offset), static_cast<const void*>(values.data()),
                    static_cast<std::int64_t>(values.size() * sizeof(T)));
  }

 protected:
  comm::Control& control() const noexcept { return window_->control(); }
  exec::DeviceBackend& device() const noexcept { return *device_; }
  /// A region of this rank's private memory, of all slots or of one.
  template <class T>
  T* shared_at(std::int64_t offset) const noexcept {
    return reinterpret_cast<T*>(local_.get() + offset);
  }
  template <class T>
  T* local_at(const Slot& slot, std::int64_t offset) const noexcept {
    return reinterpret_cast<T*>(local_base(slot) + offset);
  }
  /// A region of a slot's store in this rank's window.
  template <class T>
  T* stored_at(const Slot& slot, std::int64_t offset) const noexcept {
    return reinterpret_cast<T*>(slot_base(slot) + offset);
  }
  const DeviceRouting* routing_of(const Slot& slot) const noexcept {
    return slot.routing ? slot.routing->device.get() : nullptr;
  }
  std::int32_t* rows_per_rank(const Slot& slot) const noexcept;
  std::int32_t* token_counts(const Slot& slot) const noexcept;

  // What kernels are told.
  /// Its waits take as long as those of the phase may.
  exec::DeviceRound round_of(const Slot& slot, exec::DevicePhase phase) const noexcept;
  exec::DeviceCounts counts_of(const Slot& slot) const noexcept;
  exec::TileWords tiles_of(const Slot& slot) const noexcept;
  exec::DeviceFlags flags_of(const Slot& slot, exec::DevicePhase phase,
                             const exec::FlagFields& fields) const noexcept;
  exec::DeviceFlags combine_flags(const Slot& slot, bool release,
                                  std::int64_t hidden) const noexcept;
  exec::DeviceArrangeParams arrange_params(const Slot& slot) const noexcept;
  void set_timeout(const Slot& slot, exec::DevicePhase phase, base::Deadline deadline) noexcept;
  void poison_received(const Slot& slot);
  std::int64_t timeout_of(int slot, exec::DevicePhase phase) const noexcept {
    return timeouts_[static_cast<std::size_t>(slot)][static_cast<std::size_t>(phase)];
  }
  /// Raises the flags of a phase, waits for the peers', or both.
  void signal(const Slot& slot, const exec::DeviceFlags& flags, bool announces, bool waits);
  exec::DeviceReport& report() const noexcept {
    return *reinterpret_cast<exec::DeviceReport*>(report_.host.get());
  }
  /// The number of the round that a slot has at an epoch of it.
  std::int64_t round_at(std::uint32_t slot, std::uint64_t epoch) const noexcept;
  exec::DeviceFailure failure() const noexcept;
  /// Gives no memory back that kernels may use: work is under way that may never end.
  void keep_memory() noexcept;

 private:
  void arrange_rows(Slot& slot);
  void add_counts(const Slot& slot, exec::DeviceArrangeParams& params) const noexcept;
  void count_experts_on(Slot& slot, exec::Stream stream);
  void poison_results(const Slot& slot);
  [[noreturn]] void throw_report(exec::DeviceFailure failure);

  std::shared_ptr<SharedWindow> window_;
  exec::DeviceRoute route_;
  std::vector<std::byte*> windows_;  // [R] as kernels reach them
  std::shared_ptr<exec::DeviceBackend> device_;
  mutable std::mutex loss_mutex_;  // control().set_active and loss_watch
  exec::PinnedMemory report_;
  exec::PinnedMemory own_control_;  // this rank's control area
  std::shared_ptr<const Kept> kept_;
  exec::DeviceControl words_{};    // as uploaded last
  std::uint64_t first_epoch_ = 0;  // of this generation, in every slot
  std::int64_t first_round_ = 0;   // of this generation
  std::vector<std::array<std::int64_t, kNumPhases>>
      timeouts_;  // [F] of the last wait of each phase
  // Routings that have lost their slot: to give memory back would wait for the device.
  std::vector<std::shared_ptr<const Routing::Data>> retired_;
  bool is_stuck_ = false;  // the memory is kept, nothing waits for the device any more
};

}  // namespace fanfold::exchange
