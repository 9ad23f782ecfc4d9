// SPDX-License-Identifier: Apache-2.0

// Starts mpi_ranks under mpirun: all of its tests on four ranks, and jobs of their own for what
// needs another level of threads, a rank's death, or the time outside MPI.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "gtest/gtest.h"

namespace fanfold {
namespace {

struct JobResult {
  int status = -1;  // of mpirun
  std::string output;

  int count(const std::string& words) const {
    int num = 0;
    for (std::size_t at = output.find(words); at != std::string::npos;
         at = output.find(words, at + words.size())) {
      ++num;
    }
    return num;
  }
};

JobResult run_job(const std::string& mpi_options, const std::string& arguments) {
  // `timeout` ends a job that hangs, which is a failure.
  const std::string command =
      std::string("timeout -k 3 120 ") + FANFOLD_MPIEXEC +
      " -n 4 --allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1 --tag-output " +
      mpi_options + " " + FANFOLD_MPI_RANKS + " --gtest_color=no " + arguments + " 2>&1 </dev/null";
  JobResult result;
  // Nothing in the command comes from outside. NOLINTNEXTLINE(bugprone-command-processor)
  std::FILE* output = ::popen(command.c_str(), "r");
  if (output == nullptr) return result;
  char buffer[4096];
  while (const std::size_t num = std::fread(buffer, 1, sizeof buffer, output)) {
    result.output.append(buffer, num);
  }
  const int status = ::pclose(output);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  return result;
}

class MpiJobs : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::access(FANFOLD_MPIEXEC, X_OK) == 0) return;
    std::printf("SKIPPED: there is no mpirun ('" FANFOLD_MPIEXEC "'): nothing ran over MPI\n");
    GTEST_SKIP() << "there is no mpirun";
  }
};

TEST_F(MpiJobs, EveryTestPassesOnFourRanks) {
  const JobResult job =
      run_job("", "--gtest_brief=1 --gtest_filter=-MpiFunneled*:MpiHosts*:MpiLoss*");
  EXPECT_EQ(job.status, 0) << job.output;
  EXPECT_EQ(job.count("[  PASSED  ]"), 4) << job.output;
}

/// Copies in pieces, which the sender's calls push.
TEST_F(MpiJobs, ARankThatComputesKeepsNobodyInACollective) {
  const JobResult job = run_job("--mca btl_vader_single_copy_mechanism none",
                                "--gtest_filter=*ARankThatComputesAfterACollective*");
  EXPECT_EQ(job.status, 0) << job.output;
  EXPECT_EQ(job.count("[  PASSED  ] 1 test."), 4) << job.output;
}

TEST_F(MpiJobs, WithoutThreadsInMpiTheMainThreadAloneMayCall) {
  const JobResult job = run_job("", "--gtest_filter=MpiFunneled* funneled");
  EXPECT_EQ(job.status, 0) << job.output;
  EXPECT_EQ(job.count("[  PASSED  ] 3 tests"), 4) << job.output;
}

TEST_F(MpiJobs, RanksThatLiveNameTheOneThatDied) {
  const JobResult job = run_job("--enable-recovery", "--gtest_filter=MpiLoss* loses");
  // mpirun's status says nothing of the ranks here.
  EXPECT_EQ(job.count("[  PASSED  ] 1 test."), 3) << job.output;
  EXPECT_EQ(job.count("ended without MPI_Finalize"), 3) << job.output;
  EXPECT_EQ(job.count("Failure"), 0) << job.output;
}

TEST_F(MpiJobs, MpirunEndsAJobThatLosesARankUnlessToldToRecover) {
  const JobResult job = run_job("", "--gtest_filter=MpiLoss* loses");
  EXPECT_NE(job.status, 0) << job.output;
  EXPECT_NE(job.status, 124) << "it hung: " << job.output;
  EXPECT_NE(job.output.find("signal 9"), std::string::npos) << job.output;
}

TEST_F(MpiJobs, CallsOutsideTheTimeOfMpiAreRefused) {
  const JobResult job = run_job("", "outside");
  EXPECT_EQ(job.status, 0) << job.output;
  EXPECT_EQ(job.count("refused before, between and after"), 4) << job.output;
}

}  // namespace
}  // namespace fanfold
