// SPDX-License-Identifier: Apache-2.0
#include "positions.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace cudasim {
namespace {

struct Position {
  const void* code = nullptr;  // null: known from its Loc
  std::string text;            // empty: not looked up yet
};

/// Code addresses to ids: open addressing, since each access of a kernel asks.
class CodeTable {
 public:
  CodeTable() : entries_(std::size_t{1} << 12) {}

  PositionId& find(const void* code) {
    if (used_ * 2 > entries_.size()) grow();
    Entry& entry = probe(code);
    if (entry.code == nullptr) {
      entry.code = code;
      ++used_;
    }
    return entry.id;
  }

 private:
  struct Entry {
    const void* code = nullptr;
    PositionId id = kNoPosition;
  };

  Entry& probe(const void* code) {
    const std::size_t mask = entries_.size() - 1;
    const auto key = reinterpret_cast<std::uintptr_t>(code) * 0x9e3779b97f4a7c15ull;
    for (std::size_t i = (key >> 40) & mask;; i = (i + 1) & mask) {
      if (entries_[i].code == code || entries_[i].code == nullptr) return entries_[i];
    }
  }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.code != nullptr) probe(entry.code) = entry;
    }
  }

  std::vector<Entry> entries_;
  std::size_t used_ = 0;
};

struct Tables {
  std::vector<Position> positions{1};
  CodeTable codes;
  std::map<std::pair<const char*, int>, PositionId> sources;
};

Tables& tables() {
  static Tables* all = new Tables;  // outlives static destructors of tests
  return *all;
}

std::string base_name(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

/// "file.cu:12" of one line of addr2line; empty if it does not know.
std::string parse(const std::string& line) {
  const std::string text = base_name(line);
  const std::string position = text.substr(0, text.find_first_of(" \n"));  // no "(discriminator 2)"
  return position.empty() || position[0] == '?' ? "" : position;
}

/// Asks addr2line about the instruction before `code`. Of functions inlined into each other: the
/// innermost that is not the toolkit's.
std::string look_up(const void* code) {
  Dl_info info{};
  if (dladdr(code, &info) == 0 || info.dli_fname == nullptr) return "?";
  const auto offset = static_cast<unsigned long>(reinterpret_cast<std::uintptr_t>(code) -
                                                 reinterpret_cast<std::uintptr_t>(info.dli_fbase));
  char hex[32];
  std::snprintf(hex, sizeof hex, "%#lx", offset - 1);
  const std::string command =
      std::string("addr2line -i -e '") + info.dli_fname + "' " + hex + " 2>/dev/null";
  // The path is the loader's own.  NOLINTNEXTLINE(bugprone-command-processor)
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), &pclose);
  std::string found;
  char line[1024] = "";
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe.get()) != nullptr) {
    const std::string position = parse(line);
    const bool is_toolkit = position.rfind("cuda_", 0) == 0;
    if (found.empty() || !is_toolkit) found = position;
    if (!found.empty() && !is_toolkit) break;
  }
  return found.empty() ? base_name(info.dli_fname) + "+" + hex : found;
}

}  // namespace

PositionId position_of_code(const void* return_address) {
  PositionId& id = tables().codes.find(return_address);
  if (id == kNoPosition) {
    id = static_cast<PositionId>(tables().positions.size());
    tables().positions.push_back({return_address, ""});
  }
  return id;
}

PositionId position_of(Loc loc) {
  PositionId& id = tables().sources[{loc.file, loc.line}];
  if (id == kNoPosition) {
    id = static_cast<PositionId>(tables().positions.size());
    tables().positions.push_back({nullptr, describe(loc)});
  }
  return id;
}

std::string describe_position(PositionId id) {
  Position& position = tables().positions.at(id);
  if (position.text.empty() && position.code != nullptr) position.text = look_up(position.code);
  return position.text;
}

std::string describe(Loc loc) {
  if (loc.file == nullptr) return "?";
  return base_name(loc.file) + ":" + std::to_string(loc.line);
}

}  // namespace cudasim
