// SPDX-License-Identifier: Apache-2.0
#include "gpu/nccl_collectives.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/format.h"
#include "comm/rank_index.h"
#include "fanfold/error.h"
#include "gpu/pauses.h"

namespace fanfold::gpu {
namespace {

using comm::index;

nccl::DataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return nccl::kFloat32;
    case DType::kFloat16:
      return nccl::kFloat16;
    case DType::kBFloat16:
      return nccl::kBfloat16;
    case DType::kInt32:
      return nccl::kInt32;
    case DType::kInt64:
      return nccl::kInt64;
    default:
      throw InvalidArgument(base::str(
          "NCCL sum: expected float32, float16, bfloat16, int32 or int64, got ", name_of(dtype)));
  }
}

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

const std::byte* at(const void* data, std::int64_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}
std::byte* at(void* data, std::int64_t offset) { return static_cast<std::byte*>(data) + offset; }

void check_sizes(const char* what, std::int64_t value) {
  if (value >= 0) return;
  throw InvalidArgument(base::str(what, ": expected 0 or more, got ", value));
}

void check_spans(const char* what, const std::vector<comm::DeviceCollectives::Span>& spans,
                 int num_ranks) {
  bool fits = spans.size() == index(num_ranks);
  for (const auto& span : spans) fits = fits && span.offset >= 0 && span.bytes >= 0;
  if (fits) return;
  throw InvalidArgument(base::str(what, ": expected a span for each of ", num_ranks,
                                  " ranks, none negative, got ", spans.size(), " spans"));
}

}  // namespace

NcclCollectives::NcclCollectives(Setup setup) : setup_(std::move(setup)) {}

NcclCollectives::~NcclCollectives() { (void)drop(); }

bool NcclCollectives::drop(base::Deadline deadline) noexcept {
  std::shared_ptr<NcclEnding> ending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const nccl::Comm comm = std::exchange(comm_, nullptr);
    std::vector<std::shared_ptr<NcclMaking>> late = std::exchange(late_, {});
    const std::vector<nccl::Window> windows = std::exchange(windows_, {});
    if (comm != nullptr) ++generation_;
    if (setup_.context->driver().is_forked_child()) return true;
    if (is_adopted()) {
      for (nccl::Window window : windows) {
        (void)functions().ncclCommWindowDeregister(comm, window);
      }
    }
    const nccl::Comm own = is_adopted() ? nullptr : comm;
    if (own != nullptr || !late.empty()) {
      ending_ = NcclEnding::begin(setup_.library, setup_.context, own, std::move(late));
    }
    ending = ending_;
  }
  if (ending == nullptr || ending->wait(deadline)) return true;
  remember("NCCL still aborts the communicator: destroy the graphs that were captured over it");
  return false;
}

// --- Errors -----------------------------------------------------------------------------------

void NcclCollectives::check_usable(const char* name) {
  if (setup_.context->driver().is_forked_child()) {
    throw InvalidState(base::str(name,
                                 ": expected the process that made the communicator, got a "
                                 "forked child"));
  }
  if (is_closed_) throw InvalidState(base::str(name, ": the communicator is closed"));
  const std::string failed = reason();
  if (failed.empty()) return;
  throw InvalidState(base::str(name, ": the collectives on GPU memory have failed: ", failed));
}

void NcclCollectives::remember(const std::string& reason) noexcept {
  const std::lock_guard<std::mutex> lock(reason_mutex_);
  if (reason_.empty()) reason_ = reason;
}

std::string NcclCollectives::reason() const {
  const std::lock_guard<std::mutex> lock(reason_mutex_);
  return reason_;
}

void NcclCollectives::check_peers(const char* name) const {
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank()) continue;
    const std::string reason = setup_.group->lost_reason(peer);
    if (!reason.empty()) {
      throw PeerLost(base::str("NCCL, ", name, ": rank ", peer, " is lost: ", reason), peer);
    }
  }
}

bool NcclCollectives::has_lost_peers() const {
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer != rank() && !setup_.group->lost_reason(peer).empty()) return true;
  }
  return false;
}

std::string NcclCollectives::describe(const char* name, nccl::Result result) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return base::str("NCCL, rank ", rank(), ", ", name, ": ",
                   setup_.library->describe(result, comm_));
}

void NcclCollectives::fail(const char* name, nccl::Result result) {
  const std::string text = describe(name, result);
  remember(text);
  raise(name, result, text);
}

void NcclCollectives::refuse(const char* name, nccl::Result result) {
  if (result != nccl::kInvalidArgument) fail(name, result);
  raise(name, result, describe(name, result));
}

void NcclCollectives::raise(const char* name, nccl::Result result, const std::string& text) {
  constexpr int kUnknownCudaError = 999;  // NCCL keeps the code to itself
  switch (result) {
    case nccl::kInvalidArgument:
    case nccl::kInvalidUsage:
      throw InvalidArgument(text);
    case nccl::kSystemError:
      throw SystemFailure(text, EIO);
    case nccl::kRemoteError:
    case nccl::kTimeout:
      check_peers(name);
      throw SystemFailure(text, EPIPE);
    default:
      throw CudaFailure(text, kUnknownCudaError);
  }
}

/// The state of the communicator: success, in progress, or what has failed.
nccl::Result NcclCollectives::look(const char* name) {
  nccl::Result state = nccl::kSuccess;
  nccl::Result result = nccl::kSuccess;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) throw InvalidState(base::str("NCCL, ", name, ": ended: ", reason()));
    result = functions().ncclCommGetAsyncError(comm_, &state);
  }
  if (result != nccl::kSuccess) fail(name, result);
  return state;
}

void NcclCollectives::give_up(const char* name, base::Deadline deadline) {
  const std::string text = base::str(
      "NCCL, rank ", rank(), ", ", name, ": still in progress after ",
      deadline.timeout_ns() / 1000000,
      " ms: a peer has not come, or a graph that was captured over the communicator exists");
  remember(text);
  throw PeerTimeout(text, -1);
}

void NcclCollectives::settle(const char* name, base::Deadline deadline) {
  for (Pauses pauses;; pauses.next()) {
    const nccl::Result state = look(name);
    if (state == nccl::kSuccess) return;
    if (state != nccl::kInProgress) fail(name, state);
    if (pauses.are_long()) check_peers(name);
    if (deadline.passed()) give_up(name, deadline);
  }
}

void NcclCollectives::check() {
  check_usable("check");
  const nccl::Result state = look("check");
  if (state != nccl::kSuccess && state != nccl::kInProgress) fail("check", state);
  check_peers("check");
}

void NcclCollectives::abort() noexcept {
  remember("they were aborted");
  if (!is_adopted()) (void)drop();
}

void NcclCollectives::leave() noexcept {
  remember("the communicator was left");
  (void)drop();
}

// --- Calls ------------------------------------------------------------------------------------

void NcclCollectives::run(const char* name, const Call& call, base::Deadline deadline) {
  check_usable(name);
  issue_until(deadline, {{name, call}});
}

std::int64_t NcclCollectives::generation() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return generation_;
}

void NcclCollectives::add_window(nccl::Window window, std::int64_t generation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr || generation != generation_) {
    throw InvalidState("NCCL, ncclCommWindowRegister: the communicator ended meanwhile");
  }
  windows_.push_back(window);
}

void NcclCollectives::release_window(nccl::Window window, std::int64_t generation) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr || generation != generation_) return;
  const auto own = std::find(windows_.begin(), windows_.end(), window);
  if (own == windows_.end()) return;
  windows_.erase(own);
  (void)functions().ncclCommWindowDeregister(comm_, window);
}

void NcclCollectives::begin_group() {
  check_usable("begin_group");
  ++group_depth_;
}

void NcclCollectives::end_group() {
  if (group_depth_ == 0) throw InvalidState("end_group: expected a group that was begun");
  if (--group_depth_ > 0) return;
  const std::vector<Named> calls = std::exchange(group_calls_, {});
  check_usable("end_group");
  issue(calls);
}

void NcclCollectives::cancel_group() noexcept {
  group_calls_.clear();  // NCCL has not heard of them
  group_depth_ = 0;
}

void NcclCollectives::check_stream(void* stream) const {
  // A communicator that does not block launches from a thread of NCCL's.
  if (!is_adopted() && stream == static_cast<void*>(CU_STREAM_PER_THREAD)) {
    throw InvalidArgument(
        "stream: expected one that all threads see alike, got cudaStreamPerThread");
  }
}

void NcclCollectives::enqueue(std::vector<Named> calls, void* stream) {
  check_usable(calls.front().name);
  check_stream(stream);
  if (group_depth_ == 0) {
    issue(calls);
    return;
  }
  for (Named& call : calls) group_calls_.push_back(std::move(call));
}

void NcclCollectives::issue(const std::vector<Named>& calls) {
  if (calls.empty()) return;
  issue_until(limit_.value_or(base::Deadline(setup_.call_timeout)), calls);
}

void NcclCollectives::issue_until(base::Deadline deadline, const std::vector<Named>& calls) {
  const char* name = calls.front().name;
  nccl::Result result = nccl::kSuccess;
  {
    const DeviceContext::Current current(*setup_.context);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) throw InvalidState(base::str("NCCL, ", name, ": ended: ", reason()));
    const bool is_group = calls.size() > 1;
    if (is_group) result = functions().ncclGroupStart();
    for (const Named& one : calls) {
      if (result != nccl::kSuccess && result != nccl::kInProgress) break;
      name = one.name;
      result = one.call(functions(), comm_);
    }
    if (is_group) {  // also after a failure: the group is this thread's
      const nccl::Result ended = functions().ncclGroupEnd();
      if (result == nccl::kSuccess || result == nccl::kInProgress) result = ended;
    }
  }
  if (result != nccl::kSuccess && result != nccl::kInProgress) refuse(name, result);
  settle(name, deadline);  // some calls return success while a thread of NCCL's works on them
}

void NcclCollectives::all_gather(const void* send, void* recv, std::int64_t bytes, void* stream) {
  check_sizes("bytes", bytes);
  if (bytes == 0) return check_usable("all_gather");
  enqueue({{"ncclAllGather",
            [=](const nccl::Functions& call, nccl::Comm comm) {
              return call.ncclAllGather(send, recv, size(bytes), nccl::kUint8, comm, stream);
            }}},
          stream);
}

void NcclCollectives::all_to_all(const void* send, void* recv, std::int64_t bytes, void* stream) {
  check_sizes("bytes", bytes);
  std::vector<Span> spans;
  spans.reserve(index(num_ranks()));
  for (int peer = 0; peer < num_ranks(); ++peer) spans.push_back({peer * bytes, bytes});
  all_to_all_v(send, spans, recv, spans, stream);
}

void NcclCollectives::all_to_all_v(const void* send, const std::vector<Span>& to, void* recv,
                                   const std::vector<Span>& from, void* stream) {
  check_spans("to", to, num_ranks());
  check_spans("from", from, num_ranks());
  std::vector<Named> calls;
  for (int peer = 0; peer < num_ranks(); ++peer) {
    const Span out = to[index(peer)];
    const Span in = from[index(peer)];
    if (out.bytes > 0) {
      calls.push_back({"ncclSend", [=](const nccl::Functions& call, nccl::Comm comm) {
                         return call.ncclSend(at(send, out.offset), size(out.bytes), nccl::kUint8,
                                              peer, comm, stream);
                       }});
    }
    if (in.bytes > 0) {
      calls.push_back({"ncclRecv", [=](const nccl::Functions& call, nccl::Comm comm) {
                         return call.ncclRecv(at(recv, in.offset), size(in.bytes), nccl::kUint8,
                                              peer, comm, stream);
                       }});
    }
  }
  if (calls.empty()) return check_usable("all_to_all");
  enqueue(std::move(calls), stream);
}

void NcclCollectives::broadcast(void* data, std::int64_t bytes, int root, void* stream) {
  check_sizes("bytes", bytes);
  if (root < 0 || root >= num_ranks()) {
    throw InvalidArgument(
        base::str("root: expected a rank of 0 to ", num_ranks() - 1, ", got ", root));
  }
  if (bytes == 0) return check_usable("broadcast");
  enqueue({{"ncclBroadcast",
            [=](const nccl::Functions& call, nccl::Comm comm) {
              return call.ncclBroadcast(data, data, size(bytes), nccl::kUint8, root, comm, stream);
            }}},
          stream);
}

void NcclCollectives::all_reduce(const void* send, void* recv, DType dtype,
                                 std::int64_t num_elements, void* stream) {
  check_sizes("num_elements", num_elements);
  const nccl::DataType type = data_type(dtype);
  if (num_elements == 0) return check_usable("all_reduce");
  enqueue({{"ncclAllReduce",
            [=](const nccl::Functions& call, nccl::Comm comm) {
              return call.ncclAllReduce(send, recv, size(num_elements), type, nccl::kSum, comm,
                                        stream);
            }}},
          stream);
}

void NcclCollectives::reduce_scatter(const void* send, void* recv, DType dtype,
                                     std::int64_t num_elements, void* stream) {
  check_sizes("num_elements", num_elements);
  const nccl::DataType type = data_type(dtype);
  if (num_elements == 0) return check_usable("reduce_scatter");
  enqueue({{"ncclReduceScatter",
            [=](const nccl::Functions& call, nccl::Comm comm) {
              return call.ncclReduceScatter(send, recv, size(num_elements), type, nccl::kSum, comm,
                                            stream);
            }}},
          stream);
}

}  // namespace fanfold::gpu
