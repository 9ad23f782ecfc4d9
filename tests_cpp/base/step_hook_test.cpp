// SPDX-License-Identifier: Apache-2.0
#include "base/step_hook.h"

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "gtest/gtest.h"

namespace fanfold::base {
namespace {

/// A child process that runs `num_steps` steps and ends well, unless a knob ends it before.
class Child {
 public:
  Child(const TestKnobs& knobs, int num_steps) : pid_(::fork()) {
    if (pid_ != 0) return;
    StepHook hook(knobs, 0);
    for (int i = 0; i < num_steps; ++i) hook.step();
    ::_exit(0);
  }
  ~Child() {
    if (has_ended_) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// How the child ended, or that it stopped.
  int wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, WUNTRACED), pid_);
    has_ended_ = !WIFSTOPPED(status);
    return status;
  }
  void go_on() const { ::kill(pid_, SIGCONT); }

 private:
  pid_t pid_;
  bool has_ended_ = false;
};

bool ends_well(const TestKnobs& knobs, int num_steps) {
  const int status = Child(knobs, num_steps).wait();
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool is_killed(const TestKnobs& knobs, int num_steps) {
  const int status = Child(knobs, num_steps).wait();
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

TEST(StepHookTest, WithoutKnobsStepsDoNothing) { EXPECT_TRUE(ends_well({}, 1000)); }

TEST(StepHookTest, KillsTheProcessAtItsStepAndNotBefore) {
  TestKnobs knobs;
  for (const int step : {0, 1, 5}) {
    knobs.kill_at_step = step;
    EXPECT_TRUE(ends_well(knobs, step)) << "steps before " << step;
    EXPECT_TRUE(is_killed(knobs, step + 1)) << "step " << step;
  }
}

TEST(StepHookTest, StopsTheProcessOnceAndGoesOnWhenWoken) {
  TestKnobs knobs;
  knobs.stop_at_step = 3;
  EXPECT_TRUE(ends_well(knobs, 3));
  Child child(knobs, 100);
  const int stopped = child.wait();
  ASSERT_TRUE(WIFSTOPPED(stopped));
  EXPECT_EQ(WSTOPSIG(stopped), SIGSTOP);
  child.go_on();
  const int ended = child.wait();
  EXPECT_TRUE(WIFEXITED(ended));
}

TEST(StepHookTest, DelaysChangeNothingElse) {
  TestKnobs knobs;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    knobs.delay_seed = seed;
    knobs.kill_at_step = -1;
    EXPECT_TRUE(ends_well(knobs, 200)) << "seed " << seed;
    knobs.kill_at_step = 20;
    EXPECT_TRUE(ends_well(knobs, 20)) << "seed " << seed;
    EXPECT_TRUE(is_killed(knobs, 21)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace fanfold::base
