// SPDX-License-Identifier: Apache-2.0
#pragma once

// Collectives on GPU memory over NCCL.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/device_collectives.h"
#include "comm/group.h"
#include "gpu/device_context.h"
#include "gpu/nccl.h"
#include "gpu/nccl_ending.h"
#include "gpu/nccl_library.h"

namespace fanfold::gpu {

/// One rank's communicator of NCCL: its own, which never blocks, or the caller's.
///
/// Calls of a group are kept until `end_group`, so that NCCL is never left with a group open and
/// `abort` may come at any time. `mutex_` is held for single calls of NCCL only; those of a
/// communicator that does not block return at once.
class NcclCollectives final : public comm::DeviceCollectives {
 public:
  /// What all ranks have agreed on. Borrows the group.
  struct Setup {
    comm::Group* group;
    std::shared_ptr<const NcclLibrary> library;
    std::shared_ptr<const DeviceContext> context;
    NcclOptions options;
    std::chrono::nanoseconds call_timeout;
  };

  /// Not connected yet: `connect` does that.
  explicit NcclCollectives(Setup setup);
  /// Aborts its own communicator unless it is closed; does not wait long for that.
  ~NcclCollectives() override;

  /// Collective, over the group: with the caller's handle, by a new unique id, or out of `parent`
  /// without the ranks `lost`.
  void connect(base::Deadline deadline);
  void connect_survivors(NcclCollectives& parent, const std::vector<int>& lost,
                         base::Deadline deadline);

  int rank() const noexcept override { return setup_.group->rank(); }
  int num_ranks() const noexcept override { return setup_.group->num_ranks(); }
  int device() const noexcept override { return setup_.context->device(); }
  const Setup& setup() const noexcept { return setup_; }
  bool is_adopted() const noexcept { return setup_.options.handle != nullptr; }
  /// Calls `call(functions, comm)` where the device is current, and waits until NCCL is done with
  /// it; `name` is NCCL's. For parts of the library that use the communicator in other ways.
  void run(const char* name,
           const std::function<nccl::Result(const nccl::Functions&, nccl::Comm)>& call,
           base::Deadline deadline);

  /// Counts the communicators of NCCL that this object has let go of: what was made of one is gone
  /// with it. Any thread.
  std::int64_t generation() const noexcept;
  /// Tells of a window of the communicator of `generation`, or (`release_window`) ends it unless
  /// that communicator has taken it along. The caller's communicator is rid of all of them before
  /// this object lets go of it.
  void add_window(nccl::Window window, std::int64_t generation);
  void release_window(nccl::Window window, std::int64_t generation) noexcept;

  void begin_group() override;
  void end_group() override;
  void cancel_group() noexcept override;
  void all_gather(const void* send, void* recv, std::int64_t bytes, void* stream) override;
  void all_to_all(const void* send, void* recv, std::int64_t bytes, void* stream) override;
  void all_to_all_v(const void* send, const std::vector<Span>& to, void* recv,
                    const std::vector<Span>& from, void* stream) override;
  void broadcast(void* data, std::int64_t bytes, int root, void* stream) override;
  void all_reduce(const void* send, void* recv, DType dtype, std::int64_t num_elements,
                  void* stream) override;
  void reduce_scatter(const void* send, void* recv, DType dtype, std::int64_t num_elements,
                      void* stream) override;
  void limit_calls(std::optional<base::Deadline> deadline) noexcept override { limit_ = deadline; }
  void check() override;
  void abort() noexcept override;
  void leave() noexcept override;
  void check_stream(void* stream) const override;
  std::unique_ptr<comm::DeviceCollectives> on_group(comm::Group& group,
                                                    base::Deadline deadline) override;
  void reset(base::Deadline deadline) override;
  void close(base::Deadline deadline) override;

 private:
  using Call = std::function<nccl::Result(const nccl::Functions&, nccl::Comm)>;
  struct Named {
    const char* name;
    Call call;
  };

  /// Makes a communicator of its own on all ranks, by `part`; or none on any.
  void make(const std::string& step, base::Deadline deadline,
            const std::function<void(base::Deadline)>& part);
  void make_anew(base::Deadline deadline);
  /// Waits until NCCL has given what `making` asks for. `source` made it; its next end ends what
  /// comes after the deadline.
  nccl::Comm await_made(const char* name, const std::shared_ptr<NcclMaking>& making,
                        NcclCollectives& source, base::Deadline deadline);
  void make_out_of(NcclCollectives& parent, std::vector<int> lost, base::Deadline deadline);
  void adopt();
  /// @throws InvalidArgument  NCCL's idea of the survivors is another than the group's.
  void check_child() const;
  /// Tells all ranks how `part` went on this one, and throws what went wrong on any.
  std::vector<std::string> meet(const std::string& step, base::Deadline deadline,
                                const std::function<std::string()>& part) const;
  /// Into the open group, or at once.
  void enqueue(std::vector<Named> calls, void* stream);
  void issue(const std::vector<Named>& calls);
  void issue_until(base::Deadline deadline, const std::vector<Named>& calls);
  /// Waits until NCCL has begun what was called. @throws what has failed, also of peers.
  void settle(const char* name, base::Deadline deadline);
  /// Waits for what is enqueued; false if a peer is gone for whom it would wait.
  bool finalize(base::Deadline deadline);
  void destroy();
  [[noreturn]] static void throw_not_ended(const char* call, base::Deadline deadline);
  [[noreturn]] void give_up(const char* name, base::Deadline deadline);
  void check_usable(const char* name);
  nccl::Result look(const char* name);
  [[noreturn]] void fail(const char* name, nccl::Result result);
  /// As `fail`, for what a call itself has returned: one with wrong arguments did nothing.
  [[noreturn]] void refuse(const char* name, nccl::Result result);
  std::string describe(const char* name, nccl::Result result);
  [[noreturn]] void raise(const char* name, nccl::Result result, const std::string& text);
  void check_peers(const char* name) const;
  bool has_lost_peers() const;
  /// Remembers why calls fail from now on, unless something else was first.
  void remember(const std::string& reason) noexcept;
  std::string reason() const;
  /// Lets go of the communicator; one of its own is aborted, which goes on where it takes longer
  /// than until `deadline`: then false.
  bool drop(base::Deadline deadline) noexcept;
  bool drop() noexcept { return drop(base::Deadline(kAbortTime)); }
  const nccl::Functions& functions() const noexcept { return setup_.library->functions(); }

  static constexpr std::chrono::milliseconds kAbortTime{400};

  Setup setup_;
  mutable std::mutex mutex_;  // guards what follows, to the next one
  nccl::Comm comm_ = nullptr;
  std::int64_t generation_ = 0;
  std::vector<nccl::Window> windows_;              // of comm_
  std::vector<std::shared_ptr<NcclMaking>> late_;  // calls on comm_ that were given up
  std::shared_ptr<NcclEnding> ending_;             // of the communicator before
  mutable std::mutex reason_mutex_;                // guards reason_; may be taken within mutex_
  std::string reason_;                             // why calls fail; empty: they do not
  bool is_closed_ = false;
  std::optional<base::Deadline> limit_;  // of calls; null: setup_.call_timeout
  int group_depth_ = 0;
  std::vector<Named> group_calls_;
};

}  // namespace fanfold::gpu
