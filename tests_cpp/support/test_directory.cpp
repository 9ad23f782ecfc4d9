// SPDX-License-Identifier: Apache-2.0
#include "support/test_directory.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace fanfold::testing {

TestDirectory::TestDirectory() : path_("/tmp/fanfold-test-XXXXXX") {
  if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp " + path_);
}

TestDirectory::~TestDirectory() {
  for (const std::string& name : entries()) (void)::unlink((path_ + "/" + name).c_str());
  (void)::rmdir(path_.c_str());
}

std::vector<std::string> TestDirectory::entries() const {
  std::vector<std::string> names;
  DIR* const directory = ::opendir(path_.c_str());
  if (directory == nullptr) return names;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  ::closedir(directory);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace fanfold::testing
