// SPDX-License-Identifier: Apache-2.0
#pragma once

// A place for the sockets and files of one test.

#include <string>
#include <vector>

namespace fanfold::testing {

/// A directory that only this user can write to, removed with all that is in it.
class TestDirectory {
 public:
  TestDirectory();
  ~TestDirectory();
  TestDirectory(const TestDirectory&) = delete;
  TestDirectory& operator=(const TestDirectory&) = delete;
  const std::string& path() const { return path_; }
  /// Names of what is in it.
  std::vector<std::string> entries() const;

 private:
  std::string path_;
};

}  // namespace fanfold::testing
