// SPDX-License-Identifier: Apache-2.0
#include "comm/host_identity.h"

#include <sys/stat.h>

#include <fstream>
#include <map>
#include <optional>

#include "base/env.h"
#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr const char* kVariable = "FANFOLD_HOST_ID";
constexpr std::size_t kMaxBytes = 200;

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  if (std::getline(file, id) && !id.empty()) return id;
  throw Unsupported(
      base::str("host: expected to read /proc/sys/kernel/random/boot_id, which names "
                "the machine, got nothing; set ",
                kVariable));
}

std::string network_namespace() {
  struct stat status{};
  if (::stat("/proc/self/ns/net", &status) == 0) return std::to_string(status.st_ino);
  throw Unsupported(
      base::str("host: expected to find /proc/self/ns/net, which names the network "
                "namespace, got nothing; set ",
                kVariable));
}

}  // namespace

std::string host_identity() {
  const std::optional<std::string> given = base::env_variable(kVariable);
  if (!given.has_value() || given->empty()) {
    return base::str("boot ", boot_id(), " net ", network_namespace());
  }
  if (given->size() > kMaxBytes || given->find('\n') != std::string::npos) {
    throw InvalidArgument(base::str(kVariable, ": expected one line of at most ", kMaxBytes,
                                    " bytes, got ", given->size(), " bytes"));
  }
  return base::str(kVariable, " ", *given);
}

std::string describe_hosts(int rank_a, const std::string& host_a, int rank_b,
                           const std::string& host_b) {
  return base::str("rank ", rank_a, " on host '", host_a, "' and rank ", rank_b, " on host '",
                   host_b, "' (boot id and network namespace, or ", kVariable, ")");
}

std::vector<int> number_hosts(const std::vector<std::string>& identities) {
  std::map<std::string, int> known;
  std::vector<int> numbers;
  numbers.reserve(identities.size());
  for (const std::string& identity : identities) {
    numbers.push_back(known.emplace(identity, static_cast<int>(known.size())).first->second);
  }
  return numbers;
}

}  // namespace fanfold::comm
