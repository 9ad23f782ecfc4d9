// SPDX-License-Identifier: Apache-2.0
#pragma once

// A group of ranks and its collectives.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/export.h"
#include "fanfold/tensor_view.h"
#include "fanfold/transport.h"

namespace fanfold {

struct NcclOptions;

/// Time after which a wait gives up when nothing else is said.
inline constexpr std::chrono::nanoseconds kDefaultTimeout = std::chrono::seconds(60);

/// A group of ranks. Each rank holds its own Communicator and calls the collectives in the same
/// order with matching arguments; what must match is exchanged and compared, and a difference is
/// InvalidArgument on every rank, naming two ranks and both values.
///
/// Collectives take contiguous CPU tensors; rows are counted along the first dimension. Data moves
/// through shared memory. They return when this rank may reuse its inputs and read its results.
/// Sums are taken in rank order from +0.0f in float32 and rounded once (integers wrap), so every
/// rank and run gets the same bits.
///
/// A communicator of `from_nccl` takes GPU tensors as well, all of a call's on its device. Such a
/// call enqueues on `stream`, which must be given (a cudaStream_t; null is the legacy stream),
/// returns at once, and may be captured into a graph; the deadline bounds only what NCCL does
/// before that. Nothing is compared between the ranks: a difference may hang the stream until
/// `abort`. Sums are NCCL's: in its order and precision, which may differ between versions and
/// runs.
///
/// Threads: one call at a time per object; distinct objects are independent.
/// Ownership: objects made from a communicator share its state; it is closed by `close()`.
/// After PeerTimeout or PeerAborted from a collective, call `reset()` on every rank; after PeerLost
/// the group is broken. In a forked child every call throws InvalidState.
class FANFOLD_EXPORT Communicator {
 public:
  using Bytes = std::vector<std::byte>;
  /// Gives every rank's bytes, in rank order; collective. Lengths may differ.
  using AllGatherCallback = std::function<std::vector<Bytes>(const Bytes&)>;
  using BarrierCallback = std::function<void()>;

  /// The ranks of a new group whose ranks are threads of this process; element r is rank r.
  /// @throws InvalidArgument  num_ranks < 1 or above 1024.
  static std::vector<Communicator> threads(int num_ranks,
                                           std::chrono::nanoseconds timeout = kDefaultTimeout);

  /// Joins a group of processes of one machine. `rendezvous` is a path for a Unix socket in a
  /// directory that only this user can write; rank 0 creates it and removes it when all have
  /// joined. Collective. Processes of another user are refused.
  /// @throws InvalidArgument  rank or num_ranks out of range, or the ranks disagree on num_ranks.
  /// @throws PeerTimeout      a rank did not join within `timeout`.
  static Communicator processes(int rank, int num_ranks, const std::string& rendezvous,
                                std::chrono::nanoseconds timeout = kDefaultTimeout);

  /// `processes` with rank, size and a rendezvous named by torchrun's environment variables RANK,
  /// WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT. They
  /// only name a socket in this user's run-time directory; the port is not opened.
  /// @throws InvalidArgument  a variable is missing or malformed.
  static Communicator from_env(std::chrono::nanoseconds timeout = kDefaultTimeout);

  /// `processes` bootstrapped through the caller's own collectives, which are called on this thread
  /// and only before this returns.
  static Communicator from_callbacks(int rank, int num_ranks, const AllGatherCallback& all_gather,
                                     const BarrierCallback& barrier,
                                     std::chrono::nanoseconds timeout = kDefaultTimeout);

  /// Ranks that a transport connects, on one host or on several. With kAuto and all ranks on one
  /// host it is `processes`, and the transport only serves to meet. Collective.
  ///
  /// Ranks are on one host if the machine's boot id and the network namespace are the same, or the
  /// environment variable FANFOLD_HOST_ID where one is set. If such ranks cannot meet through a
  /// socket in the temporary directory within 5 s, as in containers that share no file system,
  /// kAuto goes on with the transport on all of them: `kind` and `shares_memory` tell, and errors
  /// of what needs the memory say why.
  ///
  /// A transport that is bound to a thread is closed by that one. If the last of what was made from
  /// the communicator goes on another thread, the peers learn of it when the owner makes its next
  /// call on a transport that is bound to it, or ends.
  /// @throws Unsupported  kSharedMemory, and the ranks are on different hosts.
  /// @throws PeerTimeout, PeerLost, and with kSharedMemory what keeps ranks of one host from
  /// meeting
  static Communicator from_transport(std::shared_ptr<Transport> transport,
                                     TransportUse use = TransportUse::kAuto,
                                     std::chrono::nanoseconds timeout = kDefaultTimeout);

  /// The ranks of `bootstrap` with collectives on GPU tensors over NCCL, whose host side works over
  /// a split of `bootstrap`. Collective. A failure on one rank fails on all of them, in words.
  /// @throws Unsupported      no NCCL of version 2.19 or later, other versions on other ranks, no
  ///         such device, a build without the GPU backend.
  /// @throws InvalidArgument  the handle is of other ranks or another device, or not every rank
  ///         gives one.
  /// @throws CudaFailure, SystemFailure, PeerTimeout, PeerLost
  static Communicator from_nccl(Communicator& bootstrap, const NcclOptions& options);

  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  /// Marks this rank as left and frees local resources; never waits. Prefer `close()`.
  ~Communicator();

  int rank() const;
  int num_ranks() const;
  /// "threads", "processes", "nccl", or the kind of the transport.
  std::string kind() const;
  /// The CUDA device of a communicator that `from_nccl` made; nothing of others.
  std::optional<int> device_index() const;
  /// The host of each rank: numbers from 0 in the order in which ranks first name them.
  std::vector<int> hosts() const;
  /// Whether every rank reaches the others' memory, which strategies one_sided, low_latency,
  /// high_throughput and two_sided need.
  bool shares_memory() const noexcept;
  /// The default deadline of its calls.
  std::chrono::nanoseconds timeout() const;

  /// Returns when every rank has called it.
  void barrier(std::optional<std::chrono::nanoseconds> timeout = {});
  /// recv [sum(counts), ...] = the `send` [counts[r], ...] of every rank, in rank order.
  /// `counts` (equal on all ranks) has one entry per rank.
  void all_gather_v(const TensorView& send, const TensorView& recv,
                    const std::vector<std::int64_t>& counts,
                    std::optional<std::chrono::nanoseconds> timeout = {},
                    std::optional<void*> stream = {});
  /// recv [counts[rank], ...] = this rank's rows of the sum over ranks of send [sum(counts), ...].
  /// float32, float16, bfloat16, int32 or int64.
  void reduce_scatter_v(const TensorView& send, const TensorView& recv,
                        const std::vector<std::int64_t>& counts,
                        std::optional<std::chrono::nanoseconds> timeout = {},
                        std::optional<void*> stream = {});
  /// Splits `send` [num_ranks * n, ...] equally: block r goes to rank r; recv likewise.
  void all_to_all(const TensorView& send, const TensorView& recv,
                  std::optional<std::chrono::nanoseconds> timeout = {},
                  std::optional<void*> stream = {});
  /// Block r of `send`, send_counts[r] rows, goes to rank r; recv holds recv_counts[r] rows of each
  /// rank r in rank order. What one rank sends the other must expect.
  void all_to_all_v(const TensorView& send, const TensorView& recv,
                    const std::vector<std::int64_t>& send_counts,
                    const std::vector<std::int64_t>& recv_counts,
                    std::optional<std::chrono::nanoseconds> timeout = {},
                    std::optional<void*> stream = {});
  /// Every rank's `tensor` becomes the root's.
  void broadcast(const TensorView& tensor, int root,
                 std::optional<std::chrono::nanoseconds> timeout = {},
                 std::optional<void*> stream = {});
  /// recv = sum over ranks of send; may be the same tensor. Types as reduce_scatter_v.
  void all_reduce(const TensorView& send, const TensorView& recv,
                  std::optional<std::chrono::nanoseconds> timeout = {},
                  std::optional<void*> stream = {});
  /// Every rank's bytes in rank order; lengths may differ.
  std::vector<Bytes> all_gather_bytes(const Bytes& bytes,
                                      std::optional<std::chrono::nanoseconds> timeout = {});

  /// The ranks that give the same `color` form a new group, ordered by (key, rank). A negative
  /// color joins none and gets nullopt. Collective. Of a communicator of `from_nccl` the new group
  /// has a communicator of NCCL of its own, also where that one is the caller's.
  std::optional<Communicator> split(int color, int key,
                                    std::optional<std::chrono::nanoseconds> timeout = {});

  /// Of a communicator of `from_nccl` that has lost ranks: that of the others, on their host
  /// communicator `survivors`, where they have the same order. Collective over `survivors`. This
  /// one can only be closed then. With NCCL before 2.27 the new one is made from nothing.
  /// @throws InvalidArgument  `lost` and `survivors` do not add up to this one's ranks.
  Communicator shrink(const std::vector<int>& lost, Communicator& survivors,
                      std::optional<std::chrono::nanoseconds> timeout = {});
  /// What has failed of collectives on GPU tensors since; never waits. Nothing where there are
  /// none.
  /// @throws PeerLost, CudaFailure, SystemFailure, InvalidArgument, InvalidState
  void check_device();

  /// Makes waits of all ranks on this communicator throw PeerAborted(rank, reason) until `reset`.
  /// May be called from another thread. What this rank has enqueued over a communicator that
  /// `from_nccl` made ends; peers must call it, too.
  void abort(const std::string& reason);
  /// Brings the group back after PeerTimeout or PeerAborted. Collective, waits. NCCL's communicator
  /// is made anew: graphs that captured its calls must be captured again.
  /// @throws Unsupported  NCCL's communicator is the caller's, and has failed.
  void reset(std::optional<std::chrono::nanoseconds> timeout = {});
  /// Leaves the group: waits until every rank has called it or has left, then frees. Idempotent.
  /// @throws PeerTimeout  a rank did not call it in time; this rank is closed all the same.
  void close(std::optional<std::chrono::nanoseconds> timeout = {});
  bool is_closed() const noexcept;

  class Impl;
  /// For the library itself.
  const std::shared_ptr<Impl>& impl() const noexcept { return impl_; }

 private:
  explicit Communicator(std::shared_ptr<Impl> impl) noexcept;
  std::shared_ptr<Impl> impl_;
};

}  // namespace fanfold
