// SPDX-License-Identifier: Apache-2.0
#pragma once

// Messages between the processes of an MPI communicator.

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "fanfold/transport.h"

namespace fanfold::mpi {

/// Messages on a communicator of its own, which it frees if it is closed cleanly: everything sent
/// has left, and every peer has said that it sends nothing more. Otherwise MPI could give the
/// communicator's number to the next one, and a late message would arrive there.
class MpiTransport final : public Transport {
 public:
  /// Duplicates `communicator`. Collective.
  /// @throws as fanfold::from_mpi.
  static std::shared_ptr<MpiTransport> create(MPI_Comm communicator,
                                              std::chrono::nanoseconds timeout);
  ~MpiTransport() override;

  int rank() const noexcept override { return rank_; }
  int num_ranks() const noexcept override { return num_ranks_; }
  std::string kind() const override { return "mpi"; }
  bool is_thread_bound() const noexcept override { return is_thread_bound_; }

  void start(std::int64_t max_message_bytes) override;
  void send(int peer, const std::vector<Part>& parts) override;
  std::optional<Message> receive(std::chrono::nanoseconds max_wait) override;
  bool has_unsent(int peer) const override;
  std::string lost_reason(int peer) const override;
  void close(std::chrono::nanoseconds timeout) noexcept override;

 private:
  /// A message that MPI reads until its request is complete.
  struct Outgoing {
    int peer;
    std::vector<std::byte> bytes;
  };
  /// A message that MPI writes until its request is complete.
  struct Incoming {
    int source;
    int tag;
    MPI_Request request;
    std::vector<std::byte> bytes;
  };
  /// What MPI works on.
  struct InFlight {
    std::vector<MPI_Request> requests;  // of outgoing, by index
    std::vector<Outgoing> outgoing;
    std::vector<Incoming> incoming;  // in the order in which MPI gave them
  };
  struct Peer {
    std::string lost_reason;
    bool is_silent = false;  // has said that it sends nothing more
  };

  explicit MpiTransport(MPI_Comm duplicate);

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  void lose(int rank, const char* call, int code);
  void post(int rank, int tag, std::vector<std::byte> bytes);
  void advance_sends();
  /// Takes the next message from MPI, if there is one; returns whether there was.
  bool match();
  bool match(int source, int* code);
  /// The first message that is complete, without overtaking one of the same rank.
  std::optional<Message> take_arrived();
  void pause(const base::Deadline& deadline) const;
  bool is_drained() const;
  /// Whether something has not left that its receiver may still take.
  bool has_unsent_to_any() const;
  void drain(const base::Deadline& deadline);

  MPI_Comm comm_;  // MPI_COMM_NULL once closed
  int rank_ = 0;
  int num_ranks_ = 0;
  bool is_thread_bound_ = false;
  std::thread::id owner_;
  std::int64_t last_traffic_ns_ = 0;
  std::vector<Peer> peers_;
  std::unique_ptr<InFlight> in_flight_;
  std::vector<int> completed_;  // for MPI_Testsome
  std::vector<MPI_Status> statuses_;
};

}  // namespace fanfold::mpi
