// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks as processes: the test program starts itself anew for each rank, by exec, so that
// sanitizers stay happy. A program that uses this has a main of its own, see
// support/process_main.cpp.

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace fanfold::testing {

/// What a started process is told.
struct RankArguments {
  int rank = 0;
  int num_ranks = 1;
  std::string rendezvous;  // a socket's path in a directory of the test
  std::string extra;
};

/// Something that a started process does. Lines that it prints with `say` reach the test. An
/// exception is printed as "error: <text>" and makes the exit status 1.
struct Scenario {
  const char* name;
  void (*run)(const RankArguments& arguments);
};

/// Every scenario of this program; the program defines it.
std::vector<Scenario> scenarios();

/// Runs a scenario if the program was started for one; returns whether it was.
bool run_scenario(int argc, char** argv, int* exit_status);

/// Prints a line for `Process::read_line`.
void say(const std::string& line);
/// Waits for a line of the test.
std::string listen();

/// A started process. Killed with this object.
class Process {
 public:
  /// `environment` holds further variables, "NAME=value".
  Process(const std::string& scenario, const RankArguments& arguments,
          const std::vector<std::string>& environment = {});
  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;

  pid_t pid() const { return pid_; }
  void send_signal(int number) const;
  /// The next line, or "" at the end of the output or after `limit`.
  std::string read_line(std::chrono::milliseconds limit = std::chrono::seconds(20));
  void write_line(const std::string& line) const;
  /// Waits for the end: the exit status, or -signal; -1000 after `limit`.
  int wait(std::chrono::milliseconds limit = std::chrono::seconds(20));

 private:
  pid_t pid_ = -1;
  int output_ = -1;
  int input_ = -1;
  std::string pending_;
};

/// One process per rank, ranks 0 to num_ranks - 1.
std::vector<Process> spawn_processes(const std::string& scenario, int num_ranks,
                                     const std::string& rendezvous, const std::string& extra = "",
                                     const std::vector<std::string>& environment = {});

}  // namespace fanfold::testing
