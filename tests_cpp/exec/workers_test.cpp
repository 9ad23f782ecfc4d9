// SPDX-License-Identifier: Apache-2.0
#include "exec/workers.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "support/sanitizer.h"

namespace fanfold::exec {
namespace {

using std::chrono::milliseconds;

void no_fence() {}

/// Runs `body` on a helper, once: the caller waits in its own piece until that has happened.
template <class F>
void on_helper(Workers& workers, F&& body) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> done{false};
  std::atomic<int> num_helped{0};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  workers.run(2, 1, [&](std::int64_t, std::int64_t) {
    if (std::this_thread::get_id() != caller) {
      done.store(true);
      if (num_helped.fetch_add(1) == 0) body();
      return;
    }
    while (!done.load() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  });
  EXPECT_TRUE(done.load()) << "no helper took a piece";
}

TEST(WorkersTest, EachItemIsDoneOnce) {
  Workers workers(&no_fence, 0);
  for (const int num_workers : {1, 2, 3, 8}) {
    workers.set_num_workers(num_workers);
    for (const std::int64_t num_items : {0, 1, 2, 7, 8, 1000}) {
      for (const std::int64_t grain : {1, 3, 8, 2000}) {
        std::vector<int> times(static_cast<std::size_t>(num_items), 0);
        workers.run(num_items, grain, [&](std::int64_t begin, std::int64_t end) {
          EXPECT_LE(end - begin, grain);
          for (std::int64_t i = begin; i < end; ++i) ++times[static_cast<std::size_t>(i)];
        });
        EXPECT_EQ(times, std::vector<int>(times.size(), 1))
            << num_workers << " workers, " << num_items << " items, grain " << grain;
      }
    }
  }
}

TEST(WorkersTest, WhatHelpersWroteIsThereAfterwards) {
  Workers workers(&no_fence, 0);
  std::vector<std::int64_t> values(64, 0);
  for (std::int64_t round = 1; round <= 2000; ++round) {
    workers.set_num_workers(1 + static_cast<int>(round / 100 % 4));
    workers.run(64, 1 + round % 5, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) values[static_cast<std::size_t>(i)] += round + i;
    });
  }
  for (std::int64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(values[static_cast<std::size_t>(i)], 2000 * 2001 / 2 + 2000 * i);
  }
}

TEST(WorkersTest, EveryThreadFencesItsStores) {
  static std::mutex mutex;
  static std::vector<std::thread::id> fenced;
  Workers workers(
      [] {
        const std::lock_guard<std::mutex> lock(mutex);
        fenced.push_back(std::this_thread::get_id());
      },
      0);
  workers.set_num_workers(2);
  std::thread::id helper;
  on_helper(workers, [&] { helper = std::this_thread::get_id(); });
  ASSERT_EQ(fenced.size(), 2U);
  EXPECT_NE(fenced[0], fenced[1]);
  EXPECT_TRUE(helper == fenced[0] || helper == fenced[1]);
}

TEST(WorkersTest, HelpersStartWhenNeededAndEndWhenLowered) {
  Workers workers(&no_fence, 0);
  EXPECT_EQ(workers.num_workers(), 1);
  workers.set_num_workers(4);
  EXPECT_EQ(workers.num_workers(), 4);
  EXPECT_EQ(workers.num_helpers(), 0);
  const auto nothing = [](std::int64_t, std::int64_t) {};
  workers.run(1, 1, nothing);
  EXPECT_EQ(workers.num_helpers(), 0);
  workers.run(3, 1, nothing);
  EXPECT_EQ(workers.num_helpers(), 2);
  workers.run(100, 1, nothing);
  EXPECT_EQ(workers.num_helpers(), 3);
  workers.set_num_workers(2);
  EXPECT_EQ(workers.num_helpers(), 1);
  on_helper(workers, [] {});
  workers.set_num_workers(1);
  EXPECT_EQ(workers.num_helpers(), 0);
  workers.set_num_workers(3);
  on_helper(workers, [] {});
  EXPECT_EQ(workers.num_helpers(), 1);
}

TEST(WorkersTest, SmallPhasesAreLeftToTheCaller) {
  Workers by_default(&no_fence, -1);
  Workers by_knob(&no_fence, 100);
  EXPECT_FALSE(by_knob.takes(1000)) << "there is one worker";
  for (Workers* workers : {&by_default, &by_knob}) workers->set_num_workers(2);
  EXPECT_FALSE(by_knob.takes(99));
  EXPECT_TRUE(by_knob.takes(100));
  EXPECT_FALSE(by_default.takes(32 * 4096));
  EXPECT_TRUE(by_default.takes(std::int64_t{64} << 20));

  std::vector<std::int64_t> ends;
  const auto note = [&](std::int64_t, std::int64_t end) { ends.push_back(end); };
  for_ranges(nullptr, 1'000'000, 1'000'000, note);
  for_ranges(&by_knob, 9, 11, note);
  EXPECT_EQ(ends, (std::vector<std::int64_t>{1'000'000, 9}));
  EXPECT_EQ(by_knob.num_helpers(), 0);
}

TEST(WorkersTest, TheFirstExceptionReachesTheCaller) {
  Workers workers(&no_fence, 0);
  workers.set_num_workers(3);
  const std::thread::id caller = std::this_thread::get_id();
  for (const bool from_helper : {false, true, true, false}) {
    std::string what;
    try {
      if (from_helper) {
        on_helper(workers, [] { throw std::runtime_error("of a helper"); });
      } else {
        workers.run(50, 1, [&](std::int64_t, std::int64_t) {
          if (std::this_thread::get_id() == caller) throw std::runtime_error("of the caller");
        });
        // The helpers may have been faster.
        what = "of the caller";
      }
    } catch (const std::runtime_error& error) {
      what = error.what();
    }
    EXPECT_EQ(what, from_helper ? "of a helper" : "of the caller");
    // The next job knows nothing of it.
    std::vector<int> times(50, 0);
    workers.run(
        50, 1, [&](std::int64_t begin, std::int64_t) { ++times[static_cast<std::size_t>(begin)]; });
    EXPECT_EQ(times, std::vector<int>(50, 1));
  }
}

TEST(WorkersTest, HelpersBlockAllSignals) {
  sigset_t before;
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, nullptr, &before), 0);
  Workers workers(&no_fence, 0);
  workers.set_num_workers(2);
  sigset_t of_helper;
  ::sigemptyset(&of_helper);
  on_helper(workers, [&] { ::pthread_sigmask(SIG_SETMASK, nullptr, &of_helper); });
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1, SIGPROF}) {
    EXPECT_EQ(::sigismember(&of_helper, signal), 1) << "signal " << signal;
  }
  sigset_t after;
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, nullptr, &after), 0);
  EXPECT_EQ(::sigismember(&after, SIGINT), ::sigismember(&before, SIGINT));
}

TEST(WorkersTest, HelpersRoundToNearestWhateverTheirCreatorDid) {
  Workers workers(&no_fence, 0);
  workers.set_num_workers(2);
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  int of_helper = -1;
  on_helper(workers, [&] { of_helper = std::fegetround(); });
  EXPECT_EQ(std::fesetround(FE_TONEAREST), 0);
  EXPECT_EQ(of_helper, FE_TONEAREST);
}

TEST(WorkersTest, IdleHelpersUseNoTime) {
  Workers workers(&no_fence, 0);
  workers.set_num_workers(3);
  on_helper(workers, [] {});
  std::this_thread::sleep_for(milliseconds(10));  // both are asleep by now
  timespec before{};
  timespec after{};
  ASSERT_EQ(::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before), 0);
  std::this_thread::sleep_for(milliseconds(200));
  ASSERT_EQ(::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after), 0);
  const auto used_ns =
      (after.tv_sec - before.tv_sec) * 1'000'000'000 + after.tv_nsec - before.tv_nsec;
  EXPECT_LT(used_ns, 50'000'000);
}

TEST(WorkersTest, AForkedChildHasNone) {
  if (testing::kIsThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer lacks fork beside threads; presets cpu and asan run this";
  }
  Workers* const workers = new Workers(&no_fence, 0);
  workers->set_num_workers(3);
  on_helper(*workers, [] {});
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(20);
    int status = 1;
    try {
      workers->run(100, 1, [](std::int64_t, std::int64_t) {});
    } catch (const InvalidState&) {
      workers->set_num_workers(2);
      delete workers;
      status = 0;
    }
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  on_helper(*workers, [] {});
  delete workers;
}

TEST(WorkersTest, OthersWorkOnSideBySide) {
  std::vector<std::thread> ranks;
  std::atomic<int> num_wrong{0};
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&num_wrong] {
      Workers workers(&no_fence, 0);
      std::vector<int> times(200, 0);
      for (int round = 1; round <= 200; ++round) {
        workers.set_num_workers(1 + round % 4);
        workers.run(200, 7, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) ++times[static_cast<std::size_t>(i)];
        });
        for (const int count : times) num_wrong += count != round ? 1 : 0;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(num_wrong.load(), 0);
}

}  // namespace
}  // namespace fanfold::exec
