// SPDX-License-Identifier: Apache-2.0

// Every driver call made to fail at each occurrence, and handles of others.

#include <cuda.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/fabric_outcome.h"
#include "gpu/simulated_devices.h"
#include "gtest/gtest.h"

namespace fanfold::gpu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::SimulatedDevices;
using ::testing::StartsWith;

/// Calls that give back: a failure of theirs leaves what they did not free.
std::set<std::string> giving_back() {
  return {"cuMemRelease",    "cuMemUnmap",      "cuMemAddressFree", "cuDevicePrimaryCtxRelease",
          "cuStreamDestroy", "cuCtxPopCurrent", "cuMemFree",        "cuCtxSynchronize",
          "nvmlShutdown"};
}
/// Calls that are asked while looking for something else.
std::set<std::string> asking() {
  return {"cuGetErrorName", "cuGetErrorString", "cuGetProcAddress", "cuInit"};
}

class EveryCallFailsTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    All, EveryCallFailsTest,
    ::testing::Values(Case{RankKind::kThreads, HandleKind::kFabric, 2, 2},
                      Case{RankKind::kThreads, HandleKind::kFileDescriptor, 3, 1},
                      Case{RankKind::kThreads, HandleKind::kSameProcess, 2, 2},
                      Case{RankKind::kProcesses, HandleKind::kFabric, 2, 1},
                      Case{RankKind::kProcesses, HandleKind::kFileDescriptor, 3, 3}),
    &name_of_case);

TEST_P(EveryCallFailsTest, AtEachOccurrenceNothingIsLeftAndTheStepAndRankAreNamed) {
  const Case one = GetParam();
  const SimulatedDevices devices(one.num_devices);
  std::map<std::string, int> calls;
  const auto run = [&] {
    std::vector<std::shared_ptr<FabricWindows>> kept(static_cast<std::size_t>(one.num_ranks));
    Results results(one.num_ranks);
    cudasim::clear_calls();
    on_each_rank(one.ranks, one.num_ranks, [&](comm::Group& group) {
      std::string text;
      try {
        const auto context = std::make_shared<const DeviceContext>(group.rank() % one.num_devices);
        const SharedWindows shared = share_windows(group, context, 1, {one.kind}, soon());
        kept[static_cast<std::size_t>(group.rank())] = shared.windows;
        text = describe(shared);
      } catch (const CudaFailure& error) {
        text = base::str("CudaFailure ", error.code(), " ", error.what());
      } catch (const PeerError& error) {
        text = error.what();  // a rank that failed before the first step does not come
      }
      results.set(group.rank(), text);
    });
    calls = cudasim::calls();
    cudasim::clear_faults();  // what gives back is another test's
    return results.common();
  };
  EXPECT_EQ(run(), name_of(one.kind));
  const std::map<std::string, int> clean_calls = calls;
  int num_faults = 0;
  for (const auto& [name, num] : clean_calls) {
    if (giving_back().count(name) + asking().count(name) > 0 || name.rfind("cu", 0) != 0) continue;
    if (name.rfind("cuda", 0) == 0) continue;  // the simulator's own way
    // Before the first step a rank is alone: see the allocator's tests.
    if (name == "cuDeviceGet" || name == "cuDeviceGetCount" || name == "cuDeviceGetPCIBusId" ||
        name == "cuDevicePrimaryCtxRetain" || name == "cuDeviceGetAttribute") {
      continue;
    }
    for (int nth = 1; nth <= num; ++nth) {
      SCOPED_TRACE(base::str(name, " number ", nth));
      cudasim::fail_call(name.c_str(), CUDA_ERROR_UNKNOWN, nth);
      const std::string text = run();
      EXPECT_THAT(text,
                  AllOf(StartsWith(base::str("CudaFailure ", CUDA_ERROR_UNKNOWN)),
                        HasSubstr(": rank "), HasSubstr(name), HasSubstr("CUDA_ERROR_UNKNOWN")));
      devices.expect_nothing_left("after the fault");
      ++num_faults;
    }
  }
  EXPECT_GE(num_faults, 12 * one.num_ranks);
}

TEST_P(EveryCallFailsTest, ThatGivesBackNobodyThrows) {
  const Case one = GetParam();
  cudasim::Config config;
  config.devices = one.num_devices;
  config.host_threads = 8;
  cudasim::configure(config);
  for (const std::string& name : giving_back()) {
    cudasim::fail_call(name.c_str(), CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(common_outcome(one.ranks, one.num_devices, {one.kind}), name_of(one.kind)) << name;
    cudasim::clear_faults();
  }
  cudasim::clear_reports();
}

/// Passes everything on, but changes what this rank gets from its peers in the step `handles`.
class MeddlingGroup final : public comm::Group {
 public:
  using Meddle = std::function<void(std::vector<comm::Parcel>&)>;
  MeddlingGroup(comm::Group& group, Meddle meddle)
      : Group(group.rank(), group.num_ranks()), group_(group), meddle_(std::move(meddle)) {}

  const char* kind() const noexcept override { return group_.kind(); }
  comm::Windows share_windows(std::int64_t bytes, base::Deadline deadline) override {
    return group_.share_windows(bytes, deadline);
  }
  comm::Windows reserve_windows(std::int64_t bytes, base::Deadline deadline) override {
    return group_.reserve_windows(bytes, deadline);
  }
  std::vector<comm::Parcel> exchange(const std::string& call, comm::Parcel own,
                                     const std::optional<comm::Failure>& failure,
                                     base::Deadline deadline) override {
    auto all = group_.exchange(call, std::move(own), failure, deadline);
    if (call.find(": handles") != std::string::npos) meddle_(all);
    return all;
  }
  std::unique_ptr<Group> split(const std::vector<int>& members, base::Deadline deadline) override {
    return group_.split(members, deadline);
  }
  std::string lost_reason(int rank) const override { return group_.lost_reason(rank); }
  void leave() noexcept override { group_.leave(); }
  bool is_forked_child() const noexcept override { return group_.is_forked_child(); }

 private:
  comm::Group& group_;
  Meddle meddle_;
};

std::string meddled_outcome(HandleKind kind, const MeddlingGroup::Meddle& meddle) {
  Results results(2);
  on_each_rank(RankKind::kProcesses, 2, [&](comm::Group& group) {
    MeddlingGroup meddling(group, meddle);
    comm::Group& used = group.rank() == 0 ? meddling : group;
    results.set(group.rank(), outcome(used, group.rank(), {kind}));
    (void)group.share_windows(64, soon());
  });
  return results.common();
}

TEST(ForeignHandleTest, AHandleOfAnotherAllocationIsRefusedByItsToken) {
  const SimulatedDevices devices(2);
  std::string stale;  // of an earlier allocation
  for (const HandleKind kind : {HandleKind::kFabric, HandleKind::kFileDescriptor}) {
    (void)meddled_outcome(kind, [&](auto& all) { stale = all[1].bytes; });
    EXPECT_EQ(meddled_outcome(kind, [&](auto& all) { all[1].bytes = stale; }),
              "InvalidArgument GPU memory: rank 1: expected a handle of this group and allocation, "
              "got another's");
  }
}

TEST(ForeignHandleTest, MemoryOfAnotherGroupBehindARightTokenIsRefusedByItsMark) {
  const SimulatedDevices devices(2);
  const Driver& driver = Driver::get();
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemGenericAllocationHandle handle = 0;
  driver.check(driver.cuMemCreate(&handle, kRounded, &prop, 0), "cuMemCreate");
  const MemoryHandle others(driver, handle);
  const auto meddle = [&](std::vector<comm::Parcel>& all) {
    int fd = -1;
    driver.check(driver.cuMemExportToShareableHandle(&fd, handle, prop.requestedHandleTypes, 0),
                 "export");
    all[1].fds[0] = base::FileDescriptor(fd);
  };
  EXPECT_THAT(meddled_outcome(HandleKind::kFileDescriptor, meddle),
              HasSubstr("rank 0: expected the memory of rank 1 behind its handle, found other "
                        "memory"));
}

TEST(ForeignHandleTest, MessagesThatAreNoneAreRefusedInWords) {
  const SimulatedDevices devices(2);
  EXPECT_THAT(meddled_outcome(HandleKind::kFabric, [](auto& all) { all[1].bytes += 'x'; }),
              HasSubstr("got another message"));
}

}  // namespace
}  // namespace fanfold::gpu
