// SPDX-License-Identifier: Apache-2.0
#include "support/spawn_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <utility>

#include "support/eventually.h"

namespace fanfold::testing {
namespace {

constexpr const char* kFlag = "--fanfold-scenario";

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

void make_pipe(int* reader, int* writer) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2");
  *reader = ends[0];
  *writer = ends[1];
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& one : strings) pointers.push_back(one.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

bool run_scenario(int argc, char** argv, int* exit_status) {
  if (argc != 7 || std::strcmp(argv[1], kFlag) != 0) return false;
  const RankArguments arguments{std::stoi(argv[3]), std::stoi(argv[4]), argv[5], argv[6]};
  *exit_status = 2;
  for (const Scenario& scenario : scenarios()) {
    if (std::strcmp(scenario.name, argv[2]) != 0) continue;
    try {
      scenario.run(arguments);
      *exit_status = 0;
    } catch (const std::exception& error) {
      say(std::string("error: ") + error.what());
      *exit_status = 1;
    }
  }
  return true;
}

void say(const std::string& line) { std::cout << line + "\n" << std::flush; }

std::string listen() {
  std::string line;
  std::getline(std::cin, line);
  return line;
}

Process::Process(const std::string& scenario, const RankArguments& arguments,
                 const std::vector<std::string>& environment) {
  int child_output = -1;
  int child_input = -1;
  make_pipe(&output_, &child_output);
  make_pipe(&child_input, &input_);
  std::vector<std::string> words{"/proc/self/exe",
                                 kFlag,
                                 scenario,
                                 std::to_string(arguments.rank),
                                 std::to_string(arguments.num_ranks),
                                 arguments.rendezvous,
                                 arguments.extra};
  std::vector<std::string> variables = environment;
  for (char** one = environ; *one != nullptr; ++one) variables.emplace_back(*one);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, child_input, STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, child_output, STDOUT_FILENO);
  const std::vector<char*> argv = pointers_to(words);
  const std::vector<char*> envp = pointers_to(variables);
  const int code = ::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), envp.data());
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(child_output);
  ::close(child_input);
  if (code != 0) {
    errno = code;
    fail("posix_spawn");
  }
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      output_(std::exchange(other.output_, -1)),
      input_(std::exchange(other.input_, -1)),
      pending_(std::move(other.pending_)) {}

Process::~Process() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    (void)::waitpid(pid_, nullptr, 0);
  }
  if (output_ >= 0) ::close(output_);
  if (input_ >= 0) ::close(input_);
}

void Process::send_signal(int number) const { ::kill(pid_, number); }

std::string Process::read_line(std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  for (;;) {
    const std::size_t newline = pending_.find('\n');
    if (newline != std::string::npos) {
      const std::string line = pending_.substr(0, newline);
      pending_.erase(0, newline + 1);
      return line;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd entry{output_, POLLIN, 0};
    if (left.count() <= 0 || ::poll(&entry, 1, static_cast<int>(left.count())) <= 0) return "";
    std::array<char, 512> buffer{};
    const ssize_t size = ::read(output_, buffer.data(), buffer.size());
    if (size <= 0) return "";
    pending_.append(buffer.data(), static_cast<std::size_t>(size));
  }
}

void Process::write_line(const std::string& line) const {
  const std::string text = line + "\n";
  if (::write(input_, text.data(), text.size()) < 0) fail("write to a rank");
}

int Process::wait(std::chrono::milliseconds limit) {
  int status = 0;
  const auto has_ended = [&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; };
  if (!eventually(has_ended, limit)) return -1000;
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

std::vector<Process> spawn_processes(const std::string& scenario, int num_ranks,
                                     const std::string& rendezvous, const std::string& extra,
                                     const std::vector<std::string>& environment) {
  std::vector<Process> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back(scenario, RankArguments{rank, num_ranks, rendezvous, extra}, environment);
  }
  return ranks;
}

}  // namespace fanfold::testing
