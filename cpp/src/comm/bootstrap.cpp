// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap.h"

#include <charconv>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/byte_math.h"
#include "base/env.h"
#include "base/format.h"
#include "comm/failure.h"
#include "comm/host_identity.h"
#include "comm/private_directory.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

std::string required_variable(const char* name) {
  const std::optional<std::string> value = base::env_variable(name);
  if (value.has_value() && !value->empty()) return *value;
  throw InvalidArgument(base::str(name,
                                  ": expected this environment variable, as torchrun sets it, got "
                                  "nothing"));
}

int integer_variable(const char* name) {
  const std::string text = required_variable(name);
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && stop == end) return value;
  throw InvalidArgument(base::str(name, ": expected a whole number, got '", text, "'"));
}

std::uint64_t digest_of(const std::string& text, std::uint64_t digest) {
  for (const char letter : text) {
    digest = base::mix_digest(digest, static_cast<unsigned char>(letter));
  }
  return digest;
}

/// What a rank tells the others.
struct Introduction {
  std::string host;
  std::string path;  // of rank 0
  std::optional<Failure> failure;

  Communicator::Bytes encode() const {
    const std::string rest = failure.has_value() ? "!" + failure->encode() : "=" + path;
    const std::string text = host + "\n" + rest;
    Communicator::Bytes bytes(text.size());
    std::memcpy(bytes.data(), text.data(), text.size());
    return bytes;
  }

  static Introduction decode(const Communicator::Bytes& bytes) {
    const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const std::size_t end = text.find('\n');
    if (end == std::string::npos || end + 1 >= text.size()) {
      throw InvalidArgument(base::str("all_gather: expected what the ranks gave, got ",
                                      bytes.size(), " other bytes"));
    }
    Introduction result;
    result.host = text.substr(0, end);
    const std::string rest = text.substr(end + 2);
    if (text[end + 1] == '!') {
      result.failure = Failure::decode(rest);
    } else {
      result.path = rest;
    }
    return result;
  }
};

std::vector<Introduction> introduce(int rank, int num_ranks, const Introduction& own,
                                    const Communicator::AllGatherCallback& all_gather) {
  const Communicator::Bytes bytes = own.encode();
  const std::vector<Communicator::Bytes> gathered = all_gather(bytes);
  if (gathered.size() != static_cast<std::size_t>(num_ranks) ||
      gathered[static_cast<std::size_t>(rank)] != bytes) {
    throw InvalidArgument(base::str("all_gather: expected the bytes of ", num_ranks,
                                    " ranks in rank order, with what rank ", rank,
                                    " gave at its place, got ", gathered.size(), " entries"));
  }
  std::vector<Introduction> all;
  all.reserve(gathered.size());
  for (const auto& entry : gathered) all.push_back(Introduction::decode(entry));
  return all;
}

}  // namespace

void check_num_ranks(int num_ranks) {
  if (num_ranks >= 1 && num_ranks <= kMaxRanks) return;
  throw InvalidArgument(base::str("num_ranks: expected 1 to ", kMaxRanks, ", got ", num_ranks));
}

void check_rank(int rank, int num_ranks) {
  if (rank >= 0 && rank < num_ranks) return;
  throw InvalidArgument(base::str("rank: expected 0 to ", num_ranks - 1, ", got ", rank));
}

RendezvousConfig rendezvous_from_env() {
  const int num_ranks = integer_variable("WORLD_SIZE");
  const int rank = integer_variable("RANK");
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw InvalidArgument(base::str("WORLD_SIZE: expected 1 to ", kMaxRanks, ", got ", num_ranks));
  }
  if (rank < 0 || rank >= num_ranks) {
    throw InvalidArgument(base::str("RANK: expected 0 to ", num_ranks - 1, ", got ", rank));
  }
  // A job's name: two jobs of one user on one machine differ in one of these.
  std::string job = required_variable("MASTER_ADDR") + "\n" + required_variable("MASTER_PORT");
  for (const char* name : {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}) {
    job += "\n" + base::env_variable(name).value_or("");
  }
  std::ostringstream name;
  name << std::hex << std::setfill('0') << std::setw(16) << digest_of(job, base::kDigestSeed)
       << std::setw(16) << digest_of("2\n" + job, base::kDigestSeed);
  return {base::str(runtime_directory(), "/fanfold-", name.str()), rank, num_ranks};
}

std::unique_ptr<Group> join_with_callbacks(int rank, int num_ranks,
                                           const Communicator::AllGatherCallback& all_gather,
                                           const Communicator::BarrierCallback& barrier,
                                           base::Deadline deadline) {
  if (!all_gather || !barrier) {
    throw InvalidArgument("from_callbacks: expected an all_gather and a barrier to call, got none");
  }
  Introduction own;
  std::optional<TemporaryDirectory> directory;
  try {
    own.host = host_identity();
    if (rank == 0) own.path = directory.emplace().path() + "/rendezvous";
  } catch (...) {
    own.failure = Failure::current(rank);
  }
  const std::vector<Introduction> all = introduce(rank, num_ranks, own, all_gather);
  for (int other = 0; other < num_ranks; ++other) {
    const Introduction& theirs = all[static_cast<std::size_t>(other)];
    if (theirs.failure.has_value()) theirs.failure->raise();
    if (theirs.host != all[0].host) {
      throw Unsupported(base::str("from_callbacks: expected all ranks on one host, got ",
                                  describe_hosts(0, all[0].host, other, theirs.host)));
    }
  }
  std::unique_ptr<Group> group = join_group({all[0].path, rank, num_ranks}, deadline);
  barrier();
  return group;
}

}  // namespace fanfold::comm
