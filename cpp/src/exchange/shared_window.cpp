// SPDX-License-Identifier: Apache-2.0
#include "exchange/shared_window.h"

#include <utility>

#include "base/mapping.h"
#include "comm/communicator_impl.h"
#include "memory/symmetric_block.h"

namespace fanfold::exchange {

SharedWindow::SharedWindow(const Setup& setup, std::int64_t bytes, std::int64_t zero_bytes,
                           base::Deadline deadline)
    : communicator_(setup.communicator),
      allocator_(std::make_unique<Allocator>(
          setup.allocator != nullptr ? *setup.allocator : Allocator(*setup.handle))),
      owns_allocator_(setup.allocator == nullptr || setup.owns_allocator),
      memory_(allocator_->allocate(bytes, zero_bytes,
                                   std::chrono::nanoseconds(deadline.remaining_ns()))) {
  for (int rank = 0; rank < memory_.num_ranks(); ++rank) bases_.push_back(memory_.data(rank));
  comm::Group& group = communicator_->group();
  if (memory_.block()->memory.device == DeviceType::kGpu) {
    control_windows_ = group.share_windows(comm::Control::bytes(group.num_ranks()), deadline);
  }
  const bool is_apart = !control_windows_.empty();
  control_ = std::make_unique<comm::Control>(
      group, is_apart ? control_windows_ : memory_.block()->windows, setup.what);
}

SharedWindow::SharedWindow(const Setup& setup, base::Deadline deadline)
    : communicator_(setup.communicator) {
  comm::Group& group = communicator_->group();
  control_windows_ = group.share_windows(comm::Control::bytes(group.num_ranks()), deadline);
  control_ = std::make_unique<comm::Control>(group, control_windows_, setup.what);
}

const base::Mapping& SharedWindow::own_control() const noexcept {
  return *control_windows_[static_cast<std::size_t>(communicator_->group().rank())];
}

bool SharedWindow::is_usable() const {
  const auto& block = memory_.block();
  return block == nullptr || !block->is_usable || block->is_usable();
}

SharedWindow::~SharedWindow() { leave(); }

void SharedWindow::leave() noexcept {
  if (std::exchange(left_, true) || communicator_->group().is_forked_child()) return;
  control_->mark_left();
}

void SharedWindow::close(base::Deadline deadline) {
  leave();
  control_->wait_all_left(deadline);
  if (!allocator_) return;
  // A window that somebody still looks at is not handed out again: it goes with its last view.
  if (memory_.block().use_count() == 1) allocator_->free(memory_);
  memory_ = SymmetricMemory();
  if (owns_allocator_) allocator_->trim();
}

SharedChannel make_channel(const Setup& setup, std::int64_t bytes, base::Deadline deadline) {
  comm::Group& group = setup.communicator->group();
  SharedChannel made;
  if (!group.shares_memory()) {
    made.windows = group.share_windows(comm::Channel::window_bytes(group.num_ranks()), deadline);
  } else if (setup.allocator == nullptr) {
    made.windows = group.share_windows(bytes, deadline);
  } else {
    made.allocator = *setup.allocator;
    made.memory = made.allocator->allocate(bytes, comm::Channel::window_bytes(group.num_ranks()),
                                           std::chrono::nanoseconds(deadline.remaining_ns()));
    made.windows = made.memory.block()->windows;
  }
  made.channel = std::make_shared<comm::Channel>(group, made.windows, setup.what);
  return made;
}

void SharedChannel::close(base::Deadline deadline) {
  channel->close(deadline);
  channel.reset();
  windows.clear();
  own_blocks.reset();
  // As above: what is still looked at goes with its last view.
  if (allocator && memory.block().use_count() == 1) allocator->free(memory);
  memory = SymmetricMemory();
}

}  // namespace fanfold::exchange
