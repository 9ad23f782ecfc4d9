// SPDX-License-Identifier: Apache-2.0
#include "gpu/fabric_windows.h"

#include <cstring>
#include <exception>
#include <optional>
#include <random>
#include <utility>

#include "base/byte_math.h"
#include "base/format.h"
#include "base/keep_forever.h"
#include "comm/failure.h"
#include "comm/rank_index.h"
#include "fanfold/error.h"
#include "gpu/fabric_card.h"

namespace fanfold::gpu {
namespace {

using comm::index;
using comm::Parcel;

CUmemAllocationHandleType handle_type(HandleKind kind) noexcept {
  switch (kind) {
    case HandleKind::kFabric:
      return CU_MEM_HANDLE_TYPE_FABRIC;
    case HandleKind::kFileDescriptor:
      return CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    case HandleKind::kSameProcess:
    case HandleKind::kNccl:
      return CU_MEM_HANDLE_TYPE_NONE;
  }
  return CU_MEM_HANDLE_TYPE_NONE;
}

CUmemAllocationProp properties(const DeviceContext& context, HandleKind kind) noexcept {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = handle_type(kind);
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = context.device();
  return prop;
}

std::uint64_t random_word() {
  std::random_device source;
  return (std::uint64_t{source()} << 32U) ^ source();
}

/// Tries one kind of handle. Members are declared in the order in which they may be needed by the
/// ones below them: whatever stops an attempt, what it made is given back.
class Attempt {
 public:
  Attempt(comm::Group& group, std::shared_ptr<const DeviceContext> context, std::int64_t bytes,
          HandleKind kind, base::Deadline deadline)
      : group_(group),
        owner_(std::move(context)),
        context_(*owner_),
        driver_(Driver::get()),
        bytes_(bytes),
        kind_(kind),
        deadline_(deadline) {}

  /// Collective. The verdict is the same on every rank.
  Verdict run();
  std::shared_ptr<FabricWindows> windows() { return std::move(windows_); }

 private:
  // What this rank does in each step; all throw.
  void offer();
  void make_and_export();
  void import_and_map();
  void read_marks() const;

  template <class Part>
  Verdict try_part(Part&& part);
  /// Tells the others how this rank's part went, with a card and perhaps a descriptor; returns the
  /// verdict of the first rank for which it went badly.
  template <class Card>
  Verdict meet(const char* step, const Verdict& own, const Card& card,
               base::FileDescriptor fd = {});
  template <class Card>
  std::vector<Card> cards(const char* step) const;
  /// What follows from everybody's offer.
  Verdict agree();
  MemoryHandle import(const Ticket& ticket);
  std::uint64_t mark_of(int rank) const noexcept {
    return base::mix_digest(token_, static_cast<std::uint64_t>(rank) + 1);
  }

  comm::Group& group_;
  std::shared_ptr<const DeviceContext> owner_;
  const DeviceContext& context_;
  const Driver& driver_;
  std::int64_t bytes_;
  HandleKind kind_;
  base::Deadline deadline_;

  std::optional<comm::Failure> failure_;  // an error that no other kind of handle would mend
  std::vector<Parcel> received_;          // of the last step
  Offer offer_{};
  Ticket ticket_{};
  std::uint64_t token_ = 0;
  std::size_t stride_ = 0;
  MemoryHandle own_;
  base::FileDescriptor own_fd_;
  std::shared_ptr<FabricWindows> windows_;
};

template <class Part>
Verdict Attempt::try_part(Part&& part) {
  try {
    part();
    return {};
  } catch (const CudaFailure& error) {
    return {base::str("rank ", group_.rank(), ": ", error.what()), error.code()};
  } catch (const Unsupported& error) {
    return {base::str("rank ", group_.rank(), ": ", error.what()), 0};
  } catch (...) {
    failure_ = comm::Failure::current(group_.rank());
    return {};
  }
}

template <class Card>
Verdict Attempt::meet(const char* step, const Verdict& own, const Card& card,
                      base::FileDescriptor fd) {
  static_assert(std::is_trivially_copyable_v<Card>);
  Parcel parcel;
  parcel.bytes = encode(own, &card, sizeof card);
  if (fd.is_open()) parcel.fds.push_back(std::move(fd));
  const std::string call =
      base::str("GPU memory of ", bytes_, " bytes per rank, by ", name_of(kind_), ": ", step);
  received_ = group_.exchange(call, std::move(parcel), failure_, deadline_);
  for (const Parcel& theirs : received_) {
    Verdict verdict = decode_verdict(theirs.bytes);
    if (!verdict.is_good()) return verdict;
  }
  return {};
}

template <class Card>
std::vector<Card> Attempt::cards(const char* step) const {
  std::vector<Card> all(received_.size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (decode_card(received_[rank].bytes, &all[rank], sizeof(Card))) continue;
    throw InvalidArgument(base::str("GPU memory: rank ", rank, ": expected ", sizeof(Card),
                                    " bytes in step '", step, "', got another message"));
  }
  return all;
}

void Attempt::offer() {
  if (kind_ == HandleKind::kSameProcess && group_.num_ranks() > 1 &&
      std::strcmp(group_.kind(), "threads") != 0) {
    throw Unsupported("expected ranks that are threads of one process, got processes");
  }
  if (kind_ == HandleKind::kFabric &&
      !context_.has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)) {
    throw Unsupported(base::str("device ", context_.device(), " has no fabric handles"));
  }
  if (kind_ == HandleKind::kFileDescriptor &&
      !context_.has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
    throw Unsupported(base::str("device ", context_.device(), " has no descriptor handles"));
  }
  if (kind_ == HandleKind::kFabric) {
    const FabricState state = fabric_state(context_.pci_bus_id());
    if (!state.objection.empty()) throw Unsupported(state.objection);
    offer_.has_domain = state.domain.has_value();
    if (state.domain) offer_.domain = *state.domain;
  }
  const CUmemAllocationProp prop = properties(context_, kind_);
  std::size_t granularity = 0;
  driver_.check(driver_.cuMemGetAllocationGranularity(&granularity, &prop,
                                                      CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                "cuMemGetAllocationGranularity");
  offer_.nonce = random_word();
  offer_.bytes = bytes_;
  offer_.kind = kind_;
  offer_.granularity = static_cast<std::int64_t>(granularity);
}

Verdict Attempt::agree() {
  const std::vector<Offer> offers = cards<Offer>("offer");
  std::int64_t granularity = 1;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const Offer& theirs = offers[rank];
    granularity = std::max(granularity, theirs.granularity);
    token_ = base::mix_digest(token_, theirs.nonce);
    if (kind_ != HandleKind::kFabric || theirs.has_domain != offers[0].has_domain ||
        theirs.domain == offers[0].domain) {
      continue;
    }
    return {base::str("rank ", rank, ": its device is in ", theirs.domain.describe(),
                      ", that of rank 0 in ", offers[0].domain.describe()),
            0};
  }
  if (bytes_ > INT64_MAX / group_.num_ranks() - granularity) {
    throw OutOfMemory(base::str("GPU memory of ", bytes_, " bytes per rank: no machine has that"));
  }
  stride_ = static_cast<std::size_t>(base::align_up(bytes_, granularity));
  return {};
}

void Attempt::make_and_export() {
  const CUmemAllocationProp prop = properties(context_, kind_);
  CUmemGenericAllocationHandle handle = 0;
  driver_.check(driver_.cuMemCreate(&handle, stride_, &prop, 0),
                base::str("cuMemCreate of ", stride_, " bytes on device ", context_.device(),
                          kind_ == HandleKind::kFabric
                              ? " with a fabric handle (which needs a running IMEX daemon and "
                                "access to its channel)"
                              : ""));
  own_ = MemoryHandle(driver_, handle);
  ticket_.token = token_;
  ticket_.bytes = static_cast<std::int64_t>(stride_);
  ticket_.rank = group_.rank();
  ticket_.kind = kind_;
  if (kind_ == HandleKind::kSameProcess) {
    std::memcpy(ticket_.handle.data(), &handle, sizeof handle);
    return;
  }
  int fd = -1;
  void* const out = kind_ == HandleKind::kFabric ? static_cast<void*>(ticket_.handle.data()) : &fd;
  driver_.check(driver_.cuMemExportToShareableHandle(out, handle, handle_type(kind_), 0),
                "cuMemExportToShareableHandle");
  own_fd_ = base::FileDescriptor(fd);
}

MemoryHandle Attempt::import(const Ticket& ticket) {
  CUmemGenericAllocationHandle handle = 0;
  base::FileDescriptor fd;
  std::array<std::byte, 64> blob = ticket.handle;
  void* in = blob.data();
  if (kind_ == HandleKind::kFileDescriptor) {
    fd = received_[index(ticket.rank)].take_fd(0);
    in = pointer_of(fd.get());
  }
  driver_.check(driver_.cuMemImportFromShareableHandle(&handle, in, handle_type(kind_)),
                base::str("cuMemImportFromShareableHandle of rank ", ticket.rank, "'s memory"));
  return {driver_, handle};
}

void Attempt::import_and_map() {
  const std::vector<Ticket> tickets = cards<Ticket>("handles");
  for (int rank = 0; rank < group_.num_ranks(); ++rank) {
    const Ticket& ticket = tickets[index(rank)];
    if (ticket.token == token_ && ticket.rank == rank && ticket.kind == kind_ &&
        ticket.bytes == static_cast<std::int64_t>(stride_)) {
      continue;
    }
    throw InvalidArgument(base::str("GPU memory: rank ", rank,
                                    ": expected a handle of this group "
                                    "and allocation, got another's"));
  }
  const std::size_t total = stride_ * index(group_.num_ranks());
  CUdeviceptr begin = 0;
  driver_.check(driver_.cuMemAddressReserve(&begin, total, 0, 0, 0),
                base::str("cuMemAddressReserve of ", total, " bytes"));
  windows_ = std::make_shared<FabricWindows>(owner_, AddressRange(driver_, begin, total), stride_);
  for (const Ticket& ticket : tickets) {
    if (ticket.rank == group_.rank()) {
      windows_->map_next(own_.get());
    } else if (kind_ == HandleKind::kSameProcess) {
      CUmemGenericAllocationHandle handle = 0;
      std::memcpy(&handle, ticket.handle.data(), sizeof handle);
      windows_->map_next(handle);
    } else {
      windows_->map_next(import(ticket).get());
    }
  }
  context_.write_word(windows_->data(group_.rank()), mark_of(group_.rank()));
}

void Attempt::read_marks() const {
  for (int rank = 0; rank < group_.num_ranks(); ++rank) {
    if (context_.read_word(windows_->data(rank)) == mark_of(rank)) continue;
    throw Unsupported(
        base::str("expected the memory of rank ", rank, " behind its handle, found other memory"));
  }
}

Verdict Attempt::run() {
  Verdict verdict = meet("offer", try_part([&] { offer(); }), offer_);
  if (!verdict.is_good()) return verdict;
  const Verdict made = try_part([&] {
    verdict = agree();
    if (verdict.is_good()) make_and_export();
  });
  if (!verdict.is_good()) return verdict;
  verdict = meet("handles", made, ticket_, std::move(own_fd_));
  if (!verdict.is_good()) return verdict;
  verdict = meet("mapping", try_part([&] { import_and_map(); }), ticket_);
  own_.reset();  // all who need it have it mapped
  if (!verdict.is_good()) return verdict;
  verdict = meet("reading", try_part([&] { read_marks(); }), ticket_);
  if (!verdict.is_good()) return verdict;
  // Nobody writes before all are zero.
  const auto zero = [&] { context_.zero(windows_->data(group_.rank()), windows_->bytes()); };
  return meet("zeroing", try_part(zero), ticket_);
}

}  // namespace

FabricWindows::~FabricWindows() {
  if (!is_handed_out_) return;
  try {
    context_->wait_idle([] {});
  } catch (...) {
    // Work may go on that uses them; addresses that are not given back harm nobody.
    struct Kept {
      AddressRange range;
      std::vector<MappedMemory> mapped;
    };
    base::keep_forever(std::make_shared<Kept>(Kept{std::move(range_), std::move(mapped_)}));
  }
}

void FabricWindows::map_next(CUmemGenericAllocationHandle handle) {
  const Driver& driver = Driver::get();
  const std::size_t rank = mapped_.size();
  const CUdeviceptr begin = range_.begin() + rank * stride_;
  mapped_.reserve(rank + 1);  // nothing may fail between mapping and owning
  driver.check(driver.cuMemMap(begin, stride_, 0, handle, 0),
               base::str("cuMemMap of rank ", rank, "'s memory"));
  mapped_.emplace_back(driver, begin, stride_);
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context_->device();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  driver.check(driver.cuMemSetAccess(begin, stride_, &access, 1),
               base::str("cuMemSetAccess of device ", context_->device(), " to rank ", rank,
                         "'s memory (which needs peer access between two devices)"));
}

const char* name_of(HandleKind kind) {
  switch (kind) {
    case HandleKind::kFabric:
      return "fabric";
    case HandleKind::kFileDescriptor:
      return "file_descriptor";
    case HandleKind::kSameProcess:
      return "same_process";
    case HandleKind::kNccl:
      return "nccl";
  }
  return "";
}

SharedWindows share_windows(comm::Group& group, const std::shared_ptr<const DeviceContext>& context,
                            std::int64_t bytes, const std::vector<HandleKind>& kinds,
                            base::Deadline deadline) {
  SharedWindows result{};
  for (const HandleKind kind : kinds) {
    Attempt attempt(group, context, bytes, kind, deadline);
    const Verdict verdict = attempt.run();
    if (verdict.is_good()) {
      result.kind = kind;
      result.windows = attempt.windows();
      result.windows->hand_out();
      return result;
    }
    result.passed_over.push_back(base::str(name_of(kind), ": ", verdict.reason));
    if (kinds.size() == 1 && verdict.code != 0) {
      throw CudaFailure(base::str("GPU memory of ", bytes, " bytes: ", verdict.reason),
                        verdict.code);
    }
  }
  std::string text = base::str("GPU memory of ", bytes, " bytes: no way to share it works");
  for (const std::string& reason : result.passed_over) text += "; " + reason;
  throw Unsupported(text);
}

}  // namespace fanfold::gpu
