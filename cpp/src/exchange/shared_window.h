// SPDX-License-Identifier: Apache-2.0
#pragma once

// Symmetric memory of the AllToAlls of one workspace: one of them, or several that share it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "comm/channel.h"
#include "comm/control.h"
#include "exchange/exchange.h"
#include "fanfold/allocator.h"

namespace fanfold::exchange {

/// A window per rank that begins with a control area; on a GPU, where the host cannot reach it, the
/// control areas lie in windows of their own. This rank leaves when the last exchange that
/// uses it is gone, or at `close`.
class SharedWindow {
 public:
  /// Collective. From the allocator of `setup`, where one is given; zero in the first `zero_bytes`.
  SharedWindow(const Setup& setup, std::int64_t bytes, std::int64_t zero_bytes,
               base::Deadline deadline);
  /// Collective. Control areas only, in windows of their own: no memory, no bases.
  SharedWindow(const Setup& setup, base::Deadline deadline);
  ~SharedWindow();
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  comm::Control& control() const noexcept { return *control_; }
  /// Starts of all ranks' windows; index = rank. Empty where there are control areas only.
  const std::vector<std::byte*>& bases() const noexcept { return bases_; }
  /// Keeps the windows mapped while held. Empty after `close`.
  const SymmetricMemory& memory() const noexcept { return memory_; }
  /// False where the memory ended with what carried it: NCCL's communicator.
  bool is_usable() const;
  /// Where control areas have windows of their own: this rank's control area.
  const base::Mapping& own_control() const noexcept;
  /// Tells the peers that this rank uses the windows no more. Idempotent, never waits.
  void leave() noexcept;
  /// Collective: waits until every active rank has left, then gives the memory back.
  /// @throws PeerTimeout
  void close(base::Deadline deadline);

 private:
  std::shared_ptr<Communicator::Impl> communicator_;
  std::unique_ptr<Allocator> allocator_;  // null where there are control areas only
  bool owns_allocator_ = false;
  SymmetricMemory memory_;
  std::vector<std::byte*> bases_;
  comm::Windows control_windows_;  // on a GPU, or of control areas only
  std::unique_ptr<comm::Control> control_;
  bool left_ = false;
};

/// A channel of the group for the strategies over collectives. Copies share it.
struct SharedChannel {
  std::shared_ptr<comm::Channel> channel;
  comm::Windows windows;  // the channel's; with what follows it, where ranks share memory
  // What would follow it in this rank's, where they do not; null if nothing would.
  std::shared_ptr<std::byte> own_blocks;
  // Where an allocator was given:
  std::optional<Allocator> allocator;
  SymmetricMemory memory;

  /// Collective: waits until every rank has closed it, then gives the memory back.
  void close(base::Deadline deadline);
};

/// Collective. `bytes`: of a window, of which the channel takes the first `Channel::window_bytes`.
/// Where ranks share no memory they have no more than those.
SharedChannel make_channel(const Setup& setup, std::int64_t bytes, base::Deadline deadline);

}  // namespace fanfold::exchange
