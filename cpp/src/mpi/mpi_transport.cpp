// SPDX-License-Identifier: Apache-2.0
#include "mpi/mpi_transport.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::mpi {
namespace {

constexpr int kMessageTag = 0;
constexpr int kSilenceTag = 1;  // the last message of a rank, empty

// After so long without a message a wait gives its core away, then sleeps, longer and longer.
constexpr std::int64_t kSpinNs = 20'000;
constexpr std::int64_t kYieldNs = 200'000;
constexpr std::int64_t kMaxSleepNs = 500'000;

// How long a rank that closes waits for the others to do so.
constexpr std::chrono::nanoseconds kPatience = std::chrono::milliseconds(300);

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return base::str("MPI error ", code);
  return std::string(text, static_cast<std::size_t>(length));
}

[[noreturn]] void raise(const char* call, int code) {
  throw SystemFailure(base::str(call, " failed: ", error_text(code)), EIO);
}

void check(const char* call, int code) {
  if (code != MPI_SUCCESS) raise(call, code);
}

bool is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

// MPI ends the process that calls it after MPI_Finalize.
void check_not_finalized() {
  if (is_finalized()) {
    throw InvalidState("MPI: expected calls before MPI_Finalize, got one after it");
  }
}

/// Whether only one thread may call MPI, which is this one.
bool check_thread_level() {
  int level = MPI_THREAD_SINGLE;
  check("MPI_Query_thread", MPI_Query_thread(&level));
  if (level >= MPI_THREAD_SERIALIZED) return false;
  int is_main = 0;
  check("MPI_Is_thread_main", MPI_Is_thread_main(&is_main));
  if (is_main == 0) {
    throw InvalidState(
        "from_mpi: expected the thread that initialised MPI, since MPI's level is below "
        "MPI_THREAD_SERIALIZED, got another thread");
  }
  return true;
}

void check_communicator(MPI_Comm communicator) {
  if (communicator == MPI_COMM_NULL) {
    throw InvalidArgument("communicator: expected one of MPI, got MPI_COMM_NULL");
  }
  int is_inter = 0;
  check("MPI_Comm_test_inter", MPI_Comm_test_inter(communicator, &is_inter));
  if (is_inter != 0) {
    throw InvalidArgument("communicator: expected an intracommunicator, got an intercommunicator");
  }
}

struct Duplication {
  MPI_Comm result = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
};

MPI_Comm duplicate_of(MPI_Comm communicator, std::chrono::nanoseconds timeout) {
  const base::Deadline deadline(timeout);
  auto duplication = std::make_unique<Duplication>();
  check("MPI_Comm_idup", MPI_Comm_idup(communicator, &duplication->result, &duplication->request));
  for (;;) {
    int is_done = 0;
    check("MPI_Test", MPI_Test(&duplication->request, &is_done, MPI_STATUS_IGNORE));
    if (is_done != 0) return duplication->result;
    if (deadline.passed()) break;
    std::this_thread::yield();
  }
  // MPI will write there when the late rank comes, and cannot be told not to.
  [[maybe_unused]] const Duplication* const left_to_mpi = duplication.release();
  throw PeerTimeout(
      base::str("from_mpi: expected a call on every rank of the communicator within ",
                static_cast<double>(timeout.count()) / 1e9, " s, got none on at least one rank"),
      -1);
}

}  // namespace

std::shared_ptr<MpiTransport> MpiTransport::create(MPI_Comm communicator,
                                                   std::chrono::nanoseconds timeout) {
  if (timeout.count() < 0) {
    throw InvalidArgument(
        base::str("timeout: expected 0 or more, got ", timeout.count(), " nanoseconds"));
  }
  int is_initialized = 0;
  MPI_Initialized(&is_initialized);
  if (is_initialized == 0) {
    throw InvalidState("from_mpi: expected a call after MPI_Init, got one before it");
  }
  check_not_finalized();
  const bool is_thread_bound = check_thread_level();
  check_communicator(communicator);
  MPI_Comm duplicate = duplicate_of(communicator, timeout);
  std::shared_ptr<MpiTransport> transport;
  try {
    transport.reset(new MpiTransport(duplicate));
  } catch (...) {
    MPI_Comm_free(&duplicate);  // nothing has been sent on it here
    throw;
  }
  transport->is_thread_bound_ = is_thread_bound;
  return transport;
}

MpiTransport::MpiTransport(MPI_Comm duplicate)
    : comm_(duplicate),
      owner_(std::this_thread::get_id()),
      last_traffic_ns_(base::now_ns()),
      in_flight_(std::make_unique<InFlight>()) {
  check("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  check("MPI_Comm_rank", MPI_Comm_rank(comm_, &rank_));
  check("MPI_Comm_size", MPI_Comm_size(comm_, &num_ranks_));
  peers_.resize(static_cast<std::size_t>(num_ranks_));
  peer(rank_).is_silent = true;
}

MpiTransport::~MpiTransport() { close(std::chrono::nanoseconds(0)); }

void MpiTransport::start(std::int64_t max_message_bytes) {
  if (max_message_bytes > INT_MAX) {
    throw InvalidArgument(base::str("max_message_bytes: expected at most ", INT_MAX,
                                    ", MPI's largest count, got ", max_message_bytes));
  }
}

void MpiTransport::lose(int rank, const char* call, int code) {
  std::string& reason = peer(rank).lost_reason;
  if (reason.empty()) reason = base::str(call, " failed: ", error_text(code));
}

std::string MpiTransport::lost_reason(int peer) const {
  return peers_[static_cast<std::size_t>(peer)].lost_reason;
}

// --- Sending ----------------------------------------------------------------------------------

void MpiTransport::send(int peer, const std::vector<Part>& parts) {
  check_not_finalized();
  const Peer& to = peers_[static_cast<std::size_t>(peer)];
  if (!to.lost_reason.empty() || to.is_silent) return;
  std::int64_t size = 0;
  for (const Part& part : parts) size += part.bytes;
  std::vector<std::byte> bytes;
  bytes.reserve(static_cast<std::size_t>(size));
  for (const Part& part : parts) bytes.insert(bytes.end(), part.data, part.data + part.bytes);
  post(peer, kMessageTag, std::move(bytes));
  advance_sends();
}

void MpiTransport::post(int rank, int tag, std::vector<std::byte> bytes) {
  auto& [requests, outgoing, incoming] = *in_flight_;
  outgoing.push_back({rank, std::move(bytes)});
  requests.push_back(MPI_REQUEST_NULL);
  const std::vector<std::byte>& kept = outgoing.back().bytes;
  const int code = MPI_Isend(kept.data(), static_cast<int>(kept.size()), MPI_BYTE, rank, tag, comm_,
                             &requests.back());
  last_traffic_ns_ = base::now_ns();
  if (code == MPI_SUCCESS) return;
  outgoing.pop_back();
  requests.pop_back();
  lose(rank, "MPI_Isend", code);
}

void MpiTransport::advance_sends() {
  std::vector<MPI_Request>& requests = in_flight_->requests;
  std::vector<Outgoing>& outgoing = in_flight_->outgoing;
  if (requests.empty()) return;
  completed_.resize(requests.size());
  statuses_.resize(requests.size());
  int num = 0;
  const int code = MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &num,
                                completed_.data(), statuses_.data());
  if (code != MPI_SUCCESS) {
    int error_class = MPI_SUCCESS;
    MPI_Error_class(code, &error_class);
    if (error_class != MPI_ERR_IN_STATUS) raise("MPI_Testsome", code);
    for (int i = 0; i < num; ++i) {
      const auto which = static_cast<std::size_t>(i);
      const int own = statuses_[which].MPI_ERROR;
      if (own == MPI_SUCCESS || own == MPI_ERR_PENDING) continue;
      lose(outgoing[static_cast<std::size_t>(completed_[which])].peer, "MPI_Isend", own);
    }
  }
  if (num <= 0) return;  // none, or MPI_UNDEFINED
  std::sort(completed_.begin(), completed_.begin() + num);
  for (int i = num; i-- > 0;) {
    const int index = completed_[static_cast<std::size_t>(i)];
    requests.erase(requests.begin() + index);
    outgoing.erase(outgoing.begin() + index);
  }
}

bool MpiTransport::has_unsent(int peer) const {
  const Peer& to = peers_[static_cast<std::size_t>(peer)];
  if (!to.lost_reason.empty() || to.is_silent) return false;
  const std::vector<Outgoing>& outgoing = in_flight_->outgoing;
  return std::any_of(outgoing.begin(), outgoing.end(),
                     [peer](const Outgoing& message) { return message.peer == peer; });
}

// --- Receiving --------------------------------------------------------------------------------

std::optional<Transport::Message> MpiTransport::receive(std::chrono::nanoseconds max_wait) {
  check_not_finalized();
  const base::Deadline deadline(max_wait);
  for (;;) {
    advance_sends();
    const bool has_more = match();
    if (std::optional<Message> message = take_arrived()) return message;
    if (deadline.passed()) return std::nullopt;
    if (!has_more) pause(deadline);
  }
}

bool MpiTransport::match() {
  int code = MPI_SUCCESS;
  if (match(MPI_ANY_SOURCE, &code)) return true;
  if (code == MPI_SUCCESS) return false;
  // Some rank is at fault. Asked for one by one, the others still give their messages.
  bool is_known = false;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    int own = MPI_SUCCESS;
    if (rank != rank_ && lost_reason(rank).empty() && match(rank, &own)) return true;
    if (own != MPI_SUCCESS) lose(rank, "MPI_Improbe", own);
    is_known = is_known || !lost_reason(rank).empty();
  }
  if (!is_known) raise("MPI_Improbe", code);
  return false;
}

bool MpiTransport::match(int source, int* code) {
  int has_message = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  *code = MPI_Improbe(source, MPI_ANY_TAG, comm_, &has_message, &message, &status);
  if (*code != MPI_SUCCESS || has_message == 0) return false;
  int size = 0;
  check("MPI_Get_count", MPI_Get_count(&status, MPI_BYTE, &size));
  std::vector<Incoming>& matched = in_flight_->incoming;
  matched.push_back({status.MPI_SOURCE, status.MPI_TAG, MPI_REQUEST_NULL, {}});
  Incoming& incoming = matched.back();
  incoming.bytes.resize(static_cast<std::size_t>(size));
  const int received =
      MPI_Imrecv(incoming.bytes.data(), size, MPI_BYTE, &message, &incoming.request);
  last_traffic_ns_ = base::now_ns();
  if (received == MPI_SUCCESS) return true;
  lose(incoming.source, "MPI_Imrecv", received);
  matched.pop_back();
  return true;
}

std::optional<Transport::Message> MpiTransport::take_arrived() {
  std::vector<Incoming>& matched = in_flight_->incoming;
  for (std::size_t i = 0; i < matched.size(); ++i) {
    Incoming& incoming = matched[i];
    const auto is_earlier = [&](const Incoming& other) { return other.source == incoming.source; };
    const auto here = matched.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::any_of(matched.begin(), here, is_earlier)) continue;
    int is_done = 0;
    const int code = MPI_Test(&incoming.request, &is_done, MPI_STATUS_IGNORE);
    if (code == MPI_SUCCESS && is_done == 0) continue;
    Message message{incoming.source, std::move(incoming.bytes)};
    const bool is_last = incoming.tag == kSilenceTag;
    matched.erase(here);
    last_traffic_ns_ = base::now_ns();
    if (code != MPI_SUCCESS) {
      lose(message.source, "MPI_Imrecv", code);
    } else if (is_last) {
      peer(message.source).is_silent = true;
    } else {
      return message;
    }
    --i;
  }
  return std::nullopt;
}

void MpiTransport::pause(const base::Deadline& deadline) const {
  const std::int64_t idle_ns = base::now_ns() - last_traffic_ns_;
  if (idle_ns < kSpinNs) return;
  if (idle_ns < kYieldNs) {
    std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(
      std::chrono::nanoseconds(std::min({idle_ns / 8, kMaxSleepNs, deadline.remaining_ns()})));
}

// --- The end ----------------------------------------------------------------------------------

bool MpiTransport::is_drained() const {
  return in_flight_->outgoing.empty() && in_flight_->incoming.empty() &&
         std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.is_silent; });
}

bool MpiTransport::has_unsent_to_any() const {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (has_unsent(rank)) return true;
  }
  return false;
}

void MpiTransport::drain(const base::Deadline& deadline) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_ && peer(rank).lost_reason.empty()) post(rank, kSilenceTag, {});
  }
  // Peers may have their reasons not to close for long: a group that this rank is not of.
  const base::Deadline patience(
      std::min(kPatience, std::chrono::nanoseconds(deadline.remaining_ns())));
  for (;;) {
    advance_sends();
    const bool has_more = match();
    while (take_arrived().has_value()) continue;
    if (is_drained() || deadline.passed() || (patience.passed() && !has_unsent_to_any())) return;
    if (!has_more) pause(deadline);
  }
}

void MpiTransport::close(std::chrono::nanoseconds timeout) noexcept {
  if (comm_ == MPI_COMM_NULL) return;
  const bool may_call = !is_thread_bound_ || owner_ == std::this_thread::get_id();
  bool is_clean = false;
  if (may_call && !is_finalized()) {
    try {
      drain(base::Deadline(timeout));
      is_clean = is_drained();
    } catch (...) {
      is_clean = false;
    }
  }
  if (is_clean) {
    MPI_Comm_free(&comm_);
    return;
  }
  comm_ = MPI_COMM_NULL;
  // MPI may read and write there until the process ends.
  [[maybe_unused]] const InFlight* const left_to_mpi = in_flight_.release();
}

}  // namespace fanfold::mpi
